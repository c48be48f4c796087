"""Fill in the tables of docs/parallel.md with the output of each of its commands.

python scripts/write_parallel_docs.py            write the page
python scripts/write_parallel_docs.py --print    print it instead
"""

from __future__ import annotations

import io
import re
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path

from offload_trainer.cli import main

PAGE = Path(__file__).resolve().parents[1] / "docs" / "parallel.md"
_TABLE = re.compile(r"^ {4}offload-train (plan --parallel [^\n]+)\n\n```text\n.*?^```$", re.MULTILINE | re.DOTALL)


def filled(page: str) -> str:
    """Return the page with each command's current table, without the arguments that all of them share."""
    return _TABLE.sub(lambda found: f"    offload-train {found[1]}\n\n```text\n{_printed(found[1])}```", page)


def _printed(command: str) -> str:
    told = io.StringIO()
    with redirect_stdout(told):
        main(shlex.split(command))
    return "".join(f"{line}\n" for line in told.getvalue().splitlines() if not line.startswith("  assumed: "))


if __name__ == "__main__":
    page = filled(PAGE.read_text())
    if "--print" in sys.argv:
        print(page, end="")
    else:
        PAGE.write_text(page)
