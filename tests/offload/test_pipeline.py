"""Tests of ranks that compute one model together (parallel.pipeline): they have the bits of one rank."""

import random
import re
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from commands import TINY
from engine_bench import DROPOUT, batches, engine, model_directory, train
from forked_ranks import call_ranks, counts, in_ranks
from late_transfers import late_engine
from placements import ALL_ON_DRIVES, BEHIND, FULL, IN_LINE, ON, hold_up
from rank_cases import Case, Result, run_ranks, train_cases
from sample_chats import lines, turns
from sample_plans import GB, SHAPES, cluster, machine, rate, timed, wish
from test_gradients import model as small_units
from test_gradients import places, sums
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from offload_trainer import ranks
from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.engine.tiered import TieredEngine
from offload_trainer.machine.probe import probe_machine
from offload_trainer.machine.rate_cache import keep_rates
from offload_trainer.model.breadth_first import BreadthFirst
from offload_trainer.model.loader import checkpoint_blocks, resolve_model
from offload_trainer.model.loss import CausalLoss
from offload_trainer.offloading.device import CpuDevice
from offload_trainer.offloading.gradients.collector import GradientIntake
from offload_trainer.offloading.ranks.cuts import Cuts, Like
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.offloading.update.updater import SpeculativeStep
from offload_trainer.plan.memory import BlockInputs
from offload_trainer.plan.planner import any_placement_fits, make_plan, resolved
from offload_trainer.plan.step_time import pipeline_seconds
from offload_trainer.plan.tiered.footprint import fetched as of_plan
from offload_trainer.plan.tiered.layout import ALIGN, RAM
from offload_trainer.plan.tiered.spec import layouts_of
from offload_trainer.settings import load_config
from offload_trainer.telemetry.metrics import read_evaluations, read_metrics

pytestmark = pytest.mark.usefixtures("nothing_is_small")

HALF = ("--optimizer", "nvme", "--ram-fraction", "0.5")
CLIP, UNCLIPPED = "optim.max_grad_norm=0.3", "optim.max_grad_norm=0"
SMALL_STATE = ("optim.moment_dtype=8bit", "optim.master_dtype=bf16")
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {  # model, micro-batches of a step, words
    "weights in RAM": ("gpt2", 2, ("--params", "cpu", CLIP, BEHIND)),
    "weights in place": ("llama", 6, ("--params", "gpu", *HALF, IN_LINE)),
    "all on the drive": ("gpt2", 6, (*ALL_ON_DRIVES, "tiered.state_copies=2", BEHIND, ON)),
    "one micro-batch": ("gpt2", 1, ("--params", "cpu", "--dtype", "fp32", *HALF, CLIP)),
    "one micro-batch, untied": ("llama", 1, (*ALL_ON_DRIVES, BEHIND)),
    "many micro-batches": ("qwen3", 8, ("--params", "cpu", "--dtype", "fp32", CLIP, "tiered.weight_buffers=1")),
    "experts": ("mixtral", 6, ("--params", "cpu", *HALF, BEHIND)),
    "experts on the drive": ("mixtral", 2, (*ALL_ON_DRIVES, "--dtype", "fp32")),
    "overflows": ("gpt2", 2, ("--params", "cpu", "--dtype", "fp16", CLIP)),
    "inputs away": ("llama", 2, ("--params", "nvme", ON, "model.offload_activations=true", "tiered.weight_buffers=2")),
    "Muon": ("qwen3", 2, ("--params", "cpu", *HALF, "optim.name=muon", "--dtype", "fp32")),
    "small state": ("gpt2", 2, ("--params", "cpu", *HALF, *SMALL_STATE)),
    "early, overflows": ("gpt2", 2, ("--params", "cpu", *HALF, "--dtype", "fp16", CLIP, FULL)),
    "early, Muon": ("qwen3", 2, ("--params", "cpu", *HALF, "optim.name=muon", "--dtype", "fp32", UNCLIPPED, FULL)),
    "early, small state": ("llama", 2, (*ALL_ON_DRIVES, *SMALL_STATE, "model.offload_activations=true", ON, FULL)),
}
# Updates that begin during the backward: each model with each placement, and each of both with each number.
MICRO = (1, 2, 5, 8)
PLACES = (
    ("--params", "cpu", "--ram-fraction", "1"),
    (*ALL_ON_DRIVES, UNCLIPPED),
    ("--params", "nvme", "--ram-fraction", "1", "--dtype", "fp32", UNCLIPPED),
    ("--params", "cpu", *HALF, CLIP),
)
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": DROPOUT,  # tied
    "llama": {"tied": False, "attention_dropout": 0.1},
    "qwen3": {},
    "mixtral": {"tied": False, "num_hidden_layers": 4},
}
for (one, model), (other, place) in product(enumerate(MODELS), enumerate(PLACES)):
    CASES[f"early, {model}, {other}"] = (model, MICRO[(one + other) % 4], (*place, FULL))


