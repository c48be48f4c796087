"""Each placement against plain torch: same weights, same rows, as a table.

    compare_placements.py OUT DRIVE DTYPE[,DTYPE] WORDS...

WORDS are what `offload-train` takes (--model, --steps, ...); OUT is the page to write, DRIVE a directory on the drive.
Exits with 1 if a placement fails, or its loss is ever further than 2e-2 from plain torch's.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from offload_trainer.tiers.removal import scratch

PLACEMENTS = {
    "plain torch": ["--engine", "plain"],
    "tiered, weights gpu, state RAM": ["--engine", "tiered", "--params", "gpu", "--optimizer", "cpu"],
    "tiered, weights gpu, state half RAM": ["--engine", "tiered", "--params", "gpu", "--ram-fraction", "0.5"],
    "tiered, weights cpu, state RAM": ["--engine", "tiered", "--params", "cpu", "--optimizer", "cpu"],
    "tiered, all nvme": [
        *("--engine", "tiered", "--params", "nvme", "--optimizer", "nvme", "placement.gradients=nvme")
    ],
    "ZeRO-2, optimizer gpu": ["--engine", "deepspeed", "--params", "gpu", "--optimizer", "gpu"],
    "ZeRO-2, optimizer cpu": ["--engine", "deepspeed", "--params", "gpu", "--optimizer", "cpu"],
    "ZeRO-3, both cpu": ["--engine", "deepspeed", "--params", "cpu", "--optimizer", "cpu"],
    "ZeRO-3, optimizer nvme": ["--engine", "deepspeed", "--params", "gpu", "--optimizer", "nvme"],
    "ZeRO-3, weights nvme": ["--engine", "deepspeed", "--params", "nvme", "--optimizer", "cpu"],
    "ZeRO-3, both nvme": ["--engine", "deepspeed", "--params", "nvme", "--optimizer", "nvme"],
}
ALWAYS = ["train.eval_every=0", "--save-every", "0"]
BOUND = 2e-2
WARM = 2  # steps whose seconds do not count


def run(words: list[str], output: Path) -> tuple[list[dict], int, str]:
    """Metrics of one run and the plan's bytes of RAM; without metrics, the last line that it said."""
    command = [sys.executable, "-m", "offload_trainer", *words, *ALWAYS, "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return [], 0, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return rows, json.loads((output / "plan.json").read_text())["tiers"]["ram"]["need"], ""


def cells(rows: list[dict], planned: int) -> str:
    """Medians of seconds and drive bytes, and peaks, as columns."""
    late = rows[WARM:]
    seconds = [statistics.median(row["seconds"] for row in late)]
    seconds += [statistics.median(row["phases"][p] for row in late) for p in ("forward", "backward", "update")]
    drive = [statistics.median(row[f"nvme_{way}_bytes"] for row in late) / 1e9 for way in ("read", "written")]
    peaks = [rows[-1]["device_peak_bytes"] / 1e9, rows[-1]["host_rss_bytes"] / 1e9, planned / 1e9]
    return " | ".join([f"{number:.3f}" for number in seconds] + [f"{number:.2f}" for number in drive + peaks])


def head(words: list[str]) -> list[str]:
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    about = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in about if line.startswith("model name")), "CPU")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: the CPU computes"
    return [
        "# Placements against plain torch",
        "",
        f"{device}; {cpu}, {len(os.sched_getaffinity(0))} cores; {platform.system()}; commit {commit}, torch "
        f"{torch.__version__}, deepspeed {version('deepspeed')}, transformers {version('transformers')}.",
        f"`{' '.join(words)}`.",
        f"Seconds and drive bytes are medians without the first {WARM} steps; peaks are of the whole run.",
        "",
        "| dtype | placement | largest loss difference | step s | forward | backward | update | read GB | written GB "
        "| GPU peak GB | RSS peak GB | planned RAM GB |",
        "| --- " * 12 + "|",
    ]


def main() -> int:
    target, drive, dtypes, words = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(","), sys.argv[4:]
    lines = head(words)
    good = True
    for dtype in dtypes:
        plain: list[dict] = []
        for name, homes in PLACEMENTS.items():
            with scratch("placements-") as folder:
                rows, planned, error = run([*words, *homes, "--nvme", drive, "--dtype", dtype], folder / "out")
            plain = plain or rows
            if not rows or not plain:
                lines.append(f"| {dtype} | {name} | failed: {error} |" + " |" * 9)
                good = False
            else:
                # A step that fp16 skipped trained on nothing.
                pairs = [(a, b) for a, b in zip(rows, plain, strict=True) if not (a["skipped"] or b["skipped"])]
                apart = max(abs(a["loss"] - b["loss"]) for a, b in pairs)
                good = good and apart < BOUND
                lines.append(f"| {dtype} | {name} | {apart:.1e} | {cells(rows, planned)} |")
            print(lines[-1], flush=True)
    target.write_text("\n".join(lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
