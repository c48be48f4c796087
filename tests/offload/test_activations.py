"""Tests of offloaded checkpoint inputs, in host memory and on drives: their order, and bytes that match the plan.
`test_pairs.py` compares results.
"""

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_gpu import queued
from engine_bench import DROPOUT, batches, engine, model_directory, moved_in_step, train
from late_transfers import LateTransfers
from sample_plans import SHAPES, machine, wish
from seen_calls import run_before

from offload_trainer.errors import TrainerError, UserError
from offload_trainer.offloading.activation_offload import Activations
from offload_trainer.offloading.device import CpuDevice
from offload_trainer.plan.memory import INPUT_BUFFERS, INPUTS_UNDER_WAY, BlockInputs
from offload_trainer.plan.planner import make_plan
from offload_trainer.settings import load_config
from offload_trainer.storage.transfer import DriveFile

pytestmark = pytest.mark.usefixtures("nothing_is_small")

ON = ["model.activation_checkpointing=on", "model.overrides.n_layer=9"]


def model_of(folder: Path) -> Path:
    return model_directory(folder / "gpt2", "gpt2", n_layer=9, **DROPOUT)


INPUT = 8192  # bytes: 2 rows of 24 tokens, 72 wide, in bf16, rounded up to a multiple of 4096


@pytest.mark.slow
@pytest.mark.parametrize("home", ["false", "nvme"])
def test_inputs_leave_memory_for_the_drives_and_the_plan_counts_the_same(home: str, folder: Path) -> None:
    """On the CPU too, at most two of nine inputs stay in memory as they are, in addition to four buffers."""
    words = (*ON, f"model.offload_activations={home}", "--seq-len", "24", "--micro-batch", "2")
    inputs, held = list[weakref.ref[Any]](), list[int]()
    with engine(model_of(folder), *words, drives=[folder / "a", folder / "b"]) as ours:
        body = ours._module.model.transformer
        for block in body.h:
            block.register_forward_pre_hook(lambda _, given: inputs.append(weakref.ref(given[0].untyped_storage())))
        train(ours, batches(2))
        body.ln_f.register_forward_hook(lambda *_: held.append(sum(one() is not None for one in inputs[-9:])))
        if home == "false":
            train(ours, batches(1))
            assert held == [9]
            return
        moved = moved_in_step(ours, batches(1))
    assert held[0] <= INPUTS_UNDER_WAY
    assert moved == ((9 - INPUT_BUFFERS) * INPUT, 9 * INPUT)
    assert sum(buffer.memory.numel() for buffer in ours.offloaded.activations._ring) == INPUT_BUFFERS * INPUT
    items = {(item.tier, item.bytes) for item in ours.plan.items if item.name == "block inputs"}
    first, second = str(folder / "a"), str(folder / "b")
    assert items == {("ram", 2 * INPUT), ("ram", 4 * INPUT), (first, 5 * INPUT), (second, 4 * INPUT)}


def test_an_input_is_prefetched_while_the_previous_one_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the forward starts the backward's first copy; each later copy starts one block ahead of its use."""
    events: list[str] = []
    run_before(monkeypatch.setattr, CpuDevice, "keep", lambda *_: events.append("out"))
    run_before(monkeypatch.setattr, CpuDevice, "copy_back", lambda *_, **__: events.append("back"))
    with engine(model_of(folder), *ON, "model.offload_activations=cpu", device=CpuDevice()) as ours:
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
        (2, [900, 5000, 700, 1000], (3, 2, 1, 0)),  # more and larger ones than planned stay in host memory
        (2, [900, 5000, 700, 1000], (1, 0, 3, 2)),
    ],
)
def test_any_order_of_the_backward_is_correct(
    planned: int, sizes: Sequence[int], order: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [DriveFile(tmp_path / name, 6 * 4096) for name in "ab"]
    inputs = [torch.full((size,), float(number)) for number, size in enumerate(sizes)]
    with queued(monkeypatch, haste=0.05, seconds=0.001) as cuda:
        device, transfers = cuda.device(), LateTransfers()
        places: dict[str, Any] = {"device": device, "files": files, "transfers": transfers, "references": None}
        kept = Activations(BlockInputs(planned, 4096), **places)
        for given in (inputs, inputs, inputs[:2]):
            with kept.forward():
                handles = [kept.pack_input(one) for one in given]
            for number in (number for number in order if number < len(given)):
                assert torch.equal(kept.unpack(handles[number]), inputs[number])
        kept.close()
        transfers.close()
        device.close()
    for file in files:
        file.close()


def test_impossible_offloads_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"model.offload_activations=nvme needs a drive: add --nvme DIR"):
        load_config(["model.offload_activations=nvme"])
    with pytest.raises(UserError, match="belongs to --engine tiered, not to deepspeed: use cpu"):
        load_config(["model.offload_activations=nvme", "--nvme", "/ssd", "--engine", "deepspeed"])
    assert load_config(["model.offload_activations=true"]).model.offload_activations == "cpu"
    assert load_config(["model.offload_activations=false"]).model.offload_activations is False

    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("offload_trainer.storage.transfer.os.posix_fallocate", full)
    words = [*ON, "model.offload_activations=nvme", "--seq-len", "24", "--micro-batch", "2"]
    with (
        pytest.raises(TrainerError, match=r"activations-0: 73.7 kB cannot be set aside there: No space left on device"),
        engine(model_of(folder), *words, drives=[folder / "a"]),
    ):
        pass


def test_a_plan_notes_that_host_memory_is_the_device() -> None:
    """Without a GPU, offload_activations=cpu only adds copies in transit, at most three, and the plan says so."""
    found = {}
    for home in ("false", "cpu"):
        plan = make_plan(wish("--micro-batch", "4", f"model.offload_activations={home}"), SHAPES["gpt2-xl"], machine())
        found[home] = sum(item.bytes for item in plan.items if item.name in ("block inputs", "activations"))
        assert any("offload_activations=cpu has no effect without a GPU" in note for note in plan.notes) == (
            home == "cpu"
        )
    assert found["false"] < found["cpu"] <= found["false"] + 3 * 2 * 4 * 1024 * 1600
