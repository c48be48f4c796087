"""A test that the messages that docs/faults.md quotes are those that the code prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def literals() -> Iterator[str]:
    """Yield each string in the package; `...` stands for a value of an f-string."""
    for path in (ROOT / "offload_trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)


def quoted() -> list[str]:
    """Return the messages in the first column of the tables whose header begins with "message"."""
    found, in_table = [], False
    for line in (ROOT / "docs/faults.md").read_text().splitlines():
        in_table = line.startswith("| message") or (in_table and line.startswith("|"))
        found += re.findall(r"^\| `(.+?)`", line) if in_table else []
    return found


def test_quoted_messages_are_printed() -> None:
    """`...` in a message stands for any text of the same string."""
    text = [literal.replace("\n", " ") for literal in literals()]
    messages = quoted()
    assert len(messages) > 20
    for message in messages:
        pattern = re.compile(".*".join(map(re.escape, re.split(r"\s*\.\.\.\s*", message))))
        assert any(map(pattern.search, text)), message
