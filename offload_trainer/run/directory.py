"""A run directory: what is known at the start, the log, and the lock that keeps a second run out.

config.yaml plan.json machine.json environment.json model/    written when the plan has passed
log.txt                                                       every line for people
.lock                                                         held while the run lives; not empty if it died
"""

from __future__ import annotations

import json
import os
import platform
import stat
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch

from offload_trainer.errors import UserError, explain
from offload_trainer.retention import remove_leftovers
from offload_trainer.safe_files import is_there
from offload_trainer.stdio import write_now
from offload_trainer.storage.atomic_io import make_directories, open_to_append, remove_abandoned, write_text
from offload_trainer.storage.locks import NoLocks, open_lock, take
from offload_trainer.storage.owned_dirs import reason
from offload_trainer.units import shown

# What a run writes in its directory, but for checkpoints and weights, which are looked at by themselves.
WRITTEN = (
    *("config.yaml", "plan.json", "machine.json", "environment.json", "deepspeed.json", "trackers.json"),
    *("log.txt", "metrics.jsonl", "evaluations.jsonl", "report.html", "export.json"),
)
_MARK = ".lock"
_TRIES, _INSTANT = 20, 0.05  # seconds: twenty looks of others, one after the other


@dataclass
class Log:
    """Lines for people: to log.txt once there is a run directory, and to stderr. Silent on ranks other than 0.

    The file comes first: stderr may block, and a terminal or pipe go away.
    """

    loud: bool
    file: RawIOBase | None = field(default=None)

    def say(self, line: str) -> None:
        if self.loud:
            self.write(line)
            print(shown(line), file=sys.stderr, flush=True)

    def say_now(self, line: str) -> None:
        """The same from a signal's handler."""
        if self.loud:
            self.write(line)
            write_now(line)

    def write(self, text: str) -> None:
        """To log.txt alone."""
        if self.file is None:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = "".join(f"{stamp} {part}\n" for part in shown(text).splitlines())
        try:
            self.file.write(lines.encode(errors="backslashreplace"))
        except OSError as error:  # what it is about is more important than the log
            self.file = None
            write_now(f"note: log.txt can no longer be written: {error.strerror}")


@contextmanager
def _ends_told(log: Log) -> Iterator[None]:
    """Why a run ended stands in log.txt; who shows it to the user is `cli`."""
    try:
        yield
    except BaseException as error:
        log.write(f"ended: {explain(error) or traceback.format_exc()}")
        raise


def refuse_second(output: Path) -> None:
    """UserError where a run is writing in `output`: asked before its checkpoints are looked at."""
    lock = _open_lock(output, create=False)
    if lock is None:
        return
    try:
        _take(lock, output, shared=True)
    except NoLocks:
        pass  # `held` says so
    finally:
        os.close(lock)


def refuse_strangers(output: Path) -> None:
    """UserError where a run would replace or append to what no run has written: somebody's own files."""
    there = [name for name in WRITTEN if is_there(output / name)]
    odd = [name for name in there if not stat.S_ISREG((output / name).lstat().st_mode)]
    if odd:
        raise UserError(
            f"{output / odd[0]} is a link, a directory or no regular file, and a run writes a file of that name: move "
            "it away, or name another --output"
        )
    if is_there(output / "model"):
        there.append("model")
    if there and not is_there(output / _MARK):
        raise UserError(
            f"{output} holds {', '.join(there)}, which a run there would replace, and no {_MARK}, so it was not "
            "written by a run: name another --output, or move it away. If it is a copy of a run, make an empty "
            f"{output / _MARK}"
        )


@contextmanager
def held(output: Path, log: Log) -> Iterator[int]:
    """The run directory, made if it is missing, for this run alone; gives the descriptor of its lock.

    UserError where another run has it. Where there are no locks that is said, and nobody keeps a second run out.
    """
    make_directories(output)
    lock = _open_lock(output, create=True)
    assert lock is not None
    try:
        try:
            _take_in_the_end(lock, output)
        except NoLocks as error:
            log.say(
                f"note: {output}: {error}. A second run in this directory would not be noticed: start none. Older "
                "checkpoints are not pruned, and leftovers of a killed save are not removed"
            )
        yield lock
    finally:
        os.close(lock)


def _open_lock(output: Path, *, create: bool) -> int | None:
    try:
        return open_lock(output / _MARK, create=create)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{output / _MARK} cannot be a run's lock: {reason(error)}; move it away") from error


def _take_in_the_end(lock: int, output: Path) -> None:
    """The lock for good. A start that only looks (`refuse_second`) has it for an instant, which is waited for."""
    for _ in range(_TRIES):
        try:
            return take(lock)
        except BlockingIOError:
            time.sleep(_INSTANT)
    _take(lock, output)


def _take(lock: int, output: Path, *, shared: bool = False) -> None:
    try:
        take(lock, shared=shared)
    except BlockingIOError:
        raise UserError(f"{output}: another run is using this directory; name another --output") from None


@contextmanager
def run_directory(output: Path, log: Log, *, lock: int) -> Iterator[None]:
    """The run directory that is `held`, while the run lives: every line goes to its log, and why the run ended."""
    with open(open_to_append(output / "log.txt"), "ab", buffering=0) as log.file:
        try:
            with _ends_told(log), _noted_as_alive(lock, log):
                remove_leftovers(output / "checkpoints")
                remove_abandoned(output)
                yield
        finally:
            log.file = None


def write_known(output: Path, *, config: str, plan: dict[str, Any], machine: dict[str, Any]) -> None:
    """What is known at the start."""
    write_text(output / "config.yaml", config)
    for name, about in (("plan", plan), ("machine", machine), ("environment", environment())):
        write_text(output / f"{name}.json", json.dumps(about, indent=1))


def keep_model(directory: Path, source: Any, *, dtype: torch.dtype, tokenizer: Any, end_of_text: int | None) -> None:
    """The configuration and the tokenizer of `source` (a ModelSource), from which its exports are made."""
    from offload_trainer.data.tokenizer import save_tokenizer
    from offload_trainer.model.loader import save_model_config

    save_model_config(source, directory, dtype=dtype, end_of_text=end_of_text)
    save_tokenizer(tokenizer, directory)


@contextmanager
def _noted_as_alive(lock: int, log: Log) -> Iterator[None]:
    """The lock file holds something while a run lives; what a run finds there was left by one that could not say so."""
    if os.fstat(lock).st_size:
        log.say("note: the last run here ended without a message: it was killed, ran out of memory, or lost power")
        os.ftruncate(lock, 0)
    try:
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        error.filename = os.readlink(f"/proc/self/fd/{lock}")
        raise
    try:
        yield
    finally:
        os.ftruncate(lock, 0)


def environment() -> dict[str, Any]:
    packages: dict[str, str | None] = {}
    for name in ("offload-trainer", "torch", "deepspeed", "transformers", "bitsandbytes", "safetensors"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": packages,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "command": sys.argv,
    }
