"""The results of one stage so far, STAGE.json and STAGE.md, rewritten after every row, and an archive of all stages.

A process that is killed at a time limit leaves all rows that it had, and `"done": false`.
"""

from __future__ import annotations

import json
import os
import sys
import tarfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OUT_OF_TIME = "not run: out of time"
REHEARSAL = "rehearsal without a GPU on tiny shapes: these numbers mean nothing"


class Record:
    """The rows of one stage.

    A row's `outcome` is "ok", "not run: WHY", "failed: WHY" or, for a speed that must not be quoted, "not comparable:
    WHY". The table shows the configured columns.
    """

    def __init__(
        self,
        folder: Path,
        stage: str,
        *,
        title: str,
        columns: Mapping[str, str],
        about: dict[str, Any],
        rehearsal: bool,
    ) -> None:
        """Start a record with empty files.

        `columns`: heading by key. The JSON has all keys of a row, with or without a column.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rehearsal, self.about = folder, rehearsal, about
        self.rows: list[dict[str, Any]] = []
        self._json, self.page = folder / f"{stage}.json", folder / f"{stage}.md"
        self._title, self._columns = title, columns
        self._content: dict[str, Any] = {"stage": stage, "rehearsal": rehearsal, "done": False}
        self._content["began"] = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())
        self._content |= {"about": about, "rows": self.rows, "notes": []}
        self._start = time.monotonic()
        self.save()

    def add(self, outcome: str = "ok", **row: Any) -> None:
        """Add one row; both files are written when this returns."""
        self.rows.append({"outcome": outcome, **row})
        told = ", ".join(str(row[key]) for key in self._columns if key in row)
        print(f"gpu_suite: {told}: {outcome}", file=sys.stderr, flush=True)
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
        """Write both files."""
        self._content["seconds"] = round(time.monotonic() - self._start, 1)
        _replace(self._json, json.dumps(self._content, indent=1))
        _replace(self.page, "\n".join(self._lines()) + "\n")

    def _lines(self) -> list[str]:
        content, mark = self._content, "rehearsal: " if self.rehearsal else ""
        about = "; ".join(f"{key} {value}" for key, value in self.about.items())
        state = f"{content['seconds']:.0f} s" if content["done"] else "not at its end yet, or killed"
        lines = [f"# {mark}{self._title}", "", *([REHEARSAL, ""] if self.rehearsal else [])]
        lines += [f"`scripts/gpu_suite.sh {content['stage']}`, {content['began']}, {state}; {about}.", ""]
        lines += [f"- {note}" for note in content["notes"]] + ([""] if content["notes"] else [])
        headings = [*self._columns.values(), "outcome"]
        headings[0] = mark + headings[0]
        lines += [_line(headings), _line(["---"] * len(headings))]
        return lines + [_line([_cell(row.get(key)) for key in (*self._columns, "outcome")]) for row in self.rows]


class Archive:
    """A gzipped tar file of a folder, replaced every ten seconds and at the end, for a machine that returns few files.

    A process that is killed leaves the last complete archive.
    """

    def __init__(self, folder: Path, file: Path, *, every: float = 10.0) -> None:
        self._folder, self._file, self._every = folder, file, every
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Archive:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _repeat(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(self._every)
            self._write()

    def _write(self) -> None:
        beside = self._file.with_name(f".{self._file.name}.tmp")
        with tarfile.open(beside, "w:gz", compresslevel=1) as tar:
            for path in sorted(self._folder.glob("[!.]*")):  # a name with a dot is a file that is being written
                if path.is_file():
                    tar.add(path, arcname=path.name)
        os.replace(beside, self._file)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(str(value).split()).replace("|", "/")[:300]


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(text)
    os.replace(beside, path)
