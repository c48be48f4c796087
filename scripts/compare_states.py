"""Loss curves of the precisions in which moments are stored, side by side, as a table.

    compare_states.py OUT SEEDS WORDS...

WORDS are what `offload-train` takes; OUT is the page to write. Each of SEEDS (1,2,...) sets the weights and the order
of the rows of one run in each precision. Exits with 1 if a run fails.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from offload_trainer.plan.layout import bytes_of_state

STATES = ("fp32", "bf16", "8bit")


def run(words: list[str], output: Path) -> dict[int, float]:
    """Validation loss by step."""
    command = [sys.executable, "-m", "offload_trainer", *words, "--engine", "tiered", "--output", str(output)]
    subprocess.run(command, check=True)
    lines = [json.loads(line) for line in (output / "evaluations.jsonl").read_text().splitlines()]
    return {line["step"]: line["validation_loss"] for line in lines}


def main() -> int:
    out, seeds, *words = sys.argv[1:]
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for seed in seeds.split(","):
        for states in STATES:
            with tempfile.TemporaryDirectory() as folder:
                more = [f"optim.states={states}", f"train.seed={seed}", "--save-every", "0"]
                curves[seed, states] = run([*words, *more], Path(folder, "run"))
    lines = [
        f"Validation loss of `offload-train {' '.join(words)}` with `optim.states=`, "
        + ", ".join(f"{states} ({bytes_of_state(states):.2f} B a parameter)" for states in STATES),
        "",
        " | ".join(["step", *(f"{states}, seed {seed}" for seed, states in curves)]),
        " | ".join(["---"] * (1 + len(curves))),
    ]
    for step in next(iter(curves.values())):
        lines.append(" | ".join([str(step), *(f"{curve[step]:.4f}" for curve in curves.values())]))
    Path(out).write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
