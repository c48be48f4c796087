"""Tests of TRL's trainers for rewards over an offloaded model, compared with the stock ones: KTO, reward models, GRPO,
RLOO.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compare_trainers import assert_same, told, weights
from hf_trainers import HOMES, loaded, model_folder
from peft import LoraConfig
from sample_chats import chat_tokenizer, labelled, preferences, prompts
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from trl import (
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)

from offload_trainer import offload
from offload_trainer.errors import UserError
from offload_trainer.hf import Offloaded, attach, session_of

pytestmark = pytest.mark.slow


class KTO(Offloaded, KTOTrainer):
    pass


class Reward(Offloaded, RewardTrainer):
    pass


class GRPO(Offloaded, GRPOTrainer):
    pass


class RLOO(Offloaded, RLOOTrainer):
    pass


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return chat_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), vocab_size=272, max_position_embeddings=128, pad_token_id=0)


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def words(output: Path, **changes: Any) -> dict[str, Any]:
    """Return arguments that make a run short and quiet, without TRL's default bf16."""
    return {
        "output_dir": str(output),
        "bf16": False,
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
    } | changes


def losses(trainer: Any) -> list[tuple[float, float]]:
    """Return the loss and the gradient norm of each step."""
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def assert_learned(trainer: Any) -> None:
    """Check that at least every other step had a gradient; RLOO clips completions that it uses a second time."""
    norms = [norm for _, norm in losses(trainer)]
    assert sum(norm > 0 for norm in norms) >= len(norms) / 2 > 0


