"""Tests of DeepSpeed's AutoTP with ZeRO-1: results match transformers and torch, and bytes match the plan."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Run
from engine_bench import assert_near, batches, model_directory
from forked_ranks import call_ranks
from safetensors.torch import load_file
from sample_plans import GB, SHAPES, machine
from stock_deepspeed import ACCUMULATE, planned_bytes, train_stock
from uneven_targets import masked, random_weights, transformers_alone

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.config import ModelSection
from offload_trainer.engine.deepspeed import Parts
from offload_trainer.model.loader import resolve_model
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import make_plan
from offload_trainer.plan.shape import ModelShape
from offload_trainer.run.export import export
from offload_trainer.settings import load_config

STEPS = 3


def directory(folder: Path, kind: str, **changes: Any) -> Path:
    return random_weights(model_directory(folder, "qwen3", tied=False, model_type=kind, **changes))


def shape_of(folder: Path) -> ModelShape:
    return resolve_model(ModelSection(name=str(folder)), seed=0).shape


@pytest.mark.slow
@pytest.mark.ops
def test_ranks_share_each_product(tmp_path: Path) -> None:
    """2 x 2 ranks match transformers on one batch, in fp32 with uneven numbers of targets."""
    model, ranks = directory(tmp_path / "model", "qwen3"), 4
    words = ["--optimizer", "cpu", "parallel.tensor=2", "--dtype", "fp32", "model.activation_checkpointing=on"]
    found = train_stock(tmp_path, *words, ranks=ranks, steps=STEPS)
    rows = ACCUMULATE * ranks // 2
    expected, weights = transformers_alone(model, masked(batches(STEPS * rows)), at_a_time=rows)
    assert found.apart == []  # weights that are not divided
    assert_near(found.steps, expected, rel=1e-5)
    assert set(found.masters) == set(weights)
    for key, weight in weights.items():
        torch.testing.assert_close(found.masters[key], weight, rtol=1e-4, atol=1e-5)
    assert found.bytes == pytest.approx(planned_bytes(tmp_path, *words, ranks=ranks), rel=0.02), found.calls


@pytest.mark.slow
@pytest.mark.ops
def test_the_command_saves_and_exports_whole_weights(tmp_path: Path) -> None:
    """Two ranks resume their checkpoint exactly, and one rank closely; an export in bf16 has the masters' bits."""
    directory(tmp_path / "model", "qwen3", vocab_size=2048)
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
    for folder in (unsaved / "export", tmp_path / "hf"):
        held = load_file(folder / "model.safetensors")
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


def plan_of(shape: ModelShape, *words: str, ranks: int = 2, gpu: int = 0) -> Plan:
    config = load_config(["--engine", "deepspeed", "parallel.tensor=2", *words])
    return make_plan(config, shape, machine(gpu=gpu, ram=64 * GB), world=ranks)


@pytest.mark.slow
def test_models_that_cannot_be_divided_are_refused_by_name(tmp_path: Path) -> None:
    shape, sums = shape_of(directory(tmp_path / "model", "llama")), ("--accumulate", "2")
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
        shape = shape_of(random_weights(model_directory(tmp_path / kind, kind)))
        assert not any(weight.split for weight in shape.weights)


def test_a_weight_that_is_not_split_as_planned_is_refused() -> None:
    with pytest.raises(TrainerError, match=r"r was not split as planned: \[6, 4\] for \[6, 2\]"):
        Parts({"r": -1}, 2, 0, None).of("r", torch.zeros(6, 4), (6, 4))
