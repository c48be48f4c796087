"""Train with fp32 masters, with bf16 ones, and with bf16 ones that are rounded to nearest; print and draw the losses.

    bench_masters.py FOLDER --model DIRECTORY --data TEXT ...    the words are offload-train's

The runs are FOLDER/fp32, bf16 and nearest, the picture FOLDER/masters.svg. The package does not round masters to
nearest: for the last run this script takes the random bits from torch's kernel.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

RUNS = ("fp32", "bf16", "nearest")
WORDS = ["--dtype", "bf16", "--optimizer", "cpu", "optim.kernel=torch"]
WINDOW = 20  # steps of a mean


def read(path: Path, key: str) -> list[float]:
    return [json.loads(line)[key] for line in path.read_text().splitlines()]


def picture(curves: dict[str, list[float]]) -> str:
    from offload_trainer.telemetry.report import Series, colour, lines

    series = [Series(name, [(WINDOW * (i + 1), loss) for i, loss in enumerate(its)]) for name, its in curves.items()]
    chart = lines(series, label="loss over steps").rpartition("<p class=")[0]
    style = "text { font: 12px sans-serif; fill: gray } .rule { stroke: silver }"
    names = [
        f'<text x="110" y="{190 + 16 * row}" style="fill: {colour(row)}">{name}</text>'
        for row, name in enumerate(curves)
    ]
    head, _, rest = chart.partition(">")
    head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"')
    return f"{head}><style>{style} .line {{ fill: none }}</style>{''.join(names)}{rest}"


def train_to_nearest(words: list[str]) -> int:
    from offload_trainer.cli import main as train
    from offload_trainer.optim.kernel_api import TorchKernel

    update = TorchKernel.update_page
    TorchKernel.update_page = lambda self, page: update(self, replace(page, noise=None))  # type: ignore[method-assign]
    return train(words)


def main() -> None:
    folder, *words = sys.argv[1:]
    curves, last = dict[str, list[float]](), dict[str, float]()
    for name in RUNS:
        program = [__file__, "--nearest"] if name == "nearest" else ["-m", "offload_trainer"]
        more = [] if name == "fp32" else ["optim.master_dtype=bf16"]
        output = Path(folder, name)
        command = [sys.executable, *program, "train", *words, *WORDS, *more, "--output", str(output)]
        subprocess.run(command, check=True)
        losses = read(output / "metrics.jsonl", "loss")
        curves[name] = [fmean(losses[end - WINDOW : end]) for end in range(WINDOW, len(losses) + 1, WINDOW)]
        last[name] = read(output / "evaluations.jsonl", "validation_loss")[-1]
    print(f"| step | {' | '.join(RUNS)} |\n| --- |{' --- |' * len(RUNS)}")
    rows = {str(WINDOW * (i + 1)): row for i, row in enumerate(zip(*curves.values(), strict=True))}
    for step, row in (rows | {"validation": tuple(last.values())}).items():
        print(f"| {step} | {' | '.join(f'{loss:.4f}' for loss in row)} |")
    Path(folder, "masters.svg").write_text(picture(curves))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--nearest"]:
        sys.exit(train_to_nearest(sys.argv[2:]))
    main()
