"""A test of the memory of two tensor-parallel ranks whose block inputs are sharded, with a row of 8,192 tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import long_rows

# Four inputs of 16 MiB, of which each rank has half; heads and MLPs are small, for speed.
SHAPE = long_rows.DEEP | {"hidden_size": 512, "num_hidden_layers": 4, "max_position_embeddings": long_rows.TOKENS}
SHAPE |= {"head_dim": 8}
WORDS = ["--seq-len", str(long_rows.TOKENS), "--micro-batch", "1", "--dtype", "fp32", "placement.threads=1"]


@pytest.mark.slow
@pytest.mark.ops
@pytest.mark.skipif(torch.cuda.is_available(), reason="host memory has the activations where the CPU computes")
def test_ranks_need_the_planned_memory_for_parts(tmp_path: Path) -> None:
    """Ranks hold at most 5 % more than planned; a process's own memory was measured once, and varies between machines.

    `long_rows.py inputs` has all cases and their losses; tests/engine/test_tensor_parallel.py tests the bits.
    """
    words = [*WORDS, "data.validation=0", *long_rows.INPUTS["tensor 2, in parts"]]
    found = long_rows.run(tmp_path, "parts", SHAPE, *words)
    assert found.code == 0, found.said[-2000:]
    assert len(found.peaks) == 2
    assert len(found.losses) == long_rows.STEPS
    assert 0.90 * found.planned <= found.peak <= 1.05 * found.planned
    (why,) = (item["why"] for item in found.plan["items"] if item["name"] == "block inputs")
    assert "1 / 2 of each on each rank" in why
