"""Start commands, and compare what they leave with what an undisturbed run left.

`kill_and_resume.py` uses it. A command runs in a fork of a process that has imported torch, which saves its startup
time (tests/helpers/commands.py); ranks are started by the command's own launcher, as for a user. Results are read
without the package, as an independent check.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests/helpers"))

import counted_once  # noqa: F401  # its counts are shared by all commands of a script
from commands import FAULTY, results, start

PATIENCE = 900  # seconds for a command


class Difference(Exception):
    """A broken promise. The text says what differs, and where."""


# -- commands ----------------------------------------------------------------------------------------------------------


class Run:
    """A running `offload-train WORDS` and its ranks. `log` receives their output."""

    def __init__(self, words: Sequence[object], *, log: Path) -> None:
        self.words, self.log = [*map(str, words)], log
        log.write_text("")
        scale = f"{2**40},3"  # the scale of a short fp16 run changes often
        self._process = start(FAULTY, "none", *words, stdout=log, stderr=log, LOSS_SCALE=scale)
        self._family = [psutil.Process(self._process.pid)]  # the launcher, and when it was killed its ranks

    def send(self, number: int, *, choose: Callable[[list[int]], int]) -> bool:
        """Send a signal to one process; return False if the command has ended.

        `choose` gets the pids of the launcher and of its ranks. The launcher is suspended meanwhile, so that no
        rank starts that `_family` lacks, for which `wait` would not wait.
        """
        launcher = self._family[0]
        try:
            launcher.suspend()
            self._family += launcher.children(recursive=True)
            os.kill(choose([process.pid for process in self._family]), number)
            launcher.resume()
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False
        return True

    def wait_for(self, when: Callable[[], bool]) -> bool:
        """Wait until `when` is true or the command has ended; return True if it is still running."""
        self._until(lambda: self._process.poll() is not None or when(), PATIENCE)
        return self._process.poll() is None

    def wait(self, seconds: float = PATIENCE) -> int:
        """Wait until the command and its ranks have ended; return the exit code, negative for a signal."""
        self._until(lambda: self._process.poll() is not None and not any(map(_lives, self._family)), seconds)
        return self._process.wait()

    def _until(self, met: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not met():
            if time.monotonic() > deadline:
                for process in filter(_lives, self._family):
                    process.kill()
                raise Difference(f"did not end within {seconds} s: {self}")
            time.sleep(0.0005)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def __str__(self) -> str:
        return f"offload-train {' '.join(self.words)}\n{self.text[-4000:]}"


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def finish(words: Sequence[object], *, log: Path) -> str:
    """Run a command to its end and return its output; raise Difference unless it succeeds."""
    run = Run(words, log=log)
    if (code := run.wait()) != 0:
        raise Difference(f"exit {code}: {run}")
    return run.text


# -- results -----------------------------------------------------------------------------------------------------------


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def checkpoints_in(run: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by step: directories of that name with a manifest."""
    found = (path.parent for path in run.glob("checkpoints/step-*/MANIFEST.json"))
    return {int(path.name[5:]): path for path in sorted(found)}


def verify_checkpoint(checkpoint: Path) -> None:
    """Raise Difference unless a checkpoint holds the files that its manifest names, with their checksums."""
    files = json.loads((checkpoint / "MANIFEST.json").read_text())["files"]
    held = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    if held != {*files, "MANIFEST.json"}:
        raise Difference(f"{checkpoint} holds {sorted(held)}, and its manifest names {sorted(files)}")
    for name, about in files.items():
        data = (checkpoint / name).read_bytes()
        if (len(data), zlib.crc32(data)) != (about["bytes"], about["crc32"]):
            raise Difference(f"{checkpoint}/{name} is not what the manifest says")


def compare(run: Path, alone: Path) -> None:
    """Raise Difference unless two finished runs are equal bit for bit in all that `results` returns of them."""
    try:
        ours, theirs = results(run), results(alone)
    except OSError as error:
        raise Difference(f"{run} cannot be compared with {alone}: {error}") from error
    if not theirs["tensors"]:
        raise Difference(f"{alone} has neither a checkpoint nor an export to compare with")
    for what, right in theirs.items():
        held, wanted = (dict(each) if isinstance(each, dict) else dict(enumerate(each)) for each in (ours[what], right))
        if differs := [key for key in wanted | held if held.get(key) != wanted.get(key)]:
            first = f"{differs[0]}: {held.get(differs[0])}, undisturbed {wanted.get(differs[0])}"
            raise Difference(f"{run}: {what} differs from {alone} in {len(differs)} of {len(wanted)}: {first}")
