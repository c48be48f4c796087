"""Tests of ways to divide a step among ranks: bytes against simulation and by hand, memory, seconds, refusals."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from sample_plans import SHAPES, cluster, rate, wish

from offload_trainer.config import DeepSpeedSection
from offload_trainer.errors import UserError
from offload_trainer.plan.deepspeed import gathered, zero_sizes
from offload_trainer.plan.parallel.collectives import (
    Collective,
    all_to_alls,
    column_products,
    link_seconds,
    refusal,
    tensor_collectives,
    weights_held,
    zero_collectives,
)
from offload_trainer.plan.parallel.comm_cost import GPUS
from offload_trainer.plan.planner import make_plan, workload
from offload_trainer.plan.shape import Weight
from offload_trainer.plan.tiers import Placement
from offload_trainer.plan.workload import Workload
from offload_trainer.run.commands.plan import compare_modes, modes

SHAPE = SHAPES["gpt2-medium"]  # 24 blocks of 1024, 16 heads


here = partial(cluster, copies=(1e10, 1e10, 1e10), matmul=1e14, memory=1e11, update=1e9)


def work(*words: str, world: int = 8, nodes: int = 1) -> Workload:
    return workload(wish(*words), SHAPE, world=world, nodes=nodes, saves=False)


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_all_to_alls_and_zero_1_by_hand() -> None:
    words = ("--micro-batch", "2", "--accumulate", "4", "--seq-len", "512", "model.activation_checkpointing=off")
    step, each = replace(work(*words), sequence=4), 3 / 4 * 2 * (2 * 512 / 4) * 1024
    assert [sent.bytes for sent in all_to_alls(step)] == pytest.approx([4 * 24 * 4 * each] * 2)
    assert [*all_to_alls(replace(step, checkpointed=7))][1].bytes == pytest.approx(4 * 31 * 4 * each)
    assert next(all_to_alls(replace(step, shape=replace(SHAPE, key_heads=4)))).bytes == pytest.approx(240 * each)
    found = [(sent.phase, sent.bytes) for sent in zero_collectives(work("--accumulate", "3"), stage=1, trained=800)]
    assert found == [("backward", pytest.approx(7 / 8 * 2 * 800)), ("update", pytest.approx(7 / 8 * 2 * 800))]


def simulated(group: int, apart: int, *, here: int, world: int, kind: str) -> tuple[float, float]:
    """Return the bytes a rank sends, and those a node's ranks send to other nodes, for one byte of data on each rank.

    The simulation goes message by message: n - 1 ring steps with one part each to the next rank, or each pair of
    an all-to-all.
    """
    sent: Counter[int] = Counter()
    out: Counter[int] = Counter()
    for first in (rank for rank in range(world) if rank // apart % group == 0):
        ranks = [first + place * apart for place in range(group)]
        pairs = {
            "ring": [(a, b, 1 / group) for a, b in zip(ranks, ranks[1:] + ranks[:1], strict=True)] * (group - 1),
            "all-to-all": [(a, b, 1 / group) for a in ranks for b in ranks if a != b],
        }[kind]
        for a, b, size in pairs:
            sent[a] += size  # type: ignore[assignment]
            if a // here != b // here:
                out[a // here] += size  # type: ignore[assignment]
    return max(sent.values()), max(out.values(), default=0.0)


@pytest.mark.parametrize("kind", ["ring", "all-to-all"])
@pytest.mark.parametrize("here", [1, 2, 4, 8, 16])
def test_bytes_through_a_nodes_network_equal_simulated_messages(kind: str, here: int) -> None:
    world = 16
    for group in (2, 4, 8, 16):
        for apart in (1, 2, 4, 8):
            if group * apart > world:
                continue
            gpu, network = simulated(group, apart, here=here, world=world, kind=kind)
            flow = Collective("forward", gpu, 1, group, apart, kind)  # type: ignore[arg-type]
            assert flow.network(here) == pytest.approx(network), (group, apart)


def test_an_impossible_stage_is_refused() -> None:
    stock = ("--engine", "deepspeed")
    with pytest.raises(UserError, match=r"zero_stage=2 keeps whole weights on each GPU.*use --params gpu"):
        wish(*stock, "deepspeed.zero_stage=2", "--params", "cpu")
    with pytest.raises(UserError, match=r"parallel.tensor=2 works with ZeRO-1 only: leave deepspeed.zero_stage out"):
        wish(*stock, "deepspeed.zero_stage=3", "parallel.tensor=2")
    wish(*stock, "deepspeed.zero_stage=3", "--params", "cpu")
    words = ("--engine", "deepspeed", "--save-every", "0", "deepspeed.zero_stage=1", "--accumulate", "2")
    with pytest.raises(UserError, match=r"zero_stage=1 --optimizer gpu with fp32 sums"):
        make_plan(wish(*words, "--optimizer", "gpu"), SHAPE, here(), world=2)
    plan = make_plan(wish(*words), SHAPE, here(), world=2)
    assert (plan.title, plan.placement.optimizer) == ("DeepSpeed ZeRO-1", "cpu")


def test_zero_3_gathers_once_what_stays_for_the_backward() -> None:
    """If all weights stay, they come once; if none stay, twice."""
    sizes = zero_sizes(SHAPE, DeepSpeedSection(), Placement("cpu", "cpu"), world=8, item_bytes=2)
    small = sum(weight.numel for weight in SHAPE.weights if weight.numel <= 100_000)
    moving = SHAPE.parameters - small + SHAPE.largest  # the tied head comes twice
    for live, prefetch, again in (
        (2 * SHAPE.parameters, 1, 0),
        (1, 0, moving),
        (10**8, 1, moving - 10**8),
        (10**8, 0, moving - 10**8 // 2),
    ):
        found = gathered(SHAPE, replace(sizes, max_live=live, prefetch_bucket=prefetch))
        assert found == {"forward": moving, "backward": again, "update": small}


def test_tensor_parallel_by_hand() -> None:
    """gpt2-medium has 4 matrices a block, 2 of them split by columns, in 24 blocks with bf16 states of 1024."""
    step = work("--micro-batch", "2", "--accumulate", "5", "--seq-len", "512", "model.activation_checkpointing=off")
    step = replace(step, tensor=8)
    forward, backward = tensor_collectives(step)
    each = 2 * 7 / 8 * 2 * (2 * 512) * 1024
    assert column_products(SHAPE) == 2
    assert (forward.phase, forward.bytes) == ("forward", pytest.approx(5 * 24 * 2 * each))
    assert (backward.phase, backward.bytes) == ("backward", pytest.approx(5 * 24 * 2 * each))
    _, again = tensor_collectives(replace(step, checkpointed=24))
    assert again.bytes == pytest.approx(5 * 24 * 3 * each)
    matrices = 24 * 12 * 1024**2
    rest = SHAPE.parameters - matrices
    assert weights_held(SHAPE, 8) == matrices // 8 + rest


# -- seconds ----------------------------------------------------------------------------------------------------------


def test_rates_timed_between_ranks_count_if_no_links_are_described() -> None:
    flow = next(zero_collectives(work(), stage=2, trained=10**9))
    across = replace(flow, kind="all-to-all")
    timed = {"all_gather": rate(2e9), "all_to_all": rate(5e9)}
    assert link_seconds(flow, here(**timed), here=8) == flow.bytes / 2e9
    assert link_seconds(across, here(**timed), here=8) == flow.bytes / 5e9
    assert link_seconds(across, here(between_gpus=rate(1e11), **timed), here=8) == flow.bytes / 1e11
    assert link_seconds(flow, here(), here=8) == flow.bytes / 1e10


# -- available modes ---------------------------------------------------------------------------------------------------


def test_models_that_cannot_be_divided_are_named() -> None:
    def told(*, tensor: int = 1, sequence: int = 1, **changed: object) -> str:
        return refusal(replace(SHAPE, **changed), tensor=tensor, sequence=sequence, seq_len=512)  # type: ignore[arg-type]

    assert told(tensor=8) == ""
    assert told(tensor=32) == "16 attention heads are not a multiple of 32"
    assert told(tensor=8, key_heads=4) == "4 key-value heads are not a multiple of 8"
    assert told(sequence=3) == "16 attention heads are not a multiple of 3"
    experts = Weight("h.0.experts", (4, 8, 8), unit="h.0", block=True)
    assert "experts" in told(tensor=2, weights=(*SHAPE.weights, experts))
    assert told(sequence=16, heads=0) == ""
    assert told(sequence=3, heads=0) == "rows of 512 tokens are not a multiple of 3"


def test_modes_are_those_that_an_engine_runs() -> None:
    """Every name and setting is of one mode, and the configuration accepts every setting."""
    for world in (2, 4, 6, 8, 16):
        found = list(modes(world))
        assert len({name for name, *_ in found}) == len({words for _, words, _ in found}) == len(found)
        for _, words, _ in found:
            wish(*words.split())


def test_rows_of_the_table_are_plans() -> None:
    """Each mode has its plan's JSON; refused modes are named with their reason."""
    fast = here(between_gpus=rate(1e11), network=rate(1e10))
    model = ("--model", "gpt2-medium", "--gpus", "8")
    found, text, best = compare_modes(wish(*model, "--micro-batch", "1", "--accumulate", "16"), fast, None)
    refused = ["tensor 2 x ZeRO-1 over 4", "tensor 4 x ZeRO-1 over 2", "tensor 8"]
    assert [one["mode"] for one in found["refused"]] == refused
    assert f"refused: {', '.join(refused)}: transformers has no" in text
    assert all(row["name"] in text for row in found["modes"])
    assert re.search(r"  between gpus +100 GB/s +measured: for a test", text)
    assert (found["tokens_per_step"], found["ranks"]) == (8 * 16 * 1024, 8)
    rows = {row["name"]: row for row in found["modes"]}
    assert len(rows) == 7
    seconds = [row["step"] for row in rows.values()]
    assert seconds == sorted(seconds)
    assert (found["fastest"], best.forecast.step) == (next(iter(rows)), seconds[0])
    stage_2 = rows["ZeRO-2 over 8"]
    assert stage_2["words"] == "--engine deepspeed deepspeed.zero_stage=2"
    micro = stage_2["chosen"]["micro_batch"]
    words = (*stage_2["words"].split(), "--micro-batch", str(micro), "--accumulate", str(16 // micro))
    plan = make_plan(wish(*model, *words), SHAPE, fast, world=8)
    for key, value in json.loads(json.dumps(plan.to_json())).items():
        assert json.loads(json.dumps(stage_2[key])) == value, key
    shared = rows["tiered, 8 ranks, sequence 2"]
    assert shared["words"] == "--engine tiered parallel.sequence=2"
    assert moved(shared, GPUS) > moved(rows["tiered, 8 ranks"], GPUS)  # neighbouring ranks share rows


def moved(row: dict[str, Any], place: str) -> int:
    """Return the bytes that a mode's step receives over a link."""
    return sum(one["read"] for one in row["links"] if one["place"] == place)


@pytest.mark.parametrize("words", ["parallel.sequence=4 --micro-batch 1", "parallel.sequence=8 --micro-batch 1"])
def test_one_row_for_all_ranks_is_divided_by_sequence_parallelism(words: str) -> None:
    """Modes that need a row for each rank are refused with the reason, also where the setting needs more ranks."""
    found, *_ = compare_modes(wish("--model", "gpt2-medium", "--gpus", "4", *words.split()), here(), None)
    assert [row["name"] for row in found["modes"]] == ["tiered, 4 ranks, sequence 4"]
    reasons = {row["mode"]: row["reason"] for row in found["refused"]}
    assert reasons["tiered, 4 ranks"] == "1 rows a step are not a multiple of 4 data-parallel ranks"
