"""Blocks by the module where there is no room for one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import LIMIT

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import long_rows


@pytest.mark.box
@pytest.mark.slow
def test_a_model_runs_by_the_module_where_it_does_not_by_the_block(box: Path, tmp_path: Path) -> None:
    """Whole blocks are refused, or killed; of their parts the plan lets it run, with the losses of the whole."""
    inside = ["sh", "-c", f'echo $$ > {box}/cgroup.procs && exec "$@"', "box"]
    found = long_rows.parts(tmp_path, drive=tmp_path, dtype="fp32", box=inside)
    whole, parts = found["whole, outside"], found["by the module"]
    assert whole.code == 0, whole.said[-2000:]
    assert found["whole"].code == 2
    assert "ram needs" in found["whole"].said
    assert found["whole, --force"].code == long_rows.KILLED
    assert parts.code == 0, parts.said[-2000:]
    assert any(note.startswith("tiered.fetch=module: blocks' weights come in parts") for note in parts.plan["notes"])
    assert parts.peak <= LIMIT < whole.peak
    assert len(parts.losses) == 2
    assert parts.losses == whole.losses
