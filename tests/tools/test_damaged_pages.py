"""Tests of the soak that damages page files: a short one, and its failure if a start ignores checksums."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment

SCRIPT = Path(__file__).resolve().parents[2] / "soak/damaged_pages.py"


@pytest.mark.slow
@pytest.mark.parametrize("blind", [False, True])
def test_damaged_pages(blind: bool, seed: int) -> None:
    words = ["--damages", "50", "--seed", str(seed + 7), "--kinds", "1", "--commands", "0" if blind else "3"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *words, *(["--blind"] if blind else [])],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    printed = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == blind, printed
    assert ("give other bytes" if blind else "50 damages, 3 of them by the command") in printed