@pytest.mark.parametrize("home", HOMES)
def test_kto(home: str, folder: Path, drive: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """KTO matches the stock trainer, with reference log-probabilities and KL terms; an example is one row."""
    given = {"train_dataset": labelled(), "processing_class": tokenizer}
    more = {"precompute_ref_log_probs": True}
    stock = KTOTrainer(plain(folder), args=KTOConfig(**words(tmp_path / "stock", **more)), **given)
    stock.train()
    with loaded(folder, drive, home=home, seq_len=64, micro_batch_size=2) as model:
        trainer = KTO(model, args=KTOConfig(**words(tmp_path / "ours", **more)), **given)
        trainer.train()
        assert told(trainer) == told(stock)
        assert_learned(trainer)
        trainer.save_model(str(tmp_path / "final"))
    assert_same(weights(tmp_path / "final"), dict(stock.model.state_dict()))


def test_kto_with_a_reference_in_memory_is_refused(
    folder: Path, drive: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with loaded(folder, drive) as model, pytest.raises(UserError, match=r"precompute_ref_log_probs=True"):
        KTO(model, args=KTOConfig(**words(tmp_path)), train_dataset=labelled(), processing_class=tokenizer)


@pytest.fixture(scope="module")
def classifier(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model of the same shape that has one reward in place of logits."""
    made = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(2)
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(made)
    return made


def classifying(folder: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)


@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.parametrize("home", HOMES)
def test_reward_model(
    home: str, classifier: Path, drive: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """A reward model that was offloaded from memory matches the stock trainer, resumes, and loads in transformers."""
    given = {"train_dataset": preferences(), "processing_class": tokenizer}
    more = {"save_steps": 3}
    stock = RewardTrainer(classifying(classifier), args=RewardConfig(**words(tmp_path / "stock", **more)), **given)
    stock.train()
    keys: dict[str, Any] = {"seq_len": 64, "micro_batch_size": 4, "page_size": 8192, "kernel": "torch", **HOMES[home]}
    with offload(classifying(classifier), nvme=drive, say=lambda _: None, **keys) as session:
        trainer = Reward(attach(session), args=RewardConfig(**words(tmp_path / "ours", **more)), **given)
        trainer.train()
        assert told(trainer) == told(stock)
        assert_learned(trainer)
    with offload(classifying(classifier), nvme=drive, say=lambda _: None, **keys) as session:
        trainer = Reward(attach(session), args=RewardConfig(**words(tmp_path / "ours", **more)), **given)
        trainer.train(resume_from_checkpoint=str(tmp_path / "ours/checkpoint-3"))
        assert losses(trainer) == losses(stock)
        trainer.save_model(str(tmp_path / "final"))
        tokens = tokenizer("What follows one?", return_tensors="pt").input_ids
        with torch.no_grad():
            expected = session.model.eval()(tokens).logits
    assert_same(weights(tmp_path / "final"), dict(stock.model.state_dict()))
    with torch.no_grad():
        assert torch.equal(classifying(tmp_path / "final").eval()(tokens).logits, expected)


def test_a_pair_of_a_reward_model_is_two_rows(
    classifier: Path, drive: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    keys: dict[str, Any] = {"seq_len": 64, "micro_batch_size": 2, **HOMES["resident"]}
    given = {"train_dataset": preferences(), "processing_class": tokenizer}
    said = r"4 rows in a micro-batch, and the plan counts 2"
    with offload(classifying(classifier), nvme=drive, say=lambda _: None, **keys) as session:
        model = attach(session)
        with pytest.raises(UserError, match=said):
            Reward(model, args=RewardConfig(**words(tmp_path)), **given)


# -- training on completions that the model generates ------------------------------------------------------------------

GENERATES = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8, "beta": 0.0}


def distinct(completions: list[Any], **_: Any) -> list[float]:
    """Reward completions of many distinct characters."""
    return [float(len(set(completion[0]["content"]))) for completion in completions]


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize("home", HOMES)
def test_generated_completions(
    home: str, kind: str, folder: Path, drive: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """GRPO and RLOO generate and learn as the stock trainers do, each completion being used for two steps."""
    stock_class, own_class, config = (
        (GRPOTrainer, GRPO, GRPOConfig) if kind == "GRPO" else (RLOOTrainer, RLOO, RLOOConfig)
    )
    more = GENERATES | {"num_iterations": 2}
    given = {"reward_funcs": distinct, "train_dataset": prompts(), "processing_class": tokenizer}
    stock = stock_class(plain(folder), args=config(**words(tmp_path / "stock", **more)), **given)
    stock.train()
    with loaded(folder, drive, home=home, seq_len=64, micro_batch_size=4) as model:
        trainer = own_class(model, args=config(**words(tmp_path / "ours", **more)), **given)
        trainer.train()
        assert told(trainer) == told(stock)
        assert_learned(trainer)
        trainer.save_model(str(tmp_path / "final"))
    assert_same(weights(tmp_path / "final"), dict(stock.model.state_dict()))


def test_grpo_of_adapters(folder: Path, drive: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """GRPO with adapters and a KL term matches the stock trainer, with the base model as the reference."""
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    given = {"reward_funcs": distinct, "train_dataset": prompts(), "processing_class": tokenizer}
    given |= {"peft_config": adapters}
    more = GENERATES | {"beta": 0.1, "learning_rate": 1e-2}
    stock = GRPOTrainer(plain(folder), args=GRPOConfig(**words(tmp_path / "stock", **more)), **given)
    stock.train()
    with loaded(folder, drive, seq_len=64, micro_batch_size=4, freeze=["."]) as model:
        trainer = GRPO(model, args=GRPOConfig(**words(tmp_path / "ours", **more)), **given)
        trainer.train()
        assert told(trainer) == told(stock)
        assert_learned(trainer)


@pytest.mark.parametrize("home", HOMES)
def test_a_rollout_function_sees_the_current_weights(
    home: str,
    folder: Path,
    drive: Path,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`named_weights` gives a generation server the stock trainer's weights in each step."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def rollout(seen: list[dict[str, torch.Tensor]], weights_of: Callable[[Any], Any]) -> Callable[..., dict[str, Any]]:
        def complete(conversations: list[Any], trainer: Any) -> dict[str, Any]:
            seen.append({name: weight.detach().clone() for name, weight in weights_of(trainer.model)})
            asked = tokenizer.apply_chat_template(
                conversations, add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
            answers = [[20 + len(seen) + (row % 4) * token for token in range(4)] for row in range(len(asked))]
            return {"prompt_ids": asked, "completion_ids": answers, "logprobs": None}

        return complete

    given = {"reward_funcs": distinct, "train_dataset": prompts(), "processing_class": tokenizer}
    expected: list[dict[str, torch.Tensor]] = []
    stock = GRPOTrainer(
        plain(folder),
        args=GRPOConfig(**words(tmp_path / "stock", **GENERATES)),
        rollout_func=rollout(expected, lambda model: model.named_parameters()),
        **given,
    )
    stock.train()
    found: list[dict[str, torch.Tensor]] = []
    with loaded(folder, drive, home=home, seq_len=64, micro_batch_size=4) as model:
        trainer = GRPO(
            model,
            args=GRPOConfig(**words(tmp_path / "ours", **GENERATES)),
            rollout_func=rollout(found, lambda model: session_of(model).named_weights()),
            **given,
        )
        trainer.train()
        assert told(trainer) == told(stock)
    assert len(found) == len(expected) == 6
    assert not torch.equal(found[0]["lm_head.weight"], found[1]["lm_head.weight"])
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": 0.1}, r"beta=0\.1: the reference would be a second model in memory: beta=0\.0, or adapters"),
        ({"use_vllm": True}, r"use_vllm=True: .*rollout_func may send session\.named_weights\(\)"),
        (
            {"use_transformers_continuous_batching": True},
            r"use_transformers_continuous_batching=True: .*thread",
        ),
        ({"cast_lm_head_to_fp32": True}, r"cast_lm_head_to_fp32=True: it converts an offloaded weight in place"),
    ],
)
def test_what_cannot_generate_is_refused(
    changes: dict[str, Any], message: str, folder: Path, drive: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    given = {"reward_funcs": distinct, "train_dataset": prompts(), "processing_class": tokenizer}
    with loaded(folder, drive, seq_len=64, micro_batch_size=4) as model, pytest.raises(UserError, match=message):
        GRPO(model, args=GRPOConfig(**words(tmp_path, **(GENERATES | changes))), **given)
