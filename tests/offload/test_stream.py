"""Tests of prefetching weights: each transfer starts before its unit is needed, and bytes match the plan."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from engine_bench import batches, engine, model_directory, train
from placements import OFF, ON
from seen_calls import calls_of

import offload_trainer.plan.tiered.layout as layout
from offload_trainer.offloading.weights.prefetch import WeightPrefetcher

pytestmark = pytest.mark.usefixtures("nothing_is_small")

DEPTH, BREADTH = (f"tiered.micro_batch_order={order}_first" for order in ("depth", "breadth"))
TWO = "model.activation_checkpointing=2"
FROZEN = 'model.freeze=["embed_tokens","layers.0."]'
KINDS = {
    "tied": ("gpt2", True, []),
    "untied": ("gpt2", False, []),
    "untied, checkpointed": ("qwen3", False, [ON, DEPTH]),
    "untied, breadth-first": ("qwen3", False, [ON, BREADTH]),
    "tied, breadth-first": ("gpt2", True, [ON, BREADTH]),
    "untied, two blocks checkpointed": ("qwen3", False, [TWO]),
    "tied, checkpointed": ("gpt2", True, [ON, DEPTH]),
    "untied, frozen": ("qwen3", False, [OFF, FROZEN]),
    "untied, frozen, checkpointed": ("qwen3", False, [ON, DEPTH, FROZEN]),
    "untied, frozen, breadth-first": ("qwen3", False, [ON, BREADTH, FROZEN]),
}

Event = tuple[str, int | str]


def log_calls(patch: pytest.MonkeyPatch) -> list[Event]:
    """Return a list that receives the units that prefetchers are asked for and start, and their passes, in order."""
    events: list[Event] = []
    notes: dict[str, Callable[..., Event]] = {
        "need": lambda _, unit: ("need", unit),
        "_start": lambda _, unit, number: ("start", unit),
        "begin": lambda _: ("begin", ""),
        "passing": lambda _, *, backward, then: ("pass", "backward" if backward else "forward"),
    }
    for name, note in notes.items():
        calls_of(patch.setattr, WeightPrefetcher, name, note, seen=events)
    return events


def third_step(
    kind: str, buffers: int, accumulate: int, folder: Path, patch: pytest.MonkeyPatch
) -> tuple[list[Event], int, int]:
    """Return the third step's events, the bytes they fetch, and the bytes in the plan."""
    patch.setattr(layout, "SMALL", 2000)  # norms stay on the device, embeddings are offloaded
    architecture, tied, words = KINDS[kind]
    model = model_directory(folder / "model", architecture, tied=tied)
    words = ["--params", "cpu", f"tiered.weight_buffers={buffers}", "--accumulate", str(accumulate), *words]
    with engine(model, *words) as ours:
        events = log_calls(patch)
        train(ours, batches(3 * accumulate), accumulate=accumulate)
        fetched = {unit.index: 2 * unit.elements for unit in ours.offloaded.units}
    begins = [index for index, event in enumerate(events) if event == ("begin", "")]
    assert len(begins) == 3
    events = events[begins[1] : begins[2]]
    planned = sum(moved.read for moved in ours.plan.traffic if moved.place == "device" and moved.phase != "update")
    return events, sum(fetched[unit] for kind, unit in events if kind == "start"), planned


@pytest.mark.parametrize(
    ("kind", "buffers", "accumulate"),
    [case for n, kind in enumerate(KINDS) for case in ((kind, 2, 1), (kind, (1, 9)[n % 2], 3))],
)
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


def test_reading_a_weight_of_another_block_gives_nan(qwen3: Path) -> None:
    """Absent weights are NaN: code that reads one without calling its module stops the run rather than
    use old values.
    """
    with engine(qwen3, "--params", "cpu", OFF, "tiered.weight_buffers=1") as ours:
        first, second = (ours.offloaded._module.get_submodule(f"model.layers.{number}") for number in (0, 1))
        gate = first.mlp.gate_proj.weight
        second.mlp.register_forward_hook(lambda module, given, output: output + gate.sum())
        loss, norm = train(ours, batches(1))[0]
        assert loss != loss
        assert norm is None
