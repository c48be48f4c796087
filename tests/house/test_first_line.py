"""Tests that a terminal is told before torch and transformers are loaded, which takes seconds."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest
from commands import environment

pytestmark = pytest.mark.slow

WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Refuse())
sys.argv[0] = "offload-train"
from offload_trainer.__main__ import main
raise SystemExit(main())
"""


def all_of(terminal: int) -> bytes:
    """Return all output written to a pseudo-terminal, whose other end is closed."""
    told = b""
    with suppress(OSError):  # raised at the end
        while more := os.read(terminal, 10_000):
            told += more
    return told


@pytest.mark.parametrize(
    "words",
    [["train"], ["plan"], ["sample", "runs/none"], ["export", "runs/none", "out"]],
)
def test_a_terminal_is_told_before_torch_is_loaded(words: list[str]) -> None:
    """Only a terminal, not a pipe, gets the notice that torch is loading."""
    argv = [sys.executable, "-c", WITHOUT_TORCH, *words]
    ours, theirs = pty.openpty()
    done = subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=theirs, env=environment(), timeout=300)
    os.close(theirs)
    told = all_of(ours).decode().splitlines()
    os.close(ours)
    assert done.returncode
    assert told[0] == "loading torch and transformers", told
    assert "torch is not installed" in told[-1]
    piped = subprocess.run(argv, capture_output=True, text=True, env=environment(), timeout=300)
    assert piped.stderr.startswith("offload-train: ")
