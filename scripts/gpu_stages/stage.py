"""What a stage works with: its time limit, a directory on the drive, its record, and worker processes for the GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from worker import OUT_OF_TIME, Failure, Worker

from gpu_stages.record import Record
from offload_trainer.storage.owned_dirs import scratch

ROOT = Path(__file__).resolve().parent.parent.parent
_CLOSING = 12.0  # seconds reserved for ending processes and writing the page
_LEAST = 15.0  # seconds below which nothing new starts: starting a process takes as many


class Stage:
    """One stage's record and time, and a call's drive and processes, which end and are removed with the context."""

    def __init__(self, *, drive: Path, only: str = "", rehearsal: bool = False) -> None:
        """`only`: run the cases whose names contain it."""
        self.rehearsal, self._only, self._drive = rehearsal, only, drive
        self._kept: Worker | None = None
        self._open = ExitStack()

    def begin(self, record: Record, *, seconds: float) -> None:
        """Begin a stage."""
        self.record, self._end = record, time.monotonic() + seconds - _CLOSING
        self._shortest = 0.0  # seconds of the shortest run so far

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

    def add_row(self, measure: Callable[[dict[str, Any]], str | None], **row: Any) -> None:
        """Add a row if its case, the first value of `row`, is selected.

        `measure` completes the row and returns its outcome, by default "ok". A Failure that it raises is the outcome.
        """
        if self._only not in next(iter(row.values())):
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

    def run(self, words: Sequence[str], **job: Any) -> dict[str, Any]:
        """Measure the run that `words` configure in a process of its own, which ends afterwards.

        In a rehearsal the process serves later runs too, since starting one takes seconds.
        `{drive}` among the words stands for a drive directory of the process. worker.py documents `job` and the answer.
        Raises Failure, with the process's last output or for lack of time, after ending the process. No process starts
        if not even the shortest one so far would fit.
        """
        self.need_time(max(_LEAST, self._shortest))
        start, worker, self._kept = time.monotonic(), self._kept or Worker(self.drive), None
        here = ["--nvme", str(worker.folder)] if "{drive}" in words else []
        here += ["placement.threads=1"] if self.rehearsal else []
        words = [*(word for word in words if word != "{drive}"), *here]
        try:
            answer = worker.run(within=self.left(), words=words, kept=self.rehearsal, **job)
            self._kept = worker if self.rehearsal else None
        finally:
            if self._kept is None:
                worker.end()
        taken = time.monotonic() - start
        self._shortest = 0.0 if self.rehearsal else min(self._shortest or taken, taken)
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
