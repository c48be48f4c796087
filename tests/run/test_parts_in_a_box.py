"""A test of fetching weights by module where memory has no room for a whole block."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import LIMIT

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import long_rows


@pytest.mark.box
@pytest.mark.slow
def test_a_model_runs_by_the_module_where_it_does_not_fit_by_the_block(box: Path, tmp_path: Path) -> None:
    """A model whose whole blocks do not fit runs with fetches by module, which the plan chooses without an argument.

    `long_rows.py parts` compares the losses.
    """
    inside = ["sh", "-c", f'echo $$ > {box}/cgroup.procs && exec "$@"', "box"]
    (parts,) = long_rows.parts(tmp_path, drive=tmp_path, dtype="fp32", box=inside, only="by the module").values()
    assert parts.code == 0, parts.said[-2000:]
    assert any(
        note.startswith("tiered.fetch_granularity=module: weights of blocks are fetched in parts")
        for note in parts.plan["notes"]
    )
    assert parts.peak <= LIMIT
    assert len(parts.losses) == 2
    assert parts.losses[1] < parts.losses[0]
