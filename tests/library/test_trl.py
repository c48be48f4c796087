"""Tests of TRL's trainers over an offloaded model: SFT on chats, and DPO, compared with the stock ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compare_trainers import assert_same, told, weights
from hf_trainers import HOMES, loaded, model_folder
from peft import LoraConfig
from sample_chats import chat_tokenizer, chats, preferences
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from offload_trainer.errors import UserError
from offload_trainer.hf import Offloaded


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return chat_tokenizer()


class SFT(Offloaded, SFTTrainer):
    pass


class DPO(Offloaded, DPOTrainer):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), vocab_size=272, max_position_embeddings=128, pad_token_id=0)


def words(output: Path, **changes: Any) -> dict[str, Any]:
    """Return arguments that make a run short and quiet, without TRL's default bf16."""
    return {
        "output_dir": str(output),
        "bf16": False,
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
    } | changes


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_loads(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """Check that transformers loads the model with the logits of `model`, and the tokenizer next to it."""
    tokens = tokenizer("What follows one?", return_tensors="pt").input_ids
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model.eval()(tokens).logits)
    assert PreTrainedTokenizerFast.from_pretrained(folder).chat_template == tokenizer.chat_template


@pytest.mark.parametrize("home", HOMES)
def test_sft(home: str, folder: Path, drive: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """SFT matches the stock trainer, although its loss reads the head's weight without calling the head."""
    rate = {"learning_rate": 1e-3}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = SFTConfig(**words(tmp_path / "stock", **rate))
    stock = SFTTrainer(model, config, train_dataset=chats(), processing_class=tokenizer)
    stock.train()
    with loaded(folder, drive, home=home, seq_len=64) as model:
        config = SFTConfig(**words(tmp_path / "ours", **rate))
        trainer = SFT(model, config, train_dataset=chats(), processing_class=tokenizer)
        trainer.train()
        assert told(trainer) == told(stock)
        assert losses(trainer)[-1] < losses(trainer)[0]
        trainer.save_model(str(tmp_path / "final"))
        assert_loads(tmp_path / "final", model, tokenizer)
    assert_same(weights(tmp_path / "final"), dict(stock.model.state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize("home", HOMES)
def test_dpo(home: str, folder: Path, drive: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """DPO matches the stock trainer, with reference log-probabilities computed before the first step."""
    more = {"learning_rate": 1e-3, "precompute_ref_log_probs": True}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = DPOConfig(**words(tmp_path / "stock", **more))
    stock = DPOTrainer(model, args=config, train_dataset=preferences(), processing_class=tokenizer)
    stock.train()
    with loaded(folder, drive, home=home, seq_len=64, micro_batch_size=4) as model:
        config = DPOConfig(**words(tmp_path / "ours", **more))
        trainer = DPO(model, args=config, train_dataset=preferences(), processing_class=tokenizer)
        trainer.train()
        assert told(trainer) == told(stock)
        assert losses(trainer)[-1] < losses(trainer)[0]
        trainer.save_model(str(tmp_path / "final"))
        assert_loads(tmp_path / "final", model, tokenizer)
    assert_same(weights(tmp_path / "final"), dict(stock.model.state_dict()))


@pytest.mark.slow
def test_dpo_of_adapters(folder: Path, drive: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """DPO with adapters matches the stock trainer, with the base model as the reference in each step."""
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    given = {"train_dataset": preferences(), "processing_class": tokenizer, "peft_config": adapters}
    torch.manual_seed(0)  # TRL 1.10 initialises adapters before it seeds
    stock = DPOTrainer(model, args=DPOConfig(**words(tmp_path / "stock", learning_rate=1e-2)), **given)
    stock.train()
    with loaded(folder, drive, seq_len=64, micro_batch_size=4, freeze=["."]) as model:
        torch.manual_seed(0)
        trainer = DPO(model, args=DPOConfig(**words(tmp_path / "ours", learning_rate=1e-2)), **given)
        trainer.train()
        assert told(trainer) == told(stock)
        assert losses(trainer)[-1] < losses(trainer)[0]


@pytest.mark.slow
def test_a_reference_model_in_memory_is_refused(
    folder: Path, drive: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with loaded(folder, drive) as model, pytest.raises(UserError, match=r"precompute_ref_log_probs=True"):
        DPO(model, args=DPOConfig(**words(tmp_path)), train_dataset=preferences(), processing_class=tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync_ref_model", "IterableDataset", "vision"])
def test_modes_that_need_the_reference_in_memory_are_refused(
    mode: str, folder: Path, drive: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """The three modes that cannot precompute the reference are refused by name, with it or without it."""
    data: Any = preferences()
    if mode == "IterableDataset":
        data = data.to_iterable_dataset()
    if mode == "vision":
        data = data.add_column("images", [[] for _ in data])
    changes = {"sync_ref_model": True} if mode == "sync_ref_model" else {}
    with loaded(folder, drive, seq_len=64, micro_batch_size=4) as model:
        for precompute in (False, True):
            config = DPOConfig(**words(tmp_path, precompute_ref_log_probs=precompute, **changes))
            with pytest.raises((UserError, ValueError), match=mode if precompute else "precompute_ref_log_probs=True"):
                DPO(model, args=config, train_dataset=data, processing_class=tokenizer)
