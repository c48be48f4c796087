"""Test that tests/README.md, the table of promises, names every test file and no other."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent.parent


def test_each_test_file_holds_a_promise() -> None:
    named = set(re.findall(r"`([a-z]+/test_\w+\.py)`", (TESTS / "README.md").read_text()))
    there = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    assert named == there
