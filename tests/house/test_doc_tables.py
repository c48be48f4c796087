"""Tests that the tables of README and documentation are Markdown tables, with as many cells in each row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "tests/README.md")] + sorted(ROOT.glob("docs/**/*.md"))
SEPARATOR = re.compile(r"\|( *:?-{3,}:? *\|)+")
_CODE = re.compile(r"`[^`]*`|\\\|")


def cells(line: str) -> int:
    """Return the number of cells in a row; a bar in code or behind a backslash is text."""
    return _CODE.sub("", line).strip().count("|") - 1


def mistakes(text: str) -> Iterator[str]:
    """Yield each table's mistake: a row without its bars, no separator, or another number of cells than the header."""
    table: list[str] = []
    in_code = False
    for line in [*text.splitlines(), ""]:
        bare = line.strip()
        in_code ^= bare.startswith("```")
        if not in_code and bare.startswith("|"):
            table.append(bare)
            continue
        if not in_code and re.search(r"-{3,} *\| *:?-{3,}|\| [^|]* \| ", _CODE.sub("", bare)):
            yield f"a row that does not begin with a bar: {bare}"
        if table and (len(table) < 2 or not SEPARATOR.fullmatch(table[1])):
            yield f"no separator behind {table[0]}"
        for row in table:
            if not row.endswith("|") or cells(row) != cells(table[0]):
                yield f"{cells(row)} cells, and the header has {cells(table[0])}: {row}"
        table = []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_tables(page: Path) -> None:
    assert not list(mistakes(page.read_text()))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("| a | b |\n| --- | --- |\n| `x|y` | 2 \\| 3 |\n", 0),
        ("```\na | b | c |\n```\n", 0),
        ("a | b\n--- | ---\n1 | 2\n", 1),  # its separator
        ("case | step | built |\nin s --- | --- | --- stock | 1 | 2\n", 2),
        ("| a | b |\n| 1 | 2 |\n", 1),
        ("| a | b |\n| --- | --- |\n| 1 |\n", 1),
        ("| a | b |\n| --- |\n", 1),
        ("| a | b |\n| --- | --- |\n| 1 | 2\n", 1),
    ],
)
def test_mistakes_are_seen(text: str, count: int) -> None:
    assert len(list(mistakes(text))) == count
