"""Tests of PEFT's adapters over an offloaded base, in a loop and in a Trainer: results have plain PEFT's bits.

The last tests are of a quantised base: bytes, memory, stored forms, what is quantised or refused.
"""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from engine_bench import assert_same
from hf_trainers import Ours, arguments, loaded, model_folder, rows, told
from peft import PeftModel
from safetensors.torch import load_file
from seen_calls import calls_of
from session_loop import HOMES, adapted, by_torch, one_cycle, opened, plain, rounded, trained
from small_architectures import ARCHITECTURES, reference
from torch import nn
from transformers import AutoModelForCausalLM, Trainer

import offload_trainer as ot
from offload_trainer.common.errors import UserError
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.weights.placed import QuantisedUnit
from offload_trainer.plan.machine import read_machine
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.plan.tiered.layout import units_of
from offload_trainer.run.commands.plan import plan_elsewhere
from offload_trainer.run.export import export
from offload_trainer.run.planning import plan_run
from offload_trainer.session import api
from offload_trainer.settings import load_config

pytestmark = pytest.mark.usefixtures("nothing_is_small")
BITS_OF_A_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the reference's bits are the CPU's")

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"target_modules": "all-linear"},
    "DoRA": {"use_dora": True},
    "dropout": {"use_rslora": True, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj", "lm_head"]},
}
FROZEN = ["."]
ALL_BUT_NORMS = [r"^(?!.*norm)"]
ADAPTERS = "adapter_model.safetensors"


def adapters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


def with_norms(model: PeftModel) -> PeftModel:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.requires_grad_(True)
    return model


@pytest.fixture(scope="module")
def references(folder: Path) -> Callable[[str, str], tuple[list[Any], PeftModel]]:
    """Return the steps and the model of plain PEFT, for a kind of adapters and the base's format."""

    @cache
    def reference(kind: str, base: str) -> tuple[list[Any], PeftModel]:
        model = adapted(plain(folder, base), **KINDS[kind])
        return by_torch(model), model

    return reference


LOOPS = [("resident", "DoRA"), ("in RAM", "plain"), ("on the drive", "DoRA"), ("on the drive", "dropout")]
ROUNDED = [("nf4", "all"), ("int8", "DoRA")]


@BITS_OF_A_CPU
@pytest.mark.parametrize(
    ("base", "home", "kind"),
    [("model", *loop) for loop in LOOPS] + [(base, home, kind) for base, kind in ROUNDED for home in HOMES],
)
def test_a_loop_has_the_bits_of_plain_peft(
    home: str, kind: str, base: str, folder: Path, references: Any, drive: Path, tmp_path: Path
) -> None:
    expected, reference = references(kind, base)
    with opened(folder, drive, base, home=home) as session:
        model = adapted(session.model, **KINDS[kind])
        optimizer = session.adamw(model.parameters(), lr=1e-2)
        names = [name.removeprefix("base_model.model.") for name in adapters_of(model)]
        assert list(session.trained) == names
        assert list(trained(model, optimizer, one_cycle(optimizer), session=session)) == expected
        assert_same(adapters_of(model), adapters_of(reference))
        session.export(tmp_path / "merged", dtype="fp32")
        session.export(tmp_path / "base", dtype="fp32", merge=False)
        assert_same(dict(session.named_weights(merge=True)), dict(plain(tmp_path / "merged").named_parameters()))
        assert_same(dict(session.named_weights()), dict(plain(tmp_path / "base").named_parameters()))
        model.save_pretrained(tmp_path / "apart", save_embedding_layers=False)
        little = mock.patch("psutil.virtual_memory", return_value=SimpleNamespace(available=1000))
        with little, pytest.raises(ot.UserError, match=r"1 kB that are free: use session\.export"):
            session.model.state_dict()
    note = f"21 matrices of 3 blocks (model.layers.0 to model.layers.2) were rounded to {base}"
    assert (note in (tmp_path / "merged/README.md").read_text()) == (base != "model")
    apart = PeftModel.from_pretrained(plain(folder, base), tmp_path / "apart")
    inputs = rows(1)[0]["input_ids"][None]
    with torch.no_grad():
        assert torch.equal(apart(inputs).logits, reference.eval()(inputs).logits)
    assert_same(plain(tmp_path / "merged").state_dict(), apart.merge_and_unload().state_dict())
    assert_same(plain(tmp_path / "base").state_dict(), plain(folder, base).state_dict())


