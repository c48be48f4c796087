"""Tests of stock DeepSpeed in cases that it gets silently wrong: rounded initial masters, weights without a gradient,
and steps whose micro-batches count different numbers of targets.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import HELPERS, run_script
from engine_bench import batches, model_directory
from safetensors.torch import load_file
from stock_deepspeed_ranks import ACCUMULATE, planned_bytes, run_stock_ranks
from uneven_targets import masked, plain_alone, random_weights, transformers_alone

from offload_trainer.config import ModelSection
from offload_trainer.model.loader import resolve_model


@pytest.mark.ops
@pytest.mark.parametrize(("params", "optimizer"), [("gpu", "cpu"), ("cpu", "nvme")])
def test_masters_begin_unrounded_and_weights_without_a_gradient_are_refused(
    params: str, optimizer: str, tmp_path: Path
) -> None:
    """A bf16 run starts from an fp32 directory; its last block is then left out of one of two micro-batches."""
    random_weights(model_directory(tmp_path / "model", "qwen3", tied=False))
    words = ["--params", params, "--optimizer", optimizer, "--accumulate", "2", "model.activation_checkpointing=off"]
    done = run_script(HELPERS / "run_stock_deepspeed.py", tmp_path, *words, stock=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["begun"]
    assert "11 of 58 weights got no gradient (model.layers.4." in found["refused"]
    assert "--engine tiered" in found["refused"]
    assert found["kept"]


@pytest.mark.ops
def test_masters_are_whole_with_late_writes_to_the_drive(tmp_path: Path) -> None:
    """Several weights share a sub-group that is read and written for each of them, and its last write is
    asynchronous.
    """
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    random_weights(model_directory(tmp_path / "model", "qwen3", tied=False, **wide))
    words = ["--optimizer", "nvme", "--accumulate", "2", "deepspeed.sub_group_size=1000000"]
    words += ["model.activation_checkpointing=off"]
    done = run_script(HELPERS / "run_stock_deepspeed.py", tmp_path, "late", *words, stock=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["begun"]
    assert found["kept"]


ZERO = {  # keyed by ZeRO stage and placement
    "1 gpu": ["deepspeed.zero_stage=1", "--optimizer", "gpu"],
    "2": ["--params", "gpu", "--optimizer", "cpu"],
    "3": ["--params", "cpu", "--optimizer", "cpu"],
}


@pytest.mark.ops
@pytest.mark.parametrize(("zero", "ranks"), [("1 gpu", 2), ("2", 4), ("3", 2)])
def test_the_mean_is_over_all_targets_that_all_ranks_count(zero: str, ranks: int, tmp_path: Path) -> None:
    """Losses, norms and masters match transformers alone, though one rank counts nine times as many targets as the
    other.

    The bytes of a step's collectives match the plan.
    """
    model = random_weights(model_directory(tmp_path / "model", "qwen3", tied=False))
    steps = 3
    data = masked(batches(steps * ACCUMULATE * ranks))
    losses, norms, weights = transformers_alone(model, data, at_a_time=ACCUMULATE * ranks)
    words = [*ZERO[zero], "--dtype", "fp32"]
    found = run_stock_ranks(tmp_path, *words, ranks=ranks, steps=steps)
    assert found["stage"] == int(zero[0])
    for (loss, norm), expected, length in zip(found["steps"], losses, norms, strict=True):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert norm == pytest.approx(length, rel=1e-5)
    masters = load_file(tmp_path / "masters.safetensors")
    for name, weight in weights.items():
        torch.testing.assert_close(masters[name], weight, rtol=1e-5, atol=1e-6)
    assert found["bytes"][-1] == pytest.approx(planned_bytes(tmp_path, *words, ranks=ranks), rel=0.02), found["calls"]


@pytest.mark.ops
def test_four_ranks_follow_one_process_in_bf16(tmp_path: Path) -> None:
    """Six steps follow the plain engine, which has all rows."""
    model, rows, lr = random_weights(model_directory(tmp_path / "model", "qwen3", tied=False)), 4 * ACCUMULATE, 1e-3
    found = run_stock_ranks(tmp_path, *ZERO["2"], "--dtype", "bf16", "--lr", str(lr), ranks=4, steps=6)
    alone = plain_alone(model, masked(batches(6 * rows)), at_a_time=rows, dtype="bf16", lr=lr)
    assert found["apart"] == []
    for (loss, norm), (expected, length) in zip(found["steps"], alone, strict=True):
        assert loss == pytest.approx(expected, abs=2e-2)
        assert norm == pytest.approx(length, rel=3e-2)


@pytest.mark.ops
@pytest.mark.parametrize("checkpointing", ["off", "on"])
def test_what_zero_3_gathers_is_what_the_plan_says(checkpointing: str, tmp_path: Path) -> None:
    """The last blocks of a forward stay until their backward; all other matrices are gathered again."""
    wide = {"model_type": "llama", "hidden_size": 384, "intermediate_size": 768, "num_key_value_heads": 4}
    random_weights(model_directory(tmp_path / "model", "qwen3", tied=False, head_dim=96, **wide))
    words = [*ZERO["3"], "--dtype", "bf16", f"model.activation_checkpointing={checkpointing}"]
    found = run_stock_ranks(tmp_path, *words, ranks=2)
    told = planned_bytes(tmp_path, *words, ranks=2)
    exact = 0.02 if checkpointing == "off" else 0.1  # of this small model, a block comes once more to be recomputed
    assert found["bytes"][-1] == pytest.approx(told, rel=exact), found["calls"]
    shape = resolve_model(ModelSection(name=str(tmp_path / "model")), seed=0).shape
    assert told < 0.95 * ACCUMULATE * 3 * shape.parameters  # 2 bytes each, of which the other rank sends half
