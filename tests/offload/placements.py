"""Placements of weights, gradients and state, schedules of the update, and what tests of them share."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_bench import DROPOUT, engine, model_directory, train
from late_transfers import late_engine
from seen_calls import until

from offload_trainer.data.rows import Batch
from offload_trainer.offloading.ranks.sharded_gradients import ShardedGradients
from offload_trainer.offloading.update.updater import SpeculativeStep
from offload_trainer.telemetry.meters import read_io

BEHIND, FULL, IN_LINE = (f"tiered.overlap={how}" for how in ("forward", "backward", "off"))
ON, OFF = "model.activation_checkpointing=on", "model.activation_checkpointing=off"
AWAY = ["--params", "nvme", "placement.gradients=nvme", "tiered.weight_buffers=2"]
ALL_ON_DRIVES = [*AWAY, "--optimizer", "nvme"]
HOMES = {
    "all in RAM": ["--ram-fraction", "1"],
    "a third in RAM": ["--ram-fraction", "0.3"],
    "nothing in RAM": ["--ram-fraction", "0"],
    "weights in RAM": ["--params", "cpu", "--ram-fraction", "0.3", "tiered.weight_buffers=2"],
    "weights and gradients on the drive": [*AWAY, "--ram-fraction", "0.3"],
    "a part on the device": ["--gpu-fraction", "0.3", "--ram-fraction", "0.3"],
    "all on the device": ["--gpu-fraction", "1"],
    "state on the device, weights on the drive": [*AWAY, "--gpu-fraction", "0.5", "--ram-fraction", "0.3"],
    "sums on the device": ["placement.gradients=gpu", "--ram-fraction", "0.3"],
    "sums on the device, weights on the drive": [*AWAY, "placement.gradients=gpu", "--ram-fraction", "0.5"],
    "sums on the drive": ["placement.gradients=nvme", "--ram-fraction", "0.6"],
    "two copies on the drive": ["--ram-fraction", "0.3", "tiered.state_copies=2"],
    "all on three drives": ALL_ON_DRIVES,
}
CLIP = "optim.max_grad_norm=2"  # some steps of the small models exceed it
FIRST = "transformer.h.0.ln_1.weight"  # one of the last gradients of a backward


def gpt2(folder: Path, *, tied: bool = True) -> Path:
    return model_directory(folder / f"gpt2-{tied}", "gpt2", tied=tied, **DROPOUT)


@dataclass(frozen=True)
class Build:
    """A builder of engines for a small GPT-2 with dropout, whose state may be on one drive."""

    model: Path
    drive: Path

    @contextmanager
    def __call__(self, home: str | Sequence[str], *words: str, held: bool = False, **extra: Any) -> Iterator[Any]:
        """Yield an engine placed as `home` names or says, perhaps `held` (see `hold_up`), or with `late` transfers."""
        build = partial(late_engine, late) if (late := extra.pop("late", None)) else engine
        home = HOMES[home] if isinstance(home, str) else home
        with build(self.model, *home, *words, drives=[self.drive], **extra) as ours:
            if held:
                hold_up(ours)
            yield ours


def plant(ours: Any, values: dict[int, float], *, weight: str = FIRST) -> Callable[[int], None]:
    """Return a `before` hook that fills the gradient of `weight` with the value of a step, in the steps of `values`."""
    step = [0]
    ours.offloaded.parameters[weight][0].register_hook(
        lambda gradient: gradient.fill_(values[step[0]]) if step[0] in values else gradient
    )
    return lambda number: step.__setitem__(0, number)


def hold_up(ours: Any) -> None:
    """Pause the backward at the first block's gradients until this rank's pages of all complete units are updated."""
    updater, gradients, pages = ours.offloaded.updater, ours.offloaded.gradients, ours.offloaded.store.pages
    block = next(unit for unit in ours.offloaded.units if unit.block)

    def complete() -> set[int]:
        if isinstance(gradients, ShardedGradients):
            return set(gradients._normed)
        if gradients._own:  # other ranks of a pipeline complete the blocks between its own
            return {page.unit for page in pages if page.unit > block.index}
        return {unit for unit, lacking in gradients._missing.items() if not lacking}

    def wait(_: torch.Tensor) -> None:
        if (ahead := updater.announced) is not None:
            units = complete()
            early = (n for n in updater.numbers if pages[n].home >= 0 or n in updater.shadows)
            wanted = {number for number in early if pages[number].unit in units}
            until(lambda: bool(ahead.error) or wanted <= ahead.written.keys())

    norms = (".ln_1.weight", ".input_layernorm.weight")
    (norm,) = (n for n in ours.offloaded.parameters if n.startswith(f"{block.name}.") and n.endswith(norms))
    ours.offloaded.parameters[norm][0].register_hook(wait)


def record_kept(patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that receives, for each speculative step, how many of its updated pages were kept, and of all."""
    found, its = list[tuple[int, int]](), SpeculativeStep.kept

    def seen(ahead: SpeculativeStep, *given: Any) -> set[int]:
        numbers = its(ahead, *given)
        found.append((len(numbers), len(ahead.written)))
        return numbers

    patch.setattr(SpeculativeStep, "kept", seen)
    return found


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a checksum of the tensors' bits, which compares sooner than lists of numbers."""
    bits = (tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(b"".join(bits)).hexdigest()


def moved_in_step(ours: Any, data: Sequence[Batch]) -> tuple[int, int]:
    """Train a step; return the bytes read from drives and written, as the kernel counts them, which are the plan's.

    The counts include page faults in libraries, of which there are none unless the page cache is dropped meanwhile.
    """

    def settled() -> Any:
        """Return the counts once nothing is on its way: no step waits for its prefetches."""
        ours.synchronize()
        for slot in ours.offloaded.stream._slots:
            if slot.arrival is not None:
                slot.arrival.wait()
        return read_io()

    before = settled()
    train(ours, data, accumulate=len(data))
    moved = settled() - before
    planned = [one for one in ours.plan.traffic if one.place != "device"]
    assert moved.read_bytes == sum(one.read for one in planned)
    assert moved.written_bytes == sum(one.written for one in planned)
    return moved.read_bytes, moved.written_bytes
