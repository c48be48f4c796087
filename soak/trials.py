"""Run commands that are ended at random moments, and compare what they leave with an undisturbed run.

A command runs in a fork of a process that has imported torch, which saves its startup time. Signals, closed terminals
and the kernel end it like any other process. Results are read here without the package, as an independent check.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import re
import signal
import sys
import termios
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

PATIENCE = 900  # seconds for a command
# fields of a step that must be equal, however it was computed
SAME = ("step", "tokens", "loss", "grad_norm", "lr", "loss_scale", "skipped")
CHECKPOINT = re.compile("step-([0-9]+)")

End = Literal["file", "pipe", "terminal"]  # the kind of a command's stdout and stderr


class Difference(Exception):
    """A broken guarantee."""


def load_libraries() -> None:
    """Import what each command needs, once. Nothing is computed here, since a fork would lose the threads
    that start.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # Checking for a GPU then does not initialise CUDA, which would not work in forks.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    from offload_trainer.run.process_setup import quieten

    quieten()
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    import offload_trainer.engine.plain
    import offload_trainer.engine.tiered
    import offload_trainer.export.export_command
    import offload_trainer.run.train
    import offload_trainer.trainer  # noqa: F401


def soak_of_kills(
    parser: argparse.ArgumentParser,
    carry_out: Callable[[Path, random.Random, argparse.Namespace], None],
    *,
    kills: int,
) -> None:
    """Parse --kills and --seed, import the libraries, and run a soak in a temporary directory (in KILL_DIRECTORY)."""
    from offload_trainer.storage.owned_dirs import scratch

    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--seed", type=int, default=0)
    wishes, named = parser.parse_args(), os.environ.get("KILL_DIRECTORY")
    load_libraries()
    with scratch("kills-", directory=named and Path(named)) as folder:
        try:
            carry_out(folder, random.Random(wishes.seed), wishes)
        except Difference as found:
            raise SystemExit(str(found)) from None


class Command:
    """A running `offload-train WORDS` in a new session. `log` receives its output; `first` is called in
    it beforehand.
    """

    _far: dict[int, int] = {}  # the other ends of open pipes and terminals: no other command may hold them  # noqa: RUF012

    def __init__(
        self, words: Sequence[object], *, log: Path, end: End = "file", first: Callable[[], None] | None = None
    ) -> None:
        self.words = [str(word) for word in words]
        self.log, self.code = log, None
        near = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._log = near
        far = -1
        if end == "pipe":
            far, near = os.pipe()
        elif end == "terminal":
            far, near = os.openpty()
        sys.stdout.flush()
        sys.stderr.flush()
        # The fork ignores it from the start, as the command does once it has parsed its words.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        self.pid = os.fork()
        if not self.pid:
            self._carry_out(near, [far, *self._far.values()], end, first)
        if end == "file":
            return
        os.close(near)
        os.set_blocking(far, False)
        self._far[self.pid] = far

    code: int | None  # set once it has ended; negative for a signal

    def _carry_out(self, near: int, others: list[int], end: End, first: Callable[[], None] | None) -> None:
        """Run the command in the fork; never return."""
        code = 1
        try:
            os.setsid()
            for other in others:
                if other >= 0:
                    os.close(other)
            if end == "terminal":
                self._take_terminal(near)
            for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, near), (2, near)):
                os.dup2(source, descriptor)
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if first is not None:
                first()
            code = self._main()
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            with suppress(OSError):
                traceback.print_exc()
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)

    def _main(self) -> int:
        from offload_trainer.cli import main

        return main(self.words)

    def _take_terminal(self, near: int) -> None:
        """Make it the fork's controlling terminal; if it is closed already, end as the kernel would (SIGHUP)."""
        try:
            fcntl.ioctl(near, termios.TIOCSCTTY, 0)
        except OSError:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGHUP)

    def ended(self) -> bool:
        """Return True if the command has ended, and collect its output."""
        if self.code is not None:
            return True
        if not self._reaped():
            return False
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # processes that it started
        self._listen()
        self.hang_up()
        os.close(self._log)
        return True

    def _reaped(self) -> bool:
        """Return True if its main process has ended."""
        self._listen()
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.code = os.waitstatus_to_exitcode(status)
        return bool(pid)

    def _listen(self) -> None:
        far = self._far.get(self.pid)
        if far is None:
            return
        with suppress(OSError):
            while said := os.read(far, 1 << 16):
                os.write(self._log, said)

    def wait(self) -> int:
        """Return the exit code; raise Difference if the command does not end."""
        deadline = time.monotonic() + PATIENCE
        while not self.ended():
            if time.monotonic() > deadline:
                self.send(signal.SIGABRT)
                raise Difference(f"did not end within {PATIENCE} s: {self}")
            time.sleep(0.002)
        assert self.code is not None
        return self.code

    def wait_for(self, when: Callable[[], bool]) -> bool:
        """Wait until `when` is true or the command has ended; return True if it is still running."""
        deadline = time.monotonic() + PATIENCE
        while not self.ended():
            if when():
                return True
            if time.monotonic() > deadline:
                self.send(signal.SIGABRT)
                raise Difference(f"did not get on within {PATIENCE} s: {self}")
            time.sleep(0.0005)
        return False

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def hang_up(self) -> None:
        """Close the reading end of its pipe or terminal."""
        far = self._far.pop(self.pid, None)
        if far is not None:
            os.close(far)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def __str__(self) -> str:
        return f"offload-train {' '.join(self.words)}\n{self.text[-4000:]}"


