"""gpu_smoke.py OUT DRIVE: see gpu_smoke.sh. Exits with 1 if a placement fails or leaves plain torch by over 2e-2."""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

PLACEMENTS = {
    "plain torch": ["--engine", "plain"],
    "ZeRO-2, all on the GPU": ["--params", "gpu", "--optimizer", "gpu"],
    "ZeRO-2, optimizer cpu": ["--params", "gpu", "--optimizer", "cpu"],
    "ZeRO-3, both cpu": ["--params", "cpu", "--optimizer", "cpu"],
    "ZeRO-3, optimizer nvme": ["--params", "gpu", "--optimizer", "nvme"],
    "ZeRO-3, weights nvme": ["--params", "nvme", "--optimizer", "cpu"],
    "ZeRO-3, both nvme": ["--params", "nvme", "--optimizer", "nvme"],
}
MODEL = ["--model", "gpt2-medium", "--seq-len", "512", "--micro-batch", "4", "--steps", "20", "--lr", "1e-4"]
STEPS = ["train.eval_every=0", "--save-every", "0", "data.validation=0"]
BOUND = 2e-2


def run(words: list[str], output: Path) -> tuple[list[dict], str]:
    """Metrics of one run, or none and the last line that it said."""
    command = [sys.executable, "-m", "offload_trainer", *MODEL, *STEPS, *words, "--output", str(output)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": path})
    if done.returncode:
        return [], (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()], ""


def main() -> int:
    import torch

    if not torch.cuda.is_available():
        print("gpu_smoke: torch sees no GPU here; nothing was run", file=sys.stderr)
        return 1
    target, drive = Path(sys.argv[1]), sys.argv[2]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    lines = [
        "# Placements on a GPU",
        "",
        f"{torch.cuda.get_device_name()}, {platform.processor() or platform.machine()}, commit {commit}, "
        f"torch {torch.__version__}, deepspeed {version('deepspeed')}, transformers {version('transformers')}.",
        f"`{' '.join(MODEL)}`, 2048 tokens a step, 20 steps; seconds are medians of the last 15.",
        "",
        "| dtype | placement | largest loss difference | step s | forward | backward | update | GPU peak GB | RSS GB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    good = True
    for dtype in ("bf16", "fp16"):
        plain: list[dict] = []
        for name, words in PLACEMENTS.items():
            with tempfile.TemporaryDirectory() as folder:
                rows, error = run([*words, "--nvme", drive, "--dtype", dtype], Path(folder) / "out")
            plain = plain or rows
            if not rows or not plain:
                lines.append(f"| {dtype} | {name} | failed: {error} | | | | | | |")
                good = False
                continue
            # A skipped step of fp16 trains on nothing, so from there on runs with other skips are other runs.
            pairs = [(a, b) for a, b in zip(rows, plain, strict=True) if not (a["skipped"] or b["skipped"])]
            apart = max(abs(a["loss"] - b["loss"]) for a, b in pairs)
            good = good and apart < BOUND
            late = rows[5:]
            phases = [statistics.median(row["phases"][p] for row in late) for p in ("forward", "backward", "update")]
            cells = [statistics.median(row["seconds"] for row in late), *phases]
            peaks = [rows[-1]["device_peak_bytes"] / 1e9, rows[-1]["host_rss_bytes"] / 1e9]
            numbers = " | ".join([f"{cell:.3f}" for cell in cells] + [f"{peak:.2f}" for peak in peaks])
            lines.append(f"| {dtype} | {name} | {apart:.1e} | {numbers} |")
            print(lines[-1], flush=True)
    target.write_text("\n".join(lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