@pytest.mark.slow
def test_in_bf16_merged_weights_are_pefts_too(folder: Path, drive: Path, tmp_path: Path) -> None:
    """A merge into bf16 rounds the sum with fp32 adapters once; adapters of embeddings are included."""
    changes = {"target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"], "init_lora_weights": False}
    with opened(folder, drive, dtype="bf16") as session:
        adapted(session.model, **changes)
        session.export(tmp_path / "merged", dtype="bf16")
        streamed = dict(session.named_weights(merge=True))
    reference = adapted(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), **changes)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    assert_same(merged.state_dict(), reference.merge_and_unload().state_dict())
    assert_same(streamed, dict(merged.named_parameters()))


@pytest.mark.slow
@pytest.mark.parametrize(("base", "keys"), [("model", {}), ("nf4", {"overlap": "forward"})])
def test_resumed_in_another_place(base: str, keys: dict[str, Any], folder: Path, drive: Path, tmp_path: Path) -> None:
    """Norms that are offloaded share one optimizer with the adapters, which are new when it resumes."""
    reference = with_norms(adapted(plain(folder, base)))
    expected = by_torch(reference)
    with opened(folder, drive, base, freeze=ALL_BUT_NORMS, **keys) as session:
        model = with_norms(adapted(session.model))
        optimizer = session.adamw(lr=1e-2)
        scheduler = one_cycle(optimizer)
        assert list(trained(model, optimizer, scheduler, session=session, steps=5)) == expected[:5]
        session.save(tmp_path / "saves", scheduler)
    with opened(folder, drive, base, home="in RAM", freeze=ALL_BUT_NORMS, **keys) as session:
        model = with_norms(adapted(session.model, init_lora_weights=False))
        optimizer = session.adamw()  # all trainable parameters
        scheduler = one_cycle(optimizer)
        assert session.resume(tmp_path / "saves", scheduler) == 5
        assert list(trained(model, optimizer, scheduler, session=session, start=5)) == expected[5:]
        assert_same(adapters_of(model), adapters_of(reference))
        assert sum("norm" in name for name in session.trained) == 7
        session.export(tmp_path / "merged", dtype="fp32")
    assert_same(plain(tmp_path / "merged").state_dict(), reference.merge_and_unload().state_dict())


@pytest.mark.slow
def test_a_save_holds_adapters_and_other_ones_refuse_it(folder: Path, drive: Path, tmp_path: Path) -> None:
    """It holds adapters by name and no frozen base, so the export command and another base refuse it too."""
    save, other = tmp_path / "save", model_folder(tmp_path / "other", initializer_range=0.03)
    with opened(folder, drive) as session:
        model = adapted(session.model)
        optimizer = session.adamw(model.parameters(), lr=1e-2)
        list(trained(model, optimizer, one_cycle(optimizer), session=session, steps=2))
        session.save(save)
    held = {path.stem: load_file(path) for path in (save / "resident").iterdir()}
    assert held.keys() == {"weight", "step", "exp_avg", "exp_avg_sq"}
    assert all(len(tensors) == 12 for tensors in held.values())
    assert {float(step) for step in held["step"].values()} == {2.0}
    assert "model.layers.0.self_attn.q_proj.lora_A.default.weight" in held["weight"]
    assert sum(path.stat().st_size for path in save.rglob("*.safetensors")) < 50_000
    with pytest.raises(ot.UserError, match="beside the model's weights"):
        export(save, tmp_path / "out", dtype="fp32", check=False)
    cases: tuple[tuple[Path, str, dict[str, Any] | None, str], ...] = (
        (folder, "model", {"r": 8}, r"lora_A\.default\.weight: it has .*4, 64.*, this run .*8, 64"),
        (folder, "model", None, "it has .*, this run none"),
        (other, "model", {}, "made with other weights"),
        (folder, "nf4", {}, "another dtype or base"),
    )
    for place, base, changes, message in cases:
        with opened(place, drive, base, freeze=ALL_BUT_NORMS if changes is None else FROZEN) as session:
            model = session.model if changes is None else adapted(session.model, **changes)
            optimizer = session.adamw(model.parameters())
            before = adapters_of(model)
            with pytest.raises(ot.UserError, match=message):
                session.resume(save)
            assert_same(adapters_of(model), before)
            assert not any(optimizer.state.values())


