"""Tests that each command of docs/scaling.md runs and fits as the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from offload_trainer.cli import main

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "scaling.md").read_text()
COMMANDS = re.findall(r"^ {4}offload-train (.+)$", PAGE, re.MULTILINE)


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_fits_as_the_page_says(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 0
    printed = capsys.readouterr().out
    assert "assumed: " in printed
    assert "DOES NOT FIT" not in printed
