"""Placements of weights, gradients and state, schedules of the update, and what tests of them share."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_bench import DROPOUT, engine, model_directory
from late_transfers import late_engine

from offload_trainer.offloading.ranks.sharded_gradients import ShardedGradients
from offload_trainer.offloading.update.updater import SpeculativeStep

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
LATE = re.compile(r"\.(ln_1|input_layernorm)\.weight$")  # such weights of any block


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


def skip_last_block(trained: Any, steps: set[int]) -> Callable[[int], None]:
    """Return a `before` hook that removes the last block in these steps, so that its weights get no gradient."""
    body = trained._module.model.transformer
    whole = body.h

    def before(step: int) -> None:
        body.h = whole[:-1] if step in steps else whole

    return before


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
        if (ahead := updater._speculative) is not None:
            units = complete()
            early = (n for n in updater.numbers if pages[n].home >= 0 or n in updater.shadows)
            wanted = {number for number in early if pages[number].unit in units}
            until(lambda: bool(ahead.error) or wanted <= ahead.written.keys())

    (norm,) = (name for name in ours.offloaded.parameters if name.startswith(f"{block.name}.") and LATE.search(name))
    ours.offloaded.parameters[norm][0].register_hook(wait)


def until(true: Callable[[], bool]) -> None:
    """Wait until `true` returns True; fail after five minutes."""
    end = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end
        time.sleep(0.0005)


def record_kept(patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that receives, for each speculative step, how many of its updated pages were kept, and of all."""
    found, its = list[tuple[int, int]](), SpeculativeStep.kept

    def seen(ahead: SpeculativeStep, *given: Any) -> set[int]:
        numbers = its(ahead, *given)
        found.append((len(numbers), len(ahead.written)))
        return numbers

    patch.setattr(SpeculativeStep, "kept", seen)
    return found
