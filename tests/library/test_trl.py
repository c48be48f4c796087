"""Tests of TRL's trainers over an offloaded model, compared with the stock ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from engine_bench import assert_same
from hf_trainers import HOMES, loaded, told, weights
from peft import LoraConfig
from sample_chats import TEMPLATE, chat_tokenizer, chats, preferences, prompts
from session_loop import plain
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from offload_trainer import offload
from offload_trainer.common.errors import UserError
from offload_trainer.hf import Offloaded, attach

pytestmark = pytest.mark.slow


GENERATES = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8, "beta": 0.0}
REFERENCE = {"precompute_ref_log_probs": True}
# The data and the arguments of a kind's trainer
KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "SFT": (chats, {}),
    "DPO": (preferences, REFERENCE),
    "KTO": (preferences, REFERENCE),
    "GRPO": (prompts, GENERATES | {"num_iterations": 2}),
    "RLOO": (prompts, GENERATES | {"num_iterations": 2}),
    "Reward": (preferences, {"save_steps": 2}),
}


def words(output: Path, **changes: Any) -> dict[str, Any]:
    """Return arguments that make a run short and quiet, without TRL's default bf16."""
    return {
        "output_dir": str(output),
        "bf16": False,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
    } | changes


def trainer_of(kind: str, model: Any, output: Path, *, ours: bool, more: Any = None, **changes: Any) -> Any:
    """Return the stock trainer, or with `ours` the offloaded one; `more`: further words for it."""
    stock, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    data, arguments = KINDS[kind]
    made = type("OffloadedTrainer", (Offloaded, stock), {}) if ours else stock
    given = {"train_dataset": data(), "processing_class": chat_tokenizer()} | (more or {})
    if data is prompts:
        given["reward_funcs"] = lambda completions, **_: [float(len(set(one[0]["content"]))) for one in completions]
    return made(model, args=config(**words(output, **(arguments | changes))), **given)


def losses(trainer: Any) -> list[tuple[float, float]]:
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def assert_learned(trainer: Any) -> None:
    """Check that at least every other step had a gradient; RLOO clips completions that it uses a second time."""
    norms = [norm for _, norm in losses(trainer)]
    assert sum(norm > 0 for norm in norms) >= len(norms) / 2 > 0


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "GRPO", "RLOO"])
def test_logs_and_weights_are_the_stock_trainers(kind: str, folder: Path, drive: Path, tmp_path: Path) -> None:
    """SFT's loss reads the head's weight without calling it; GRPO and RLOO use each completion for two steps."""
    stock = trainer_of(kind, plain(folder), tmp_path / "stock", ours=False)
    stock.train()
    with loaded(folder, drive, seq_len=64, micro_batch_size=4) as model:
        trainer = trainer_of(kind, model, tmp_path / "ours", ours=True)
        trainer.train()
        assert told(trainer) == told(stock)
        assert_learned(trainer)
        trainer.save_model(str(tmp_path / "final"))
    assert_same(weights(tmp_path / "final"), dict(stock.model.state_dict()))
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "final").chat_template == TEMPLATE


@pytest.mark.parametrize(
    ("kind", "changes"), [("DPO", {"precompute_ref_log_probs": False}), ("GRPO", {"beta": 0.1, "num_iterations": 1})]
)
def test_adapters(kind: str, changes: dict[str, Any], folder: Path, drive: Path, tmp_path: Path) -> None:
    """The base model is the reference in each step, for GRPO in a KL term."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    words = {"more": {"peft_config": lora}, "learning_rate": 1e-2, **changes}
    torch.manual_seed(0)  # TRL 1.10 initialises adapters before it seeds
    stock = trainer_of(kind, plain(folder), tmp_path / "stock", ours=False, **words)
    stock.train()
    with loaded(folder, drive, seq_len=64, micro_batch_size=4, freeze=["."]) as model:
        torch.manual_seed(0)
        trainer = trainer_of(kind, model, tmp_path / "ours", ours=True, **words)
        trainer.train()
        assert told(trainer) == told(stock)
        assert_learned(trainer)


@pytest.mark.usefixtures("nothing_is_small")
def test_reward_model(folder: Path, drive: Path, tmp_path: Path) -> None:
    torch.manual_seed(2)
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")

    def read(place: str) -> Any:
        return AutoModelForSequenceClassification.from_pretrained(tmp_path / place, num_labels=1, dtype=torch.float32)

    stock = trainer_of("Reward", read("model"), tmp_path / "stock", ours=False)
    stock.train()
    keys: dict[str, Any] = {"nvme": drive, "say": lambda _: None, "seq_len": 64, "page_size": 8192, "kernel": "torch"}
    for resume in (None, str(tmp_path / "ours/checkpoint-2")):
        with offload(read("model"), micro_batch_size=4, **keys, **HOMES["drive"]) as session:
            trainer = trainer_of("Reward", attach(session), tmp_path / "ours", ours=True)
            trainer.train(resume_from_checkpoint=resume)
            assert losses(trainer) == losses(stock)
            assert_learned(trainer)
            trainer.save_model(str(tmp_path / "final"))
    assert_same(weights(tmp_path / "final"), dict(stock.model.state_dict()))
    tokens = chat_tokenizer()("What follows one?", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(read("final").eval()(tokens).logits, stock.model.eval()(tokens).logits)
    # An example is a pair of rows.
    with offload(read("model"), micro_batch_size=2, **keys, **HOMES["drive"]) as session:
        model = attach(session)
        with pytest.raises(UserError, match=r"4 rows in a micro-batch, and the plan counts 2"):
            trainer_of("Reward", model, tmp_path, ours=True)


def test_arguments_that_are_refused(untrained: Any, tmp_path: Path) -> None:
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("DPO", {"precompute_ref_log_probs": False}, "precompute_ref_log_probs=True"),
        ("DPO", {"sync_ref_model": True}, "sync_ref_model"),
        ("KTO", {"precompute_ref_log_probs": False}, "precompute_ref_log_probs=True"),
        ("GRPO", {"beta": 0.1}, r"beta=0\.1: the reference would be a second model in memory: beta=0\.0, or adapters"),
        ("GRPO", {"use_vllm": True}, r"use_vllm=True: .*rollout_func sends session\.named_weights\(\)"),
        ("GRPO", {"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching=True: .*thread"),
        ("GRPO", {"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32=True: it converts offloaded weights in place"),
    ]
    for kind, changes, message in refused:
        with pytest.raises((UserError, ValueError), match=message):
            trainer_of(kind, untrained, tmp_path, ours=True, **changes)
