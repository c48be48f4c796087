"""Compare memory, drive bytes and update seconds of 1, 2 and 4 ranks on this machine with the plan and with one rank.

    python benchmarks/ranks_memory.py [--ranks 1,2,4] [--pairs 3] [--box "box --read 400M --write 400M --"]
        [WORDS]

Each run is the user's command (`--engine tiered --gpus N`) with the same rows a step: N ranks take 4 / N micro-batches
each. One run of each N is only sampled for memory and not timed: PSS over all ranks (/proc/PID/smaps_rollup, where
shared pages count once), as often as possible. Then `--pairs` rounds of 1, 2, 4, 1, ... are timed without sampling. The
update's ratio relates to one rank in the same round. WORDS apply to all runs (--ram-fraction 0.5 --nvme DIR).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from offload_trainer.storage.owned_dirs import scratch

ROWS, STEPS = 4, 5  # micro-batches of a step, over all ranks; the first two steps are not timed
COMMON = [
    "--model",
    "gpt2-medium",
    "--seq-len",
    "64",
    "--micro-batch",
    "1",
    "--steps",
    str(STEPS),
    "--engine",
    "tiered",
]
COMMON += ["--save-every", "0", "train.eval_every=0", "data.shuffle=false", "tiered.overlap=off"]


@dataclass(frozen=True)
class Ran:
    """A run's metrics, and the largest observed sum of PSS in bytes, 0 without sampling."""

    plan: dict[str, Any]
    steps: list[dict[str, Any]]
    pss: int
    parts: dict[str, int]  # shared, anonymous and file memory at that moment

    def of_steps(self, key: str) -> float:
        """Return the median over the timed steps."""
        found = [step["phases"]["update"] if key == "update" else step[key] for step in self.steps[2:]]
        return float(median(value or 0 for value in found))


def ranks_below(parent: int) -> list[int]:
    """Return the training processes among a command's descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                held = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            children.setdefault(int(held[1]), []).append(int(entry))
    found, left = [], [parent]
    while left:
        pid = left.pop()
        left += children.get(pid, [])
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"offload_trainer" in words and b"train" in words:
            found.append(pid)
    return [pid for pid in found if not set(children.get(pid, [])) & set(found)]  # all except their launcher


def pss_of(pids: list[int]) -> dict[str, int]:
    """Return bytes of all processes by kind; memory that several map counts once."""
    sums: dict[str, int] = {}
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, rest = line.partition(":")
            if name in ("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem"):
                sums[name] = sums.get(name, 0) + 1024 * int(rest.split()[0])
    return sums


def run(count: int, words: list[str], *, box: list[str], looked_at: bool) -> Ran:
    """Train with `count` ranks."""
    with scratch("ranks-") as folder:
        told = ["--gpus", str(count), "--accumulate", str(ROWS // count), "--output", f"{folder}/run"]
        command = [*box, sys.executable, "-m", "offload_trainer", "train", *COMMON, *told, *words]
        most: dict[str, int] = {"Pss": 0}
        with open(folder / "log", "w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            while process.poll() is None:
                if looked_at:
                    most = max(most, pss_of(ranks_below(process.pid)), key=lambda sums: sums.get("Pss", 0))
                time.sleep(0.1)
        if process.returncode:
            raise SystemExit((folder / "log").read_text()[-3000:])
        steps = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        return Ran(json.loads((folder / "run/plan.json").read_text()), steps, most.pop("Pss"), most)


def told_of_memory(count: int, ran: Ran) -> str:
    planned = ran.plan["tiers"]["ram"]["need"]
    parts = ", ".join(f"{name.removeprefix('Pss_').lower()} {size / 1e9:.3f}" for name, size in ran.parts.items())
    return (
        f"{count} ranks: PSS {ran.pss / 1e9:.3f} GB ({parts}), planned {planned / 1e9:.3f} GB, measured / planned "
        f"{ran.pss / planned:.3f}"
    )


def told_of_drives(count: int, ran: Ran) -> str:
    drives = [moved for moved in ran.plan["traffic"] if moved["place"] != "device"]
    ways = [("nvme_read_bytes", "read"), ("nvme_written_bytes", "written")]
    parts = [
        f"{ran.of_steps(key) / 1e6:.1f} MB {way} (plan {sum(m[way] for m in drives) / 1e6:.1f})" for key, way in ways
    ]
    return f"{count} ranks: drives a step, the kernel's counters: {', '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--box", default="")
    options, words = parser.parse_known_args()
    counts, box = [int(count) for count in options.ranks.split(",")], shlex.split(options.box)
    for count in counts:
        ran = run(count, words, box=box, looked_at=True)
        print(told_of_memory(count, ran), told_of_drives(count, ran), sep="\n", flush=True)
        for item in ran.plan["items"]:
            if item["tier"] == "ram" and item["bytes"]:
                print(f"    {item['name']:<24}{item['bytes'] / 1e6:>10.1f} MB")
    rounds = [{count: run(count, words, box=box, looked_at=False) for count in counts} for _ in range(options.pairs)]
    for count in counts if rounds else ():
        seconds = [one[count].of_steps("update") for one in rounds]
        ratios = [one[count].of_steps("update") / one[counts[0]].of_steps("update") for one in rounds]
        told = f"update {median(seconds):.3f} s ({min(seconds):.3f}-{max(seconds):.3f})"
        to_first = f"{median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}) of {counts[0]} rank's"
        print(f"{count} ranks: {told}, {to_first}", flush=True)


if __name__ == "__main__":
    main()
