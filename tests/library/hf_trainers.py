"""Set up transformers' Trainer, stock or offloaded, on a small model and fixed rows."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from engine_bench import batches
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Trainer, TrainingArguments

import offload_trainer.plan.tiered.layout as layout
from offload_trainer.hf import Offloaded, load, session_of

STEPS = 20
# Settings for each placement of the weights. Optimizer state is on the drive, or in the same place as the weights.
HOMES: dict[str, dict[str, Any]] = {
    "resident": {"params": "gpu", "ram_fraction": 1.0},
    "drive": {"params": "nvme", "ram_fraction": 0.0},
}


def model_folder(folder: Path, **changes: Any) -> Path:
    """Write a small fp32 model. All sizes are multiples of 16, for the reason in test_against_torch.py."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "vocab_size": 272, "pad_token_id": 0}
    torch.manual_seed(1)
    config = LlamaConfig(**(shape | {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False} | changes))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Return learnable rows; each row's loss counts a different number of tokens."""
    made = []
    for number, batch in enumerate(batches(count, rows=1)):
        labels = batch.inputs[0].clone()
        labels[: 1 + 5 * number % 19] = -100
        made.append({"input_ids": batch.inputs[0], "labels": labels, "attention_mask": torch.ones_like(labels)})
    return made


def arguments(output: Path, **changes: Any) -> TrainingArguments:
    words: dict[str, Any] = {"max_steps": STEPS, "save_steps": 5, "eval_strategy": "steps", "eval_steps": 5}
    words |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2}
    words |= {"learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 3, "weight_decay": 0.1}
    words |= {"max_grad_norm": 0.5, "logging_steps": 1, "report_to": "none", "disable_tqdm": True}
    return TrainingArguments(str(output), **(words | changes))


class Ours(Offloaded, Trainer):
    pass


def told(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the log history without the entries that depend on the clock."""
    clock = re.compile("runtime|per_second|total_flos|step_time")
    return [{k: v for k, v in entry.items() if not clock.search(k)} for entry in trainer.state.log_history]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / "model.safetensors"))


def stock(folder: Path, output: Path, **changes: Any) -> Trainer:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Trainer(model, arguments(output, **changes), train_dataset=rows(48), eval_dataset=rows(6))


@contextmanager
def loaded(folder: Path, drive: Path, *, home: str = "drive", **keys: Any) -> Iterator[PreTrainedModel]:
    """Yield the model with its session open. No weight is small enough to be exempt from offloading."""
    sizes = {"dtype": "fp32", "seq_len": 24, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
    sizes |= {"page_size": 8192, "kernel": "torch"}
    with mock.patch.object(layout, "SMALL", 0):
        model = load(str(folder), nvme=[str(drive)], **(sizes | HOMES[home] | keys))
    try:
        yield model
    finally:
        session_of(model).close()


def ours(model: PreTrainedModel, output: Path, **changes: Any) -> Trainer:
    return Ours(model, arguments(output, **changes), train_dataset=rows(48), eval_dataset=rows(6))
