"""How a run ends: every signal, in every phase, on every kind of stream; and what runs without checkpoints leave."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from conftest import environment

HERE = Path(__file__).parents[1]


def script(name: str, *words: object) -> str:
    done = subprocess.run(
        [sys.executable, HERE / name, *map(str, words)], capture_output=True, text=True, env=environment(), timeout=1500
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_every_signal_in_every_phase_on_every_stream(tmp_path: Path) -> None:
    """The table in docs/faults.md: exit codes, what is saved, nothing left, no traceback, the reason in log.txt."""
    ends = [json.loads(line) for line in script("ends.py", tmp_path).splitlines()]
    assert len(ends) == 5 * 2 * 8 * 4
    wrong = [end for end in ends if end["wrong"]]
    assert not wrong, json.dumps(wrong, indent=1)


def test_runs_without_checkpoints(tmp_path: Path) -> None:
    """The stories of tests/stories.py."""
    assert len(script("stories.py", tmp_path).split()) == 4
