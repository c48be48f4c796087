"""The results of one stage so far, STAGE.json and STAGE.md, and an archive of all stages, rewritten after every row.

A process that is killed at a time limit leaves all rows that it had, and `"done": false`.
"""

from __future__ import annotations

import json
import sys
import tarfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

from offload_trainer.storage.atomic_io import write_bytes, write_text

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
