"""Tests of PEFT's adapters over an offloaded base, in a loop and in a Trainer: results have plain PEFT's bits."""

import copy
from collections.abc import Callable
from functools import cache, partial
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
from session_loop import HOMES, adapted, by_torch, clipped, one_cycle, opened, plain, trained
from torch import nn
from transformers import AutoModelForCausalLM, Trainer

import offload_trainer as ot
from offload_trainer.common.errors import UserError
from offload_trainer.run.export import export

pytestmark = pytest.mark.usefixtures("nothing_is_small")

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="the reference's bits are the CPU's")
@pytest.mark.parametrize(
    ("base", "home", "kind"),
    [("model", *loop) for loop in LOOPS] + [(base, home, kind) for base, kind in ROUNDED for home in HOMES],
)
def test_a_loop_has_the_bits_of_plain_peft(
    home: str, kind: str, base: str, folder: Path, references: Any, drive: Path, tmp_path: Path
) -> None:
    """Losses, norms, adapters, and exports with and without merging have plain PEFT's bits, over a rounded base too."""
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
    rounded = f"21 matrices of 3 blocks (model.layers.0 to model.layers.2) were rounded to {base}"
    assert (rounded in (tmp_path / "merged/README.md").read_text()) == (base != "model")
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_and_scales_in_a_bare_loop(kind: str, folder: Path, drive: Path) -> None:
    def losses(model: Any) -> list[float]:
        torch.manual_seed(7)
        model = peft.get_peft_model(model, copy.deepcopy(PROMPTS[kind]))
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
        found = []
        for row in rows(4):
            loss = model(**{name: tokens[None] for name, tokens in row.items()}).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    expected = losses(plain(folder))
    with loaded(folder, drive, freeze=FROZEN) as base:
        assert losses(base) == expected


@pytest.mark.slow
def test_adapters_that_change_or_copy_the_base_are_refused(folder: Path, drive: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"modules_to_save": ["lm_head"]}, "cannot be copied"),
        ({"init_lora_weights": "pissa"}, "q_proj.weight"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "cannot be copied"),
        ({}, "freeze"),  # of a base that was loaded with state
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


@pytest.mark.slow
def test_a_head_of_the_users(folder: Path, drive: Path, tmp_path: Path) -> None:
    inputs = rows(1)[0]["input_ids"][None]
    words = {"lr": 1e-2, "weight_decay": 0.1}

    def losses(model: nn.Module, optimizer: Any, clip: Any, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            loss = (model(inputs) - 1).square().mean()
            loss.backward()
            found += [loss.item(), float(clip(0.5))]
            optimizer.step()
            optimizer.zero_grad()
        return found

    reference = WithValue(plain(folder))
    usual = torch.optim.AdamW(reference.parameters(), fused=True, **words)
    expected = losses(reference, usual, partial(clipped, reference), 6)
    keys = {"freeze": [], "optimizer": "nvme"}
    for start in (0, 3):
        with opened(folder, drive, **keys) as session:
            model = WithValue(session.model)
            optimizer = session.adamw(model.parameters(), **words)
            assert session.resume(tmp_path / "saves") == start
            assert losses(model, optimizer, session.clip_grad_norm_, 3) == expected[2 * start : 2 * start + 6]
            assert session.trained[-2:] == ("beside.0", "beside.1")
            session.save(tmp_path / "saves")
    assert torch.equal(model.value.weight, reference.value.weight)
