"""A test that the messages that the pages quote are those that the code prints."""

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
    """Return the messages that the pages quote.

    They are in the first column of tables whose header begins with "message" or "symptom", and behind "says".
    """
    found: list[str] = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text, in_table = page.read_text(), False
        found += [" ".join(message.split()) for message in re.findall(r"\bsays?\s`([^`]+)`", text)]
        for line in text.splitlines():
            in_table = line.startswith(("| message", "| symptom")) or (in_table and line.startswith("|"))
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
