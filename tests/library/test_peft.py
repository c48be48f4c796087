"""Tests of PEFT's LoRA over an offloaded base model: results have the bits of PEFT on a model in memory."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compare_trainers import assert_same, told
from hf_trainers import HOMES, Ours, arguments, loaded, model_folder, rows
from peft import (
    IA3Config,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer

from offload_trainer.errors import UserError
from offload_trainer.hf import save_merged, session_of
from offload_trainer.plan.machine import read_machine
from offload_trainer.run.commands.plan import plan_elsewhere
from offload_trainer.run.planning import plan_run
from offload_trainer.settings import load_config

pytestmark = pytest.mark.slow

ADAPTERS = "adapter_model.safetensors"
FROZEN = {"freeze": ["."]}


def lora(**changes: Any) -> LoraConfig:
    words: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    return LoraConfig(**(words | {"lora_dropout": 0.1, "task_type": "CAUSAL_LM"} | changes))


def adapted(model: Any) -> PeftModel:
    torch.manual_seed(7)
    return get_peft_model(model, lora())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Return a stock Trainer after training plain PEFT."""
    output = tmp_path_factory.mktemp("stock")
    model = adapted(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    trainer = Trainer(model, arguments(output), train_dataset=rows(48), eval_dataset=rows(6))
    trainer.train()
    return trainer


@pytest.mark.parametrize("home", HOMES)
def test_logs_and_adapters_are_plain_pefts(
    home: str, folder: Path, reference: Trainer, drive: Path, tmp_path: Path
) -> None:
    """Logs, adapters and merged exports match plain PEFT's, including dropout of adapters."""
    with loaded(folder, drive, home=home, **FROZEN) as base:
        model = adapted(base)
        plan = session_of(model).plan
        assert not session_of(model).trained
        assert not any(item.bytes for item in plan.items if item.name.startswith(("state", "gradients")))
        trainer = Ours(model, arguments(tmp_path), train_dataset=rows(48), eval_dataset=rows(6))
        trainer.train()
        assert told(trainer) == told(reference)
        for name in ("checkpoint-5", "checkpoint-20"):
            theirs = load_file(Path(reference.args.output_dir) / name / ADAPTERS)
            assert_same(load_file(tmp_path / name / ADAPTERS), theirs)
        save_merged(model, tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    apart = PeftModel.from_pretrained(plain, tmp_path / "checkpoint-20")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert_same(merged.state_dict(), apart.merge_and_unload().state_dict())


def test_a_base_with_state_is_refused(folder: Path, drive: Path, tmp_path: Path) -> None:
    with loaded(folder, drive) as base, pytest.raises(UserError, match=r"freeze"):
        Ours(adapted(base), arguments(tmp_path), train_dataset=rows(48), eval_dataset=rows(6))


KINDS: dict[str, dict[str, Any]] = {  # each is saved, loaded by PEFT, and resumed by the Trainer
    "DoRA": {"use_dora": True},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "tokens": {"trainable_token_indices": {"embed_tokens": [1, 5, 7]}},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "bias": {"bias": "all"},
}


def short(trainer_of: Any, model: Any, output: Path, **changes: Any) -> Trainer:
    words = {"eval_strategy": "no", "max_steps": 4, "save_steps": 2} | changes
    return trainer_of(model, arguments(output, **words), train_dataset=rows(48))


@pytest.fixture(scope="module")
def with_biases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("biases"), attention_bias=True)


@pytest.mark.parametrize("kind", KINDS)
def test_other_adapters_are_trained_saved_and_resumed(
    kind: str, folder: Path, with_biases: Path, drive: Path, tmp_path: Path
) -> None:
    """Each adapter kind trains, saves and resumes like the stock one; biases of the base resume with the session."""
    biases = kind == "bias"
    folder = with_biases if biases else folder
    keys = {"freeze": [r"^(?!.*bias)"] if biases else ["."]}

    def adapted(model: Any) -> PeftModel:
        torch.manual_seed(7)
        return get_peft_model(model, lora(**KINDS[kind]))

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stock = short(Trainer, adapted(plain), tmp_path / "stock")
    stock.train()
    theirs = load_file(tmp_path / "stock/checkpoint-4" / ADAPTERS)
    for home, words in (("drive", {}), ("resident", {"resume_from_checkpoint": str(tmp_path / "ours/checkpoint-2")})):
        with loaded(folder, drive, home=home, **keys) as base:
            trainer = short(Ours, adapted(base), tmp_path / "ours")
            trainer.train(**words)
            assert told(trainer)[:-1] == told(stock)[:-1]
        assert_same(load_file(tmp_path / "ours/checkpoint-4" / ADAPTERS), theirs)
    if not biases:
        with loaded(folder, drive) as base:
            again = PeftModel.from_pretrained(base, tmp_path / "ours/checkpoint-4").eval()
            inputs = rows(1)[0]["input_ids"][None]
            with torch.no_grad():
                assert torch.equal(again(inputs).logits, stock.model.eval()(inputs).logits)


PROMPTS: dict[str, PeftConfig] = {  # adapters that are no LoRA
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "p-tuning": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=32),
    "IA3": IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_and_scales_in_a_bare_loop(kind: str, folder: Path, drive: Path) -> None:
    """A loop without `micro_batch` and without the Trainer has plain torch's bits."""

    def losses(model: Any) -> list[float]:
        torch.manual_seed(7)
        model = get_peft_model(model, copy.deepcopy(PROMPTS[kind]))
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
        found = []
        for row in rows(4):
            loss = model(**{name: tokens[None] for name, tokens in row.items()}).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    expected = losses(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    with loaded(folder, drive, **FROZEN) as base:
        assert losses(base) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, "cannot be copied"),
        ({"init_lora_weights": "pissa"}, "q_proj.weight"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "cannot be copied"),
    ],
)
def test_adapters_that_change_or_copy_the_base_are_refused(
    changes: dict[str, Any], message: str, folder: Path, drive: Path, tmp_path: Path
) -> None:
    """Adapters that change or copy the base are refused when the Trainer is built."""
    with loaded(folder, drive, **FROZEN) as base, pytest.raises(UserError, match=message):
        Ours(get_peft_model(base, lora(**changes)), arguments(tmp_path, eval_strategy="no"), train_dataset=rows(8))


def test_a_run_of_the_command_that_trains_nothing_is_refused(folder: Path) -> None:
    """A run or a plan of the command with all weights frozen is refused."""
    config = load_config(["--model", str(folder), "model.freeze=['.']"])
    for planned in (plan_run, partial(plan_elsewhere, machine=read_machine("h200"))):
        with pytest.raises(UserError, match="leaves nothing to train"):
            planned(config)
