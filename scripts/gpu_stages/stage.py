"""What a stage works with: its time limit, a directory on the drive, its record, and worker processes for the GPU."""

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
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
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
    """One stage's record and time, and a call's drive and processes, which end and are removed with the context."""

    def __init__(self, *, drive: Path, only: str = "", rehearsal: bool = False) -> None:
        """`only`: run the cases whose names contain it."""
        self.rehearsal, self._only, self._drive = rehearsal, only, drive
        self._kept: Worker | None = None
        self._open = ExitStack()

    def begin(self, record: Record, *, seconds: float) -> None:
        """Begin a stage. In a rehearsal it has the process of the stage before, since starting one takes seconds."""
        self.record, self._end = record, time.monotonic() + seconds - _CLOSING
        self._shortest = 0.0  # seconds of the shortest run in a process of its own so far
        if not self.rehearsal:
            self._end_kept()

    def __enter__(self) -> Stage:
        self.drive = self._open.enter_context(scratch("gpu-suite-", directory=self._drive))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._end_kept()
        self._open.__exit__(*exception)

    def _end_kept(self) -> None:
        if self._kept:
            self._kept.end()
        self._kept = None

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

    def need_time(self, least: float = _LEAST) -> None:
        """Raise Failure (out of time) if fewer than `least` seconds remain."""
        if self.left() < least:
            raise Failure(OUT_OF_TIME)

    def run(self, words: Sequence[str], *, kept: bool = False, **job: Any) -> dict[str, Any]:
        """Measure the run that `words` configure in a process of its own, which ends afterwards.

        With `kept`, and always in a rehearsal, the process serves later runs too.
        worker.py documents `job` and the answer. Raises Failure, with the process's last output or for lack of time,
        after ending the process. No process starts if not even the shortest one so far would fit.
        """
        self.need_time(_LEAST if kept else max(_LEAST, self._shortest))
        start, kept = time.monotonic(), kept or self.rehearsal
        worker, self._kept = self._kept or Worker(self), None
        try:
            answer = worker.run(words, kept=kept, **job)
        except BaseException:
            worker.end()
            raise
        if kept:
            self._kept = worker
        else:
            worker.end()
            taken = time.monotonic() - start
            self._shortest = min(self._shortest or taken, taken)
        return answer

    def command(self, argv: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
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
    """A client of worker.py: a process with its own directory on the drive."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._runs, self._open = stage, 0, ExitStack()
        self.folder = self._open.enter_context(scratch("worker-", directory=stage.drive))
        command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, **pipes, stderr=log, cwd=ROOT)

    def run(self, words: Sequence[str], **job: Any) -> dict[str, Any]:
        """Send one job, with drive and output in this directory, and return the answer, or raise Failure."""
        self._runs += 1
        here = ["--nvme", str(self.folder)] if "{drive}" in words else []
        words = [*(word for word in words if word != "{drive}"), *here]
        words += ["placement.threads=1"] if self._stage.rehearsal else []
        job |= {"words": words, "output": str(self.folder / f"run-{self._runs}")}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
            with selectors.DefaultSelector() as waiting:
                waiting.register(self.process.stdout, selectors.EVENT_READ)
                if not waiting.select(self._stage.left()):
                    raise Failure(OUT_OF_TIME)
            answer: dict[str, Any] = json.loads(self.process.stdout.readline())  # one write, so the line is complete
        except (BrokenPipeError, json.JSONDecodeError):
            code = self.process.wait()
            how = f"killed by signal {-code}" if code < 0 else f"exit {code}"
            said = (self.folder / "log").read_text(errors="replace")
            raise Failure(f"failed: {how}: {' '.join(said.split())[-300:]}") from None
        if error := answer.get("error"):
            raise Failure(f"{'not run' if 'this does not fit' in error else 'failed'}: {error[-400:]}")
        return answer

    def end(self) -> None:
        """Kill the process and remove its directory on the drive."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
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
    describe = ["git", "describe", "--always", "--dirty"] if shutil.which("git") else ["true"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    total = hashlib.sha256()  # also identifies a copy without git history
    for path in sorted((ROOT / "offload_trainer").rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            total.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return {"commit": commit or "unknown", "source": total.hexdigest()[:12], **found}
