"""Benchmark the cost of a checkpoint during training: steps without one, with one in the background, and after one.

    python benchmarks/bench_save.py --rounds 3 --steps 4 -- --model gpt2-medium --nvme DIR --ram-fraction 0.5 ...

The three ways alternate in one process. A round's cost is its time, until the checkpoint is complete, minus the time
of the same steps without a checkpoint. The words after -- configure the run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

WAYS = ("none", "behind", "before")


def main() -> None:
    split = sys.argv.index("--")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of a round")
    wishes = parser.parse_args(sys.argv[1:split])
    from offload_trainer.run.process_setup import prepared

    config = prepared([*sys.argv[split + 1 :], "--steps", "100000", "train.eval_every=0"])
    from offload_trainer.run import train

    train.train_run(config, instead=lambda job: show(compare(job, rounds=wishes.rounds, steps=wishes.steps)))


def compare(job: Any, *, rounds: int, steps: int) -> dict[str, Any]:
    """Return a checkpoint's bytes, its seconds alone, and the seconds of each round's `steps` for each
    way of saving.
    """
    from offload_trainer.checkpoint import TrainState
    from offload_trainer.telemetry.meters import peak_rss_bytes
    from offload_trainer.trainer import timed_steps

    running = timed_steps(job, steps=sys.maxsize)
    for _ in range(2):
        next(running)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    saved: list[float] = []
    with job.checkpoints:
        for number in range(rounds):
            for way in WAYS:
                start = time.perf_counter()
                if way != "none":
                    job.checkpoints.save(job.engine, TrainState(step=number + 1, tokens=0, data_position=0))
                if way == "before":
                    job.checkpoints.synchronize()
                    saved.append(time.perf_counter() - start)
                for _ in range(steps):
                    next(running)
                job.checkpoints.synchronize()
                seconds[way].append(time.perf_counter() - start)
                print(f"{way}: {seconds[way][-1]:.2f} s", file=sys.stderr, flush=True)
    newest = sorted(Path(job.save_request_file.parent / "checkpoints").glob("step-*"))[-1]
    size = sum(about["bytes"] for about in json.loads((newest / "MANIFEST.json").read_text())["files"].values())
    return {
        "bytes": size,
        "alone": median(saved),
        "steps": steps,
        "seconds": seconds,
        "middle": {way: median(seconds[way]) for way in WAYS},
        "peak_rss": peak_rss_bytes(),
    }


def show(found: dict[str, Any]) -> None:
    size, middle = found["bytes"], found["middle"]
    told = {way: [round(value, 2) for value in values] for way, values in found["seconds"].items()}
    print(
        f"{size / 1e9:.2f} GB, alone {found['alone']:.2f} s ({size / found['alone'] / 1e6:.0f} MB/s); {found['steps']} "
        f"steps {middle['none']:.2f} s; a checkpoint behind them costs {middle['behind'] - middle['none']:.2f} s, "
        f"before them {middle['before'] - middle['none']:.2f} s; peak RSS {found['peak_rss'] / 1e9:.2f} GB; {told}"
    )


if __name__ == "__main__":
    main()
