"""Tests of ranks that compute one model together (parallel.pipeline): they have the bits of one rank."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from commands import TINY
from engine_bench import DROPOUT, model_directory
from forked_ranks import Case, Result, call_ranks, in_ranks, run_ranks
from late_transfers import late_engine
from placements import ALL_ON_DRIVES, BEHIND, IN_LINE, ON
from sample_plans import GB, SHAPES, machine, wish
from transformers import AutoConfig, AutoModelForCausalLM

from offload_trainer import ranks
from offload_trainer.errors import TrainerError, UserError
from offload_trainer.machine.probe import probe_machine
from offload_trainer.model.breadth_first import BreadthFirst
from offload_trainer.model.init_weights import meta_model
from offload_trainer.model.loader import checkpoint_blocks, resolve_model
from offload_trainer.model.loss import CausalLoss
from offload_trainer.model.probes.blocks import why_no_chain
from offload_trainer.offloading.device import CpuDevice
from offload_trainer.offloading.gradients.collector import GradientIntake
from offload_trainer.offloading.ranks.cuts import Cuts, Like
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.plan.memory import BlockInputs
from offload_trainer.plan.planner import make_plan
from offload_trainer.plan.step_time import longer_in_turn
from offload_trainer.plan.tiered.layout import ALIGN
from offload_trainer.settings import load_config
from offload_trainer.telemetry.metrics import read_evaluations, read_metrics

pytestmark = pytest.mark.usefixtures("nothing_is_small")

HALF = ("--optimizer", "nvme", "--ram-fraction", "0.5")
CLIP = "optim.max_grad_norm=0.3"
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {n}?"},
            {"role": "assistant", "content": f"It is {n * n}." * 3},
        ]
    }
    for n in range(200)
]
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
    "inputs away": ("llama", 2, ("--params", "nvme", ON, "model.offload_activations=nvme", "tiered.weight_buffers=2")),
    "Muon": ("qwen3", 2, ("--params", "cpu", *HALF, "optim.name=muon", "--dtype", "fp32")),
    "small state": ("gpt2", 2, ("--params", "cpu", *HALF, "optim.moment_dtype=8bit", "optim.master_dtype=bf16")),
    "sums in 16 bits": ("llama", 6, ("--params", "cpu", "optim.accumulate_dtype=model", "model.mlp_chunk=8")),
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": DROPOUT,  # tied
    "llama": {"tied": False, "attention_dropout": 0.1},
    "qwen3": {},
    "mixtral": {"tied": False, "num_hidden_layers": 4},
}


def cases(folder: Path, out: Path, *, count: int, names: tuple[str, ...], groups: int = 1) -> list[Case]:
    """Return cases whose micro-batches have different numbers of targets, for `groups` pipelines of `count` ranks.

    One rank computes in its usual order.
    """
    pipeline = (f"parallel.pipeline={count}",) if count > 1 else ()
    found = []
    for name in names:
        kind, micro, words = CASES[name]
        model = model_directory(folder / kind, kind, **MODELS[kind])
        given = (*words, *pipeline, "--accumulate", str(micro // groups))
        shared: dict[str, Any] = {"steps": 3, "micro": micro, "unequal": micro > 1, "drives": (folder / "drive",)}
        found.append(Case(model, given, out / name, **shared))
    return found


def results(
    folder: Path, out: Path, *, count: int, names: tuple[str, ...], groups: int = 1, nodes: int = 1
) -> list[list[Result]]:
    made = cases(folder, out, count=count, names=names, groups=groups)
    return run_ranks(made, count=count * groups, folder=out / "ranks", nodes=nodes)


FAST = ("weights in RAM", "one micro-batch, untied")


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
    """Losses, norms, masters and saved states match; all ranks together read as much from drives as one rank."""
    found = results(folder, tmp_path, count=count, names=names)
    for name, of_ranks, of_one in zip(names, found, alone(names), strict=True):
        assert of_ranks == of_one * count, name
        if name == "overflows":
            assert {norm is None for _, norm in of_one[0].steps} == {True, False}
        if name == "all on the drive":
            assert sum(one.counts["read"] for one in of_ranks) <= 1.05 * of_one[0].counts["read"]


SEVERAL = tuple(name for name, (_, micro, _) in CASES.items() if micro % 2 == 0)


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


def train_late(cases: Sequence[Case]) -> list[Result]:
    """Train the cases as one of the ranks, whose copies and transfers complete late and out of order."""
    with pytest.MonkeyPatch.context() as patch:
        return [case.run(partial(late_engine, patch)) for case in cases]


def test_late_copies_change_nothing(alone: Callable[..., list[list[Result]]], folder: Path, tmp_path: Path) -> None:
    made = cases(folder, tmp_path, count=2, names=FAST)
    found = run_ranks(made, count=2, folder=tmp_path / "ranks", work=train_late)
    assert found == [of_one * 2 for of_one in alone(FAST)]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "groups"), [(3, 1), (2, 2)])
def test_bytes_on_drives_are_the_plans(count: int, groups: int, folder: Path, tmp_path: Path) -> None:
    """What all ranks read and write in a fourth step is what the plan of a step says."""
    words = (*ALL_ON_DRIVES, IN_LINE, "--accumulate", "4", "--seq-len", "24", "--micro-batch", "2")
    model, words = model_directory(folder / "llama", "llama", **MODELS["llama"]), (*words, f"parallel.pipeline={count}")
    case = Case(model, words, tmp_path / "3", steps=3, micro=4 * groups, drives=(folder / "drive",))
    longer = replace(case, steps=4, out=tmp_path / "4")
    both = run_ranks([case, longer], count=count * groups, folder=tmp_path / "ranks")
    fewer, more = (sum((Counter(one.counts) for one in of_case), Counter[str]()) for of_case in both)
    always = ("--model", str(case.model), "--scratch", "--nvme", str(folder / "drive"), "tiered.page_size=8192")
    config = load_config([*always, *case.words])
    shape = resolve_model(config.model, seed=0).shape
    plan = make_plan(config, shape, probe_machine(config.placement), world=count * groups)
    moved = [moved for moved in plan.traffic if moved.place == str(folder / "drive")]
    assert more["read"] - fewer["read"] == sum(one.read for one in moved)
    assert more["written"] - fewer["written"] == sum(one.written for one in moved)


def wait_for_a_rank_that_hangs() -> str:
    ranks.STALLED = ranks._LATER = 1
    node = Node(together=True)
    cuts = Cuts([0, 1, 0], BlockInputs(1, 4 * ALIGN), node=node, device=CpuDevice(), stream=Mock())
    if node.rank:
        time.sleep(4)
        return ""
    with pytest.raises(TrainerError) as told:
        cuts.receive(Like(torch.Size([4]), torch.float32), micro_batch=0, block=1, forward=True)
    return str(told.value)


def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    told = in_ranks(wait_for_a_rank_that_hangs, count=2, folder=tmp_path)[0]
    assert told.startswith("after 1 s rank 1 has not computed block 1 or its gradient, and the run ends")


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Conversations in packed rows, with validation: 2 x 2, 3 and then 1 ranks go on from each other's checkpoints."""
    data = tmp_path / "chat.jsonl"
    data.write_text("\n".join(json.dumps(one) for one in CHATS))
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
        (["parallel.sequence=2"], 2, {}, "pipeline=2: parallel.sequence divides rows"),
        (["tiered.overlap=backward"], 2, {}, "gradients of other ranks' blocks"),
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


