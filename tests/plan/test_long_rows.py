"""Tests of rows that fit only with MLPs in pieces, and of the longest row that fits, in what `plan` chooses and
reports.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
from commands import ask
from sample_plans import GB, SHAPES, machine, wish

from offload_trainer.config import ModelSection
from offload_trainer.errors import UserError
from offload_trainer.model.loader import resolve_model
from offload_trainer.model.probes.blocks import with_tiles
from offload_trainer.plan.machine import Rate, layer_key, read_machine
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import longest_row, make_plan, resolved, workload
from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.workload import chunks_of
from offload_trainer.run.commands.plan import plan_elsewhere
from offload_trainer.settings import load_config

WIDE = {"n_positions": 65536, "n_layer": 2, "n_embd": 256, "n_inner": 16384, "n_head": 4}
ROWS = ["--seq-len", "32768", "--micro-batch", "1", "model.activation_checkpointing=on", "--ram-fraction", "1"]


@cache
def wide() -> ModelShape:
    """Return a model whose MLPs are 64 times as wide as its hidden states."""
    return with_tiles(resolve_model(ModelSection(overrides=WIDE), seed=0)).shape


@pytest.mark.slow
def test_a_plan_that_tries_pieces_has_no_warnings_of_transformers() -> None:
    """GPT-2's class has no entry among transformers' losses, of which its tiny model would warn."""
    words = [f"model.overrides.{key}={value}" for key, value in WIDE.items()]
    done = ask("plan", "--machine", "rtx4090-64gb", *words, "--seq-len", 65536, "--micro-batch", 8, own=True)
    assert done.returncode == 0
    assert "MLPs in chunks of" in done.stdout
    assert done.stderr == ""


def planned(gpu: float, *words: str, rows: Sequence[str] = ROWS) -> Plan:
    return make_plan(wish(*rows, *words), wide(), machine(gpu=int(gpu * GB)))


def needs(plan: Plan) -> int:
    return plan.tiers["gpu"]["need"]


def test_pieces_are_taken_where_nothing_fits_without_and_the_largest_that_does() -> None:
    """Pieces shrink from the whole row to 256 tokens, each size taken once the larger one no longer fits."""
    roomy = planned(40)
    assert (roomy.work.mlp_chunk, roomy.fits) == (0, True)
    sizes = {chunk: needs(planned(40, f"model.mlp_chunk={chunk}", "--params", "nvme")) for chunk in (8192, 1024, 256)}
    assert sizes[256] < sizes[1024] < sizes[8192] < needs(planned(40, "--params", "nvme"))
    assert sizes[8192] - sizes[1024] > 7168 * 16384 * 2 * 3  # at least three intermediate tensors of an MLP
    for chunk, size in sizes.items():
        plan = planned(size / GB + 1e-3, "--params", "nvme", "placement.gpu_fraction=0", rows=ROWS[:-2])
        assert (plan.work.mlp_chunk, plan.fits) == (chunk, True)
        assert f"MLPs in chunks of {chunk} tokens" in plan.describe(full=True)
        assert plan.to_json()["chosen"]["mlp_chunk"] == chunk
    least = planned(sizes[256] / GB - 1e-3, "--params", "nvme", "placement.gpu_fraction=0", rows=ROWS[:-2])
    assert not least.fits


def test_auto_is_resolved_for_the_engine_as_planned() -> None:
    small = needs(planned(80, "model.mlp_chunk=256", "--params", "nvme")) / GB + 0.01
    wished = wish(*ROWS[:-2], "--params", "nvme")
    plan = make_plan(wished, wide(), machine(gpu=int(small * GB)))
    config = resolved(wished, plan)
    assert plan.work.mlp_chunk == config.model.mlp_chunk == workload(config, wide()).mlp_chunk > 0
    plan = make_plan(wish(*ROWS), wide(), machine(gpu=80 * GB))
    config = resolved(wish(*ROWS), plan)
    assert (plan.work.mlp_chunk, config.model.mlp_chunk, workload(config, wide()).mlp_chunk) == (0, "off", 0)
    off = make_plan(wish(*ROWS, "--params", "nvme", "model.mlp_chunk=off"), wide(), machine(gpu=int(small * GB)))
    assert not off.fits


def test_pieces_as_long_as_a_micro_batch_are_not_tiles() -> None:
    assert planned(80, "model.mlp_chunk=32768").work.mlp_chunk == 0
    assert planned(80, "model.mlp_chunk=32767").work.mlp_chunk == 32767
    assert chunks_of(workload(wish("--seq-len", "512", "--micro-batch", "2"), wide())) == (512, 256)


def test_what_cannot_be_in_pieces_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.mlp_chunk=256: no part of this model's blocks is a module"):
        make_plan(wish("model.mlp_chunk=256", "--seq-len", "1024"), SHAPES["gpt2"], machine(gpu=80 * GB))
    with pytest.raises(UserError, match=r"model\.mlp_chunk=256 belongs to --engine tiered, not to deepspeed"):
        wish("model.mlp_chunk=256", "--engine", "deepspeed")


@pytest.mark.parametrize("gpu", [2.5, 4, 24])
@pytest.mark.parametrize("pieces", ["auto", "off"])
def test_the_longest_row_fits_and_the_next_does_not(gpu: float, pieces: str) -> None:
    """The plans of both lengths confirm it."""
    shape = wide() if pieces == "auto" else resolve_model(ModelSection(overrides=WIDE), seed=0).shape
    here, words = machine(gpu=int(gpu * GB)), ["--micro-batch", "1", f"model.mlp_chunk={pieces}"]
    found = longest_row(wish(*words), shape, here, world=1, nodes=1)
    assert 0 < found <= 65536
    assert make_plan(wish(*words, "--seq-len", str(found)), shape, here).fits
    if found < 65536:
        assert found % 512 == 0  # a 128th of the context
        assert not make_plan(wish(*words, "--seq-len", str(found + 512)), shape, here).fits


def seconds_of_backward(shape: ModelShape, *words: str, timed: bool = False) -> float:
    """Return the backward's computing seconds; `timed` adds a rate for what is not a matrix product."""
    here, rows = read_machine("h200"), ["--seq-len", "8192", "--micro-batch", "1", "model.loss_chunk=8192"]
    if timed:
        parts = [(part, phase) for part in ("attention", "values", "loss") for phase in ("forward", "backward")]
        slow = {layer_key("bf16", *each): Rate(1e12 if each[0] == "values" else 1e30, "assumed", "") for each in parts}
        here = replace(here, rates=replace(here.rates, layers=slow))
    plan = make_plan(load_config([*rows, *words]), shape, here)
    return next(one.seconds or 0.0 for one in plan.forecast.bounds if (one.phase, one.kind) == ("backward", "compute"))


