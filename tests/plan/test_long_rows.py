"""Rows that fit only with MLPs in pieces, and the longest row that fits: what `plan` chooses and says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from plans import GB, SHAPES, machine, wish

from offload_trainer.config import ModelSection
from offload_trainer.errors import UserError
from offload_trainer.model.positionwise import with_tiles
from offload_trainer.model.source import resolve_model
from offload_trainer.plan.choose import make_plan, settle_and_plan, workload
from offload_trainer.plan.longest import longest, longest_row
from offload_trainer.plan.machine import read_machine
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.workload import chunks_of
from offload_trainer.run.planning import plan_elsewhere
from offload_trainer.settings import load_config

WIDE = {"n_positions": 65536, "n_layer": 2, "n_embd": 256, "n_inner": 16384, "n_head": 4}
ROWS = ["--seq-len", "32768", "--micro-batch", "1", "model.checkpointing=on", "--ram-fraction", "1"]


@cache
def wide() -> ModelShape:
    """With MLPs 64 times as wide as the hidden states."""
    return with_tiles(resolve_model(ModelSection(overrides=WIDE), seed=0)).shape


def planned(gpu: float, *words: str, rows: Sequence[str] = ROWS) -> Plan:
    return make_plan(wish(*rows, *words), wide(), machine(gpu=int(gpu * GB)))


def needs(plan: Plan) -> int:
    return plan.tiers["gpu"]["need"]


def test_pieces_are_taken_where_nothing_fits_without_and_the_largest_that_does() -> None:
    """From all of the row down to 256 tokens, each where the one before has become too much."""
    roomy = planned(80)
    assert (roomy.mlp_chunk, roomy.fits) == (0, True)
    sizes = {chunk: needs(planned(80, f"model.mlp_chunk={chunk}", "--params", "nvme")) for chunk in (8192, 1024, 256)}
    assert sizes[256] < sizes[1024] < sizes[8192] < needs(planned(80, "--params", "nvme"))
    assert sizes[8192] - sizes[1024] > 7168 * 16384 * 2 * 3  # three of an MLP's insides at least
    for chunk, size in sizes.items():
        plan = planned(size / GB + 1e-3, "--params", "nvme", "placement.gpu_fraction=0", rows=ROWS[:-2])
        assert (plan.mlp_chunk, plan.fits) == (chunk, True)
        assert f"MLPs {chunk} tokens at a time" in plan.describe()
        assert plan.to_json()["chosen"]["mlp_chunk"] == chunk
    least = planned(sizes[256] / GB - 1e-3, "--params", "nvme", "placement.gpu_fraction=0", rows=ROWS[:-2])
    assert not least.fits


def test_the_wish_is_settled_so_that_the_engine_has_what_was_planned() -> None:
    small = needs(planned(80, "model.mlp_chunk=256", "--params", "nvme")) / GB + 0.01
    config, plan = settle_and_plan(wish(*ROWS[:-2], "--params", "nvme"), wide(), machine(gpu=int(small * GB)))
    assert plan.mlp_chunk == config.model.mlp_chunk == workload(config, wide()).mlp_chunk > 0
    config, plan = settle_and_plan(wish(*ROWS), wide(), machine(gpu=80 * GB))
    assert (plan.mlp_chunk, config.model.mlp_chunk, workload(config, wide()).mlp_chunk) == (0, "off", 0)
    off = make_plan(wish(*ROWS, "--params", "nvme", "model.mlp_chunk=off"), wide(), machine(gpu=int(small * GB)))
    assert not off.fits


def test_pieces_as_long_as_a_micro_batch_are_none() -> None:
    assert planned(80, "model.mlp_chunk=32768").mlp_chunk == 0
    assert planned(80, "model.mlp_chunk=32767").mlp_chunk == 32767
    assert chunks_of(workload(wish("--seq-len", "512", "--micro-batch", "2"), wide())) == (512, 256)


def test_what_cannot_be_in_pieces_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.mlp_chunk=256: no part of this model's blocks is a module"):
        make_plan(wish("model.mlp_chunk=256", "--seq-len", "1024"), SHAPES["gpt2"], machine(gpu=80 * GB))
    with pytest.raises(UserError, match=r"model\.mlp_chunk=256 belongs to --engine tiered, not to deepspeed"):
        wish("model.mlp_chunk=256", "--engine", "deepspeed")


@pytest.mark.parametrize("gpu", [2.5, 4, 24])
@pytest.mark.parametrize("pieces", ["auto", "off"])
def test_the_longest_row_fits_and_the_next_does_not(gpu: float, pieces: str) -> None:
    """By the plans of both."""
    shape = wide() if pieces == "auto" else resolve_model(ModelSection(overrides=WIDE), seed=0).shape
    here, words = machine(gpu=int(gpu * GB)), ["--micro-batch", "1", f"model.mlp_chunk={pieces}"]
    found = longest_row(wish(*words), shape, here, world=1, nodes=1)
    assert 0 < found <= 65536
    assert make_plan(wish(*words, "--seq-len", str(found)), shape, here).fits
    if found < 65536:
        assert found % 512 == 0  # a 128th of the context
        assert not make_plan(wish(*words, "--seq-len", str(found + 512)), shape, here).fits


def test_pieces_make_longer_rows() -> None:
    here = machine(gpu=4 * GB)
    plain = resolve_model(ModelSection(overrides=WIDE), seed=0).shape
    whole, pieces = (longest_row(wish("--micro-batch", "1"), one, here, world=1, nodes=1) for one in (plain, wide()))
    assert pieces > 4 * whole


def test_pieces_of_blocks_that_are_not_checkpointed_are_computed_twice() -> None:
    inside = 2 * 2 * 2 * 256 * 16384  # of a token: a product and a sum in two matrices of two blocks
    assert wide().tiled_flops() - inside < 0.001 * inside
    timed = read_machine("h200")

    def backward(*words: str) -> float:
        rows = ["--seq-len", "8192", "--micro-batch", "1", "model.loss_chunk=8192", *words]
        plan = make_plan(load_config(rows), wide(), timed)
        return next(
            one.seconds or 0.0 for one in plan.forecast.bounds if (one.phase, one.kind) == ("backward", "compute")
        )

    more = backward("model.mlp_chunk=1024", "model.checkpointing=off") / backward("model.checkpointing=off")
    flops = wide().backward_flops(seq_len=8192)
    assert more == pytest.approx((flops + wide().tiled_flops()) / flops)
    assert backward("model.mlp_chunk=1024", "model.checkpointing=on") == backward("model.checkpointing=on")


def test_the_search_finds_each_length() -> None:
    for most in (0, 255, 256, 300, 512, 999, 1000, 5000):
        asked: list[int] = []
        found = longest(1000, lambda length, most=most, asked=asked: (asked.append(length), length <= most)[1])
        assert found == (1000 if most >= 1000 else most // 256 * 256)
        assert len(asked) < 6


def test_the_plan_says_it(tmp_path: Path) -> None:
    """On a described machine, without torch for a preset; a command's JSON has it too."""
    plan = plan_elsewhere(wish("--model", "gpt2"), machine(gpu=24 * GB))
    assert plan.longest_row == 1024
    assert "longest row: 1024 tokens" in plan.describe()
    assert json.loads(json.dumps(plan.to_json()))["longest_row"] == 1024
    words = [f"model.overrides.{key}={value}" for key, value in WIDE.items()]
    small = plan_elsewhere(wish(*words, "--micro-batch", "1", "--seq-len", "512"), machine(gpu=4 * GB))
    assert small.mlp_chunk == 0
    assert small.longest_row == longest_row(wish("--micro-batch", "1"), wide(), machine(gpu=4 * GB), world=1, nodes=1)
