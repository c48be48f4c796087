"""The environment of a stage: its time limit, a directory on the drive, its record, and worker processes for the GPU.

with stage.worker() as worker:
    steps = worker.run([...], steps=5)["steps"]      within the stage's time, or Failure
"""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gpu_stages.record import OUT_OF_TIME, Record
from offload_trainer.storage.owned_dirs import scratch

ROOT = Path(__file__).resolve().parent.parent.parent
_CLOSING = 12.0  # seconds reserved for ending processes and writing the page
_LEAST = 15.0  # seconds below which nothing new starts: starting a process takes as many


class Failure(Exception):
    """The reason for a missing result, in the words of its row's outcome."""


class Stage:
    """One stage's time, drive and processes; leaving the context ends its processes and removes their files."""

    def __init__(self, record: Record, *, seconds: float, drive: Path, only: str = "") -> None:
        """`only`: run the cases whose names contain it."""
        self.record, self.rehearsal = record, record.rehearsal
        self._only = only
        self._kept: Worker | None = None
        self._end = time.monotonic() + seconds - _CLOSING
        self._shortest = 0.0  # seconds of the shortest case so far
        self._drive = drive
        self._open = ExitStack()

    def __enter__(self) -> Stage:
        self.drive = self._open.enter_context(scratch("gpu-suite-", directory=self._drive))
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._kept:
            self._kept.end()
        self._open.__exit__(*exception)

    def left(self) -> float:
        """Return the seconds that remain."""
        return max(0.0, self._end - time.monotonic())

    def asked(self, name: str) -> bool:
        """Return whether a case of this name is selected."""
        return self._only in name

    def add_row(self, measure: Callable[[dict[str, Any]], str | None], **row: Any) -> None:
        """Add a row if its case, the first value of `row`, is selected.

        `measure` completes the row and returns its outcome, by default "ok". A Failure that it raises is the outcome.
        """
        if not self.asked(next(iter(row.values()))):
            return
        try:
            self.need_time()
            outcome = measure(row) or "ok"
        except Failure as failure:
            outcome = str(failure)
        self.record.add(outcome, **row)

    @contextmanager
    def case(self) -> Iterator[None]:
        """Surround a case that is as long as others. Raises Failure if not even the shortest one so far would fit."""
        self.need_time(max(_LEAST, self._shortest))
        start = time.monotonic()
        yield
        taken = time.monotonic() - start
        self._shortest = min(self._shortest or taken, taken)

    @contextmanager
    def worker(self, *, kept: bool = False) -> Iterator[Worker]:
        """Yield a process for one run, which ends afterwards.

        With `kept`, and always in a rehearsal, later calls get the same process, since starting one takes seconds.
        Raises Failure if there is no time for one.
        """
        self.need_time()
        worker, self._kept = self._kept or Worker(self, kept=kept or self.rehearsal), None
        try:
            yield worker
        except BaseException:
            worker.end()
            raise
        if worker.kept:
            self._kept = worker
        else:
            worker.end()

    def need_time(self, least: float = _LEAST) -> None:
        """Raise Failure (out of time) if fewer than `least` seconds remain."""
        if self.left() < least:
            raise Failure(OUT_OF_TIME)

    def command(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command and return its stdout and stderr. Raises Failure (out of time) if it takes longer than left."""
        self.need_time()
        with subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
        ) as process:
            try:
                out, err = process.communicate(timeout=self.left())
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)  # also ends the processes that it started
                process.communicate()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise Failure(OUT_OF_TIME) from None
                raise
        return subprocess.CompletedProcess(argv, process.returncode, out, err)


class Worker:
    """A client of worker.py: a process with its own directory on the drive, for one run or, if `kept`, for several."""

    def __init__(self, stage: Stage, *, kept: bool) -> None:
        self.kept, self._stage = kept, stage
        self._open = ExitStack()
        self.folder = self._open.enter_context(scratch("worker-", directory=stage.drive))
        self._log, self._runs = self.folder / "log", 0
        command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=ROOT
            )

    def run(self, words: Sequence[str], **job: Any) -> dict[str, Any]:
        """Measure the run that `words` configure, with its drive and output in this worker's directory.

        worker.py documents `job` and the answer. Raises Failure, with the worker's last output or for lack of time,
        after ending the process.
        """
        self._runs += 1
        here = ["--nvme", str(self.folder)] if "{drive}" in words else []
        words = [word for word in words if word != "{drive}"]
        words = [*words, *here, *(["placement.threads=1"] if self._stage.rehearsal else [])]
        job |= {"words": words, "output": str(self.folder / f"run-{self._runs}"), "kept": self.kept}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._line())
        except (BrokenPipeError, json.JSONDecodeError):
            self._process.wait()
            why = f"failed: {self._last_words()}"
        else:
            if "error" not in answer:
                return answer
            refused = "this does not fit" in answer["error"]
            why = f"{'not run' if refused else 'failed'}: {answer['error'][-400:]}"
        self.end()
        raise Failure(why)

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._process.stdout, selectors.EVENT_READ)
            if not waiting.select(self._stage.left()):
                self.end()
                raise Failure(OUT_OF_TIME)
        return self._process.stdout.readline()  # an answer is one write, so the line is complete

    def _last_words(self) -> str:
        code = self._process.poll()
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit {code}"
        return f"{how}: {' '.join(self._log.read_text(errors='replace').split())[-300:]}"

    def end(self) -> None:
        """Kill the process and remove its directory on the drive; calling this again has no effect."""
        self.kept = False
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass
        self._open.close()


def facts(drive: Path) -> dict[str, Any]:
    """Return the facts that numbers depend on and no setting contains; `drive` is a directory on the drive.

    A separate process collects those of torch, since that initialises CUDA.
    """
    command = [sys.executable, str(Path(__file__).with_name("facts.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"gpu_suite: torch does not start here: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    kind = subprocess.run(["stat", "-f", "-c", "%T", drive], capture_output=True, text=True, check=False).stdout.strip()
    found["drive"] = f"{kind}, {shutil.disk_usage(drive).free / 1e9:.0f} GB free"
    return {"commit": _commit(), "source": _source(), **found}


def _commit() -> str:
    try:
        command = ["git", "describe", "--always", "--dirty"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _source() -> str:
    """Return a hash of the package's Python and C++ sources, which also identifies a copy without git history."""
    total = hashlib.sha256()
    for path in sorted((ROOT / "offload_trainer").rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            total.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]
