"""Tests that blocks, and units outside them, are fetched to the device as often as planned, whatever order the model
registers them in. The models are tiny ones of transformers' causal architectures.
"""

from collections import Counter
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from every_architecture import RAM, Result, Subject, Trained, examine, in_a_child, ours
from seen_calls import run_before

from offload_trainer.errors import UserError
from offload_trainer.offloading.weights.prefetch import WeightPrefetcher
from offload_trainer.plan.shape import ModelShape, Order, Weight
from offload_trainer.plan.tiered import footprint, layout
from offload_trainer.plan.tiered.layout import Unit, units_of
from offload_trainer.plan.tiered.weight_streaming import as_gradients_come, orders, with_order

pytestmark = pytest.mark.usefixtures("counted_once")

SELECTED = {
    "Bart": "a decoder, whose embeddings have a norm",
    "Fuyu": "a module for pictures, larger than all else",
    "Gemma3nText": "an embedding that is made behind the blocks",
    "GPT2": "positions, and a head that is tied",
    "MossTranscribeDiarize": "a tower with blocks of its own",
    "Roberta": "embeddings in a block",
}
OTHERWISE = {
    "runs that cannot be counted, of towers or not as they are registered": {"Bert", "Blt"},
    "runs that cannot be counted, of blocks that run several times": {"HrmText"},
    "blocks are not known": {"OpenAIGPT", "XLM", "XLNet"},
}


@dataclass(frozen=True)
class Fetched:
    """How often a step after the first fetched an offloaded unit, and how often the plan says that it does."""

    unit: Unit
    actual: int
    planned: int


def fetched(subject: Subject, *words: str) -> tuple[Trained, list[Fetched]]:
    """Train the subject with its weights in RAM; return also the fetches of each unit."""
    counts: list[Counter[int]] = [Counter(), Counter()]  # before the first step; also of a model that streams nothing

    def look(made: Any) -> None:
        candidate, planned = made.candidate, Counter[int]()
        for (unit, _), times in footprint.fetched(candidate.work, candidate._laid_out, candidate.sizes).items():
            planned[unit] += times
        away = [unit for unit in candidate.units if made.offloaded.weights.resident(unit.index) is None]
        found.extend(Fetched(unit, counts[-2][unit.index], planned[unit.index]) for unit in away)

    found: list[Fetched] = []
    with pytest.MonkeyPatch.context() as patch:
        run_before(patch.setattr, WeightPrefetcher, "_start", lambda _, unit, number: counts[-1].update([unit]))
        run_before(patch.setattr, WeightPrefetcher, "begin", lambda _: counts.append(Counter()))
        patch.setattr(layout, "SMALL", 4096)  # elements of an aligned unit of vectors
        trained, _ = ours(subject.folder, [*RAM, subject.checkpointing, *words], subject.data, look=look)
    return trained, found


def check(subject: Subject) -> Result:
    """Compare fetches with the plan, in one buffer and in two where so few suffice."""
    wrong = list[str]()
    for buffers in (1, 2):
        try:
            found, units = fetched(subject, f"tiered.weight_buffers={buffers}")
        except UserError as error:
            if "weight_buffers must be" not in str(error):
                raise
            continue
        told = [f"{one.unit.name} {one.actual} times for {one.planned}" for one in units if one.actual != one.planned]
        told += ["a loss is NaN"] if any(map(isnan, found.losses)) else []
        wrong += [f"{buffers} buffers: {text}" for text in told]
    return Result("wrong" if wrong else "right", "; ".join(wrong))


@pytest.mark.parametrize("name", SELECTED)
def test_units_are_fetched_as_often_as_planned(name: str, tmp_path: Path) -> None:
    (result,) = examine(name, tmp_path, check)
    assert (result.outcome, result.why) == ("right", "")


@pytest.mark.slow
def test_units_of_every_architecture_are_fetched_as_often_as_planned(request: pytest.FixtureRequest) -> None:
    """Without --exhaustive, only the known exceptions are tested."""
    known = {name for names in OTHERWISE.values() for name in names}
    names = tiny_models.kinds() if request.config.getoption("--exhaustive") else known
    found = {name: in_a_child(name, check)[0].outcome for name in names}
    assert {name for name, outcome in found.items() if outcome == "wrong"} == known
    assert set(found.values()) <= {"right", "wrong", "transformers"}


def test_registered_order_where_a_tower_is_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload_trainer.model.shape.with_order", lambda shape, _: shape)
    (result,) = examine("MossTranscribeDiarize", tmp_path, check)
    assert result.outcome == "wrong"
    assert "model.audio_tower.layers.0 0 times for 2" in result.why


# -- the order alone ---------------------------------------------------------------------------------------------------


def shape_of() -> ModelShape:
    weights = [
        Weight("embed.weight", (999, 64), unit="embed", uses=2),
        *(Weight(f"h.{n}.{w}", (64, 64), unit=f"h.{n}", block=True) for n in (0, 1) for w in "ab"),
        Weight("late.weight", (64, 64), unit="late"),
    ]
    return ModelShape(tuple(weights), layers=2, hidden=64, vocabulary=999, context=64)


def named(shape: ModelShape, *, checkpointing: bool) -> tuple[list[str], list[str]]:
    units = units_of(shape)
    forward, backward = orders(units, shape, checkpointing=checkpointing)
    return [units[unit].name for unit in forward], [units[unit].name for unit in backward]


def test_without_a_trace_the_order_is_that_of_registration() -> None:
    forward, backward = named(shape_of(), checkpointing=False)
    assert forward == ["embed", "h.0", "h.1", "late", "embed"]
    assert backward == ["embed", "late", "h.1", "h.0"]
    assert with_order(shape_of(), Order(tuple(forward), tuple(backward))) == shape_of()


def test_blocks_are_fetched_in_the_recorded_order_at_each_run() -> None:
    """h.0 runs twice; h.1 is frozen, and has a backward only with checkpointing."""
    order = Order(("late", "embed", "h.1", "h.0", "h.1", "h.0", "embed"), ("embed", "h.0", "late", "h.0"))
    shape = with_order(shape_of(), order)
    assert shape.order == order
    assert named(shape, checkpointing=False) == (list(order.forward), list(order.backward))
    forward, backward = named(shape, checkpointing=True)
    assert forward == list(order.forward)
    assert backward == [*order.backward, "h.1", "h.1"]
    units = units_of(shape)
    gradients = [units[unit].name for unit in as_gradients_come(units, shape)]
    assert gradients == ["h.0", "h.1", "embed", "late"]
