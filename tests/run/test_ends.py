"""How a run ends: every signal, in every phase, on every kind of stream; and what runs without checkpoints leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import run_script
from ends import PHASES, SIGNALS, STREAMS
from stories import STORIES

HERE = Path(__file__).parents[1]


def script(name: str, *words: object) -> str:
    """In a fork, from which the script's own forks come."""
    done = run_script(HERE / name, *words)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("phases", [PHASES[first : first + 2] for first in range(0, len(PHASES), 2)], ids=" and ".join)
def test_every_signal_in_every_phase_on_every_stream(phases: tuple[str, ...], tmp_path: Path) -> None:
    """The table in docs/faults.md: exit codes, what is saved, nothing left, no traceback, the reason in log.txt."""
    ends = [json.loads(line) for line in script("ends.py", tmp_path, "--phases", ",".join(phases)).splitlines()]
    assert len(ends) == len(SIGNALS) * 2 * len(phases) * len(STREAMS) == 80
    wrong = [end for end in ends if end["wrong"]]
    assert not wrong, json.dumps(wrong, indent=1)


@pytest.mark.parametrize("name", STORIES)
def test_runs_without_checkpoints(name: str, tmp_path: Path) -> None:
    """The stories of tests/stories.py."""
    assert script("stories.py", tmp_path, name).split() == [name]
