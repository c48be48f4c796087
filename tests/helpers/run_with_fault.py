"""run_with_fault.py FAULT WORDS...: run the command, in which something happens at an exact moment.

FAULT is [RANK:]ACTION[+ACTION...]@MOMENT[=NUMBER]: before the moment's call of that NUMBER (1), the actions (`happen`)
happen one after the other, with RANK in that rank only. Semicolons separate FAULTs of one start, commas those of one
start after the other, where torchrun starts ranks again. A FAULT without @ is none. LOSS_SCALE=VALUE,WINDOW in the
environment replaces those of fp16, and ENGINE=plain the engine by torch alone, whatever the plan names.
"""

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from pkgutil import resolve_name
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
    build.build_engine = lambda setup, **_: PlainEngine(setup.source, setup.config.model, setup.config.optim)


def of_file(name: str) -> Callable[..., bool]:
    return lambda _, descriptor, *__: os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"/{name}")


# The function of each moment, in the package if it is not of `os`
MOMENTS = {
    "start": "run.process_setup.prepare_process",
    "measure": "machine.bench.bench_machine",
    "plan": "run.planning.make_plan",
    "setup": "run.train.Setup",  # planned, with its data
    "compile": "optim.kernel_cache.subprocess.run",
    "build": "engine.tiered.TieredEngine.__init__",
    "load": "offloading.model.OffloadedModel.load",
    "takeover": "offloading.model.OffloadedModel.resume_from_pages",
    "step": "engine.tiered.TieredEngine.train_step",
    "loss": "model.loss.CausalLoss.forward",
    "evaluation": "engine.tiered.TieredEngine.eval_loss",
    "read": "os.preadv",
    "page": "os.pwritev",
    "flip": "offloading.pages.store.PageCopies.flip",
    "half": "os.pwrite",  # half of the record is written
    "record": "os.pwrite",  # after the record was written
    "metrics": "telemetry.sinks.JsonLines.write",
    "line": "telemetry.sinks.Telemetry.step",
    "room": "run.checkpoint.remove_leftovers",  # looks for room for a checkpoint
    "save": "offloading.pages.named_state.TieredSnapshot.write",
    "weights": "optim.state_files.WeightsSnapshot.write",
    "put": "storage.tensorfile.PlacedWriter.put",
    "manifest": "run.checkpoint.finish_checkpoint",
    "saved": "run.checkpoint.Checkpoints._report_save",
    "prune": "run.checkpoint.prune",
    "export": "run.export._write_shards",
    "end": "run.resume.drop",
}
AFTER = {"loaded": "load", "record": "record", "line": "line", "dropped": "end"}  # moments after a call


def of_a_step(_: int, descriptor: int, data: memoryview, *__: Any) -> bool:
    """Return True for a record of a step, not for the first one, which is written before any step."""
    return of_file("record")(_, descriptor) and b'"newest": ""' not in bytes(data)


# Which calls count, if not all: (number, *arguments) tells.
COUNTED: dict[str, Callable[..., bool]] = {
    "loss": lambda _, module, *__: module.training,
    "read": of_file("state"),
    "page": of_file("state"),
    "half": of_a_step,
    "record": of_a_step,
    "metrics": lambda n, _, line: json.loads(line)["step"] == n,
    "line": lambda n, _, record: record.step == n,
    "put": lambda _, w, *__: w.path.name == "exp_avg.safetensors" and "step-00000004" in str(w.path),
    "saved": lambda n, _, final, *__: final.name == f"step-{n:08d}",
}


def happen(action: str, given: tuple[Any, ...]) -> None:
    name, _, argument = action.partition("~")
    if name == "pause":  # waits until a file exists
        until = time.monotonic() + 300
        while not Path(argument).exists() and time.monotonic() < until:
            time.sleep(0.005)
    elif name in ("full", "low"):  # no byte is left on a filesystem, or 1 MB
        filler = Path(argument) / "filler"
        with open(filler, "wb", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                with suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass
        if name == "low":
            os.truncate(filler, filler.stat().st_size - (1 << 20))
    elif name == "sh":
        subprocess.run(argument, shell=True, check=True)
    elif name == "plan":
        Path(argument).write_text(repr((given[0].plan, given[0].machine, torch.get_num_threads())))
    elif name == "EIO":
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    elif name == "broken":  # a writer's file becomes one that is always full
        given[0]._file.close()
        given[0]._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - until the process ends
    elif name == "lose":
        lose_streams(argument)
    elif name != "nan":  # "nan" multiplies the call's result; all others are signals
        os.kill(os.getpid(), signal.SIGKILL if name == "kill" else signal.Signals[f"SIG{name}"])
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.5)  # Handlers run in the main thread, and a second signal must find the first one handled.


to_come: list[str] = []


def arm(actions: str, moment: str, number: int) -> None:
    """Let the actions happen at the moment."""
    key = AFTER.get(moment, moment)
    place = MOMENTS[key] if MOMENTS[key].startswith("os.") else f"offload_trainer.{MOMENTS[key]}"
    owner, name = resolve_name(place.rpartition(".")[0]), place.rpartition(".")[2]
    call, calls, counts = getattr(owner, name), itertools.count(1), COUNTED.get(key, lambda *_: True)
    nth = 1 if moment in ("metrics", "line", "saved") else number  # only the call of the step NUMBER counts for these
    to_come.append(moment)

    def act(given: tuple[Any, ...]) -> None:
        to_come.remove(moment)
        with ExitStack() as stack:  # Before there is anything to save, the first of two signals raises from there.
            for action in reversed(actions.split("+")):
                stack.callback(happen, action, given)

    def armed(*given: Any, **words: Any) -> Any:
        now = counts(number, *given) and next(calls) == nth
        if now and moment == "half":
            call(given[0], given[1][: len(given[1]) // 2], *given[2:])
        if now and moment not in AFTER:
            act(given or (SimpleNamespace(**words),))
        found = call(*given, **words)
        if now and moment in AFTER:
            act(given)
        return found * float("nan") if now and actions == "nan" else found

    setattr(owner, name, armed)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test-all` ignores it
    faults, attempt = sys.argv[1].split(","), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if "--gpus" in sys.argv and "RANK" not in os.environ:  # the ranks have the same fault
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
