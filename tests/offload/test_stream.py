"""Tests of prefetching weights to the device: each transfer starts before its unit is needed, and
bytes match the plan.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engine_bench import REENTRANT, batches, engine, model_directory, train

import offload_trainer.plan.tiered.layout as layout
from offload_trainer.config import PlacementSection
from offload_trainer.machine.probe import probe_machine
from offload_trainer.model.loader import resolve_model
from offload_trainer.offloading.weights.prefetch import WeightPrefetcher
from offload_trainer.plan.planner import make_plan
from offload_trainer.run.planning import as_wished
from offload_trainer.settings import load_config

DEPTH, BREADTH = (f"tiered.micro_batch_order={order}_first" for order in ("depth", "breadth"))
ON, OFF, TWO = (f"model.activation_checkpointing={blocks}" for blocks in ("on", "off", 2))
MODULE = "tiered.fetch_granularity=module"
FROZEN = 'model.freeze=["embed_tokens","layers.0."]'
KINDS = {
    "tied": ("gpt2", True, []),
    "untied": ("gpt2", False, []),
    "untied, checkpointed": ("qwen3", False, [ON, DEPTH]),
    "untied, breadth-first": ("qwen3", False, [ON, BREADTH]),
    "tied, breadth-first": ("gpt2", True, [ON, BREADTH]),
    "untied, two blocks checkpointed": ("qwen3", False, [TWO]),
    "untied, by the module, two blocks checkpointed": ("qwen3", False, [TWO, MODULE]),
    "untied, by the module": ("qwen3", False, [OFF, MODULE]),
    "tied, by the module, checkpointed": ("gpt2", True, [ON, MODULE]),
    "untied, by the module, checkpointed": ("qwen3", False, [ON, MODULE]),
    "untied, frozen": ("qwen3", False, [OFF, FROZEN]),
    "untied, frozen, checkpointed": ("qwen3", False, [ON, DEPTH, FROZEN]),
    "untied, frozen, breadth-first": ("qwen3", False, [ON, BREADTH, FROZEN]),
    "untied, reentrant": ("qwen3", False, [ON, DEPTH, REENTRANT]),
}

Event = tuple[str, int | str]


class Watch:
    """A log of the units that the prefetcher was asked for and started, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[Event] = []
        need, start = WeightPrefetcher.need, WeightPrefetcher._start
        passing, begin = WeightPrefetcher.passing, WeightPrefetcher.begin

        def note(kind: str, what: int | str) -> None:
            self.events.append((kind, what))

        patch.setattr(WeightPrefetcher, "need", lambda s, unit: (note("need", unit), need(s, unit))[1])
        patch.setattr(
            WeightPrefetcher, "_start", lambda s, unit, number: (note("start", unit), start(s, unit, number))[1]
        )
        patch.setattr(WeightPrefetcher, "begin", lambda s: (note("begin", ""), begin(s)))

        def watched(stream: WeightPrefetcher, *, backward: bool, then: bool | None) -> Any:
            note("pass", "backward" if backward else "forward")
            return passing(stream, backward=backward, then=then)

        patch.setattr(WeightPrefetcher, "passing", watched)


def third_step(
    kind: str, buffers: int, accumulate: int, folder: Path, patch: pytest.MonkeyPatch
) -> tuple[list[Event], int, int]:
    """Return the third step's events, the bytes they fetch, and the bytes in the plan."""
    patch.setattr(layout, "SMALL", 2000)  # norms stay on the device, embeddings are offloaded
    architecture, tied, words = KINDS[kind]
    model = model_directory(folder / "model", architecture, tied=tied)
    words = ["--params", "cpu", f"tiered.weight_buffers={buffers}", "--accumulate", str(accumulate), *words]
    with engine(model, *words) as ours:
        watch = Watch(patch)
        train(ours, batches(3 * accumulate), accumulate=accumulate)
        fetched = {unit.index: 2 * unit.elements for unit in ours.offloaded.units}
    begins = [index for index, event in enumerate(watch.events) if event == ("begin", "")]
    assert len(begins) == 3
    events = watch.events[begins[1] : begins[2]]
    config = load_config(["--model", str(model), "--scratch", *(word for word in words if word != REENTRANT)])
    source = as_wished(resolve_model(config.model, seed=0), config)
    plan = make_plan(config, source.shape, probe_machine(PlacementSection(), output=str(folder)))
    planned = sum(moved.read for moved in plan.traffic if moved.place == "device" and moved.phase != "update")
    return events, sum(fetched[unit] for kind, unit in events if kind == "start"), planned


@pytest.mark.parametrize(("buffers", "accumulate"), [(1, 3), (2, 1), (9, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_units_are_fetched_as_planned_and_before_they_are_needed(
    kind: str, buffers: int, accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first step, `need` starts no fetch if there are two buffers or three.

    That includes heads, embeddings and the first unit of a pass.
    """
    events, fetched, planned = third_step(kind, buffers, accumulate, tmp_path, monkeypatch)
    if BREADTH in KINDS[kind][2] and buffers in (1, 9):
        # The prefetcher cannot tell the last micro-batch's turn in the first block from earlier ones. With a single
        # buffer, or more buffers than blocks, it may then fetch an embedding again.
        assert planned <= fetched <= 1.05 * planned
    else:
        assert fetched == planned > 0
    if buffers not in (2, 3):
        return
    for before, event in pairwise(events):
        assert not (event[0] == "start" and before == ("need", event[1])), f"{event} was needed before"
    passes = [index for index, event in enumerate(events) if event[0] == "pass"]
    assert len(passes) == 2 * (1 if BREADTH in KINDS[kind][2] else accumulate)
    for index in passes:  # A pass's first unit was started before the pass.
        first = next(unit for kind, unit in events[index:] if kind == "need")
        assert first in [unit for kind, unit in events[:index] if kind == "start"]
