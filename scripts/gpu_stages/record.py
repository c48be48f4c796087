"""What a stage has found so far: STAGE.json and STAGE.md, both whole after every row.

A process that is killed at a time limit leaves all rows that it had, and `"done": false`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OUT_OF_TIME = "not run: out of time"
REHEARSAL = "rehearsal without a GPU on tiny shapes: these numbers mean nothing"


class Record:
    """Rows of one stage. A row's `outcome` is "ok", "not run: WHY", "failed: WHY" or, of a speed that
    is not to be quoted, "not comparable: WHY"; the columns go into the table."""

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
        """`columns`: heading by key; all of a row is in the JSON, whether it has a column or not."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rehearsal = folder, rehearsal
        self._json, self.page = folder / f"{stage}.json", folder / f"{stage}.md"
        self._title, self._columns = title, columns
        began = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())
        self._content: dict[str, Any] = {
            "stage": stage,
            "rehearsal": rehearsal,
            "done": False,
            "began": began,
            "about": about,
            "rows": [],
            "notes": [],
        }
        self._start = time.monotonic()
        self._save()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self._content["rows"]

    @property
    def about(self) -> dict[str, Any]:
        """What the numbers depend on: GPU, versions."""
        return self._content["about"]

    def add(self, outcome: str = "ok", **row: Any) -> None:
        """One result more, on the disk when this returns."""
        self.rows.append({"outcome": outcome, **row})
        told = ", ".join(str(row[key]) for key in self._columns if key in row)
        print(f"gpu_suite: {told}: {outcome}", file=sys.stderr, flush=True)
        self._save()

    def complete(self, **more: Any) -> None:
        """Put more into the row that was added last."""
        self.rows[-1] |= more
        self._save()

    def note(self, text: str) -> None:
        """A line above the table, once however often it is noted."""
        if text not in self._content["notes"]:
            self._content["notes"].append(text)
        self._save()

    def close(self) -> bool:
        """Whether nothing failed."""
        self._content["done"] = True
        self._save()
        return not any(row["outcome"].startswith("failed") for row in self.rows)

    def _save(self) -> None:
        self._content["seconds"] = round(time.monotonic() - self._start, 1)
        _replace(self._json, json.dumps(self._content, indent=1))
        _replace(self.page, "\n".join(self._lines()) + "\n")

    def _lines(self) -> list[str]:
        content, mark = self._content, "rehearsal: " if self.rehearsal else ""
        about = "; ".join(f"{key} {value}" for key, value in content["about"].items())
        state = f"{content['seconds']:.0f} s" if content["done"] else "not at its end yet, or killed"
        lines = [f"# {mark}{self._title}", "", *([REHEARSAL, ""] if self.rehearsal else [])]
        lines += [f"`scripts/gpu_suite.sh {content['stage']}`, {content['began']}, {state}; {about}.", ""]
        lines += [f"- {note}" for note in content["notes"]] + ([""] if content["notes"] else [])
        headings = [*self._columns.values(), "outcome"]
        headings[0] = mark + headings[0]
        lines += [_line(headings), _line(["---"] * len(headings))]
        return lines + [_line([_cell(row.get(key)) for key in (*self._columns, "outcome")]) for row in self.rows]


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