def test_a_step_updates_both_or_neither(folder: Path, drive: Path) -> None:
    batch = {key: value[None] for key, value in rows(1)[0].items()}
    with opened(folder, drive, freeze=ALL_BUT_NORMS) as session:
        model = with_norms(adapted(session.model))
        optimizer = session.adamw(model.parameters(), lr=1e-2)
        before, masters = adapters_of(model), {n: m.clone() for n, m in session.named_masters()}

        def backward(factor: float = 1.0) -> None:
            with session.micro_batch():
                (model(**batch).loss * factor).backward()

        def unchanged() -> bool:
            same = all(torch.equal(m, masters[n]) for n, m in session.named_masters())
            return same and all(torch.equal(p, before[n]) for n, p in adapters_of(model).items())

        backward()
        adapter = next(p for name, p in model.named_parameters() if "lora_B" in name)
        assert adapter.grad is not None
        adapter.grad[0, 0] = torch.nan  # only an adapter has a NaN
        with pytest.raises(ot.NonFiniteGradient):
            optimizer.step()
        assert unchanged()
        optimizer.zero_grad()
        assert adapter.grad is None
        optimizer.step()
        assert unchanged()
        backward()
        session.clip_grad_norm_(1e-3)
        adapter.grad.mul_(2)
        for refused in (optimizer.step, lambda: session.clip_grad_norm_(1.0)):
            with pytest.raises(ot.UserError, match="after clip_grad_norm_"):
                refused()
        optimizer.zero_grad()
        backward()
        optimizer.step()
        assert adapter.grad is None
        assert not unchanged()


@pytest.mark.slow
def test_other_trained_parameters_are_counted(folder: Path, drive: Path, tmp_path: Path) -> None:
    """adamw() counts values, gradients and two moments of extra parameters, and refuses those that do not fit."""
    with opened(folder, drive) as session:
        planned = session.plan
        assert not any(item.bytes for item in planned.items if item.name.startswith(("state", "gradients")))
        model = adapted(session.model)
        size = sum(p.nbytes for name, p in model.named_parameters() if "lora_" in name)
        session.adamw(model.parameters())
        assert session.plan.tiers["ram"]["need"] == planned.tiers["ram"]["need"] + 4 * size
        assert sum(item.bytes for item in session.plan.items if item.name == "adapters") == 4 * size
    with opened(folder, drive) as session:
        large = nn.Parameter(torch.empty(1, device="meta").expand(1 << 44))
        with pytest.raises(ot.UserError, match=r"for the other trained parameters this does not fit: ram needs"):
            session.adamw([large])
        with pytest.raises(ot.UserError, match="nothing to train"):
            session.adamw(session.model.parameters())
        adapted(session.model, lora_bias=True, target_modules=["q_proj"])
        with pytest.raises(ot.UserError, match=r"cannot be merged .*lora_A.*merge=False"):
            session.export(tmp_path / "out")


SAVED: dict[str, dict[str, Any]] = {  # each is saved, loaded by PEFT, and resumed by the Trainer
    "DoRA": {"use_dora": True},
    "tokens": {"trainable_token_indices": {"embed_tokens": [1, 5, 7]}},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "bias": {"bias": "all"},
}


def short(trainer_of: Any, model: Any, output: Path, **changes: Any) -> Trainer:
    words = {"eval_strategy": "no", "max_steps": 4, "save_steps": 2} | changes
    return trainer_of(model, arguments(output, **words), train_dataset=rows(48))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAVED)