def test_pieces_of_blocks_that_are_not_checkpointed_are_computed_twice() -> None:
    """Their products are repeated, and so are the operations on values around them."""
    inside = 2 * 2 * 2 * 256 * 16384  # per token: multiply and add in two matrices of two blocks
    more, widths = wide().tiled(checkpointing=False)
    assert more - inside < 0.001 * inside
    assert widths == pytest.approx(2 * 2 * (256 + 16384), rel=0.001)
    off, on = "model.activation_checkpointing=off", "model.activation_checkpointing=on"
    backward = partial(seconds_of_backward, wide())
    flops = wide().backward_flops(seq_len=8192)
    assert backward("model.mlp_chunk=1024", off) / backward(off) == pytest.approx((flops + more) / flops)
    found = backward("model.mlp_chunk=1024", off, timed=True) - backward(off, timed=True)
    products = backward("model.mlp_chunk=1024", off) - backward(off)
    assert found == pytest.approx(0.8 * products + 8192 * widths / 1e12, rel=1e-3)
    assert backward("model.mlp_chunk=1024", on) == backward(on)


def test_pieces_with_a_norm_behind_them_are_computed_three_times(tmp_path: Path) -> None:
    """Gemma 2's recomputation runs checkpointed pieces again, since the norm needs their output."""
    config = {"model_type": "gemma2", "hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    shape = with_tiles(resolve_model(ModelSection(name=str(tmp_path), random_init=True), seed=0)).shape
    assert shape.tiles_again == shape.tiles != () == wide().tiles_again
    assert shape.tiled(checkpointing=True)[0] == 2 * 3 * 2 * 64 * 512
    on, off = (
        seconds_of_backward(shape, "model.mlp_chunk=1024", words) - seconds_of_backward(shape, words)
        for words in ("model.activation_checkpointing=on", "model.activation_checkpointing=off")
    )
    assert on == pytest.approx(off)
    assert on > 0


def test_the_plan_names_tiled_mlps(tmp_path: Path) -> None:
    """The plan states it for a described machine, without torch for a preset, and in the command's JSON."""
    plan = plan_elsewhere(wish("--model", "gpt2"), machine(gpu=24 * GB))
    assert plan.longest_row == 1024
    assert "rows of up to 1024 tokens fit" in plan.describe(full=True)
    assert json.loads(json.dumps(plan.to_json()))["longest_row"] == 1024
    words = [f"model.overrides.{key}={value}" for key, value in WIDE.items()]
    small = plan_elsewhere(wish(*words, "--micro-batch", "1", "--seq-len", "512"), machine(gpu=4 * GB))
    assert small.work.mlp_chunk == 0
    assert small.longest_row == longest_row(wish("--micro-batch", "1"), wide(), machine(gpu=4 * GB), world=1, nodes=1)
