"""Tests of ways to divide a step among ranks: bytes against simulation and by hand, memory, seconds, refusals."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from plans import GB, SHAPES, machine, wish

from offload_trainer.cli import main
from offload_trainer.config import DeepSpeedSection
from offload_trainer.errors import UserError
from offload_trainer.plan.deepspeed.zero_buffers import zero_sizes
from offload_trainer.plan.deepspeed.zero_gathers import gathers
from offload_trainer.plan.machine import Links, MachineProfile, Rate, Rates
from offload_trainer.plan.parallel.cost import priced, stock_rates
from offload_trainer.plan.parallel.modes import (
    Collective,
    Mode,
    columns,
    flows,
    link_seconds,
    modes,
    refusal,
    weights_held,
)
from offload_trainer.plan.parallel.table import compare
from offload_trainer.plan.parallel.tensor_degree import tensor_of
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import make_plan, resolve_and_plan, workload
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.plan.tiers import Placement
from offload_trainer.plan.workload import Workload

SHAPE = SHAPES["gpt2-medium"]  # 24 blocks of 1024, 16 heads


def rate(value: float) -> Rate:
    return Rate(value, "assumed", "for a test")


def here(*, gpu: int = 80 * GB, **links: Rate) -> MachineProfile:
    ways = {way: rate(1e10) for way in ("to_device", "from_device", "both_ways")}
    rates = Rates(matmul={"bf16": rate(1e14)}, memory=rate(1e11), update={"native": rate(1e9)}, **ways)
    return replace(machine(gpu=gpu, ram=500 * GB), rates=rates, links=Links(**links))


def work(*words: str, world: int = 8, nodes: int = 1) -> Workload:
    return workload(wish(*words), SHAPE, world=world, nodes=nodes, saves=False)


def moved(mode: Mode, step: Workload) -> dict[tuple[str, str], Collective]:
    held = weights_held(mode, SHAPE)
    return {(one.what, one.phase): one for one in flows(mode, step, held=held, trained=held)}


# -- bytes ------------------------------------------------------------------------------------------------------------


def simulated(group: int, apart: int, *, here: int, world: int, kind: str) -> tuple[float, float]:
    """Return the bytes a rank sends, and those a node's ranks send to other nodes, for one byte of data on each rank.

    The simulation goes message by message: n - 1 ring steps with one part each to the next rank, each pair of an
    all-to-all, or everything to the next stage.
    """
    sent: Counter[int] = Counter()
    out: Counter[int] = Counter()
    for first in (rank for rank in range(world) if rank // apart % group == 0):
        ranks = [first + place * apart for place in range(group)]
        pairs = {
            "ring": [(a, b, 1 / group) for a, b in zip(ranks, ranks[1:] + ranks[:1], strict=True)] * (group - 1),
            "all-to-all": [(a, b, 1 / group) for a in ranks for b in ranks if a != b],
            "send": [(a, b, 1.0) for a, b in pairwise(ranks)],
        }[kind]
        for a, b, size in pairs:
            sent[a] += size  # type: ignore[assignment]
            if a // here != b // here:
                out[a // here] += size  # type: ignore[assignment]
    return max(sent.values()), max(out.values(), default=0.0)


@pytest.mark.parametrize("kind", ["ring", "all-to-all", "send"])
@pytest.mark.parametrize("here", [1, 2, 4, 8, 16])
def test_what_goes_through_a_nodes_network_is_what_messages_carry(kind: str, here: int) -> None:
    world = 16
    for group in (2, 4, 8, 16):
        for apart in (1, 2, 4, 8):
            if group * apart > world:
                continue
            gpu, network = simulated(group, apart, here=here, world=world, kind=kind)
            flow = Collective("", "forward", gpu, 1, group, apart, kind)  # type: ignore[arg-type]
            assert flow.network(here) == pytest.approx(network), (group, apart)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("nodes", [1, 2])
def test_zero_by_itself_moves_what_the_plan_of_stock_deepspeed_says(stage: int, nodes: int) -> None:
    """tests/engine/test_deepspeed_engine.py compares that plan with counted runs."""
    words = ("--accumulate", "3", "--engine", "deepspeed", f"deepspeed.zero_stage={stage}", "--save-every", "0")
    step, fast = work(*words, nodes=nodes), here(between_gpus=rate(1e11), network=rate(1e10))
    one = next(mode for mode in modes(8) if mode == Mode(data=8, stage=stage))
    gathered = stock_rates(step, fast).gathered
    found = Counter[tuple[str, str]]()
    for flow in flows(one, step, held=SHAPE.parameters, trained=SHAPE.trainable, gathered=gathered):
        found["gpus", flow.phase] += round(flow.bytes)
        if nodes > 1:
            found["network", flow.phase] += round(flow.network(step.here))
    plan = make_plan(wish(*words), SHAPE, fast, world=8, nodes=nodes)
    planned = {(link.place, link.phase): link.read for link in plan.links}
    assert set(found) == set(planned)
    for place, size in planned.items():
        assert found[place] == pytest.approx(size, abs=3)


def test_a_stage_that_cannot_be_is_refused() -> None:
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
    """If all weights stay, they come once; if none stay, twice. A checkpointed block's recomputation gathers nothing
    more.
    """
    sizes = zero_sizes(SHAPE, DeepSpeedSection(), Placement("cpu", "cpu"), world=8, item_bytes=2)
    small = sum(weight.numel for weight in SHAPE.weights if weight.numel <= 100_000)
    moving = SHAPE.parameters - small
    everything = gathers(SHAPE, replace(sizes, max_live=2 * SHAPE.parameters), checkpointing=False)
    assert (everything.forward, everything.backward, everything.update) == (moving, 0, small)
    nothing = gathers(SHAPE, replace(sizes, max_live=1, prefetch_bucket=0), checkpointing=False)
    assert nothing.forward == moving + SHAPE.largest  # the tied head is gathered again, and its backward then finds it
    assert nothing.backward == moving
    usual = gathers(SHAPE, sizes, checkpointing=True)
    assert 0.9 * 2 * moving < usual.forward + usual.backward < 2 * moving + SHAPE.largest


def test_zero_1_scatters_once_a_step() -> None:
    found = moved(Mode(data=4, tensor=2), work("--accumulate", "3"))
    held = weights_held(Mode(data=4, tensor=2), SHAPE)
    assert found["scattered gradients", "backward"].bytes == pytest.approx(3 / 4 * 2 * held)
    assert found["new weights", "update"].bytes == pytest.approx(3 / 4 * 2 * held)


def test_tensor_parallel_by_hand() -> None:
    """gpt2-medium has 4 matrices a block, 2 of them split by columns, in 24 blocks with bf16 states of 1024."""
    step = work("--micro-batch", "2", "--accumulate", "5", "--seq-len", "512", "model.activation_checkpointing=off")
    found = moved(Mode(tensor=8), step)
    each = 2 * 7 / 8 * 2 * (2 * 512) * 1024
    assert columns(SHAPE) == 2
    assert found["all-reduces", "forward"].bytes == pytest.approx(5 * 24 * 2 * each)
    assert found["all-reduces", "backward"].bytes == pytest.approx(5 * 24 * 2 * each)
    again = replace(step, checkpointing=True)
    assert moved(Mode(tensor=8), again)["all-reduces", "backward"].bytes == pytest.approx(5 * 24 * 3 * each)
    matrices = 24 * 12 * 1024**2
    rest = SHAPE.parameters - matrices
    assert weights_held(Mode(tensor=8), SHAPE) == matrices // 8 + rest


def test_sequence_and_pipeline_by_hand() -> None:
    step = work("--micro-batch", "2", "--accumulate", "4", "--seq-len", "512", "model.activation_checkpointing=off")
    found = moved(Mode(sequence=4, data=2), step)
    each = 3 / 4 * 2 * (2 * 512 / 4) * 1024  # bytes of queries, and equally of keys, values and results: 16 heads of 64
    assert found["all-to-alls", "forward"].bytes == pytest.approx(4 * 24 * 4 * each)
    fewer = replace(step, shape=replace(SHAPE, heads=16, key_heads=4))
    held = weights_held(Mode(sequence=4), SHAPE)
    shared = next(one for one in flows(Mode(sequence=4), fewer, held=held, trained=held) if one.kind == "all-to-all")
    assert shared.bytes == pytest.approx(4 * 24 * (2 + 2 / 4) * each)
    sends = moved(Mode(pipeline=4, data=2), step)["sends", "backward"]
    assert sends.bytes == 4 * 2 * (2 * 512) * 1024
    ends = weights_held(Mode(pipeline=4, data=2), SHAPE)
    embeddings = (SHAPE.vocabulary + SHAPE.context) * 1024
    assert ends == 6 * (SHAPE.parameters - embeddings - 2 * 1024) // 24 + embeddings


# -- memory and seconds -----------------------------------------------------------------------------------------------


def test_memory_of_weights_gradients_and_state() -> None:
    step = work("--accumulate", "1", "--micro-batch", "1")
    fast = here(between_gpus=rate(1e11), network=rate(1e10))
    stock, p = stock_rates(step, fast), SHAPE.parameters
    by_mode = {mode: priced(mode, step, fast, stock).memory for mode in (Mode(data=8), Mode(data=8, stage=2))}
    one, two = by_mode.values()
    assert one["weights"] == two["weights"] == 2 * p
    assert one["gradients"] == pytest.approx(2 * p)
    assert two["gradients"] == pytest.approx(2 * p / 8, rel=1e-6)
    assert one["masters and moments"] == two["masters and moments"] == pytest.approx(12 * p / 8, rel=1e-6)
    three = priced(Mode(data=8, stage=3), step, fast, stock).memory
    assert three["weights"] == pytest.approx(2 * p / 8 + 4 * SHAPE.largest, rel=1e-6)
    tensor = priced(Mode(tensor=8), step, fast, stock)
    assert tensor.memory["masters and moments"] == 12 * weights_held(Mode(tensor=8), SHAPE)
    assert tensor.memory["activations"] < tensor.micro_batch * one["activations"]


def test_state_goes_to_ram_where_the_gpu_is_too_small_and_a_mode_is_refused_where_that_is_not_enough() -> None:
    step = work("--accumulate", "1", "--micro-batch", "1")
    link = {"between_gpus": rate(1e11), "network": rate(1e10)}
    whole = priced(Mode(data=8), step, here(**link), stock_rates(step, here(**link)))
    assert whole.home == "gpu"
    small = here(gpu=whole.gpu - whole.memory["reserve"], **link)
    found = priced(Mode(data=8), step, small, stock_rates(step, small))
    assert (found.home, found.lacks) == ("cpu", "")
    assert found.ram > 16 * SHAPE.parameters
    assert found.offload[0] == found.offload[1] == pytest.approx(2 * SHAPE.parameters / 8, rel=1e-6)
    less = here(gpu=1 * GB, **link)
    assert "on each GPU, which has 1 GB" in priced(Mode(data=8), step, less, stock_rates(step, less)).lacks


def test_what_bench_timed_between_ranks_counts_where_nothing_is_said_of_links() -> None:
    flow = next(one for one in flows(Mode(data=8, stage=3), work(), held=10**9, trained=10**9))
    across = replace(flow, kind="all-to-all")
    timed = {"all_gather": rate(2e9), "all_to_all": rate(5e9)}
    assert link_seconds(flow, here(**timed), here=8) == flow.bytes / 2e9
    assert link_seconds(across, here(**timed), here=8) == flow.bytes / 5e9
    assert link_seconds(across, here(between_gpus=rate(1e11), **timed), here=8) == flow.bytes / 1e11
    assert link_seconds(flow, here(), here=8) == flow.bytes / 1e10


def test_seconds_of_products_links_and_bubbles() -> None:
    """All modes compute equally long with free links; a pipeline has bubbles, and a slow network adds time."""
    words = ("--accumulate", "8", "--micro-batch", "1", "model.activation_checkpointing=off")
    step = work(*words, nodes=2)
    free = here(between_gpus=rate(1e20), network=rate(1e20))
    stock = stock_rates(step, free)
    assert stock.forward is not None
    whole = priced(Mode(data=8, stage=3), step, free, stock)
    assert whole.seconds is not None
    assert whole.seconds["forward"] == pytest.approx(stock.forward, rel=1e-3)
    piped = priced(Mode(pipeline=4, data=2), step, free, stock)
    assert piped.seconds is not None
    turns = piped.accumulate
    assert piped.seconds["forward"] == pytest.approx(stock.forward * (turns + 3) / turns, rel=1e-3)
    split = priced(Mode(tensor=4, data=2), step, free, stock)
    assert split.seconds is not None
    assert split.seconds["forward"] == pytest.approx(stock.forward * (1 + 3 * stock.head), rel=1e-3)
    slow = here(between_gpus=rate(1e20), network=rate(1e8))
    across = priced(Mode(tensor=8), step, slow, stock)
    assert across.step is not None
    assert across.step > across.network / 1e8 * 0.999
    unknown = here(between_gpus=rate(1e20))
    assert priced(Mode(tensor=4, data=2), step, unknown, stock).step is None
    assert priced(Mode(tensor=4, data=2), work(*words), unknown, stock).step is not None


# -- available modes ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_divided_is_named() -> None:
    def told(mode: Mode, rows: int = 16, **changed: object) -> str:
        return refusal(mode, replace(SHAPE, **changed), rows=rows, seq_len=512)  # type: ignore[arg-type]

    assert told(Mode(tensor=8)) == ""
    assert told(Mode(tensor=32)) == "16 attention heads are not a multiple of 32"
    assert told(Mode(tensor=8), key_heads=4) == "4 key-value heads are not a multiple of 8"
    assert told(Mode(sequence=3)) == "16 attention heads are not a multiple of 3"
    assert "not a multiple of 3 data" in told(Mode(data=3))
    assert told(Mode(pipeline=32)) == "24 blocks are too few for 32 pipeline stages"
    experts = Weight("h.0.experts", (4, 8, 8), unit="h.0", block=True)
    assert "experts" in told(Mode(tensor=2), weights=(*SHAPE.weights, experts))
    assert told(Mode(sequence=16), heads=0) == ""


def test_every_mode_uses_every_rank_once() -> None:
    for world in (2, 4, 6, 8, 16):
        found = list(modes(world))
        assert len(found) == len(set(found))
        assert {one.data * one.tensor * one.sequence * one.pipeline for one in found} == {world}
        assert len({one.name for one in found}) == len(found)


# -- the number of tensor ranks ----------------------------------------------------------------------------------------

RULED = replace(
    SHAPE,
    weights=tuple(
        replace(one, split=("row" if "c_proj" in one.name else "column") if one.block and len(one.shape) > 1 else "")
        for one in SHAPE.weights
    ),
)


def chosen(*words: str, shape: ModelShape = RULED, world: int = 4, nodes: int = 1, **links: Rate) -> tuple[int, Plan]:
    told = ("--engine", "deepspeed", "parallel.tensor=auto", "model.activation_checkpointing=off", *words)
    place = here(**links) if links else machine(gpu=80 * GB, ram=500 * GB)
    config, plan = resolve_and_plan(wish(*told), shape, place, world=world, nodes=nodes)
    count = tensor_of(config.parallel)
    assert config.parallel.tensor == count
    assert config.train.micro_batch_size == plan.micro_batch
    assert (
        plan.tokens_per_step
        == config.train.gradient_accumulation_steps * plan.micro_batch * plan.seq_len * world // count
    )
    return count, plan


def test_tensor_ranks_are_chosen_by_the_links() -> None:
    """Tensor ranks pay off for few tokens on a fast link, where gradients outweigh activations, but not across a
    network.
    """
    few, fast = ("--micro-batch", "1", "--seq-len", "128"), {"between_gpus": rate(1e11)}
    count, plan = chosen(*few, **fast)
    assert count > 1
    assert plan.tokens_per_step == 4 * 128
    told = plan.notes[-1]
    assert told.startswith(f"parallel.tensor=auto: {count}, 1: ")
    assert all(f", {number}: " in told for number in (1, 2, 4))
    assert chosen("--micro-batch", "16", "--seq-len", "1024", "--accumulate", "4", **fast)[0] == 1
    assert chosen(*few, world=2, nodes=2, network=rate(1e11), **fast)[0] == 1
    alone = resolve_and_plan(wish("--engine", "deepspeed", *few), RULED, here(**fast), world=4)[1]
    assert plan.forecast.step is not None
    assert alone.forecast.step is not None
    assert plan.forecast.step < alone.forecast.step


def test_one_tensor_rank_where_nothing_is_known_or_nothing_can_be_divided() -> None:
    count, plan = chosen("--micro-batch", "1")
    assert (count, "1: not timed" in plan.notes[-1]) == (1, True)
    count, plan = chosen("--micro-batch", "1", shape=SHAPE, between_gpus=rate(1e11))
    assert count == 1
    assert "2: parallel.tensor=2: transformers has no tensor-parallel plan for this architecture" in plan.notes[-1]
    with pytest.raises(UserError, match=r"parallel.tensor=auto needs DeepSpeed: add --engine deepspeed"):
        wish("parallel.tensor=auto")


# -- the command ------------------------------------------------------------------------------------------------------

WORDS = ["plan", "--parallel", "--model", "gpt2-medium", "--micro-batch", "1", "--accumulate", "16"]


def test_the_command_compares_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Modes are sorted by seconds and list their bytes; the JSON has them too, and the tiered engine is included."""
    assert main([*WORDS, "--machine", "4xrtx4090-10gbe", "--nodes", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["nodes"], found["tokens_per_step"]) == (8, 2, 8 * 16 * 1024)
    fit = [row for row in found["modes"] if not row["lacks"]]
    assert [row["seconds"] for row in fit] == sorted(row["seconds"] for row in fit)
    assert found["fastest"] == fit[0]["name"]
    assert found["wins"][0]["tokens_per_step"] == 8 * 1024
    by_name = {row["name"]: row for row in found["modes"]}
    whole, shared = by_name["tiered, 8 ranks"], by_name["tiered, 8 ranks, sequence 2"]
    assert (whole["words"], shared["words"]) == ("--engine tiered", "--engine tiered parallel.sequence=2")
    assert (whole["accumulate"] * whole["micro_batch"], shared["accumulate"] * shared["micro_batch"]) == (16, 32)
    assert shared["collectives"] == 24 * 4 * 3 * shared["accumulate"]  # each checkpointed block has as many
    assert shared["network_bytes"] == whole["network_bytes"]  # neighbouring ranks share rows
    assert shared["pcie_bytes"] > whole["pcie_bytes"]
    assert ["sequence" in row["name"] for row in found["modes"]].count(True) == 3
    assert by_name["ZeRO-3 over 8"]["network_bytes"] > by_name["pipeline 2 x ZeRO-1 over 4"]["network_bytes"] > 0
    assert by_name["ZeRO-3 over 8"]["link_bytes"] == 0 < by_name["ZeRO-3 over 8"]["pcie_bytes"]
    assert main([*WORDS, "--machine", "8xh100-80gb"]) == 0
    told = capsys.readouterr().out
    assert "tensor 2 x ZeRO-1 over 4" in told
    assert "fastest from 8.19 k tokens a step: " in told
    assert "assumed: between GPUs: 360 GB/s each way" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--machine", "8xh100-80gb", "--gpus", "1"], "there is only one rank: add --gpus N"),
        (["--machine", "8xh100-80gb", "--nodes", "1,2"], "--nodes 1,2: with --parallel, one whole number"),
        (["--machine", "8xh100-80gb", "--nodes", "0"], "--nodes 0"),
    ],
)
def test_a_mistake_is_told(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, *words]) == 2
    assert told in capsys.readouterr().err


def test_a_mode_that_runs_says_what_with() -> None:
    """Tensor parallelism is offered only for weights that have a split rule."""
    step, fast = work("--micro-batch", "1"), here(between_gpus=rate(1e11))
    ruled = replace(SHAPE, weights=tuple(replace(one, split="column" if one.block else "") for one in SHAPE.weights))
    for shape, expected in ((SHAPE, ""), (ruled, "--engine deepspeed parallel.tensor=2")):
        found = compare(replace(step, shape=shape), fast, ours=lambda *_: "")
        words = {row.name: row.words for row in found.rows}
        assert words["tensor 2 x ZeRO-1 over 4"] == expected
        for stage in (1, 2, 3):
            assert words[f"ZeRO-{stage} over 8"] == f"--engine deepspeed deepspeed.zero_stage={stage}"
        assert words["pipeline 8"] == ""
