"""Tests of stock DeepSpeed: cases that it gets silently wrong, its bytes, a killed build's lock, and AutoTP."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import Run
from engine_bench import assert_near, assert_same, batches, engine, masters, model_directory, train
from forked_ranks import call_ranks, in_ranks
from safetensors.torch import load_file
from sample_plans import GB, SHAPES, machine
from stock_deepspeed import ACCUMULATE, build, planned_bytes, train_stock
from uneven_targets import EPS, masked, random_weights, transformers_alone

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.config import ModelSection
from offload_trainer.engine import deepspeed as builds
from offload_trainer.engine.deepspeed import Parts, remove_stale_lock
from offload_trainer.model.loader import resolve_model
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import make_plan
from offload_trainer.plan.shape import ModelShape
from offload_trainer.run.export import export
from offload_trainer.settings import load_config

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
    body, before = stock._engine.module.model.model, masters(stock)
    forward, blocks = stock._engine.module.forward, iter([body.layers[:-1], body.layers])

    def with_blocks(*args: torch.Tensor) -> torch.Tensor:
        body.layers = next(blocks)
        return forward(*args)

    stock._engine.module.forward = with_blocks
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
    "1, products shared by two": ["--optimizer", "cpu", "parallel.tensor=2", "model.activation_checkpointing=on"],
    "2": ["--params", "gpu", "--optimizer", "cpu"],
    "3": ["--params", "cpu", "--optimizer", "cpu"],
}


@pytest.mark.ops
@pytest.mark.parametrize(
    ("zero", "ranks", "sharing", "rel"),
    [
        ("1 gpu", 2, 1, 1e-6),
        ("2", 4, 1, 1e-6),
        ("3", 2, 1, 1e-6),
        pytest.param("1, products shared by two", 4, 2, 1e-5, marks=pytest.mark.slow),
    ],
)
def test_the_mean_is_over_all_targets_that_all_ranks_count(
    zero: str, ranks: int, sharing: int, rel: float, tmp_path: Path
) -> None:
    """One rank counts nine times as many targets as the other. The bytes of a step's collectives match the plan."""
    model = random_weights(model_directory(tmp_path / "model", "qwen3", tied=False))
    steps, rows = 3, ACCUMULATE * ranks // sharing
    expected, weights = transformers_alone(model, masked(batches(steps * rows)), at_a_time=rows)
    words = [*ZERO[zero], "--dtype", "fp32"]
    found = train_stock(tmp_path, *words, ranks=ranks, steps=steps)
    assert found.stage == int(zero[0])
    assert found.apart == []  # weights that are not divided
    assert_near(found.steps, expected, rel=rel)
    assert set(found.masters) == set(weights)
    for name, weight in weights.items():
        torch.testing.assert_close(found.masters[name], weight, rtol=10 * rel, atol=rel)
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
    exact = 0.02 if checkpointing == "off" else 0.1  # one of the few blocks is gathered again to be recomputed
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


