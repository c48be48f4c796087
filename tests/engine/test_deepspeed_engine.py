"""Stock DeepSpeed where it would be silently wrong: masters that begin rounded, weights without a gradient, and steps
whose micro-batches count different numbers of targets.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bench_of_engines import batches, model_directory
from conftest import run_script, start
from counted import masked, random_weights, transformers_alone
from deepspeed_counted import ACCUMULATE
from safetensors.torch import load_file

HERE = Path(__file__).parents[1]


@pytest.mark.ops
@pytest.mark.parametrize(("params", "optimizer"), [("gpu", "cpu"), ("cpu", "cpu"), ("cpu", "nvme")])
def test_masters_begin_unrounded_and_weights_without_a_gradient_are_refused(
    params: str, optimizer: str, tmp_path: Path
) -> None:
    """A bf16 run from an fp32 directory; later its last block is left out in one of two micro-batches."""
    random_weights(model_directory(tmp_path / "model", "qwen3", tied=False))
    words = ["--params", params, "--optimizer", optimizer, "--accumulate", "2", "model.checkpointing=off"]
    done = run_script(HERE / "deepspeed_alone.py", tmp_path, *words, stock=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["begun"]
    assert "11 of 58 weights got no gradient (model.layers.4." in found["refused"]
    assert "--engine tiered" in found["refused"]
    assert found["kept"]


@pytest.mark.ops
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("params", ["gpu", "cpu"])
def test_the_mean_is_over_all_targets_that_all_ranks_count(params: str, ranks: int, tmp_path: Path) -> None:
    """Losses, norms and masters of transformers alone; of two ranks one counts nine times as many as the other."""
    model = random_weights(model_directory(tmp_path / "model", "qwen3", tied=False))
    steps = 3
    data = masked(batches(steps * ACCUMULATE * ranks))
    losses, norms, weights = transformers_alone(model, data, at_a_time=ACCUMULATE * ranks)
    words = [steps, "--params", params, "--optimizer", "cpu"]
    said = [tmp_path / f"said{rank}" for rank in range(ranks)]
    started = [
        start(HERE / "deepspeed_counted.py", tmp_path, rank, ranks, *words, stdout=out, stderr=out, stock=True)
        for rank, out in enumerate(said)
    ]
    codes = [process.wait(300) for process in started]
    assert not any(codes), [out.read_text()[-3000:] for out in said]
    found = json.loads(said[0].read_text().splitlines()[-1])
    for (loss, norm), expected, length in zip(found, losses, norms, strict=True):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert norm == pytest.approx(length, rel=1e-5)
    masters = load_file(tmp_path / "masters.safetensors")
    for name, weight in weights.items():
        torch.testing.assert_close(masters[name], weight, rtol=1e-5, atol=1e-6)
