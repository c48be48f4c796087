"""start_and_measure.py FOLDER FAULT WORDS...: run the command as one of several ranks, which measure their machine
first, however short the run is. With `session DRIVE` as WORDS, open and close a session whose state is on the drive.

In FOLDER, `measured` gets a line of each rank that measures, with its number of threads, and plan-RANK.json the plan
and the machine with which the rank goes on. FAULT happens to the rank that measures: the `drive` fails, the `kernel`
cannot be built, or the rank is killed (`kill`); `-`: none.
"""

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import offload_trainer as ot
from offload_trainer.cli import main
from offload_trainer.engine import timed_updates
from offload_trainer.machine import bench
from offload_trainer.run import machine_rates, train

folder, fault, *words = sys.argv[1:]
rank = os.environ["RANK"]
bench_machine, updates_of_run, resolve = bench.bench_machine, timed_updates.updates_of_run, train.resolve


def measure(*given: Any, **more: Any) -> Any:
    with (Path(folder) / "measured").open("a") as file:
        print(rank, torch.get_num_threads(), file=file)
    if fault == "drive":
        raise ot.TrainerError("the drive has failed")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return bench_machine(*given, **more)


def updates(*given: Any) -> Any:
    if fault == "kernel":
        raise ot.UserError("the kernel cannot be had")
    return updates_of_run(*given)


def tell(plan: Any, machine: Any) -> None:
    told = {"plan": plan.to_json(), "machine": machine, "threads": torch.get_num_threads()}
    (Path(folder) / f"plan-{rank}.json").write_text(json.dumps(told, default=str))


def resolve_and_tell(planned: Any, *given: Any) -> Any:
    tell(planned.plan, asdict(planned.machine))
    return resolve(planned, *given)


bench.bench_machine = measure
timed_updates.updates_of_run = updates  # type: ignore[assignment]
train.resolve = resolve_and_tell  # type: ignore[assignment]
machine_rates._WORTH_BYTES = 1
if words[0] != "session":
    raise SystemExit(main(words))
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
block = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
before = torch.get_rng_state()
with ot.offload(block, nvme=[words[1]], optimizer="nvme", ram_fraction=0, seq_len=32, kernel="torch") as session:
    tell(session.plan, None)
assert torch.equal(torch.get_rng_state(), before)