@pytest.mark.slow
@pytest.mark.ops
def test_the_command_saves_and_exports_whole_weights(tmp_path: Path) -> None:
    """Two ranks resume their checkpoint exactly, and one rank closely; an export in bf16 has the masters' bits."""
    random_weights(model_directory(tmp_path / "model", "qwen3", tied=False, vocab_size=2048))
    words = ["--model", tmp_path / "model", "--tokenizer", "builtin", "--engine", "deepspeed", "--optimizer", "cpu"]
    words += ["--steps", "4", "--seq-len", "32", "train.eval_every=2", "--lr", "1e-3"]

    def run(name: str, *, ranks: int, every: str = "2", dtype: str = "fp32") -> Run:
        more = ["--save-every", every, "--dtype", dtype, f"parallel.tensor={ranks}"]
        runs = call_ranks(*words, *more, output=tmp_path / name, count=ranks)
        assert not any(one.code for one in runs), runs[0].text[-3000:]
        return runs[0]

    def go_on(name: str, *, ranks: int) -> Run:
        shutil.copytree(tmp_path / "two", tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints/step-00000004")
        resumed = run(name, ranks=ranks)
        assert "step-00000002, step 2" in resumed.text
        return resumed

    one, two = run("one", ranks=1), run("two", ranks=2)
    unsaved, rounded = (run(f"every-{n}", ranks=2, every=n, dtype="bf16").output for n in ("0", "2"))
    export(rounded, tmp_path / "hf", dtype="fp32", check=True)
    masters = load_file(rounded / saved("master"))
    for file in (unsaved / saved("master"), tmp_path / "hf/model.safetensors"):
        held = load_file(file)
        assert held.keys() == masters.keys()
        assert all(torch.equal(held[key], master) for key, master in masters.items())
    again = go_on("again", ranks=2)
    assert [step["loss"] for step in again.steps] == [step["loss"] for step in two.steps]
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        assert (again.output / saved(kind)).read_bytes() == (two.output / saved(kind)).read_bytes(), kind
    for other in (two, go_on("to-one", ranks=1)):
        for before, after in zip(one.steps, other.steps, strict=True):
            assert after["loss"] == pytest.approx(before["loss"], abs=1e-3)
            assert after["tokens"] == before["tokens"]
        for kind, far in (("master", 0.01), ("exp_avg", 0.02), ("exp_avg_sq", 0.02)):
            alone, shared = (load_file(which.output / saved(kind)) for which in (one, other))
            assert {key: tensor.shape for key, tensor in alone.items()} == {k: t.shape for k, t in shared.items()}
            for key, tensor in alone.items():
                assert (shared[key] - tensor).norm() <= far * tensor.norm(), (kind, key)


def saved(kind: str) -> str:
    return f"checkpoints/step-00000004/{kind}.safetensors"


@pytest.mark.slow
def test_models_that_cannot_be_divided_are_refused_by_name(tmp_path: Path) -> None:
    def plan_of(shape: ModelShape, *words: str, ranks: int = 2, gpu: int = 0) -> Plan:
        config = load_config(["--engine", "deepspeed", "parallel.tensor=2", *words])
        return make_plan(config, shape, machine(gpu=gpu, ram=64 * GB), world=ranks)

    model = random_weights(model_directory(tmp_path / "model", "qwen3", tied=False, model_type="llama"))
    shape, sums = resolve_model(ModelSection(name=str(model)), seed=0).shape, ("--accumulate", "2")
    for other, words, ranks, told in (
        (SHAPES["gpt2-mini"], (), 2, "transformers has no tensor-parallel plan for this architecture"),
        (shape, (), 3, r"parallel.tensor=2 with 3 rank\(s\): a multiple of 2"),
        (replace(shape, key_heads=1), (), 2, "1 key-value heads are not a multiple of 2"),
        (shape, ("--optimizer", "gpu", *sums), 2, "use --optimizer cpu"),
    ):
        with pytest.raises(UserError, match=told):
            plan_of(other, *words, ranks=ranks, gpu=80 * GB)
    plan = plan_of(shape)
    assert (plan.title, plan.cannot_save) == ("DeepSpeed AutoTP over 2 ranks, ZeRO-1", None)
    assert [plan_of(shape, *words, gpu=80 * GB).placement.optimizer for words in (sums, ())] == ["cpu", "gpu"]


def test_no_other_rule_than_division_by_rows_and_columns_is_taken(tmp_path: Path) -> None:
    for kind in ("mixtral", "phimoe", "opt"):
        model = random_weights(model_directory(tmp_path / kind, kind))
        assert not any(weight.split for weight in resolve_model(ModelSection(name=str(model)), seed=0).shape.weights)


def test_a_weight_that_is_not_split_as_planned_is_refused() -> None:
    with pytest.raises(TrainerError, match=r"r was not split as planned: \[6, 4\] for \[6, 2\]"):
        Parts({"r": -1}, 2, 0, None).of("r", torch.zeros(6, 4), (6, 4))
