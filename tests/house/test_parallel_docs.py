"""Tests of docs/parallel.md: its tables are the output of its commands, and its text agrees with them."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from write_parallel_docs import PAGE, filled  # noqa: E402

from offload_trainer.settings import load_config  # noqa: E402

pytestmark = pytest.mark.slow

PARTS = {part.splitlines()[0]: part for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)}


@pytest.mark.parametrize("part", [name for name in PARTS if "```text" in PARTS[name]])
def test_a_table_is_what_its_command_prints(part: str) -> None:
    assert filled(PARTS[part]) == PARTS[part]


def rows(part: str) -> list[list[str]]:
    """Return the modes that fit, fastest first, of each table in a part."""
    tables = re.findall(r"^```text\n.*?\n(.*?)^```", PARTS[part], re.MULTILINE | re.DOTALL)
    return [[line.split("  ")[0] for line in table.splitlines()[1:] if not line.startswith("  ")] for table in tables]


def test_the_answers_are_the_tables() -> None:
    many, few = rows("One node with NVLink")
    assert many[0].startswith("ZeRO-")
    assert many.index("ZeRO-3 over 8") < many.index("tensor 2 x ZeRO-1 over 4") < many.index("tensor 8")
    assert few.index("tensor 2 x ZeRO-1 over 4") < few.index("ZeRO-3 over 8")
    (pcie,) = rows("One node with PCIe")
    assert pcie[:2] == ["ZeRO-3 over 4", "tiered, 4 ranks"]
    assert not [mode for mode in pcie if mode.startswith("tensor")]
    (slow,) = rows("Two nodes over 10 Gb/s")
    assert slow[0] == "tensor 4 x ZeRO-1 over 2"
    assert slow.index("ZeRO-2 over 8") < slow.index("ZeRO-3 over 8")
    assert "fastest from 65.5 k tokens a step: ZeRO-3 over 8" in PARTS["Two nodes over 10 Gb/s"]


def test_the_training_commands_are_understood() -> None:
    found = re.findall(r"^ {4}offload-train (--gpus .+)$", PAGE.read_text(), re.MULTILINE)
    tensor, sequence = (load_config(shlex.split(words)).parallel for words in found)
    assert (tensor.tensor, sequence.sequence) == (2, 4)
