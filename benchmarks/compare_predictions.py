"""Compare plans with runs: peak host bytes, drive bytes and update seconds, over sizes, engines, placements and
schedules.

    compare_predictions.py --nvme DIR [--only TEXT ...] [--steps 6]

A cell of the table is: planned, measured (measured / planned). The machine is timed first (`offload-train bench`, into
a separate cache). Then each case whose name contains a TEXT is planned, and runs for a few steps in a separate process.
Run this in a cgroup that limits the drive to a known speed, since the plan cannot foresee what other machines do to a
shared drive.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from offload_trainer.run.commands.tune import run_trial
from offload_trainer.storage.owned_dirs import scratch

_40M = "--model gpt2 model.overrides.n_layer=4 model.overrides.n_embd=512 model.overrides.n_head=8"
_124M, _354M = "--model gpt2", "--model gpt2-medium"
_SHORT, _LONG = "--seq-len 128", "--seq-len 1024"
# Nothing is clipped: a plan's seconds are those of an unclipped step, and most of a run's first steps would be clipped.
_TIERED = "--engine tiered optim.max_grad_norm=1000 --ram-fraction"
_ALL_ON_DRIVES = "--params nvme placement.gradients=nvme"
CASES = {
    "124M x 128, state on the drive, no overlap": f"{_124M} {_SHORT} {_TIERED} 0 tiered.overlap=off",
    "124M x 1024, half in RAM, no overlap": f"{_124M} {_LONG} {_TIERED} 0.5 tiered.overlap=off",
    "124M x 1024, half in RAM, overlap with the forward": f"{_124M} {_LONG} {_TIERED} 0.5 tiered.overlap=forward",
    "124M x 1024, half in RAM, overlap with the backward": f"{_124M} {_LONG} {_TIERED} 0.5 tiered.overlap=backward",
    "124M x 1024, state on the drive, overlap with the backward": (
        f"{_124M} {_LONG} {_TIERED} 0 tiered.overlap=backward"
    ),
    "39M, all on the drive, 4 micro-batches, no overlap": (
        f"{_40M} {_SHORT} {_TIERED} 0 {_ALL_ON_DRIVES} --accumulate 4 tiered.overlap=off"
    ),
    "39M, tiered, all in RAM, 4 micro-batches": f"{_40M} {_SHORT} {_TIERED} 1 --accumulate 4",
    "124M, Muon, all in RAM": f"{_124M} {_SHORT} {_TIERED} 1 optim.name=muon",
    "124M, Muon, state on the drive": f"{_124M} {_SHORT} {_TIERED} 0 optim.name=muon",
    "354M, tiered, state on the drive": f"{_354M} {_SHORT} {_TIERED} 0",
    "354M, tiered, half in RAM": f"{_354M} {_SHORT} {_TIERED} 0.5",
    "354M, tiered, all in RAM": f"{_354M} {_SHORT} {_TIERED} 1",
    "354M, tiered, weights streamed from RAM": f"{_354M} {_SHORT} {_TIERED} 1 --params cpu",
    "354M, tiered, weights and state on the drive": f"{_354M} {_SHORT} {_TIERED} 0 --params nvme",
    "354M, tiered, all on the drive": f"{_354M} {_SHORT} {_TIERED} 0 {_ALL_ON_DRIVES}",
} | {
    f"{size}, {name}": f"{model} {_SHORT} --engine deepspeed {words}"
    for size, model in (("39M", _40M), ("124M", _124M), ("354M", _354M))
    for name, words in (
        ("ZeRO-2, optimizer on the CPU", "--params gpu --optimizer cpu"),
        ("ZeRO-3, both on the CPU", "--params cpu --optimizer cpu"),
        ("ZeRO-3, optimizer on the drive", "--params gpu --optimizer nvme"),
    )
}
_ALWAYS = ["--micro-batch", "1", "--dtype", "bf16"]
_COLUMNS = ("peak host GB", "on drives GB", "read GB", "written GB", "update s", "step s")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def planned(words: list[str], drive: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "offload_trainer", "plan", "--json", *words, "--save-every", "0"]
    done = subprocess.run([*command, "--output", f"{drive}/run"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr}")
    return json.loads(done.stdout)


def compare(words: list[str], drive: str, *, steps: int) -> list[tuple[float | None, float | None]]:
    """Return (planned, measured) pairs in the order of the columns."""
    plan = planned(words, drive)
    with _bytes_below(Path(drive)) as taken:
        trial = run_trial(words, "", steps=steps, say=say)
    if trial.failed:
        raise SystemExit(f"{' '.join(words)}: {trial.failed}")
    on_drives = [moved for moved in plan["traffic"] if moved["place"] != "device"]
    peak = max(step["peak_rss"] for step in trial.steps)
    moved = [
        (
            sum(m[way] for m in on_drives) / 1e9,
            median(step[f"{way if way == 'written' else 'read'}_bytes"] for step in trial.steps[2:]) / 1e9,
        )
        for way in ("read", "written")
    ]
    known = plan["seconds"]
    step = None if None in known.values() else sum(known.values()) - plan["hidden"]
    return [
        (plan["tiers"]["ram"]["need"] / 1e9, peak / 1e9),
        (sum(item["bytes"] for item in plan["items"] if item["tier"] == drive) / 1e9, max(taken) / 1e9),
        *moved,
        (None, None) if plan["hidden"] else (known["update"], trial.phase("update")),
        (step, trial.seconds),
    ]


@contextmanager
def _bytes_below(drive: Path) -> Iterator[list[int]]:
    """Sample the bytes of the runs' private directories on the drive, every 0.1 s inside the block."""
    found, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.1):
            files = [path for path in drive.glob("offload-trainer*/run-*/*") if path.is_file()]
            with suppress(FileNotFoundError):
                found.append(sum(512 * path.stat().st_blocks for path in files))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()


def table(rows: dict[str, list[tuple[float | None, float | None]]]) -> Iterator[str]:
    yield f"| case | {' | '.join(_COLUMNS)} |"
    yield "| --- |" + " --- |" * len(_COLUMNS)
    for name, pairs in rows.items():
        cells = [
            f"{expected:.2f}, {found:.2f} ({found / expected:.2f})" if expected and found is not None else "-"
            for expected, found in pairs
        ]
        yield f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", required=True)
    parser.add_argument("--only", action="append", help="part of a case's name; repeat it for several")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    with scratch("predictions-") as folder:
        os.environ.setdefault("OFFLOAD_TRAINER_CACHE", str(folder))
        bench = [sys.executable, "-m", "offload_trainer", "bench", "--nvme", options.nvme]
        timed = subprocess.run(bench, stdout=subprocess.PIPE, text=True, check=True).stdout
        rows = {}
        for name, words in CASES.items():
            if not options.only or any(part in name for part in options.only):
                say(f"-- {name}")
                rows[name] = compare(
                    [*words.split(), *_ALWAYS, "--nvme", options.nvme], options.nvme, steps=options.steps
                )
                say("\n".join(table({name: rows[name]})))
    print("\n".join(["```", timed.rstrip(), "```", "", *table(rows)]))


if __name__ == "__main__":
    main()
