"""Tests of stock DeepSpeed in cases that it gets silently wrong, of its bytes, and of a killed build's lock."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_bench import assert_near, assert_same, batches, engine, masters, model_directory, train
from forked_ranks import in_ranks
from safetensors.torch import load_file
from stock_deepspeed import ACCUMULATE, build, planned_bytes, train_stock
from uneven_targets import EPS, masked, random_weights, transformers_alone

from offload_trainer.common.errors import TrainerError
from offload_trainer.config import ModelSection
from offload_trainer.engine import deepspeed as builds
from offload_trainer.engine.deepspeed import remove_stale_lock
from offload_trainer.model.loader import resolve_model

# Several weights share a sub-group that is read and written for each of them, and its last write is asynchronous.
LATE = ["--params", "cpu", "--optimizer", "nvme", "deepspeed.sub_group_size=1000000"]


def write_late() -> None:
    """Delay the writes of sub-groups until an operation waits for them."""
    from deepspeed.runtime.swap_tensor import pipelined_optimizer_swapper as pipelined

    write, wait = pipelined.swap_out_tensors, pipelined.OptimizerSwapOp.wait
    held: list[tuple[Any, ...]] = []

    def waited(operation: Any) -> None:
        while held and not operation.read_op:
            write(*held.pop(0))
        wait(operation)

    pipelined.swap_out_tensors = lambda *words: held.append(words)
    pipelined.OptimizerSwapOp.wait = waited


def leave_out_last_block(folder: Path, words: list[str], late: bool) -> str:
    """Train as a rank, and then leave the last block out of one of two micro-batches; return the error."""
    if late:
        write_late()
    stock = build(folder, words)
    assert_same(masters(stock), load_file(folder / "model/model.safetensors"))
    train(stock, batches(4), accumulate=2, lr=1e-3)
    body, before = stock._module.model.model, masters(stock)
    forward, blocks = stock._module.forward, iter([body.layers[:-1], body.layers])

    def with_blocks(*args: torch.Tensor) -> torch.Tensor:
        body.layers = next(blocks)
        return forward(*args)

    stock._module.forward = with_blocks
    with pytest.raises(TrainerError) as refused:
        train(stock, batches(2), accumulate=2, lr=1e-3)
    assert_same(masters(stock), before)
    return str(refused.value)


@pytest.mark.ops
@pytest.mark.parametrize("words", [["--params", "gpu", "--optimizer", "cpu"], LATE])
def test_masters_begin_unrounded_and_weights_without_a_gradient_are_refused(words: list[str], tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64} if words == LATE else {}
    random_weights(model_directory(tmp_path / "model", "qwen3", tied=False, **wide))
    more = [*words, "--accumulate", "2", "model.activation_checkpointing=off"]
    (refused,) = in_ranks(leave_out_last_block, tmp_path, more, words == LATE, count=1, folder=tmp_path, stock=True)
    assert "11 of 58 weights got no gradient (model.layers.4." in refused
    assert "--engine tiered" in refused


ZERO = {  # keyed by ZeRO stage and placement
    "1 gpu": ["deepspeed.zero_stage=1", "--optimizer", "gpu"],
    "2": ["--params", "gpu", "--optimizer", "cpu"],
    "3": ["--params", "cpu", "--optimizer", "cpu"],
}


@pytest.mark.ops
@pytest.mark.parametrize(("zero", "ranks"), [("1 gpu", 2), ("2", 4), ("3", 2)])
def test_the_mean_is_over_all_targets_that_all_ranks_count(zero: str, ranks: int, tmp_path: Path) -> None:
    """One rank counts nine times as many targets as the other. The bytes of a step's collectives match the plan."""
    model = random_weights(model_directory(tmp_path / "model", "qwen3", tied=False))
    steps = 3
    data = masked(batches(steps * ACCUMULATE * ranks))
    expected, weights = transformers_alone(model, data, at_a_time=ACCUMULATE * ranks)
    words = [*ZERO[zero], "--dtype", "fp32"]
    found = train_stock(tmp_path, *words, ranks=ranks, steps=steps)
    assert found.stage == int(zero[0])
    assert found.apart == []
    assert_near(found.steps, expected, rel=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(found.masters[name], weight, rtol=1e-5, atol=1e-6)
    assert found.bytes == pytest.approx(planned_bytes(tmp_path, *words, ranks=ranks), rel=0.02), found.calls


@pytest.mark.ops
@pytest.mark.parametrize("checkpointing", ["off", "on"])
def test_what_zero_3_gathers_is_what_the_plan_says(checkpointing: str, tmp_path: Path) -> None:
    """The last blocks of a forward stay until their backward. The steps follow the plain engine, which has all rows."""
    wide = {"model_type": "llama", "hidden_size": 384, "intermediate_size": 768, "num_key_value_heads": 4}
    model = random_weights(model_directory(tmp_path / "model", "qwen3", tied=False, head_dim=96, **wide))
    words = [*ZERO["3"], "--dtype", "bf16", "--lr", "1e-3", f"model.activation_checkpointing={checkpointing}"]
    found = train_stock(tmp_path, *words, ranks=2)
    with engine(model, "--engine", "plain", "model.random_init=false", "--dtype", "bf16", f"optim.eps={EPS}") as plain:
        alone = train(plain, masked(batches(3 * 2 * ACCUMULATE)), accumulate=2 * ACCUMULATE, lr=1e-3)
    for (loss, norm), (expected, length) in zip(found.steps, alone, strict=True):
        assert loss == pytest.approx(expected, abs=2e-2)
        assert norm == pytest.approx(length, rel=3e-2)
    told = planned_bytes(tmp_path, *words, ranks=2)
    exact = 0.02 if checkpointing == "off" else 0.1  # of this small model, a block comes once more to be recomputed
    assert found.bytes == pytest.approx(told, rel=exact), found.calls
    shape = resolve_model(ModelSection(name=str(tmp_path / "model")), seed=0).shape
    assert told < 0.95 * ACCUMULATE * 3 * shape.parameters  # 2 bytes each, of which the other rank sends half


@pytest.mark.slow
def test_a_lock_without_a_running_build_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is removed after the patience has passed; a running build removes its own, which fails if it is gone."""
    (tmp_path / "lock").touch()
    with subprocess.Popen(["sh", "-c", "sleep 1.5; rm lock"], cwd=tmp_path) as build:
        remove_stale_lock(tmp_path, patience=0.3)
        assert build.wait() == 0
    now, looks = iter(range(100)), []
    monkeypatch.setattr(builds, "_someone_works_in", lambda place: looks.append(place))
    monkeypatch.setattr(builds, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=lambda _: None))
    (tmp_path / "lock").touch()
    remove_stale_lock(tmp_path, patience=20)
    assert not (tmp_path / "lock").exists()
    assert len(looks) == 21
