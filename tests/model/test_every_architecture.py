"""Tests of selected architectures against transformers, torch and the plan; scripts/every_architecture.py has all."""

from collections import Counter
from collections.abc import Collection
from math import isnan
from pathlib import Path
from typing import Any

import every_architecture
import pytest
import tiny_models
import torch
from engine_bench import assert_same, batches, engine, masters, model_directory, plain, train
from sample_plans import machine, wish
from seen_calls import run_before
from transformers import Trainer

from offload_trainer.common.errors import UserError
from offload_trainer.config import ModelSection
from offload_trainer.model import activations
from offload_trainer.model.init_weights import meta_model
from offload_trainer.model.loader import ModelSource, resolve_model
from offload_trainer.model.shape import no_weight_decay_names
from offload_trainer.offloading.weights.prefetch import WeightPrefetcher
from offload_trainer.plan.planner import checkpointed_blocks, make_plan
from offload_trainer.plan.shape import ModelShape, Order, Weight
from offload_trainer.plan.tiered import footprint, layout
from offload_trainer.plan.tiered.layout import units_of
from offload_trainer.plan.tiered.weight_streaming import as_gradients_come, orders, with_order

pytestmark = pytest.mark.usefixtures("counted_once")

SELECTED = {
    "Camembert": "a head before its body, with a bias that is tied",
    "DiffLlama": "constructors that draw with memory",
    "Dots3NoteText": "layers with configurations of their own",
    "Gemma4Text": "embeddings for each layer",
    "GptOss": "attention with sinks, in eager only",
    "JetMoe": "no gradient checkpointing",
    "Llama4Text": "a body whose name transformers does not tell",
    "Mamba2": "no attention",
    "OPT": "a head that calls a part of the body",
    "ProphetNet": "a head that reads other states than the last",
    "Rwkv": "weights that transformers divides in place outside training",
    "XLNet": "no limit of a row",
}


def examine(
    name: str, folder: Path, check: every_architecture.Check = every_architecture.check_training
) -> every_architecture.Result:
    return every_architecture.examine(name, folder, check)[0]


@pytest.mark.parametrize("name", SELECTED)
def test_losses_norms_and_weights_are_those_of_transformers_and_torch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "Rwkv":
        # It processes tokens one by one, so its activations are estimated.
        monkeypatch.setattr(activations, "_MOST_OPERATIONS", 300)
    result = examine(name, tmp_path)
    assert (result.outcome, result.why) == ("right", "")
    notes = " ".join(result.notes)
    assert ("attention: eager" in notes) == (name in ("GptOss", "ProphetNet", "XLNet"))
    assert ("logits of all tokens" in notes) == (name == "ProphetNet")
    assert ("gradient checkpointing: off" in notes) == (name in ("JetMoe", "XLNet"))
    assert result.router == ("right" if name in ("GptOss", "JetMoe") else "")
    assert result.drawn == "equal"


