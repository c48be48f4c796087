"""Tests of offloaded block inputs: their order, and bytes that match the plan. `test_pairs.py` compares results."""

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_gpu import queued
from engine_bench import DROPOUT, batches, engine, model_directory, train
from sample_plans import SHAPES, machine, wish
from seen_calls import run_before

from offload_trainer.offloading.activation_offload import Activations
from offload_trainer.offloading.device import CpuDevice
from offload_trainer.plan.memory import INPUTS_UNDER_WAY, BlockInputs
from offload_trainer.plan.planner import make_plan

pytestmark = pytest.mark.usefixtures("nothing_is_small")

ON = ["model.activation_checkpointing=on", "model.overrides.n_layer=9"]


def model_of(folder: Path) -> Path:
    return model_directory(folder / "gpt2", "gpt2", n_layer=9, **DROPOUT)


INPUT = 8192  # bytes: 2 rows of 24 tokens, 72 wide, in bf16, rounded up to a multiple of 4096


@pytest.mark.slow
@pytest.mark.parametrize("away", ["false", "true"])
def test_inputs_are_copied_and_the_plan_counts_the_copies(away: str, folder: Path) -> None:
    """On the CPU too, at most two of nine inputs stay in memory as they are."""
    words = (*ON, f"model.offload_activations={away}", "--seq-len", "24", "--micro-batch", "2")
    inputs, held = list[weakref.ref[Any]](), list[int]()
    with engine(model_of(folder), *words) as ours:
        body = ours._module.model.transformer
        for block in body.h:
            block.register_forward_pre_hook(lambda _, given: inputs.append(weakref.ref(given[0].untyped_storage())))
        train(ours, batches(2))
        body.ln_f.register_forward_hook(lambda *_: held.append(sum(one() is not None for one in inputs[-9:])))
        train(ours, batches(1))
    if away == "false":
        assert held == [9]
        return
    assert held[0] <= INPUTS_UNDER_WAY
    assert sum(buffer.numel() for buffer in ours.offloaded.activations._buffers) == 9 * INPUT
    assert [item.bytes for item in ours.plan.items if item.name == "block inputs"] == [2 * INPUT, 9 * INPUT]


def test_an_input_is_prefetched_while_the_previous_one_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the forward starts the backward's first copy; each later copy starts one block ahead of its use."""
    events: list[str] = []
    run_before(monkeypatch.setattr, CpuDevice, "keep", lambda *_: events.append("out"))
    run_before(monkeypatch.setattr, CpuDevice, "copy_back", lambda *_, **__: events.append("back"))
    with engine(model_of(folder), *ON, "model.offload_activations=true", device=CpuDevice()) as ours:
        for number, told in ((0, "first block"), (8, "last block")):
            block = ours._module.model.transformer.h[number].attn
            block.register_forward_pre_hook(lambda *_, told=told: events.append(told))
        train(ours, batches(1))
    forward = ["out", "first block", *["out"] * 8, "last block"]
    assert events == [*forward, "back", "back", "last block", *["back"] * 7, "first block"]


@pytest.mark.parametrize(
    ("planned", "sizes", "order"),
    [
        (11, [1000] * 11, range(11)),
        (11, [1000] * 11, range(10, -1, -1)),
        (11, [1000] * 11, (3, 9, 0, 1, 10, 2, 4, 8, 5, 7, 6)),
        (2, [900, 5000, 700, 1000], (3, 2, 1, 0)),  # more and larger ones than planned
        (2, [900, 5000, 700, 1000], (1, 0, 3, 2)),
    ],
)
def test_any_order_of_the_backward_is_correct(
    planned: int, sizes: Sequence[int], order: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [torch.full((size,), float(number)) for number, size in enumerate(sizes)]
    with queued(monkeypatch, haste=0.05, seconds=0.001) as cuda:
        device = cuda.device()
        kept = Activations(BlockInputs(planned, 4096), device=device, references=None)  # type: ignore[arg-type]
        for given in (inputs, inputs, inputs[:2]):
            with kept.forward():
                handles = [kept.pack_input(one) for one in given]
            for number in (number for number in order if number < len(given)):
                assert torch.equal(kept.unpack(handles[number]), inputs[number])
        kept.close()
        device.close()


def test_a_plan_notes_that_host_memory_is_the_device() -> None:
    """Without a GPU, offload_activations only adds copies in transit, at most three, and the plan says so."""
    found = {}
    for away in ("false", "true"):
        plan = make_plan(wish("--micro-batch", "4", f"model.offload_activations={away}"), SHAPES["gpt2-xl"], machine())
        found[away] = sum(item.bytes for item in plan.items if item.name in ("block inputs", "activations"))
        assert any("offload_activations has no effect without a GPU" in note for note in plan.notes) == (away == "true")
    assert found["false"] < found["true"] <= found["false"] + 3 * 2 * 4 * 1024 * 1600
