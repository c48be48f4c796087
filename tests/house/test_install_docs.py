"""Tests of docs/install.md and the Dockerfile: they install the same torch for a card, and name every extra."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from offload_trainer.plan import machine

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/install.md").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
FINAL = re.sub(r"\\\n", "", DOCKERFILE.rpartition("\nFROM ")[2])  # the last stage, one instruction a line


def of_card(card: str) -> str:
    """Return the command for a card from the table of docs/install.md."""
    (line,) = re.findall(rf"^\| [^|]*{card}[^|]* \| `(pip install [^`]+)`", PAGE, re.MULTILINE)
    return line


def test_the_page_and_the_messages_name_one_build_for_volta() -> None:
    assert machine._CU126.replace("--force-reinstall ", "") == of_card("Volta")


def test_all_is_every_extra_and_each_is_described() -> None:
    (everything,) = EXTRAS["all"]
    named = re.fullmatch(r"offload-trainer\[(.*)\]", everything)
    assert named
    assert sorted(named[1].split(",")) == sorted(set(EXTRAS) - {"all", "test"})
    table = {name for row in re.findall(r"^\| (`[^|]+) \|", PAGE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert set(EXTRAS) - {"test"} <= table


def built(folder: Path, **arguments: str) -> tuple[int, list[str]]:
    """Run the last stage's RUN instructions with commands that only record their words; return status and records."""
    (folder / "release").mkdir(parents=True)
    (folder / "release/offload_trainer-1-py3-none-any.whl").touch()
    for name in ("pip", "apt-get", "rm"):
        (folder / name).write_text(f'#!/bin/sh\nfor word; do printf "%s " "$word"; done >> {folder}/{name}.log\n')
        (folder / name).chmod(0o755)
    given = dict(re.findall(r"^ARG (\w+)=(.*)$", FINAL, re.MULTILINE))
    assert set(arguments) <= set(given)
    env = {"PATH": f"{folder}:/usr/bin:/bin", **given, **arguments}
    for command in re.findall(r"^RUN (?:--mount=\S+ +)?(.*)$", FINAL, re.MULTILINE):
        command = command.replace("/release/", f"{folder}/release/")
        done = subprocess.run(["sh", "-c", command], env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            return done.returncode, [done.stderr]
    logs = [folder / f"{name}.log" for name in ("pip", "apt-get")]
    return 0, [log.read_text() if log.exists() else "" for log in logs]


@pytest.mark.parametrize(
    ("card", "row"), [("turing", "Turing"), ("turing", "Ampere"), ("volta", "Volta"), ("cpu", "none")]
)
def test_the_image_has_the_torch_of_the_page(card: str, row: str, tmp_path: Path) -> None:
    status, (pip, debian) = built(tmp_path, CARD=card)
    assert status == 0
    words = of_card(row).removeprefix("pip ").replace("'", "").replace("install", "install --no-cache-dir")
    assert pip.startswith(f"{words} install ")
    assert pip.endswith("offload_trainer-1-py3-none-any.whl[tensorboard,hf] ")
    assert ("g++" in debian.split()) == (card != "cpu")  # Triton compiles its launcher


def test_deepspeed_brings_its_compiler(tmp_path: Path) -> None:
    status, (pip, debian) = built(tmp_path, EXTRAS="tensorboard,deepspeed")
    assert status == 0
    assert pip.endswith("[tensorboard,deepspeed] ")
    assert {"g++", "libaio-dev"} <= set(debian.split())


def test_an_unknown_card_is_refused(tmp_path: Path) -> None:
    status, (told,) = built(tmp_path, CARD="kepler")
    assert status == 2
    assert told.startswith("CARD=kepler: volta")