def test_other_adapters_are_trained_saved_and_resumed(kind: str, folder: Path, drive: Path, tmp_path: Path) -> None:
    biases = kind == "bias"
    folder = model_folder(tmp_path / "biases", attention_bias=True) if biases else folder
    keys = {"freeze": [r"^(?!.*bias)"] if biases else FROZEN}
    words = {"lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj", "down_proj"]} | SAVED[kind]
    stock = short(Trainer, adapted(plain(folder), **words), tmp_path / "stock")
    stock.train()
    theirs = load_file(tmp_path / "stock/checkpoint-4" / ADAPTERS)
    for home, resumed in (("drive", {}), ("resident", {"resume_from_checkpoint": str(tmp_path / "ours/checkpoint-2")})):
        with loaded(folder, drive, home=home, **keys) as base:
            trainer = short(Ours, adapted(base, **words), tmp_path / "ours")
            trainer.train(**resumed)
            assert told(trainer)[:-1] == told(stock)[:-1]
        assert_same(load_file(tmp_path / "ours/checkpoint-4" / ADAPTERS), theirs)
    if not biases:
        with loaded(folder, drive) as base:
            again = PeftModel.from_pretrained(base, tmp_path / "ours/checkpoint-4").eval()
            inputs = rows(1)[0]["input_ids"][None]
            with torch.no_grad():
                assert torch.equal(again(inputs).logits, stock.model.eval()(inputs).logits)


PROMPTS: dict[str, peft.PeftConfig] = {  # adapters that are no LoRA
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "p-tuning": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=32),
    "IA3": peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}


@BITS_OF_A_CPU
@pytest.mark.slow
@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_and_scales_in_a_bare_loop(kind: str, folder: Path, drive: Path) -> None:
    def steps(model: Any) -> list[Any]:
        torch.manual_seed(7)
        model = peft.get_peft_model(model, copy.deepcopy(PROMPTS[kind]))
        return by_torch(model, parameters=[one for one in model.parameters() if one.requires_grad], steps=3)

    expected = steps(plain(folder))
    with loaded(folder, drive, freeze=FROZEN) as base:
        assert steps(base) == expected


@pytest.mark.slow
def test_adapters_that_change_or_copy_the_base_are_refused(folder: Path, drive: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"modules_to_save": ["lm_head"]}, "cannot be copied"),
        ({"init_lora_weights": "pissa"}, "q_proj.weight"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "cannot be copied"),
        ({}, "freeze"),  # this base was loaded with state
    ):
        with loaded(folder, drive, freeze=FROZEN if changes else []) as base, pytest.raises(UserError, match=message):
            short(Ours, adapted(base, **changes), tmp_path)