def test_a_model_whose_blocks_share_more_than_hidden_states_is_named(folder: Path) -> None:
    for name, changes, reason in (
        ("llama", {}, ""),
        ("mixtral", {"output_router_logits": True}, "part of the routers"),
    ):
        config = AutoConfig.from_pretrained(model_directory(folder / f"{name}-named", name, **changes))
        assert reason in why_no_chain(meta_model(config, trust_remote_code=False), pipeline=True)


def test_weights_move_once_a_pass_and_ranks_share_the_computation() -> None:
    """Of 4 GPUs each copies a quarter of what one GPU copies, and computes about a quarter."""
    words = ("--params", "cpu", "--accumulate", "16", "--micro-batch", "1", "model.activation_checkpointing=on")
    here = machine(gpu=80 * GB, ram=64 * GB)
    one = make_plan(wish(*words, "tiered.micro_batch_order=breadth_first"), SHAPES["gpt2-xl"], here)
    four = make_plan(wish(*words, "parallel.pipeline=4"), SHAPES["gpt2-xl"], here, world=4)
    copied = [sum(moved.read for moved in plan.traffic if moved.place == "device") for plan in (one, four)]
    assert 0.85 * copied[0] < 4 * copied[1] < copied[0]  # their buffers hold more of it from forward to backward
    assert four.work.tokens == one.work.tokens
    assert 1.05 < longer_in_turn(four.work) < 1.15  # the head is a block of 2.6 that one of them computes
    assert longer_in_turn(replace(four.work, accumulate=1)) == pytest.approx(4, abs=0.01)


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
