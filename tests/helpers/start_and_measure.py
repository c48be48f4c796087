"""start_and_measure.py FOLDER FAULT WORDS...: run the command as one of several ranks, which measure their machine
first, however short the run is.

In FOLDER, `measured` gets a line of each rank that measures, with its number of threads, and plan-RANK.json the plan
and the machine with which the rank goes on. FAULT happens to the rank that measures: the `kernel` cannot
be built, or the rank is killed (`kill`); `-`: none.
"""

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from offload_trainer.cli import main
from offload_trainer.engine import timed_updates
from offload_trainer.errors import UserError
from offload_trainer.machine import bench
from offload_trainer.run import machine_rates, train

folder, fault, *words = sys.argv[1:]
rank = os.environ["RANK"]
bench_machine, updates_of_run, Setup = bench.bench_machine, timed_updates.updates_of_run, train.Setup


def measure(*given: Any, **more: Any) -> Any:
    with (Path(folder) / "measured").open("a") as file:
        print(rank, torch.get_num_threads(), file=file)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return bench_machine(*given, **more)


def updates(*given: Any) -> Any:
    if fault == "kernel":
        raise UserError("the kernel cannot be had")
    return updates_of_run(*given)


def setup_and_tell(planned: Any, *given: Any) -> Any:
    machine, threads = asdict(planned.machine), torch.get_num_threads()
    told = {"plan": planned.plan.to_json(), "machine": machine, "threads": threads}
    (Path(folder) / f"plan-{rank}.json").write_text(json.dumps(told, default=str))
    return Setup(planned, *given)


bench.bench_machine = measure
timed_updates.updates_of_run = updates  # type: ignore[assignment]
train.Setup = setup_and_tell  # type: ignore[assignment, misc]
machine_rates._WORTH_BYTES = 1
raise SystemExit(main(words))