def finish(words: Sequence[object], *, log: Path) -> None:
    """Run a command to its end; raise Difference unless it succeeds."""
    command = Command(words, log=log)
    if command.wait() != 0:
        raise Difference(f"exit {command.code}: {command}")


# -- moments -----------------------------------------------------------------------------------------------------------


def moment(dice: random.Random, output: Path, *, steps: int) -> tuple[str, Callable[[], bool]]:
    """Return a random moment of a training run in `output`, in words and as a condition that is true from then on."""
    checkpoints = output / "checkpoints"
    before = {path.name for path in checkpoints.glob("step-*")}
    kind = dice.choice(["any", "step", "save", "save", "prune"])
    after, begun = dice.randrange(1, steps), time.monotonic()
    delay = dice.uniform(0, {"any": 2.5, "step": 0.05, "save": 0.06, "prune": 0.02}[kind])
    due: list[float] = []

    def when() -> bool:
        if kind == "any":
            return time.monotonic() - begun > delay
        seen = {
            "step": lambda: lines(output / "metrics.jsonl") >= after,
            "save": lambda: any(checkpoints.glob(".step-*.tmp")),
            "prune": lambda: {path.name for path in checkpoints.glob("step-*")} - before,
        }[kind]
        if not due and seen():
            due.append(time.monotonic() + delay)
        return bool(due) and time.monotonic() >= due[0]

    words = {"any": "{0} s in", "step": "{0} s after step {1}", "save": "{0} s into a save", "prune": "{0} s after one"}
    return words[kind].format(round(delay, 4), after), when


def what_was_hit(output: Path, text: str) -> str:
    """Return what a killed run was doing, judging by its files and messages."""
    names = [path.name for path in (output / "checkpoints").glob(".step-*")]
    left = [name for name in names if re.fullmatch(r"\.step-[0-9]+\.[a-z]+", name)]
    if any(name.endswith(".tmp") for name in left):
        return "in a save"
    if left:
        return "in a prune"
    return "in training" if "resumed from" in text or lines(output / "metrics.jsonl") else "at start"


# -- results -----------------------------------------------------------------------------------------------------------


def lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def rows(path: Path, keys: Sequence[str] = SAME) -> list[dict[str, Any]]:
    """Return the reproducible fields of each complete line of metrics; an incomplete last line is ignored."""
    if not path.exists():
        return []
    whole = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [{key: row[key] for key in keys} for row in map(json.loads, whole)]


def checkpoints_in(root: Path) -> dict[int, Path]:
    """Return the checkpoints by step: directories of that name with a manifest."""
    found = {}
    for path in root.glob("step-*") if root.is_dir() else ():
        named = CHECKPOINT.fullmatch(path.name)
        if named and (path / "MANIFEST.json").exists():
            found[int(named[1])] = path
    return dict(sorted(found.items()))


def verify_checkpoint(checkpoint: Path) -> int:
    """Check a checkpoint's files against its manifest; return their number. Raises Difference."""
    files = json.loads((checkpoint / "MANIFEST.json").read_text())["files"]
    held = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    if held != {*files, "MANIFEST.json"}:
        raise Difference(f"{checkpoint} holds {sorted(held)}, and its manifest names {sorted(files)}")
    for name, about in files.items():
        data = (checkpoint / name).read_bytes()
        if (len(data), zlib.crc32(data)) != (about["bytes"], about["crc32"]):
            raise Difference(f"{checkpoint}/{name} is not what the manifest says")
    return len(files)


def compare_state(checkpoint: Path, expected: Path) -> int:
    """Compare masters, moments and the engine's counts bit for bit; return the number of files. Raises Difference."""
    names = sorted(path.name for path in expected.iterdir() if path.suffix == ".safetensors")
    for name in [*names, "engine.json"]:
        compare_file(checkpoint / name, expected / name)
    more = {path.name for path in checkpoint.glob("*.safetensors")} - set(names)
    if more:
        raise Difference(f"{checkpoint} holds {sorted(more)}, and {expected} does not")
    for key in ("step", "tokens", "data_position"):
        one, other = (json.loads((path / "state.json").read_text())[key] for path in (checkpoint, expected))
        if one != other:
            raise Difference(f"{checkpoint}/state.json: {key} is {one}, alone {other}")
    return len(names) + 1


def compare_export(directory: Path, expected: Path) -> int:
    """Compare all files except the model card bit for bit; return their number. Raises Difference."""
    ours, theirs = (
        sorted(path.relative_to(folder) for path in folder.rglob("*") if path.suffix != ".md")
        for folder in (directory, expected)
    )
    if ours != theirs:
        raise Difference(f"{directory} holds {[*map(str, ours)]}, and {expected} {[*map(str, theirs)]}")
    for name in theirs:
        if (expected / name).is_file():
            compare_file(directory / name, expected / name)
    return len(theirs)


def compare_file(path: Path, expected: Path) -> None:
    """Compare byte for byte, or tensors by name, since engines may list them in different order. Raises Difference."""
    one, other = path.read_bytes(), expected.read_bytes()
    if one == other:
        return
    if path.suffix != ".safetensors":
        raise Difference(f"{path} differs from {expected}")
    ours, theirs = _tensors(one), _tensors(other)
    differs = sorted(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
    if differs:
        raise Difference(f"{path} differs from {expected} in {len(differs)} of {len(theirs)}: {', '.join(differs[:5])}")


def _tensors(data: bytes) -> dict[str, tuple[Any, ...]]:
    """Return (dtype, shape, bytes) by name, parsed as https://github.com/huggingface/safetensors specifies."""
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    found = {}
    for name, entry in entries.items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            found[name] = entry["dtype"], entry["shape"], data[start:end]
    return found
