"""Tests of a quantised base: bytes, memory, stored forms, what is quantised or refused; test_peft.py trains over it."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_trainers import model_folder, rows
from seen_calls import calls_of
from session_loop import adapted, opened, rounded
from small_architectures import ARCHITECTURES, reference

import offload_trainer as ot
from offload_trainer.common.errors import UserError
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.weights.placed import QuantisedUnit
from offload_trainer.plan.machine import read_machine
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.plan.tiered.layout import units_of
from offload_trainer.run.commands.plan import plan_elsewhere
from offload_trainer.run.planning import plan_run
from offload_trainer.session import api
from offload_trainer.settings import load_config

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the reference's bits are the CPU's"),
    pytest.mark.usefixtures("nothing_is_small"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose blocks are large enough that the padding of their stored bytes is not."""
    return model_folder(tmp_path_factory.mktemp("model"), hidden_size=256, intermediate_size=512)


@pytest.mark.slow
@pytest.mark.parametrize(("base", "dtype", "most"), [("nf4", "fp32", 0.56), ("int8", "bf16", 1.03)])
def test_bytes_of_a_pass(
    base: str, dtype: str, most: float, folder: Path, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass reads each block once, in at most `most` bytes a parameter, norms included, as the plan counts."""
    with opened(folder, drive, base, dtype=dtype, weight_buffers=1, gradient_accumulation_steps=1) as session:
        model = adapted(session.model)
        batch = {key: value[None] for key, value in rows(1)[0].items()}
        read = calls_of(monkeypatch.setattr, UnitStore, "read", lambda _, unit, start, buffer: (unit, buffer.nbytes))
        with session.micro_batch():
            model(**batch).loss.backward()
        monkeypatch.undo()
        first, *_, last = blocks = [unit for unit in session._offloaded.units if unit.block]
        times = Counter(unit for unit, _ in read)
        # With one buffer, the last block stays on the device between the forward and the backward.
        assert {unit: times[unit.index] for unit in blocks} == dict.fromkeys(blocks, 2) | {last: 1}
        parameters = sum(place.weight.numel for place in first.places)
        assert 0.9 * most < sum(size for unit, size in read if unit == first.index) / 2 / parameters <= most
        planned = [one for one in session.plan.traffic if one.phase != "update" and one.place == str(drive)]
        size = session._offloaded.weights.dtype.itemsize
        others = sum(unit.stored_bytes(size) for unit in session._offloaded.units if not unit.block)
        assert 0 <= sum(one.read for one in planned) - sum(size for _, size in read) <= others


@pytest.mark.slow
@pytest.mark.parametrize(("base", "home"), [("model", "in RAM"), ("int8", "in RAM"), ("nf4", "on the drive")])
def test_memory_is_the_plans(home: str, base: str, folder: Path, drive: Path) -> None:
    with opened(folder, drive, base, home=home) as session:
        items = {(item.tier, item.name): item.bytes for item in session.plan.items}
        model, tier = session._offloaded, {"on the drive": str(drive)}.get(home, "ram")
        size = sum(unit.stored_bytes(4) for unit in model.units)
        held = sum(item.bytes for item in session.plan.items if item.name in ("weights", "small weights"))
        assert size == held
        assert sum(item.bytes for item in session.plan.items if item.name == "weights" and item.tier == tier) == size
        slots = model.stream._slots if model.stream else []
        assert items.get(("ram", "weights in use"), 0) == sum(slot.buffer.nbytes for slot in slots)
        assert items.get(("ram", "quantised weights in use"), 0) == sum(slot.packed.nbytes for slot in slots)
        assert ("ram", "dequantisation") in items or base == "model"
        elements = sum(unit.elements for unit in model.units)
        assert (size < 2 * elements) == (base != "model")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_stored_forms_of_sizes_that_do_not_divide(base: str, dtype: torch.dtype) -> None:
    """Odd matrices, blocks of zeros, stacked experts, biases and trained weights come back as bitsandbytes has them."""
    words: dict[str, Any] = {"unit": "h.0", "block": True}
    shape = ModelShape(
        weights=(
            Weight("h.0.odd.weight", (33, 7), trainable=False, quantised=base, **words),
            Weight("h.0.odd.bias", (33,), trainable=False, products=0, **words),
            Weight("h.0.norm.weight", (300,), products=0, **words),
            Weight("h.0.experts.up", (3, 20, 50), trainable=False, quantised=base, **words),
            Weight("h.0.large.weight", (1030, 1024), trainable=False, quantised=base, **words),
        ),
        layers=1,
        hidden=7,
        vocabulary=10,
        context=8,
    )
    (unit,) = units_of(shape)
    form = QuantisedUnit(unit, dtype)
    stored = torch.zeros(unit.stored_bytes(dtype.itemsize), dtype=torch.uint8).view(dtype)
    generator = torch.Generator().manual_seed(0)
    given = {}
    for place in unit.places:
        values = torch.randn(place.weight.shape, generator=generator).to(dtype)
        if "experts" in place.weight.name:
            values[0] = 0
        given[place.weight.name] = values
        start, part = form.stored(place.start, values.reshape(-1))
        assert not stored[start : start + part.numel()].any()
        stored[start : start + part.numel()] = part
    memory = torch.full((unit.elements,), torch.nan, dtype=dtype)
    form.dequantise(stored, memory)
    for place in unit.places:
        weight, values = place.weight, given[place.weight.name]
        expected = values.reshape(-1)
        if weight.quantised:
            expected = rounded(expected, base).to(dtype)
        used = memory[place.start : place.start + weight.numel]
        assert torch.equal(used, expected), weight.name
        read = form.get(place.start, weight.numel, lambda start, count: stored[start : start + count].clone())
        assert torch.equal(read, expected), weight.name
        start, part = form.stored(place.start, used)
        stored[start : start + part.numel()] = part
    again = torch.full((unit.elements,), torch.nan, dtype=dtype)
    form.dequantise(stored, again)  # rounded weights of a save are loaded unchanged
    for place in unit.places:
        its = slice(place.start, place.start + place.weight.numel)
        assert torch.equal(again[its], memory[its]), place.weight.name


_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
QUANTISED = {
    "gpt2": {"c_attn", "c_proj", "c_fc"},
    "mixtral, experts": {*_ATTENTION, "gate_up_proj", "down_proj"},
    "falcon-h1, whose head reads a scale of the body": {
        *_ATTENTION,
        *("in_proj", "out_proj", "gate_proj", "up_proj", "down_proj"),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", QUANTISED)
def test_linear_layers_and_experts_are_quantised(kind: str, drive: Path, tmp_path: Path) -> None:
    """Routers, convolutions, biases, embeddings and heads are not; logits are those of the model in memory."""
    model = reference(ARCHITECTURES[kind]).eval()
    model.save_pretrained(tmp_path)
    with opened(tmp_path, drive, "nf4", seq_len=16, attention="eager") as session:
        found = set()
        for name, weight in session.named_weights():
            parameter = model.get_parameter(name)
            if not torch.equal(weight, parameter):
                found.add(name.removesuffix(".weight").rpartition(".")[2])
                assert torch.equal(weight, rounded(parameter, "nf4")), name
                parameter.data = weight
        assert found == QUANTISED[kind]
        inputs = torch.arange(2 * 16).view(2, 16) % 97
        with torch.no_grad():
            assert torch.equal(session.model.eval()(inputs).logits, model(inputs).logits)


def test_a_quantised_weight_cannot_be_written(folder: Path, drive: Path) -> None:
    with opened(folder, drive, "nf4") as session:
        assert session.base == "nf4"
        weight = session.model.model.layers[0].self_attn.q_proj.weight
        assert torch.equal(weight.detach().clone(), session.weight(weight.weight))
        with pytest.raises(ot.UserError, match=r"q_proj\.weight"), torch.no_grad():
            weight.mul_(2)
        other = {"layers.0.self_attn.q_proj.weight": torch.zeros(256, 256)}
        with pytest.raises((ot.UserError, RuntimeError), match=r"q_proj\.weight"):
            session.model.model.load_state_dict(other, strict=False)


@pytest.mark.slow
def test_a_base_that_cannot_be_quantised_is_refused(folder: Path, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"^base=nf4 quantises frozen matrices of the model's blocks, and none is frozen: add freeze="
    for freeze in ([], ["embed_tokens"]):
        with pytest.raises(ot.UserError, match=said):
            ot.load(folder, nvme=drive, freeze=freeze, base="nf4", say=lambda _: None)
    here = api.machine_here
    with monkeypatch.context() as patch:
        patch.setattr(api, "machine_here", lambda *given: replace(here(*given), packages=()))
        said = r"base=\"?nf4\"? needs bitsandbytes, which is not installed: pip install 'bitsandbytes>="
        with pytest.raises(ot.UserError, match=said):
            ot.load(folder, nvme=drive, freeze=["."], base="nf4", say=lambda _: None)
    words = ["--model", str(folder), "model.freeze=['.']", "model.base=nf4"]
    with pytest.raises(UserError, match=r"does not train: use the library"):
        plan_run(load_config(words))
    for model in (str(folder), "gpt2"):
        with pytest.raises(UserError, match=r"model\.base=nf4 is for adapters"):
            plan_elsewhere(load_config(["--model", model, "model.base=nf4"]), read_machine("h200"))
    with pytest.raises(UserError, match=r"model\.base=nf4 belongs to --engine tiered, not to deepspeed: leave it out"):
        load_config([*words, "--engine", "deepspeed"])
    with pytest.raises(ot.UserError, match=r"ot\.load takes it"):
        ot.offload(torch.nn.Linear(2, 2), base="nf4")