def test_a_wrong_loss_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing router loss, or an eps that is 10 % too large, is reported as wrong; without them all is right."""
    result = examine("Mixtral", tmp_path / "right")
    assert (result.outcome, result.router) == ("right", "right")
    with monkeypatch.context() as patch:
        patch.setattr("offload_trainer.model.loss.adds_router_loss", lambda _: False)
        result = examine("Mixtral", tmp_path / "router")
        assert result.outcome == "wrong"
        assert result.why.startswith("with the routers' loss: losses")
    monkeypatch.setattr(every_architecture, "EPS", 1.1e-3)
    result = examine("Llama", tmp_path / "eps")
    assert result.outcome == "wrong"
    assert "weights" in result.why


def source_of(name: str, folder: Path, *, section: dict[str, Any] | None = None, **changes: Any) -> ModelSource:
    """Return the source of a tiny model, built from its configuration alone."""
    tiny_models.tiny_config(tiny_models.kinds()[name], **changes).save_pretrained(folder)
    return resolve_model(ModelSection(name=str(folder), random_init=True, dtype="fp32", **section or {}), seed=0)


def test_the_plan_names_what_a_model_lacks_unless_it_is_asked_for(tmp_path: Path) -> None:
    shape = source_of("Gemma2", tmp_path / "a").shape
    (note,) = shape.notes
    assert note.startswith("attention: eager, since Gemma2ForCausalLM has no SDPA in transformers")
    assert note in make_plan(wish(), shape, machine()).notes
    assert shape.on_gpu.kinds[0].kept.pair > 0
    asked = source_of("Gemma2", tmp_path / "a", section={"attention": "eager"}).shape
    assert (asked.notes, asked.on_gpu) == ((), shape.on_gpu)
    whole = "loss: with the logits of all tokens at once, since ProphetNet"
    assert any(note.startswith(whole) for note in source_of("ProphetNet", tmp_path / "b").shape.notes)
    large = source_of("JetMoe", tmp_path / "c", vocab_size=4_000_000, tie_word_embeddings=True).shape
    assert large.parameters > 100_000_000  # `auto` checkpoints models this large, if transformers can
    assert not checkpointed_blocks(ModelSection(), large)
    assert any(note.startswith("gradient checkpointing: off whatever its size") for note in large.notes)


def test_unsupported_models_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Gemma2ForCausalLM does not support .* \(model.attention=auto\?\)"):
        source_of("Gemma2", tmp_path / "a", section={"attention": "sdpa"})
    with pytest.raises(
        UserError, match=r"model\.activation_checkpointing=on: JetMoeForCausalLM has none in transformers"
    ):
        source_of("JetMoe", tmp_path / "b", section={"activation_checkpointing": "on"})
    with pytest.raises(UserError, match="z_loss_coefficient adds a loss"):
        source_of("Bamba", tmp_path / "c", z_loss_coefficient=0.1).build(dtype=torch.float32)
    source = source_of("Mixtral", tmp_path / "d", section={"activation_checkpointing": "on"}, output_router_logits=True)
    with pytest.raises(UserError, match=r"the routers' loss .* gets no gradient through the reentrant checkpointing"):
        source.build(dtype=torch.float32, reentrant=True, checkpointed=source.shape.layers)


def test_weights_that_are_read_without_a_module_call_are_new_in_a_forward_that_an_update_overlaps(
    tmp_path: Path,
) -> None:
    """ProphetNet reads its n-gram embeddings so; the update that runs meanwhile changes them too."""
    every_architecture.saved(tiny_models.tiny_config(tiny_models.kinds()["ProphetNet"]), tmp_path / "model")
    found = [
        every_architecture.ours(tmp_path, words, every_architecture.batches())[0]
        for words in ([*every_architecture.DRIVE, f"tiered.overlap={overlap}"] for overlap in ("off", "forward"))
    ]
    assert every_architecture.same_bits(*found)


DECAYS: dict[str, dict[str, Any]] = {"GptOss": {}, "Cohere": {"use_qk_norm": True}, "Mamba": {}, "GPT2": {}}


@pytest.mark.parametrize("names", [DECAYS, pytest.param((), marks=pytest.mark.slow)], ids=["some", "all"])
def test_what_transformers_decays_decays(names: Collection[str]) -> None:
    """The exceptions are vectors, which never decay here (sinks, residual scales, Mamba's D), and A_log."""
    differences, built = [], 0
    for kind in names or tiny_models.kinds():
        try:
            model = meta_model(tiny_models.tiny_config(tiny_models.kinds()[kind], **DECAYS.get(kind, {})))
        except Exception:  # transformers builds no tiny model of it
            continue
        built += 1
        weights = {name for name, tensor in model.named_parameters() if tensor.dim() > 1}
        logarithms = {name for name in weights if name.endswith(".A_log")}
        assert logarithms or kind != "Mamba"
        theirs = weights.intersection(Trainer.get_decay_parameter_names(None, model)) - logarithms  # type: ignore[arg-type]
        differences += [(kind, name) for name in (weights - no_weight_decay_names(model)) ^ theirs]
    assert built == len(names) if names else built > 150
    assert not differences


NOISY = {
    "llama": {"attention_dropout": 0.2},
    "phimoe": {"router_jitter_noise": 0.3, "input_jitter_noise": 0.3},
}


@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.parametrize("architecture", NOISY)
def test_dropout_is_the_same_in_every_placement(architecture: str, folder: Path, drive: Path) -> None:
    """Whatever else draws random numbers in between. GPT-2's placements are in test_pairs.py."""
    model = model_directory(folder / f"noisy-{architecture}", architecture, **NOISY[architecture])
    expected, weights = plain(model, 3, "--accumulate", "2", "model.activation_checkpointing=off", accumulate=2)
    words = ["--accumulate", "2", "--params", "nvme", "--optimizer", "nvme", "placement.gradients=nvme"]
    words += ["tiered.weight_buffers=2", "model.activation_checkpointing=on"]
    with engine(model, *words, drives=[drive]) as ours:

        def between(step: int) -> None:
            ours.eval_loss(batches(1)[0])
            torch.rand(step)

        assert train(ours, batches(6), accumulate=2, before=between) == expected
        assert_same(masters(ours), weights)


FETCHED = {
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


def fetched(
    subject: every_architecture.Subject, *words: str
) -> tuple[every_architecture.Trained, list[tuple[str, int, int]]]:
    """Train the subject with its weights in RAM; return also offloaded units' fetches in a step, and the plan's."""
    counts: list[Counter[int]] = [Counter(), Counter()]  # before the first step; also of a model that streams nothing

    def look(made: Any) -> None:
        candidate, planned = made.candidate, Counter[int]()
        for (unit, _), times in footprint.fetched(candidate.work, candidate._laid_out, candidate.sizes).items():
            planned[unit] += times
        away = [unit for unit in candidate.layouts.units if unit.index not in made.offloaded.weights.resident]
        found.extend((unit.name, counts[-2][unit.index], planned[unit.index]) for unit in away)

    found: list[tuple[str, int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        run_before(patch.setattr, WeightPrefetcher, "_start", lambda _, unit, number: counts[-1].update([unit]))
        run_before(patch.setattr, WeightPrefetcher, "begin", lambda _: counts.append(Counter()))
        patch.setattr(layout, "SMALL", 4096)  # elements of an aligned unit of vectors
        trained, _ = every_architecture.ours(
            subject.folder, [*every_architecture.RAM, subject.checkpointing, *words], subject.data, look=look
        )
    return trained, found


def check(subject: every_architecture.Subject) -> every_architecture.Result:
    """Compare fetches with the plan, in one buffer and in two where so few suffice."""
    wrong = list[str]()
    for buffers in (1, 2):
        try:
            found, units = fetched(subject, f"tiered.weight_buffers={buffers}")
        except UserError as error:
            if "weight_buffers must be" not in str(error):
                raise
            continue
        told = [f"{unit} {actual} times for {planned}" for unit, actual, planned in units if actual != planned]
        told += ["a loss is NaN"] if any(map(isnan, found.losses)) else []
        wrong += [f"{buffers} buffers: {text}" for text in told]
    return every_architecture.Result("wrong" if wrong else "right", "; ".join(wrong))


@pytest.mark.parametrize("name", FETCHED)
def test_units_are_fetched_as_often_as_planned(name: str, tmp_path: Path) -> None:
    result = examine(name, tmp_path, check)
    assert (result.outcome, result.why) == ("right", "")


@pytest.mark.slow
def test_units_of_every_architecture_are_fetched_as_often_as_planned(request: pytest.FixtureRequest) -> None:
    """Without --exhaustive, only the known exceptions are tested."""
    known = {name for names in OTHERWISE.values() for name in names}
    names = tiny_models.kinds() if request.config.getoption("--exhaustive") else known
    found = {name: every_architecture.in_a_child(name, check)[0].outcome for name in names}
    assert {name for name, outcome in found.items() if outcome == "wrong"} == known
    assert set(found.values()) <= {"right", "wrong", "transformers"}


def test_units_are_used_in_the_recorded_order_or_else_in_that_of_registration() -> None:
    """The recorded order runs h.0 twice; h.1 is frozen, and has a backward only with checkpointing."""
    weights = [
        Weight("embed.weight", (999, 64), unit="embed", uses=2),
        *(Weight(f"h.{n}.{w}", (64, 64), unit=f"h.{n}", block=True) for n in (0, 1) for w in "ab"),
        Weight("late.weight", (64, 64), unit="late"),
    ]
    shape = ModelShape(tuple(weights), layers=2, hidden=64, vocabulary=999, context=64)
    units = units_of(shape)

    def named(shape: ModelShape, *, checkpointing: bool) -> Order:
        forward, backward = orders(units, shape, checkpointing=checkpointing)
        return Order(*(tuple(units[unit].name for unit in order) for order in (forward, backward)))

    registered = Order(("embed", "h.0", "h.1", "late", "embed"), ("embed", "late", "h.1", "h.0"))
    assert named(shape, checkpointing=False) == registered
    assert with_order(shape, registered) == shape
    order = Order(("late", "embed", "h.1", "h.0", "h.1", "h.0", "embed"), ("embed", "h.0", "late", "h.0"))
    traced = with_order(shape, order)
    assert traced.order == order
    assert named(traced, checkpointing=False) == order
    assert named(traced, checkpointing=True) == Order(order.forward, (*order.backward, "h.1", "h.1"))
    assert [units[unit].name for unit in as_gradients_come(units, traced)] == ["h.0", "h.1", "embed", "late"]