def drawn(dice: random.Random) -> tuple[str, int, tuple[str, ...]]:
    model, dtype = dice.choice([*MODELS]), dice.choice(["bf16", "fp16", "fp32"])
    rule = dice.choice(["adamw", "adamw", "adamw", "muon"])
    keys = {
        "placement.params": ["gpu", "cpu", "nvme"],
        "placement.ram_fraction": ["0", "0.5", "1"],
        "placement.gradients": ["cpu", "nvme"],
        "tiered.overlap": ["off", "forward", "backward"],
        "tiered.weight_buffers": ["1", "2", "3"],
        "model.offload_activations": ["false", "true"],
        "optim.moment_dtype": ["fp32", "bf16", "8bit"] if rule == "adamw" else ["fp32"],
        "optim.master_dtype": ["fp32", "bf16"] if (rule, dtype) == ("adamw", "bf16") else ["fp32"],
        "optim.max_grad_norm": ["0", "0.3", "1", "3"],
    }
    words = [f"{key}={dice.choice(values)}" for key, values in keys.items()]
    return model, dice.randint(1, 6), (*words, ON, f"optim.name={rule}", "--dtype", dtype)


def cases(folder: Path, out: Path, *, count: int, names: tuple[str, ...], groups: int = 1) -> list[Case]:
    """Return cases whose micro-batches have different numbers of targets, for `groups` pipelines of `count` ranks."""
    pipeline = (f"parallel.pipeline={count}",) if count > 1 else ()
    found = []
    for name in names:
        kind, micro, words = CASES[name]
        model = model_directory(folder / kind, kind, **MODELS[kind])
        words = tuple(IN_LINE if word == FULL and count == 1 else word for word in words)
        given = (*words, *pipeline, "--accumulate", str(micro // groups))
        shared: dict[str, Any] = {"steps": 3, "micro": micro, "unequal": micro > 1, "drives": (folder / "drive",)}
        found.append(Case(model, given, out / name, evaluate=True, **shared))
    return found


@contextmanager
def early(model: Path, *words: str, build: Callable[..., Any] = engine, **more: Any) -> Iterator[Any]:
    """Yield an engine; with `FULL` all updates begin during the backward, where rank 0 waits for its early pages."""
    kept = SpeculativeStep.kept

    def counted(step: SpeculativeStep, *given: Any) -> set[int]:
        numbers = kept(step, *given)
        counts.update(early=len(step.written), kept=len(numbers))
        return numbers

    shadows = {"shadows": 0.6} if FULL in words else {}
    with pytest.MonkeyPatch.context() as patch, build(model, *words, **shadows, **more) as made:
        patch.setattr(TieredEngine, "_as_expected", True)
        patch.setattr(SpeculativeStep, "kept", counted)
        if FULL in words:
            hold_up(made)
        yield made


def results(
    folder: Path, out: Path, *, count: int, names: tuple[str, ...], groups: int = 1, nodes: int = 1
) -> list[list[Result]]:
    made = cases(folder, out, count=count, names=names, groups=groups)
    work = partial(train_cases, build=early)
    return run_ranks(made, count=count * groups, folder=out / "ranks", nodes=nodes, work=work)


FAST = ("weights in RAM", "one micro-batch, untied", "early, gpt2, 1")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[[tuple[str, ...]], list[list[Result]]]:
    """Return a function that trains cases on one rank once, and returns their results."""
    return cache(lambda names: results(folder, folder / f"alone-{len(names)}", count=1, names=names))


@pytest.mark.parametrize(
    ("count", "names"),
    [(2, FAST), *(pytest.param(count, tuple(CASES), marks=pytest.mark.slow) for count in (2, 3, 4))],
)
def test_ranks_have_the_bits_of_one(
    count: int, names: tuple[str, ...], alone: Callable[..., list[list[Result]]], folder: Path, tmp_path: Path
) -> None:
    """Losses, norms, validations, masters and saved states match; together ranks read as much as one."""
    found = results(folder, tmp_path, count=count, names=names)
    for name, of_ranks, of_one in zip(names, found, alone(names), strict=True):
        assert of_ranks == of_one * count, name
        if "overflows" in name:
            assert {norm is None for _, norm in of_one[0].steps[:3]} == {True, False}
        if FULL in CASES[name][2]:
            first = of_ranks[0].counts
            assert first["early"] > 0
            assert first["kept"] == first["early"] or UNCLIPPED not in CASES[name][2]
        if name == "all on the drive":
            assert sum(one.counts["read"] for one in of_ranks) <= 1.05 * of_one[0].counts["read"]


SEVERAL = tuple(name for name, (_, micro, words) in CASES.items() if micro % 2 == 0 and FULL not in words)


@pytest.mark.parametrize(
    ("nodes", "names"),
    [(1, FAST[:1]), *(pytest.param(nodes, SEVERAL, marks=pytest.mark.slow) for nodes in (1, 2))],
)
def test_two_pipelines_have_the_bits_of_one_rank(
    nodes: int, names: tuple[str, ...], alone: Callable[..., list[list[Result]]], folder: Path, tmp_path: Path
) -> None:
    """They are two data-parallel ranks, and read each unit once for both, unless they are on two nodes."""
    found = results(folder, tmp_path, count=2, groups=2, nodes=nodes, names=names)
    known = tuple(CASES) if names == SEVERAL else FAST
    expected = dict(zip(known, alone(known), strict=True))
    for name, of_ranks in zip(names, found, strict=True):
        assert of_ranks == expected[name] * 4, name
        if name == "all on the drive" and nodes == 1:
            assert sum(one.counts["read"] for one in of_ranks) <= 1.05 * expected[name][0].counts["read"]


@pytest.mark.slow
def test_random_cases_change_no_bit(seed: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (2, 3, 4):
        names = tuple(f"{seed} {count} {number}" for number in range(7))
        for name in names:
            monkeypatch.setitem(CASES, name, drawn(random.Random(name)))
        alone = results(folder, tmp_path / f"alone-{count}", count=1, names=names)
        found = results(folder, tmp_path / f"{count}", count=count, names=names)
        for name, of_one, of_ranks in zip(names, alone, found, strict=True):
            assert of_ranks == of_one * count, (name, CASES[name])


def train_late(cases: Sequence[Case]) -> list[Result]:
    """Train the cases as one of the ranks, whose copies and transfers complete late and out of order."""
    with pytest.MonkeyPatch.context() as patch:
        late = partial(early, build=partial(late_engine, patch))
        return [case.run(partial(late, device_sums=10**9 * (case.micro > 1))) for case in cases]


@pytest.mark.parametrize("names", [FAST, pytest.param(tuple(CASES), marks=pytest.mark.slow)])
def test_late_copies_change_nothing(
    names: tuple[str, ...], alone: Callable[..., list[list[Result]]], folder: Path, tmp_path: Path
) -> None:
    made = cases(folder, tmp_path, count=2, names=names)
    found = run_ranks(made, count=2, folder=tmp_path / "ranks", work=train_late)
    assert found == [of_one * 2 for of_one in alone(names)]


def reported() -> list[int]:
    """Return the units that this rank hears of, in a backward in which a weight of the second block has no gradient."""
    node, units, owners, found = Node(together=True), small_units(), {3: 0, 2: 1, 1: 0, 0: 0}, list[int]()
    with sums(units, RAM, device=CpuDevice(), node=node) as gradients:
        for missing in ("h.1.b", ""):
            gradients.report_to(lambda unit, made, error: found.append(-1 if error else unit), owners=owners)
            for unit, place in reversed(places(units)):
                if owners[unit.index] == node.rank and place.weight.name != missing:
                    gradients.add(place.weight.name, torch.ones(place.weight.shape), last=True)
            gradients.end_of_backward(last=True)
            gradients._reports.submit(lambda: None).wait()
            gradients.finish()
            gradients.clear()
    return found


@pytest.mark.slow
def test_all_ranks_hear_of_units_that_have_all_their_gradients(tmp_path: Path) -> None:
    """A unit that lacks one is passed over when its owner's backward ends."""
    assert in_ranks(reported, count=2, folder=tmp_path) == [[3, 1, 0, 3, 2, 1, 0]] * 2


def wait_for_a_rank_that_hangs() -> str:
    ranks.STALLED = ranks._LATER = 1
    node = Node(together=True)
    cuts = Cuts(Mock(node=node, device=CpuDevice()), [0, 1, 0], BlockInputs(1, 4 * ALIGN), stream=Mock())
    if node.rank:
        time.sleep(4)
        return ""
    with pytest.raises(TrainerError) as told:
        cuts.receive(Like(torch.Size([4]), torch.float32), micro_batch=0, block=1, forward=True)
    return str(told.value)


def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    told = in_ranks(wait_for_a_rank_that_hangs, count=2, folder=tmp_path)[0]
    assert told.startswith("after 1 s rank 1, or one that it waits for, has not computed block 1 or its gradient, and")


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Conversations in packed rows, with validation: 2 x 2, 3 and then 1 ranks resume from each other's checkpoints."""
    data = tmp_path / "chat.jsonl"
    data.write_text(lines({"messages": turns(f"What is {n}?", f"It is {n * n}." * 3)} for n in range(200)))
    words = [*TINY, "model.overrides.n_layer=3", "--data", str(data), "data.packing=on"]
    words += ["optim.schedule=constant", "optim.warmup_steps=0", "train.eval_every=1", "optim.max_grad_norm=0.5"]

    def run(output: Path, *, steps: int, count: int, groups: int = 1) -> tuple[object, ...]:
        given = ["--steps", steps, "--accumulate", 4 // groups, f"parallel.pipeline={count}"]
        for one in call_ranks(*words, *given, output=output, count=count * groups):
            assert one.code == 0, one.text[-3000:]
        lines = [*read_metrics(output / "metrics.jsonl"), *read_evaluations(output / "evaluations.jsonl")]
        told = [(getattr(one, "loss", None), getattr(one, "validation_loss", None)) for one in lines]
        state = (output / f"checkpoints/step-{steps:08}").glob("*.safetensors")
        return told, {path.name: path.read_bytes() for path in state}

    run(tmp_path / "ranks", steps=2, count=2, groups=2)
    run(tmp_path / "ranks", steps=4, count=3)
    assert run(tmp_path / "ranks", steps=6, count=1) == run(tmp_path / "alone", steps=6, count=1)
    run(tmp_path / "back", steps=3, count=1)
    assert run(tmp_path / "back", steps=6, count=2, groups=2) == run(tmp_path / "alone", steps=6, count=1)


SHARED = tuple(replace(one, uses=2) if one.block else one for one in SHAPES["gpt2-medium"].weights)


@pytest.mark.parametrize(
    ("words", "count", "changes", "message"),
    [
        ([], 1, {}, r"parallel.pipeline=2: 1 rank\(s\) on a node, and a multiple of 2 is needed \(--gpus\)"),
        ([], 3, {}, r"pipeline=2: 3 rank\(s\) on a node"),
        (["tiered.overlap=backward"], 4, {}, "pipeline=2 on 4 ranks: it is for one pipeline"),
        (["tiered.micro_batch_order=depth_first"], 2, {}, "which is breadth-first"),
        (["model.activation_checkpointing=off"], 2, {}, "pipeline=2: not all blocks are checkpointed"),
        (["--gpu-fraction", "0.5"], 2, {}, "the state must be in RAM or on drives"),
        ([], 2, {"no_chain": "X is no chain of blocks"}, "pipeline=2: X is no chain of blocks; leave it out"),
        ([], 2, {"whole_logits": True}, "head and body run together"),
        ([], 2, {"weights": SHARED}, "pipeline=2: blocks share weights; leave it out"),
        (["parallel.pipeline=25"], 25, {}, "each rank needs a block, and the model has 24"),
    ],
)
def test_what_cannot_be_shared_is_refused(words: list[str], count: int, changes: dict[str, Any], message: str) -> None:
    shape, here = replace(SHAPES["gpt2-medium"], **changes), machine(gpu=80 * GB, ram=64 * GB)
    with pytest.raises(UserError, match=message):
        make_plan(wish("parallel.pipeline=2", *words), shape, here, world=count)


def simulated(owners: Sequence[int], seconds: Callable[[int, int], float], *, micro: int, **how: Any) -> float:
    """Return when the last of the ranks ends, each of which works through its own list of (pass, micro-batch)."""
    order = [*owners, *owners[-2::-1]]
    lists: dict[int, list[tuple[int, int]]] = {rank: [] for rank in owners}
    for number, rank in enumerate(order):
        back = number < len(owners) - 1 and not how["in_order"]
        lists[rank] += [(number, one) for one in sorted(range(micro), reverse=back)]
    ended: dict[tuple[int, int], float] = {}
    clocks = dict.fromkeys(owners, 0.0)
    while any(lists.values()):
        for rank, todo in lists.items():
            while todo and (todo[0][0] == 0 or (todo[0][0] - 1, todo[0][1]) in ended):
                number, one = todo.pop(0)
                if number and order[number - 1] != rank:
                    arrives = ended[number - 1, one] + how["copies"][0]
                    clocks[rank] = max(clocks[rank], arrives) + how["copies"][1]
                elif number:
                    clocks[rank] = max(clocks[rank], ended[number - 1, one])
                clocks[rank] = ended[number, one] = clocks[rank] + seconds(number, one)
    return max(clocks.values())


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(
    ("owners", "micro"),
    [((0, 1, 0, 1, 0), 1), ((0, 1, 2, 0, 1, 2, 0), 4), ((0, 1, 2, 0, 0), 2), ((0, 1, 2, 3) * 9, 32)],
)
def test_planned_waits_are_those_of_a_simulation(owners: tuple[int, ...], micro: int, in_order: bool) -> None:
    """They equal a simulation's with constant seconds of units, and are within 5 % of one where these vary by 10 %."""
    blocks = len(owners) - 1
    how: dict[str, Any] = {"copies": (0.2, 0.3), "in_order": in_order}
    times = {"forward": 1.0, "backward": 3.1, "head": 2.6}

    def seconds(number: int, one: int, *, spread: float = 0.0) -> float:
        name = "head" if number == blocks else "forward" if number < blocks else "backward"
        return times[name] * (1 + spread * random.uniform(-1, 1))

    planned = pipeline_seconds(owners, micro_batches=micro, **times, **how)
    assert planned == pytest.approx(simulated(owners, seconds, micro=micro, **how))
    random.seed(1)
    assert planned == pytest.approx(simulated(owners, partial(seconds, spread=0.1), micro=micro, **how), rel=0.05)


FAST_COPIES, SLOW_COPIES = ((rate, rate, rate) for rate in (1e18, 5e9))


@pytest.mark.parametrize(
    ("copies", "world", "changes", "chosen", "why"),
    [
        (SLOW_COPIES, 4, {}, 4, r"parallel.pipeline=1: fits, but a step takes .* longer"),
        (FAST_COPIES, 4, {}, 1, r"parallel.pipeline=4: fits, but a step takes .* longer"),
        (SLOW_COPIES, 4, {"no_chain": "X is no chain of blocks"}, 1, "parallel.pipeline=4: X is no chain of blocks$"),
        (None, 4, {}, 1, "parallel.pipeline=4: not timed"),
        (SLOW_COPIES, 1, {}, 1, ""),
    ],
)
def test_auto_takes_a_pipeline_with_the_same_rows_if_it_is_faster(
    copies: tuple[float, float, float] | None, world: int, changes: dict[str, Any], chosen: int, why: str
) -> None:
    """Data-parallel ranks each copy all weights for each micro-batch; a pipeline's ranks wait for each other."""
    here = cluster(copies=copies, matmul=1e14) if copies else machine(gpu=80 * GB, ram=500 * GB)
    words, shape = ("--params", "cpu", "--micro-batch", "2"), replace(SHAPES["gpt2-xl"], **changes)
    config = wish(*words, "--accumulate", "4", "parallel.pipeline=auto")
    plan = make_plan(config, shape, here, world=world)
    assert (plan.work.pipeline, plan.work.accumulate) == (chosen, 4 * chosen)
    assert plan.work.tokens == world * 4 * 2 * 1024
    told = [f"{name}: {reason}" for name, reason in plan.rejected if name.startswith("parallel")]
    assert [bool(re.match(why, one)) for one in told] == [True] * bool(why)
    run = resolved(config, plan)
    assert (run.parallel.pipeline, run.train.gradient_accumulation_steps) == (chosen, 4 * chosen)
    again = make_plan(run, shape, here, world=world)
    assert (again.items, again.traffic, again.forecast) == (plan.items, plan.traffic, plan.forecast)
    assert any_placement_fits(config, shape, here, world=world, nodes=1)


def test_auto_makes_a_pipeline_of_each_nodes_ranks() -> None:
    here, words = cluster(copies=SLOW_COPIES, matmul=1e14, network=rate(1e12)), ("--params", "cpu", "--accumulate", "4")
    config = wish(*words, "--micro-batch", "2", "parallel.pipeline=auto")
    plan = make_plan(config, SHAPES["gpt2-xl"], here, world=8, nodes=2)
    assert (plan.work.pipeline, plan.work.data, plan.work.accumulate) == (4, 2, 16)
    assert any_placement_fits(config, SHAPES["gpt2-xl"], here, world=8, nodes=2)


@pytest.mark.slow
def test_a_run_records_what_auto_chose_and_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow drive two ranks are a pipeline, with the state that data-parallel ranks reach."""
    for name, value in (("CACHE", tmp_path / "cache"), ("OMP_NUM_THREADS", 1), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(f"OFFLOAD_TRAINER_{name}" if name == "CACHE" else name, str(value))
    drive, known = tmp_path / "drive", timed(drive=1e6, mixed=5e5)
    drive.mkdir()
    here = probe_machine(load_config(["--nvme", str(drive)]).placement)
    keep_rates(replace(here, rates=known.rates, drives=(replace(here.drives[0], rates=known.drives[0].rates),)))
    words = [*TINY, "model.overrides.n_layer=4", "--nvme", drive, "--params", "nvme", "--ram-fraction", "1"]
    words += ["--accumulate", "2", "optim.schedule=constant", "optim.warmup_steps=0", "tiered.weight_buffers=1"]

    def run(name: str, *more: object) -> dict[str, bytes]:
        found = call_ranks(*words, *more, output=tmp_path / name, count=2)
        assert [one.code for one in found] == [0, 0], found[0].text[-3000:]
        assert "train.gradient_accumulation_steps is" not in found[0].text
        state = (tmp_path / name / "checkpoints/step-00000004").glob("*.safetensors")
        return {path.name: path.read_bytes() for path in state}

    assert not run("auto", "parallel.pipeline=auto", "--steps", 2)
    made = load_config([str(tmp_path / "auto/config.yaml")])
    assert (made.parallel.pipeline, made.train.gradient_accumulation_steps) == (2, 4)
    goes_on = run("auto", "parallel.pipeline=auto", "--steps", 4)
    assert goes_on == run("apart", "--steps", 4) != {}
    assert load_config([str(tmp_path / "apart/config.yaml")]).parallel.pipeline == 1


def test_a_norm_that_is_registered_before_the_blocks_belongs_to_the_heads_rank(folder: Path) -> None:
    model = model_directory(folder / "opt-chain", "opt", tied=False, layerdrop=0.0)
    config = wish("--model", str(model), "--scratch", *ALL_ON_DRIVES, "parallel.pipeline=2", "--accumulate", "2")
    plan = make_plan(config, resolve_model(config.model, seed=0).shape, machine(), world=2)
    units = layouts_of(plan.work).units
    homes = layouts_of(plan.work).homes(plan.placement, plan.sizes)
    used = [{units[unit].name for unit, _ in of_plan(plan.work, homes, plan.sizes, rank=n)} for n in range(2)]
    assert {"model.decoder.final_layer_norm", "lm_head"} <= used[1]
    assert not used[0] & used[1]
    assert used[0] | used[1] == {unit.name for unit in units}


class Tracked(TorchDispatchMode):
    """Count the bytes of the tensors that operations have made, on one thread; the count is of all threads."""

    def __init__(self, held: Counter[str]) -> None:
        super().__init__()
        self.held = held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        before = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        storages = [one.untyped_storage() for one in tree_leaves(made) if isinstance(one, torch.Tensor)]
        for address, storage in {one._cdata: one for one in storages}.items():
            if address not in before:
                self.held["now"] += storage.nbytes()
                weakref.finalize(storage, self.held.subtract, {"now": storage.nbytes()})
        self.held["most"] = max(self.held["most"], self.held["now"])
        return made


def peak_of_rank(model: Path, words: Sequence[str], *, micro: int) -> tuple[int, int]:
    """Return the most bytes of tensors in a forward and backward of this rank, and those that the plan has for it."""
    held, run, thread = Counter[str](), TieredEngine._accumulate_breadth_first, TieredEngine._in_thread

    def counted(*args: Any, **words: Any) -> Any:
        with Tracked(held):
            return run(*args, **words)

    @contextmanager
    def in_thread(engine: TieredEngine) -> Iterator[None]:
        with thread(engine), Tracked(held):
            yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TieredEngine, "_accumulate_breadth_first", counted)
        patch.setattr(TieredEngine, "_in_thread", in_thread)
        with engine(model, *words) as made:
            train(made, batches(2 * micro, length=256), accumulate=micro)
            (planned,) = (item.of_ranks for item in made.plan.items if item.of_ranks)
            return held["most"], planned[made.offloaded.node.rank % len(planned)]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "chain"), [(2, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("qwen3", True)])
def test_each_peak_is_the_plans(kind: str, tied: bool, count: int, chain: int, folder: Path, tmp_path: Path) -> None:
    """An untied head is on the rank after the last block's, a tied one on the first."""
    wide = {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 512}
    model = model_directory(folder / f"{kind}-wide", kind, tied=tied, **wide)
    words = ["--engine", "tiered", "--dtype", "fp32", "--params", "gpu", "--ram-fraction", "1", "--seq-len", "256"]
    words += ["--micro-batch", "2", "--accumulate", "4", f"parallel.pipeline={chain}", "model.loss_chunk=128"]
    found = in_ranks(partial(peak_of_rank, model, words, micro=4), count=count, folder=tmp_path)
    assert len({planned for _, planned in found}) > 1
    for rank, (most, planned) in enumerate(found):
        assert planned == pytest.approx(most, rel=0.05), (rank, found)


def test_a_rank_computes_a_micro_batch_before_it_waits_for_the_next(folder: Path) -> None:
    """Otherwise no two ranks would compute at a time."""
    path, found = model_directory(folder / "order", "llama", tied=False, num_hidden_layers=4), list[str]()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).train()
    checkpoint_blocks(model, reentrant=False)

    def receive(like: Like, *, micro_batch: int, block: int, forward: bool) -> torch.Tensor:
        found.append(f"{micro_batch} comes {'from' if forward else 'back to'} {block}")
        return torch.ones(like.shape, dtype=like.dtype)

    def send(values: torch.Tensor, *, micro_batch: int, block: int, forward: bool) -> None:
        found.append(f"{micro_batch} goes {'from' if forward else 'back to'} {block}")

    second = Mock(
        blocks=4, here=lambda block: block % 2 == 1, before=lambda _: nullcontext(), receive=receive, send=send
    )
    steps = BreadthFirst(CausalLoss(model, chunk=8), cuts=second, in_order=True)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    with steps.step([(ids, ids, number, 8, None) for number in range(2)]):
        steps.forward()
        forth = [("comes from 0", "goes from 1"), ("comes from 2", "goes from 3")]
        assert found == [f"{number} {one}" for ways in forth for number in range(2) for one in ways]
        found.clear()
        steps.backward(lambda number: None, [1.0, 1.0])
    back = [("comes back to 3", "goes back to 2"), ("comes back to 1", "goes back to 0")]
    assert found == [f"{number} {one}" for ways in back for number in range(2) for one in ways]


def test_a_weight_that_two_ranks_use_ends_the_run_before_its_update() -> None:
    node = Mock(all_reduce=lambda found: found.copy_(torch.tensor([[3.0, 5.0], [1, 2]])))
    with pytest.raises(TrainerError, match="several ranks have gradients of b: leave"):
        GradientIntake([]).norms_of_all({"b": torch.tensor(2.0)}, order=("a", "b"), node=node)


def test_blocks_that_return_another_dtype_are_refused() -> None:
    """A rank that does not compute a block knows its output's dtype from its input's. Mamba's residuals are fp32."""
    config = AutoConfig.for_model("mamba", hidden_size=16, num_hidden_layers=2, vocab_size=64)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    checkpoint_blocks(model, reentrant=False)
    first = Mock(blocks=2, here=lambda block: block != 1, before=lambda _: nullcontext())
    steps, ids = BreadthFirst(CausalLoss(model, chunk=8), cuts=first), torch.zeros(1, 8, dtype=torch.int64)
    with steps.step([(ids, ids, 0, 8, None)]), pytest.raises(UserError, match="or change their dtype"):
        steps.forward()
