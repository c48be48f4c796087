"""DeepSpeed's AutoTP with ZeRO-1: losses, norms and masters of transformers and torch alone, bytes as planned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_of_engines import batches, model_directory
from conftest import start
from counted import masked, random_weights, transformers_alone
from plans import GB, SHAPES, machine
from ranked import call_ranks
from safetensors.torch import load_file
from tensor_ranks import ACCUMULATE

from offload_trainer.config import ModelSection
from offload_trainer.engine.tensor import Parts
from offload_trainer.errors import TrainerError, UserError
from offload_trainer.machine.probe import probe_machine
from offload_trainer.model.source import resolve_model
from offload_trainer.plan.choose import make_plan
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.settings import load_config

SCRIPT = Path(__file__).parents[1] / "tensor_ranks.py"
STEPS = 3
SHAPED: dict[str, dict[str, Any]] = {"llama": {"model_type": "llama"}, "qwen3": {"model_type": "qwen3"}}
ALWAYS = ("--engine", "deepspeed", "--save-every", "0", "parallel.tensor=2")


def directory(folder: Path, name: str, **changes: Any) -> Path:
    return random_weights(model_directory(folder, "qwen3", tied=False, **SHAPED[name], **changes))


def shape_of(folder: Path) -> ModelShape:
    return resolve_model(ModelSection(name=str(folder)), seed=0).shape


def trained(folder: Path, *words: str, ranks: int) -> dict[str, Any]:
    said = [folder / f"said{rank}" for rank in range(ranks)]
    started = [
        start(SCRIPT, folder, rank, ranks, STEPS, *words, stdout=out, stderr=out, stock=True)
        for rank, out in enumerate(said)
    ]
    codes = [process.wait(300) for process in started]
    assert not any(codes), [out.read_text()[-3000:] for out in said]
    found: dict[str, Any] = json.loads(said[0].read_text().splitlines()[-1])
    return found


def planned(folder: Path, *words: str, ranks: int) -> Plan:
    told = ["--optimizer", "cpu", "--accumulate", str(ACCUMULATE), "--micro-batch", "2", "--seq-len", "24", *words]
    config = load_config(["--model", str(folder), *ALWAYS, *told])
    return make_plan(config, shape_of(folder), probe_machine(), world=ranks)


def sent(plan: Plan) -> int:
    """Bytes through a GPU in a step."""
    return sum(one.written for one in plan.links if one.place == "gpus")


@pytest.mark.ops
@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [("llama", 2, []), ("llama", 4, []), ("qwen3", 2, ["model.checkpointing=on"]), ("qwen3", 4, [])],
)
def test_two_ranks_share_each_product(name: str, ranks: int, words: list[str], tmp_path: Path) -> None:
    """In fp32, with unequally many targets: 2 x 1 and 2 x 2 ranks do what one batch of transformers' own does."""
    model, words = directory(tmp_path / "model", name), ["--dtype", "fp32", *words]
    found = trained(tmp_path, "parallel.tensor=2", *words, ranks=ranks)
    rows = ACCUMULATE * ranks // 2
    losses, norms, weights = transformers_alone(model, masked(batches(STEPS * rows)), at_a_time=rows)
    for (loss, norm), expected, length in zip(found["steps"], losses, norms, strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert norm == pytest.approx(length, rel=1e-4)
    masters = load_file(tmp_path / "masters.safetensors")
    assert set(masters) == set(weights)
    for key, weight in weights.items():
        torch.testing.assert_close(masters[key], weight, rtol=1e-4, atol=1e-5)
    told = STEPS * sent(planned(model, *words, ranks=ranks))
    assert sum(found["bytes"].values()) == pytest.approx(told, rel=0.02), found["calls"]


@pytest.mark.ops
def test_the_command_trains_and_exports_whole_weights(tmp_path: Path) -> None:
    """Two ranks that share each product, in bf16: losses and the export of the run that has one."""
    directory(tmp_path / "model", "qwen3", vocab_size=2048)
    words = ["--model", tmp_path / "model", "--tokenizer", "builtin", "--engine", "deepspeed", "--optimizer", "cpu"]
    words += ["--steps", "4", "--seq-len", "32", "--save-every", "0", "train.eval_every=2", "--lr", "1e-3"]
    told = []
    for count in (1, 2):
        output = tmp_path / f"out{count}"
        runs = call_ranks(*words, f"parallel.tensor={count}", output=output, count=count)
        assert not any(run.code for run in runs), runs[0].text[-3000:]
        steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        told.append((steps, load_file(output / "export/model.safetensors")))
    (alone, one), (shared, two) = told
    for before, after in zip(alone, shared, strict=True):
        assert after["loss"] == pytest.approx(before["loss"], abs=2e-2)
        assert after["tokens"] == before["tokens"]
    assert {key: tensor.shape for key, tensor in one.items()} == {key: tensor.shape for key, tensor in two.items()}
    for key, tensor in one.items():
        assert (two[key].float() - tensor.float()).norm() < 0.05 * tensor.float().norm(), key


# -- what is refused --------------------------------------------------------------------------------------------------


def plan_of(shape: ModelShape, *words: str, ranks: int = 2, gpu: int = 0) -> Plan:
    return make_plan(load_config([*ALWAYS, *words]), shape, machine(gpu=gpu, ram=64 * GB), world=ranks)


def test_what_cannot_be_divided_is_refused_by_name(tmp_path: Path) -> None:
    shape = shape_of(directory(tmp_path / "model", "llama"))
    assert plan_of(shape).title == "DeepSpeed's AutoTP over 2, ZeRO-1"
    with pytest.raises(UserError, match="transformers has no rule for this architecture"):
        plan_of(SHAPES["gpt2-mini"])
    with pytest.raises(UserError, match=r"parallel.tensor=2 with 3 rank\(s\): a multiple of 2"):
        plan_of(shape, ranks=3)
    with pytest.raises(UserError, match="1 heads of keys and values are not a multiple of 2"):
        plan_of(replace(shape, key_heads=1))
    with pytest.raises(UserError, match="use --optimizer cpu"):
        plan_of(shape, "--optimizer", "gpu", "--accumulate", "2", gpu=80 * GB)
    assert plan_of(shape, "--accumulate", "2", gpu=80 * GB).placement.optimizer == "cpu"
    assert plan_of(shape, gpu=80 * GB).placement.optimizer == "gpu"
    assert "parallel.tensor=2 divides each weight's moments" in (plan_of(shape).cannot_save or "")


@pytest.mark.parametrize("kind", ["mixtral", "phimoe", "opt"])
def test_no_rule_but_division_by_rows_and_columns_is_taken(kind: str, tmp_path: Path) -> None:
    assert not any(weight.split for weight in shape_of(random_weights(model_directory(tmp_path, kind))).weights)


def test_each_matrix_of_a_block_has_its_rule(tmp_path: Path) -> None:
    weights = shape_of(directory(tmp_path / "model", "qwen3")).weights
    found = {weight.name.removeprefix("model.layers.0."): weight.split for weight in weights}
    assert {name for name, split in found.items() if split == "row"} >= {"self_attn.o_proj.weight"}
    assert found["self_attn.q_proj.weight"] == found["mlp.gate_proj.weight"] == "column"
    assert found["self_attn.q_norm.weight"] == "summed"
    assert found["input_layernorm.weight"] == found["lm_head.weight"] == found["model.embed_tokens.weight"] == ""


def test_parts_of_a_weight() -> None:
    weights = [Weight("c", (6, 4), split="column"), Weight("r", (6, 4), split="row"), Weight("w", (6, 4))]
    made = [Parts({weight.name: weight for weight in weights}, 2, place, None) for place in (0, 1)]
    whole = torch.arange(24.0).view(6, 4)
    assert torch.equal(torch.cat([one.of("c", whole) for one in made]), whole)
    assert torch.equal(torch.cat([one.of("r", whole) for one in made], 1), whole)
    assert torch.equal(made[1].of("w", whole), whole)
    made[0].check({"c": (3, 4), "r": (6, 2), "w": (6, 4)})
    with pytest.raises(TrainerError, match=r"1 weights were divided otherwise than planned: r \[6, 4\] for \[6, 2\]"):
        made[0].check({"c": (3, 4), "r": (6, 4)})
