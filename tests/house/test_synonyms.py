"""Tests of other trainers' option names: each leads to the name used here, and no suggestion has another meaning."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from offload_trainer.cli import COMMANDS as OURS
from offload_trainer.cli import take_command
from offload_trainer.errors import UserError
from offload_trainer.settings import FLAGS, all_keys, load_config
from offload_trainer.settings.synonyms import (
    _BY_COMMAND,
    _BY_VALUE,
    _BY_WORD,
    _COMMANDS,
    _FAMILIES,
    _NEAR,
    _TERMS,
    _terms,
    nearest,
    plain,
)

ADAPTERS, QUANTISED, LOGGED = "for adapters (PEFT) use the Python library", "never quantised", "metrics.jsonl"

# what a user types -> the equivalent here, or a part of the message if nothing is equivalent
LEADS: dict[str, str] = {
    "--gradient_checkpointing": "model.activation_checkpointing=on",  # transformers and TRL
    "--gradient_checkpointing false": "model.activation_checkpointing=off",
    "--lr_scheduler_type constant_with_warmup": "optim.schedule=constant",
    "--adam_beta1 0.9": "optim.betas=",
    "--fp16 true": "--dtype fp16",
    "--optim adamw_8bit": "optim.moment_dtype=8bit",
    "--deepspeed ds.json": "--engine deepspeed",
    "--push_to_hub": "hf upload USER/NAME DIR",
    "--logging_steps 10": LOGGED,
    "--attn_implementation flash_attention_2": "model.attention=sdpa",
    "train_batch_size=64": "train.gradient_accumulation_steps=N",  # DeepSpeed
    "zero_optimization.offload_param.device=nvme": "placement.params=nvme",
    "zero_optimization.offload_optimizer.nvme_path=/x": "placement.nvme=/x",
    "bf16.enabled=true": "model.dtype=bf16",
    "aio.block_size=1048576": "deepspeed.aio_block_size=1048576",  # whose last part is another trainer's name of rows
    "--eval.max_iters 100": "train.eval_rows",
    "warmup_ratio=0.03": "optim.warmup_steps=N|auto",
    "--stage sft": "docs/tutorial.md",
    "checkpointer.output_dir=out": "save.output=out",  # torchtune
    "--batch_size=12": "--micro-batch N",  # nanoGPT
    "--wandb_log=True": "save.trackers=wandb",
    "--dtype=bfloat16": "use bf16",
    "--precision bf16-true": "--dtype bf16",  # LitGPT
    "--train.lr_warmup_steps 100": "optim.warmup_steps=100",
    "--quantize bnb.nf4": QUANTISED,
    "--resume true": "use auto",
    "--optimizer AdamW": "use optim.name=adamw",
    "--gpu 0": "CUDA_VISIBLE_DEVICES",
    "--config x.yaml": "the configuration file is the first word",
}
COMMANDS = {
    "finetune": "`offload-train train`",
    "merge": "`offload-train export`",
    "quantize": "convert_hf_to_gguf.py",
    "init": "`offload-train cp NAME`",
    "evaluate": "train.eval_every",
    "version": "`offload-train --version`",
    "gpt2-xl": "--model gpt2-xl",
    "trian": "did you mean train?",
}
SWITCHES = {"--version", "--help", *(name for command in OURS.values() for name in command.arguments)}


def told(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(list(words))
    return str(caught.value)


@pytest.mark.parametrize(("typed", "here"), LEADS.items())
def test_other_trainers_words_are_translated(typed: str, here: str) -> None:
    message = told(*shlex.split(typed))
    assert message.startswith("1 mistake")
    assert here in message
    written = re.search(r"use (--[a-z-]+ [^ ;(]+|--[a-z-]+|[a-z]+\.[a-z_.]+=[^ ;(]+)", message)
    if written and not re.search(r"[A-Z|]", written[1].partition("=")[2] or written[1].partition(" ")[2]):
        more = ["--engine", "deepspeed"] if "--engine deepspeed" in message else []
        more += ["--nvme", "/x"] if "nvme" in written[1] else []
        load_config([*shlex.split(written[1]), *more])


def _unknown_words(text: str) -> list[str]:
    """Return the keys and flags in a sentence that do not exist."""
    named = re.findall(r"(?<![\w./-])(--[a-z][a-z-]+|[a-z]+\.[a-z][a-z_]+)\b(?!\.\w)", text)
    beginnings = ("--", *{f"{key.partition('.')[0]}." for key in all_keys()})
    return [word for word in named if word.startswith(beginnings) and word not in {*FLAGS, *SWITCHES, *all_keys()}]


def test_each_target_exists() -> None:
    assert not _BY_WORD.keys() & ({plain(name) for name in FLAGS} - {"optimizer"})
    for term in {*_BY_WORD.values(), *_FAMILIES.values()}:
        key, fixed, _ = term.here.partition("=")
        assert not key or key in all_keys() or key.startswith("model.overrides.")
        if fixed:
            load_config([term.here, *(["--engine", "deepspeed"] if key.startswith("deepspeed.") else [])])
        assert term.here or term.note
        assert not _unknown_words(term.note)
        assert all(Path(page).exists() for page in re.findall(r"docs/[a-z_/]+\.md", term.note))
        assert OURS.keys() >= set(re.findall(r"`offload-train ([a-z]+)", term.note))


def test_each_translated_value_is_allowed() -> None:
    for key, values in _BY_VALUE.items():
        for value, here in values.items():
            load_config([here if "=" in here else f"{key}={here}", "--nvme", "/x"])
            assert here in told(f"{key}={value}", "--nvme", "/x")


def test_the_names_of_the_page_are_known() -> None:
    table = Path("docs/coming_from.md").read_text().partition("## What is different")[0]
    cells = [cell for line in table.splitlines() if line.startswith("| `") for cell in line.split("|")[2:]]
    names = {name.rstrip(":").partition("=")[0] for cell in cells for name in re.findall("`([^` ]+)[^`]*`", cell)}
    assert len(names) > 40
    for name in names:
        assert re.search("; use |; did you mean ", told(f"{name}=1")), name


@pytest.mark.parametrize("table", [_TERMS, _COMMANDS])
def test_no_word_has_two_meanings(table: str) -> None:
    every = [word for word, _ in _terms(table)]
    assert sorted(every) == sorted(set(every))


def test_commands_of_other_trainers_lead_to_commands() -> None:
    for word, here in COMMANDS.items():
        with pytest.raises(UserError, match=f"neither a command.*{re.escape(here)}"):
            take_command([word])
    assert not _BY_COMMAND.keys() & OURS.keys()
    for term in _BY_COMMAND.values():
        assert term.here in OURS or (not term.here and term.note)
        assert not _unknown_words(term.note)


def test_misspellings() -> None:
    """Suggestions differ by at most two letters."""
    for typed, meant in {
        "--lrr 1": "--lr",
        "--lerning-rate 3": "--lr 3",
        "--weight-decy 3": "optim.weight_decay",
        "plcement.nvme=/x": "placement.nvme",
        "optim.learing_rate=1": "optim.lr=1",
        "--optim.lr 1": "optim.lr=1",
    }.items():
        assert meant in told(*typed.split())
    assert all("did you mean" not in told(word, "3") for word in ("--xyzzy", "--lo"))
    assert nearest("lora", ["lr"]) is None or _NEAR > 0.67
    for word in ("deepspeed_stage", "training_rate", "evaluation_rows", "warm_start"):
        assert nearest(word, [*FLAGS, *(key.rpartition(".")[2] for key in all_keys())]) is None


def test_a_file_of_another_trainer_is_read_to_its_end(tmp_path: Path) -> None:
    """One message lists every key of another trainer's file, flat or in sections, with its name here."""
    path = tmp_path / "axolotl.yaml"
    path.write_text(
        "base_model: gpt2\nlearning_rate: 2e-5\nadapter: lora\nfp16: false\ndatasets:\n  - path: x\n"
        "zero_optimization: {stage: 3, offload_optimizer: {device: cpu}}\nfoo: {bar: {}}\nbf16: false\n"
        "optimizer: {lr: 3, weight_decay: 0.1}\ntrain: {max_steps: 100}\n"
    )
    message = told(str(path))
    assert message.startswith("12 mistakes")
    for here in (
        "base_model: unknown key; use model.name=gpt2",
        "learning_rate: unknown key; use optim.lr=2e-05",
        f"adapter: unknown key; this command trains all weights; {ADAPTERS}",
        "fp16: unknown key; leave it out",
        "bf16: unknown key; use model.dtype=bf16|fp16|fp32",
        "foo.bar: unknown key",
        "datasets: unknown key; use data.path=TEXT",
        "zero_optimization.stage: unknown key; use deepspeed.zero_stage=3 --engine deepspeed",
        "zero_optimization.offload_optimizer.device: unknown key; use placement.optimizer=cpu",
        "optimizer.lr: unknown key; did you mean optim.lr?",
        "optimizer.weight_decay: unknown key; did you mean optim.weight_decay?",
        "train.max_steps: unknown key; use train.steps=100",
    ):
        assert here in message


@pytest.mark.slow
def test_only_misspellings_are_suggested() -> None:
    from transformers import TrainingArguments
    from trl import ModelConfig, SFTConfig

    guessed = []
    for field in {field.name for kind in (TrainingArguments, SFTConfig, ModelConfig) for field in fields(kind)}:
        if f"--{field.replace('_', '-')}" in FLAGS:
            continue
        message = told(f"--{field}")
        guessed += [message] if "did you mean" in message and "use_rslora" not in message else []
    assert not guessed
