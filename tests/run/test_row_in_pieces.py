"""A test of a row of 32k tokens where memory has no room for its whole MLP activations."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import LIMIT

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import long_rows

NARROW = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}  # attention would take most of the time


@pytest.mark.box
@pytest.mark.slow
def test_a_row_runs_in_pieces_where_it_does_not_whole(
    box: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that is refused or killed whole runs in chunks, with the same losses."""
    monkeypatch.setattr(long_rows, "WIDE", long_rows.WIDE | NARROW)
    inside = ["sh", "-c", f'echo $$ > {box}/cgroup.procs && exec "$@"', "box"]
    found = long_rows.tiles(tmp_path, tokens=32768, dtype="fp32", box=inside)
    whole, pieces = found["whole, outside"], found["in pieces"]
    assert (whole.code, whole.chunk) == (0, 0), whole.said[-2000:]
    assert whole.planned > 1.5 * LIMIT
    assert found["whole"].code == 2
    assert "ram needs" in found["whole"].said
    assert found["whole, --force"].code == long_rows.KILLED
    assert pieces.code == 0, pieces.said[-2000:]
    assert 0 < pieces.chunk < 32768
    assert pieces.peak <= LIMIT
    assert pieces.peak <= 1.05 * pieces.planned
    assert len(pieces.losses) == 2
    assert pieces.losses == pytest.approx(whole.losses, abs=1e-5)
