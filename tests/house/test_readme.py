"""Every command of the README is one that the program understands, and every file that it names is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from offload_trainer.cli import export_wish
from offload_trainer.plan.machine import read_machine
from offload_trainer.settings import load_config

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^ {4}(?:\.venv/bin/)?(offload-train .*)$|`(offload-train [^`]+)`", README, re.MULTILINE)


@pytest.mark.parametrize("command", sorted({one or other for one, other in COMMANDS}))
def test_commands(command: str) -> None:
    words = shlex.split(command)[1:]
    if words[0] == "export":
        assert export_wish(words[1:])["dtype"] in words
        return
    if words[0] in ("plan", "bench", "tune", "doctor", "prepare"):
        words = [word for word in words[1:] if word != "--json"]
        for flag in ("--machine", "--write", "--drive-gigabytes"):
            if flag in words:
                value = words.pop(words.index(flag) + 1)
                words.remove(flag)
                assert flag != "--machine" or read_machine(value)
    if words == ["--help"]:
        return
    load_config(words)


@pytest.mark.parametrize("target", re.findall(r"^ {4}make (\w+)|`make (\w+)`", README, re.MULTILINE))
def test_make_targets(target: tuple[str, str]) -> None:
    assert re.search(rf"^{''.join(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)]+)\)", README))
def test_links(link: str) -> None:
    assert (ROOT / link).exists()
