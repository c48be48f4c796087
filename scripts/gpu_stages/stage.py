"""What every stage is given: its time, a directory on the drive, its record, and processes that hold the GPU.

with stage.worker("name") as worker:
    facts = worker.build([...])                   every answer within the stage's time, or Failure
    steps = worker.ask("steps", count=5)["steps"]
"""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from gpu_stages.record import OUT_OF_TIME, Record
from offload_trainer.storage.owned_dirs import scratch

ROOT = Path(__file__).resolve().parent.parent.parent
_Of = TypeVar("_Of")
_CLOSING = 12.0  # seconds kept for ending processes and writing the page
_LEAST = 15.0  # with fewer seconds left nothing is begun: a process takes as many to start


class Failure(Exception):
    """Why something has no result, as its row's outcome says it."""


class Stage:
    """One stage's time, drive and processes; all that it started has ended, and is removed, on the way out."""

    def __init__(self, record: Record, *, seconds: float, drive: Path, only: str = "") -> None:
        """`only`: of the cases those whose name contains it."""
        self.record, self.rehearsal = record, record.rehearsal
        self._only, self._kept = only, list[Worker]()
        self._end = time.monotonic() + seconds - _CLOSING
        self._drive = drive
        self._open = ExitStack()

    def __enter__(self) -> Stage:
        self.drive = self._open.enter_context(scratch("gpu-suite-", directory=self._drive))
        return self

    def __exit__(self, *exception: Any) -> None:
        for worker in self._kept:
            worker.end()
        self._open.__exit__(*exception)

    def left(self) -> float:
        """Seconds that may still be used."""
        return max(0.0, self._end - time.monotonic())

    def some(self, cases: Mapping[str, _Of]) -> list[tuple[str, _Of]]:
        """The cases that are asked for; in a rehearsal the first two, since the others differ in words alone."""
        asked = [(name, case) for name, case in cases.items() if self._only in name]
        return asked[: 2 if self.rehearsal else None]

    def asked(self, name: str) -> bool:
        """Whether a case of this name is asked for."""
        return self._only in name

    @contextmanager
    def process(self, name: str) -> Iterator[Worker]:
        """A process for one run, ended behind it; in a rehearsal one for all runs, since it takes seconds to start."""
        if not self.rehearsal:
            with self.worker(name) as worker:
                yield worker
            return
        self.need_time()
        if not self._kept:
            self._kept.append(self.worker("rehearsal"))
        worker = self._kept.pop()
        yield worker
        if worker.runs_one:
            worker.ask("close")
        self._kept.append(worker)  # what has failed has ended, and does not come here

    def worker(self, name: str, **settings: Any) -> Worker:
        """A process for runs; `settings` are those of worker.py. Failure where there is no time for one."""
        self.need_time()
        return Worker(self, name, settings)

    def need_time(self, least: float = _LEAST) -> None:
        """Failure, out of time, with less than this left."""
        if self.left() < least:
            raise Failure(OUT_OF_TIME)

    def command(self, argv: Sequence[str], *, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """A command within the stage's time, stdout and stderr apart. Failure, out of time, where it takes longer."""
        self.need_time()
        with subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | (env or {}),
            cwd=ROOT,
            start_new_session=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=self.left())
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)  # what it started too
                process.communicate()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise Failure(OUT_OF_TIME) from None
                raise
        return subprocess.CompletedProcess(argv, process.returncode, out, err)


class Worker:
    """The other end of worker.py: one process with a directory of its own on the drive, asked one thing at a time."""

    def __init__(self, stage: Stage, name: str, settings: dict[str, Any]) -> None:
        self.name, self._stage = name, stage
        self._open = ExitStack()
        self.folder = self._open.enter_context(scratch("worker-", directory=stage.drive))
        self._log, self._runs = self.folder / "log", 0
        self.runs_one = False  # whether a run is open in it
        command = [sys.executable, str(Path(__file__).with_name("worker.py")), json.dumps(settings)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=ROOT
            )

    def build(self, words: Sequence[str], **given: Any) -> dict[str, Any]:
        """The run that `words` mean, its drive and its directory here; `given` is as worker.py has it."""
        self._runs += 1
        self.runs_one = True
        here = ["--nvme", str(self.folder)] if "{drive}" in words else []
        words = [word for word in words if word != "{drive}"]
        words = [*words, *here, *(["placement.threads=1"] if self._stage.rehearsal else [])]
        return self.ask("build", words=words, output=str(self.folder / f"run-{self._runs}"), **given)

    def ask(self, what: str, **given: Any) -> dict[str, Any]:
        """Its answer. Failure with its last words, or out of time; the process has ended then."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"do": what, **given}).encode() + b"\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._line())
        except (BrokenPipeError, json.JSONDecodeError):
            self._process.wait()
            why = f"failed: {self._last_words()}"
        else:
            if "error" not in answer:
                self.runs_one = self.runs_one and what != "close"
                return answer
            refused = "this does not fit" in answer["error"]
            why = f"{'not run' if refused else 'failed'}: {answer['error'][-400:]}"
        self.end()
        raise Failure(why)

    def rest(self) -> None:
        """Stand still until it is asked again, so that its threads cost the others nothing."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGSTOP)

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._process.stdout, selectors.EVENT_READ)
            if not waiting.select(self._stage.left()):
                self.end()
                raise Failure(OUT_OF_TIME)
        return self._process.stdout.readline()  # one write each, so a line is whole

    def _last_words(self) -> str:
        code = self._process.poll()
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit {code}"
        return f"{how}: {' '.join(self._log.read_text(errors='replace').split())[-300:]}"

    def end(self) -> None:
        """Killed where it stands; its runs' directories and pages on the drive are removed. Again: nothing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass
        self._open.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def facts(*, rehearsal: bool) -> dict[str, Any]:
    """What numbers depend on and no setting says; asked of a process of its own, since it begins CUDA."""
    command = [sys.executable, str(Path(__file__).with_name("facts.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"gpu_suite: torch does not start here: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if rehearsal:
        found["gpu"] = None
    return {"commit": _commit(), "source": _source(), **found}


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _source() -> str:
    """Sum of the package's Python and C++, which also names a copy without its history."""
    total = hashlib.sha256()
    for path in sorted((ROOT / "offload_trainer").rglob("*")):
        if path.suffix in (".py", ".cpp", ".cu"):
            total.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]


def outcome_of(about: dict[str, Any]) -> str:
    """Return "ok" for what `Worker.build` answered, or why its speed must not be quoted.

    State in RAM and on drives is updated by the CPU. By torch's kernel, where there is no compiler, that takes a
    multiple of the time.
    """
    chosen = about["plan"]["chosen"]
    sizes = chosen["sizes"] or {}
    if chosen["engine"] != "tiered" or sizes["gpu_fraction"] >= 1 or "native kernel," in about["kernel"]:
        return "ok"
    return f"not comparable: {about['kernel']}"


def middle(steps: Sequence[dict[str, Any]], key: str) -> float:
    """Median over the steps, in whatever unit they have."""
    return median(step[key] for step in steps)


def spread(steps: Sequence[dict[str, Any]], key: str) -> str:
    """Median, smallest and largest."""
    values = [step[key] for step in steps]
    return f"{median(values):.3g} ({min(values):.3g}-{max(values):.3g})"
