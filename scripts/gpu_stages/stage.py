"""The parts that all stages use: a time limit, a directory on the drive, a record, and worker processes for the GPU.

The results of a stage so far are in STAGE.json and STAGE.md, and those of all stages in an archive; all are rewritten
after every row. A process that is killed at a time limit leaves all rows that it had, and `"done": false`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any

from worker import OUT_OF_TIME, Failure, Worker

from offload_trainer.storage.atomic_io import write_bytes, write_text
from offload_trainer.storage.owned_dirs import scratch

ROOT = Path(__file__).resolve().parent.parent.parent
_CLOSING = 12.0  # seconds reserved for ending processes and writing the page
_LEAST = 15.0  # seconds below which nothing new starts: starting a process takes as many
REHEARSAL = "rehearsal without a GPU on tiny shapes: these numbers mean nothing"


class Record:
    """The rows of one stage.

    A row's `outcome` is "ok", "not run: WHY", "failed: WHY" or, for a speed that must not be quoted, "not comparable:
    WHY". The table shows the values of a row that are neither lists nor mappings; the JSON has all.
    """

    def __init__(
        self, folder: Path, stage: str, *, title: str, about: dict[str, Any], rehearsal: bool, tar: Path | None = None
    ) -> None:
        """Start a record without rows. `tar` gets the files of `folder`, for a machine that returns few files."""
        for place in (folder, *([tar.parent] if tar else [])):
            place.mkdir(parents=True, exist_ok=True)
        self.folder, self.rehearsal, self.about = folder, rehearsal, about
        self.rows: list[dict[str, Any]] = []
        self.page = folder / f"{stage}.md"
        self._title, self._tar = title, tar
        self._content: dict[str, Any] = {"stage": stage, "rehearsal": rehearsal, "done": False}
        self._content["began"] = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())
        self._content |= {"about": about, "rows": self.rows, "notes": []}
        self._start = time.monotonic()
        self.save()

    def add(self, outcome: str = "ok", **row: Any) -> None:
        """Add one row; all files are written when this returns."""
        self.rows.append(row | {"outcome": outcome})
        print(f"gpu_suite: {next(iter(row.values()))}: {outcome}", file=sys.stderr, flush=True)
        self.save()

    def note(self, text: str) -> None:
        """Add a line above the table, unless it is there already."""
        if text not in self._content["notes"]:
            self._content["notes"].append(text)
        self.save()

    def close(self) -> bool:
        """Mark the record as done; return whether no row failed."""
        self._content["done"] = True
        self.save()
        return not any(row["outcome"].startswith("failed") for row in self.rows)

    def save(self) -> None:
        """Write all files."""
        self._content["seconds"] = round(time.monotonic() - self._start, 1)
        write_text(self.page.with_suffix(".json"), json.dumps(self._content, indent=1), sync=False)
        write_text(self.page, "\n".join(self._lines()) + "\n", sync=False)
        if self._tar:
            packed = BytesIO()
            with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
                for path in filter(Path.is_file, sorted(self.folder.glob("[!.]*"))):
                    tar.add(path, arcname=path.name)
            write_bytes(self._tar, packed.getvalue(), sync=False)

    def _lines(self) -> list[str]:
        content, mark = self._content, "rehearsal: " if self.rehearsal else ""
        about = "; ".join(f"{key} {value}" for key, value in self.about.items())
        state = f"{content['seconds']:.0f} s" if content["done"] else "not at its end yet, or killed"
        lines = [f"# {mark}{self._title}", "", *([REHEARSAL, ""] if self.rehearsal else [])]
        lines += [f"`scripts/gpu_suite.sh {content['stage']}`, {content['began']}, {state}; {about}.", ""]
        lines += [f"- {note}" for note in content["notes"]] + [""]
        shown = (key for row in self.rows for key, value in row.items() if not isinstance(value, dict | list))
        keys = [key for key in dict.fromkeys(shown) if key != "outcome"] + ["outcome"]
        lines += [_line([mark + keys[0], *keys[1:]]), _line(["---"] * len(keys))]
        return lines + [_line([_cell(row.get(key)) for key in keys]) for row in self.rows]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    return " ".join(str(value).split()).replace("|", "/")[:300]


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
        Raises Failure, with the process's last output or for lack of time, after ending the process.
        """
        self.need_time()
        worker, self._kept = self._kept or Worker(self.drive), None
        here = ["--nvme", str(worker.folder)] if "{drive}" in words else []
        here += ["placement.threads=1"] if self.rehearsal else []
        words = [*(word for word in words if word != "{drive}"), *here]
        try:
            answer = worker.run(within=self.left(), words=words, kept=self.rehearsal, **job)
            self._kept = worker if self.rehearsal else None
        finally:
            if self._kept is None:
                worker.end()
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