class WithValue(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model, self.value = model, nn.Linear(64, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.value(self.model(inputs, output_hidden_states=True).hidden_states[-1])


@BITS_OF_A_CPU
@pytest.mark.slow
def test_a_head_of_the_users(folder: Path, drive: Path, tmp_path: Path) -> None:
    inputs = rows(1)[0]["input_ids"][None]

    def loss_at(model: nn.Module, _: int) -> torch.Tensor:
        return (model(inputs) - 1).square().mean()

    reference = WithValue(plain(folder))
    expected = by_torch(reference, loss_at, steps=6)
    for start in (0, 3):
        with opened(folder, drive, freeze=[]) as session:
            model = WithValue(session.model)
            optimizer = session.adamw(model.parameters(), lr=1e-2)
            scheduler = one_cycle(optimizer)
            assert session.resume(tmp_path / "saves", scheduler) == start
            steps = trained(model, optimizer, scheduler, loss_at, session=session, start=start, steps=start + 3)
            assert list(steps) == expected[start : start + 3]
            assert session.trained[-2:] == ("beside.0", "beside.1")
            session.save(tmp_path / "saves", scheduler)
    assert torch.equal(model.value.weight, reference.value.weight)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose blocks are large enough that the padding of their stored bytes is not."""
    return model_folder(tmp_path_factory.mktemp("model"), hidden_size=256, intermediate_size=512)


@BITS_OF_A_CPU
@pytest.mark.slow
@pytest.mark.parametrize(("base", "dtype", "most"), [("nf4", "fp32", 0.56), ("int8", "bf16", 1.03)])
def test_bytes_of_a_pass(
    base: str, dtype: str, most: float, wide: Path, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass reads each block once, in at most `most` bytes a parameter, norms included, as the plan counts."""
    with opened(wide, drive, base, dtype=dtype, weight_buffers=1, gradient_accumulation_steps=1) as session:
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


@BITS_OF_A_CPU
@pytest.mark.slow
@pytest.mark.parametrize(("base", "home"), [("model", "in RAM"), ("int8", "in RAM"), ("nf4", "on the drive")])
def test_memory_is_the_plans(home: str, base: str, wide: Path, drive: Path) -> None:
    with opened(wide, drive, base, home=home) as session:
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


@BITS_OF_A_CPU
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
    generator, expected = torch.Generator().manual_seed(0), {}
    for place in unit.places:
        weight = place.weight
        values = torch.randn(weight.shape, generator=generator).to(dtype)
        if "experts" in weight.name:
            values[0] = 0
        values = values.reshape(-1)
        start, part = form.stored(place.start, values)
        assert not stored[start : start + part.numel()].any()
        stored[start : start + part.numel()] = part
        expected[weight.name] = rounded(values, base).to(dtype) if weight.quantised else values
    for _ in range(2):  # rounded weights of a save are loaded unchanged
        memory = torch.full((unit.elements,), torch.nan, dtype=dtype)
        form.dequantise(stored, memory)
        for place in unit.places:
            weight = place.weight
            used = memory[place.start : place.start + weight.numel]
            assert torch.equal(used, expected[weight.name]), weight.name
            read = form.get(place.start, weight.numel, lambda start, count: stored[start : start + count].clone())
            assert torch.equal(read, expected[weight.name]), weight.name
            start, part = form.stored(place.start, used)
            stored[start : start + part.numel()] = part


_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
QUANTISED = {
    "gpt2": {"c_attn", "c_proj", "c_fc"},
    "mixtral, experts": {*_ATTENTION, "gate_up_proj", "down_proj"},
    "falcon-h1, whose head reads a scale of the body": {
        *_ATTENTION,
        *("in_proj", "out_proj", "gate_proj", "up_proj", "down_proj"),
    },
}


@BITS_OF_A_CPU
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


@BITS_OF_A_CPU
def test_a_quantised_weight_cannot_be_written(wide: Path, drive: Path) -> None:
    with opened(wide, drive, "nf4") as session:
        assert session.base == "nf4"
        weight = session.model.model.layers[0].self_attn.q_proj.weight
        assert torch.equal(weight.detach().clone(), session.weight(weight.weight))
        with pytest.raises(ot.UserError, match=r"q_proj\.weight"), torch.no_grad():
            weight.mul_(2)
        other = {"layers.0.self_attn.q_proj.weight": torch.zeros(256, 256)}
        with pytest.raises((ot.UserError, RuntimeError), match=r"q_proj\.weight"):
            session.model.model.load_state_dict(other, strict=False)


@BITS_OF_A_CPU
@pytest.mark.slow
def test_a_base_that_cannot_be_quantised_is_refused(wide: Path, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"^base=nf4 quantises frozen matrices of the model's blocks, and none is frozen: add freeze="
    for freeze in ([], ["embed_tokens"]):
        with pytest.raises(ot.UserError, match=said):
            ot.load(wide, nvme=drive, freeze=freeze, base="nf4", say=lambda _: None)
    here = api.machine_here
    with monkeypatch.context() as patch:
        patch.setattr(api, "machine_here", lambda *given: replace(here(*given), packages=()))
        said = r"base=\"?nf4\"? needs bitsandbytes, which is not installed: pip install 'bitsandbytes>="
        with pytest.raises(ot.UserError, match=said):
            ot.load(wide, nvme=drive, freeze=["."], base="nf4", say=lambda _: None)
    words = ["--model", str(wide), "model.freeze=['.']", "model.base=nf4"]
    with pytest.raises(UserError, match=r"does not train: use the library"):
        plan_run(load_config(words))
    for model in (str(wide), "gpt2"):
        with pytest.raises(UserError, match=r"model\.base=nf4 is for adapters"):
            plan_elsewhere(load_config(["--model", model, "model.base=nf4"]), read_machine("h200"))
    with pytest.raises(UserError, match=r"model\.base=nf4 belongs to --engine tiered, not to deepspeed: leave it out"):
        load_config([*words, "--engine", "deepspeed"])
    with pytest.raises(ot.UserError, match=r"ot\.load takes it"):
        ot.offload(torch.nn.Linear(2, 2), base="nf4")
