"""Tests that blocks, and units outside them, are fetched to the device as often as planned, whatever order the model
registers them in. The models are tiny ones of transformers' causal architectures.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import every_architecture
import pytest
import tiny_models
import torch
from every_architecture import CHECKS, RAM, VECTORS, Result, Subject, in_a_child, other_fetches, ours
from small_architectures import ARCHITECTURES
from transformers import LlamaConfig

from offload_trainer.errors import UserError
from offload_trainer.model.activations import count_activations
from offload_trainer.model.init_weights import meta_model
from offload_trainer.plan.shape import ModelShape, Needs, Order, Weight
from offload_trainer.plan.tiered import layout
from offload_trainer.plan.tiered.layout import units_of
from offload_trainer.plan.tiered.weight_streaming import as_gradients_come, orders, with_order

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


def check_whole_blocks(subject: Subject) -> Result:
    """Compare fetches of whole blocks with the plan, with one and two buffers, where so few suffice."""
    wrong = []
    for buffers in (1, 2):
        words = ["tiered.fetch_granularity=block", f"tiered.weight_buffers={buffers}"]
        try:
            with mock.patch.object(layout, "SMALL", VECTORS):
                _, _, fetched = ours(subject.folder, [*RAM, *words, subject.checkpointing], subject.data)
        except UserError as error:
            if "weight_buffers must be" not in str(error):
                raise
            continue
        wrong += [f"{buffers} buffers: {told}" for told in other_fetches(fetched)]
    return Result("wrong" if wrong else "right", "; ".join(wrong))


@pytest.fixture(autouse=True)
def whole_blocks(counted_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHECKS, "fetches", check_whole_blocks)


def examine(name: str, folder: Path) -> Result:
    return every_architecture.examine(name, folder, "fetches")["fetches"]


@pytest.mark.parametrize("name", SELECTED)
def test_units_are_fetched_as_often_as_planned(name: str, tmp_path: Path) -> None:
    result = examine(name, tmp_path)
    assert (result.outcome, result.why) == ("right", "")


@pytest.mark.slow
def test_units_of_every_architecture_are_fetched_as_often_as_planned(request: pytest.FixtureRequest) -> None:
    """Without --exhaustive, only the known exceptions are tested."""
    known = {name for names in OTHERWISE.values() for name in names}
    names = tiny_models.kinds() if request.config.getoption("--exhaustive") else known
    found = {name: in_a_child(name, "fetches")["fetches"].outcome for name in names}
    assert {name for name, outcome in found.items() if outcome == "wrong"} == known
    assert set(found.values()) <= {"right", "wrong", "transformers"}


def test_registered_order_where_a_tower_is_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload_trainer.model.shape.with_order", lambda shape, _: shape)
    result = examine("MossTranscribeDiarize", tmp_path)
    assert result.outcome == "wrong"
    assert "model.audio_tower.layers.0 0 times for 2" in result.why


# -- the order alone ---------------------------------------------------------------------------------------------------


def test_blocks_that_were_not_run_are_inserted_in_order() -> None:
    """Only three blocks of each kind are run; the order of the others is inferred."""
    blocks = [f"model.layers.{number}" for number in range(7)]
    config = LlamaConfig(**ARCHITECTURES["llama, untied"].to_diff_dict() | {"num_hidden_layers": 7})
    order = count_activations(meta_model(config), blocks, dtype=torch.float32).order
    assert order.forward == ("model.embed_tokens", *blocks, "model.norm", "lm_head")
    assert order.backward == ("lm_head", "model.norm", *blocks[::-1])


def shape_of(**more: object) -> ModelShape:
    weights = [
        Weight("embed.weight", (999, 64), unit="embed", uses=2),
        *(Weight(f"h.{n}.{w}", (64, 64), unit=f"h.{n}", block=True, part=f"h.{n}.{w}") for n in (0, 1) for w in "ab"),
        Weight("late.weight", (64, 64), unit="late"),
    ]
    return ModelShape(tuple(weights), layers=2, hidden=64, vocabulary=999, context=64, **more)  # type: ignore[arg-type]


def named(shape: ModelShape, *, again: int) -> tuple[list[str], list[str]]:
    units = units_of(shape)
    forward, backward = orders(units, shape, again=again)
    return [units[unit].name for unit in forward], [units[unit].name for unit in backward]


def test_without_a_trace_the_order_is_that_of_registration() -> None:
    parts = ["h.0.a", "h.0.b", "h.1.a", "h.1.b"]
    forward, backward = named(shape_of(), again=0)
    assert forward == ["embed", *parts, "late", "embed"]
    assert backward == ["embed", "late", *parts[::-1]]
    registered = Order(("embed", "h.0", "h.1", "late", "embed"), ("embed", "late", "h.1", "h.0"))
    assert with_order(shape_of(), registered) == shape_of()


def test_parts_are_fetched_in_the_probed_order_at_each_run_of_their_block() -> None:
    """h.0 runs twice, and its trial covers both; h.1 is frozen, and is recomputed only with checkpointing."""
    needs = (Needs("h.0", ("h.0.b", "h.0.a") * 2, ("h.0.b", "h.0.a", "h.0.b") * 2),)
    order = Order(("late", "embed", "h.1", "h.0", "h.0", "embed"), ("embed", "h.0", "h.0"))
    shape = with_order(shape_of(needs=needs), order)
    assert shape.order == order
    forward, backward = named(shape, again=0)
    assert forward == ["late", "embed", "h.1.a", "h.1.b", *["h.0.b", "h.0.a"] * 2, "embed"]
    assert backward == ["embed", *["h.0.a", "h.0.b"] * 2]
    for count in (1, 2):  # h.0 is recomputed, and then h.1 needs its weights too, also if it is not
        again = named(shape, again=count)[1]
        assert again == ["embed", *["h.0.b", "h.0.a", "h.0.b"] * 2, "h.1.b", "h.1.a"]
    units = units_of(shape)
    gradients = [units[unit].name for unit in as_gradients_come(units, shape)]
    assert gradients == ["h.0.a", "h.0.b", "h.1.b", "h.1.a", "embed", "late"]
