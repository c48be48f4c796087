"""run_with_fault.py FAULT WORDS...: run the command, in which something happens at an exact moment.

FAULT is [RANK:]ACTION[+ACTION...]@MOMENT[=NUMBER]: before the moment's call of that NUMBER (1), the actions happen one
after the other. With RANK they happen in that rank only. Several FAULTs of one start are separated by semicolons. Those
separated by commas count for one start after the other, where torchrun starts ranks again; after the last one nothing
happens. The ranks that `--gpus` starts are run with the same fault. A FAULT without @ is none. The variable
LOSS_SCALE=VALUE,WINDOW replaces those of fp16, and ENGINE=plain the engine by torch alone (plain_engine.py), whatever
the plan names.

kill, INT, TERM, HUP, ...    this process gets the signal
pause~FILE                   it waits until FILE exists (5 minutes)
full~DIR, low~DIR            the filesystem of DIR has no byte left, or 1 MB
sh~COMMAND                   a shell runs the command
EIO                          the call fails with an input/output error
plan~FILE                    FILE gets the plan, the machine and the threads of `setup`
broken                       the file of a writer becomes one that is always full
lose~pipe, lose~terminal     stdout and stderr have no reader any more
nan                          the call's result is multiplied by NaN
"""

import errno
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from forked_child import lose_streams
from plain_engine import PlainEngine

from offload_trainer.cli import main
from offload_trainer.optim import state_files
from offload_trainer.run import build, process_setup

if "LOSS_SCALE" in os.environ:
    state_files.INITIAL_SCALE, state_files.WINDOW = map(int, os.environ["LOSS_SCALE"].split(","))
if os.environ.get("ENGINE") == "plain":

    def plain(setup: Any, *, swaps: Any, load_weights: bool) -> PlainEngine:
        return PlainEngine(setup.source, setup.config.model, setup.config.optim, load_weights=load_weights)

    build.build_engine = plain
PATIENCE = 300.0  # seconds


def of_file(name: str) -> Callable[..., bool]:
    return lambda _, descriptor, *__: os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"/{name}")


def of_a_step(_: int, descriptor: int, data: memoryview, *__: Any) -> bool:
    """Return True for a record of a step, not for the first one, which is written before any step."""
    return os.readlink(f"/proc/self/fd/{descriptor}").endswith("/record") and b'"newest": ""' not in bytes(data)


def second_page_of_step_4(_: int, writer: Any, *__: Any) -> bool:
    return writer.path.name == "exp_avg.safetensors" and "step-00000004" in str(writer.path)


ENGINE = "offload_trainer.engine.tiered:TieredEngine"
# The call of each moment, and which calls count: all, or those of which (number, *arguments) says so. A moment with
# `BY_STEP` is that of the step NUMBER.
MOMENTS: dict[str, tuple[str, Callable[..., bool]]] = {
    "start": ("offload_trainer.cli:prepare_process", lambda *_: True),
    "measure": ("offload_trainer.machine.bench:bench_machine", lambda *_: True),
    "plan": ("offload_trainer.run.planning:make_plan", lambda *_: True),
    "setup": ("offload_trainer.run.train:Setup", lambda *_: True),  # planned, with its data
    "compile": ("offload_trainer.optim.kernel_cache:subprocess.run", lambda *_: True),
    "build": (f"{ENGINE}.__init__", lambda *_: True),
    "load": ("offload_trainer.offloading.model:OffloadedModel.load", lambda *_: True),
    "takeover": ("offload_trainer.offloading.model:OffloadedModel.resume_from_pages", lambda *_: True),
    "step": (f"{ENGINE}.train_step", lambda *_: True),
    "loss": ("offload_trainer.model.loss:CausalLoss.forward", lambda _, module, *__: module.training),
    "evaluation": (f"{ENGINE}.eval_loss", lambda *_: True),
    "read": ("os:preadv", of_file("state")),
    "page": ("os:pwritev", of_file("state")),
    "flip": ("offload_trainer.offloading.pages.store:PageCopies.flip", lambda *_: True),
    "half": ("os:pwrite", of_a_step),  # half of the record is written
    "record": ("os:pwrite", of_a_step),  # after the record was written
    "metrics": ("offload_trainer.telemetry.sinks:JsonLines.write", lambda n, _, line: json.loads(line)["step"] == n),
    "line": ("offload_trainer.telemetry.sinks:Telemetry.step", lambda n, _, record: record.step == n),
    "room": ("offload_trainer.run.checkpoint:remove_leftovers", lambda *_: True),  # looks for room for a checkpoint
    "save": ("offload_trainer.offloading.pages.named_state:TieredSnapshot.write", lambda *_: True),
    "put": ("offload_trainer.storage.tensorfile:PlacedWriter.put", second_page_of_step_4),
    "manifest": ("offload_trainer.run.checkpoint:finish_checkpoint", lambda *_: True),
    "saved": (
        "offload_trainer.run.checkpoint:Checkpoints._report_save",
        lambda n, _, final, *__: final.name == f"step-{n:08d}",
    ),
    "prune": ("offload_trainer.run.checkpoint:prune", lambda *_: True),
    "export": ("offload_trainer.run.export:_write_shards", lambda *_: True),
    "end": ("offload_trainer.run.resume:drop", lambda *_: True),
}
BY_STEP = ("metrics", "line", "saved")
AFTER = {"loaded": "load", "record": "record", "line": "line", "dropped": "end"}  # moments after a call


