"""Tests of a run's end: every signal in every phase on every kind of stream, and runs without checkpoints."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
from command_sequences import STORIES
from commands import HELPERS, run_script
from signal_matrix import PHASES, SIGNALS, STREAMS, Cell, all_cells, pairs

pytestmark = pytest.mark.slow


def script(name: str, *words: object) -> str:
    """Run a script in a forked process, which forks the script's own processes; return its output."""
    done = run_script(HELPERS / name, *words)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("phases", [PHASES[first : first + 2] for first in range(0, len(PHASES), 2)], ids=" and ".join)
def test_every_signal_in_every_phase_on_every_stream(
    phases: tuple[str, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Ends match the table in docs/faults.md: exit code, saved state, no remains, no traceback, the reason in log.txt.

    Without --exhaustive, every pair of signal, phase and stream occurs, but not every triple.
    """
    whole = request.config.getoption("--exhaustive")
    words = [tmp_path, "--phases", ",".join(phases), *([] if whole else ["--pairs"])]
    ends = [json.loads(line) for line in script("signal_matrix.py", *words).splitlines()]
    assert len(ends) == len(SIGNALS) * 2 * len(phases) * (len(STREAMS) if whole else 1)
    wrong = [end for end in ends if end["wrong"]]
    assert not wrong, json.dumps(wrong, indent=1)


def test_a_quarter_has_each_pair() -> None:
    def found(cells: list[Cell]) -> set[tuple[object, ...]]:
        kinds = [((cell.signal, cell.times), cell.phase, cell.stream) for cell in cells]
        return {pair for kind in kinds for pair in combinations(kind, 2)}

    assert found(pairs()) == found(all_cells())
    assert 4 * len(pairs()) == len(all_cells())


@pytest.mark.parametrize("name", STORIES)
def test_runs_without_checkpoints(name: str, tmp_path: Path) -> None:
    """The scenarios of tests/helpers/command_sequences.py hold."""
    assert script("command_sequences.py", tmp_path, name).split() == [name]