def fill(directory: Path) -> None:
    """Fill the filesystem of `directory` to its last byte."""
    with open(directory / "filler", "wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass


def happen(action: str, given: tuple[Any, ...]) -> None:
    name, _, argument = action.partition("~")
    until = time.monotonic() + PATIENCE
    if name == "pause":
        while not Path(argument).exists() and time.monotonic() < until:
            time.sleep(0.005)
    elif name in ("full", "low"):
        fill(Path(argument))
        if name == "low":
            filler = Path(argument) / "filler"
            os.truncate(filler, filler.stat().st_size - (1 << 20))
    elif name == "sh":
        subprocess.run(argument, shell=True, check=True)
    elif name == "plan":
        Path(argument).write_text(repr((given[0].plan, given[0].machine, torch.get_num_threads())))
    elif name == "EIO":
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    elif name == "broken":
        given[0]._file.close()
        given[0]._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - until the process ends
    elif name == "lose":
        lose_streams(argument)
    else:
        os.kill(os.getpid(), signal.SIGKILL if name == "kill" else signal.Signals[f"SIG{name}"])
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.5)  # Handlers run in the main thread, and a second signal must find the first one handled.


to_come: list[str] = []


def arm(actions: str, moment: str, number: int) -> None:
    """Let the actions happen at the moment."""
    place, counts = MOMENTS[AFTER.get(moment, moment)]
    module, _, path = place.partition(":")
    *outer, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in outer:
        owner = getattr(owner, part)
    call, calls = getattr(owner, name), itertools.count(1)
    wanted = 1 if moment in BY_STEP else number
    to_come.append(moment)

    def act(actions: list[str], given: tuple[Any, ...]) -> None:
        try:
            happen(actions[0], given)
        finally:  # Before there is anything to save, the first of two signals raises from there.
            if actions[1:]:
                act(actions[1:], given)

    def armed(*given: Any, **words: Any) -> Any:
        now = counts(number, *given) and next(calls) == wanted
        if now:
            to_come.remove(moment)
        if now and moment == "half":
            call(given[0], given[1][: len(given[1]) // 2], *given[2:])
        if now and actions == "nan":
            return call(*given, **words) * float("nan")
        if now and moment not in AFTER:
            act(actions.split("+"), given or (SimpleNamespace(**words),))
        found = call(*given, **words)
        if now and moment in AFTER:
            act(actions.split("+"), given)
        return found

    setattr(owner, name, armed)


if __name__ == "__main__":
    faults, attempt = sys.argv[1].split(","), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if "--gpus" in sys.argv and "RANK" not in os.environ:
        process_setup.COMMAND = [sys.executable, __file__, sys.argv[1], "train"]
    for fault in faults[attempt : attempt + 1] and faults[attempt].split(";"):
        what, _, when = fault.partition("@")
        moment, _, number = when.partition("=")
        rank, _, what = what.rpartition(":")
        if when and rank in ("", os.environ.get("RANK")):
            arm(what, moment, int(number or 1))
    code = main(sys.argv[2:])
    if to_come and not code and "RANK" not in os.environ:
        raise SystemExit(f"the command ended without {to_come}")
    raise SystemExit(code)
