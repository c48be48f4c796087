"""Tests of other trainers' option names: each leads to the name used here, and no suggestion has another meaning."""

from __future__ import annotations

import dataclasses
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from offload_trainer.errors import UserError
from offload_trainer.help_text import command_names, switches_of, take_command
from offload_trainer.settings import FLAGS, all_keys, load_config
from offload_trainer.synonyms import _COMMANDS, _FAMILIES, _NEAR, _TERMS, _VALUES, nearest

ADAPTERS, QUANTISED, LOGGED = "for adapters (PEFT) use the Python library", "never quantised", "metrics.jsonl"

# trainer: what a user types -> the equivalent here, or a part of the message if nothing is equivalent
LEADS: dict[str, dict[str, str]] = {
    "transformers": {
        "--learning_rate 1e-4": "--lr 1e-4",
        "--learning-rate 1e-4": "--lr 1e-4",
        "--weight_decay 0.1": "optim.weight_decay=0.1",
        "--num_train_epochs 3": "--epochs 3",
        "--max_steps 100": "--steps 100",
        "--per_device_train_batch_size 2": "--micro-batch 2",
        "--gradient_accumulation_steps 8": "--accumulate 8",
        "--gradient_checkpointing": "model.activation_checkpointing=on",
        "--gradient_checkpointing false": "model.activation_checkpointing=off",
        "--max_grad_norm 0.5": "optim.max_grad_norm=0.5",
        "--lr_scheduler_type constant_with_warmup": "optim.schedule=constant",
        "--adam_beta1 0.9": "optim.betas=",
        "--adam_epsilon 1e-6": "optim.eps=1e-6",
        "--bf16": "--dtype bf16",
        "--fp16 true": "--dtype fp16",
        "--optim adamw_8bit": "optim.moment_dtype=8bit",
        "--optim adamw_torch_fused": "optim.name=adamw",
        "--output_dir out": "--output out",
        "--save_steps 50": "--save-every 50",
        "--save_total_limit 3": "save.keep=3",
        "--eval_steps 50": "train.eval_every=50",
        "--report_to wandb": "save.trackers=wandb",
        "--resume_from_checkpoint x": "--resume x",
        "--full_determinism": "train.deterministic=true",
        "--deepspeed ds.json": "--engine deepspeed",
        "--data_seed 3": "--seed 3",
        "--push_to_hub": "--push-to-hub USER/NAME",
        "--hub_model_id x": "--push-to-hub USER/NAME",
        "--logging_steps 10": LOGGED,
        "--torch_compile": "model.compile",
        "--do_train": "`offload-train` trains",
        "--dataloader_num_workers 4": "nothing to set",
        "--fsdp full_shard": "--gpus N",
        "--load_best_model_at_end": "save.every",
    },
    "trl": {
        "--max_length 2048": "--seq-len 2048",
        "--packing": "data.packing=",
        "--dataset_text_field body": "data.text_field=body",
        "--assistant_only_loss": "data.train_on=answers",
        "--activation_offloading": "model.offload_activations=cpu",
        "--model_name_or_path gpt2": "--model gpt2",
        "--attn_implementation flash_attention_2": "model.attention=sdpa",
        "--dataset_name x": "--data x",
        "--dataset_train_split train": "--data hub:OWNER/NAME/CONFIGURATION:SPLIT",
        "--use_peft": ADAPTERS,
        "--lora_r 16": ADAPTERS,
        "--load_in_4bit": QUANTISED,
    },
    "deepspeed": {
        "zero_optimization.stage=3": "deepspeed.zero_stage=3 --engine deepspeed",
        "train_micro_batch_size_per_gpu=4": "train.micro_batch_size=4",
        "train_batch_size=64": "train.tokens_per_step=N|auto",
        "gradient_clipping=1.0": "optim.max_grad_norm=1.0",
        "zero_optimization.offload_param.device=nvme": "placement.params=nvme",
        "zero_optimization.offload_optimizer.device=cpu": "placement.optimizer=cpu",
        "zero_optimization.offload_optimizer.nvme_path=/x": "placement.nvme=/x",
        "bf16.enabled=true": "model.dtype=bf16",
        "aio.queue_depth=8": "deepspeed.aio_queue_depth=8 --engine deepspeed",
        "steps_per_print=10": LOGGED,
    },
    "axolotl": {
        "base_model=gpt2": "model.name=gpt2",
        "sequence_len=2048": "data.seq_len=2048",
        "sample_packing=true": "data.packing=on",
        "num_epochs=3": "train.epochs=3",
        "optimizer=adamw_bnb_8bit": "optim.moment_dtype=8bit",
        "val_set_size=0.1": "data.validation=",
        "train_on_inputs=true": "data.train_on=all",
        "flash_attention=true": "model.attention=sdpa",
        "warmup_ratio=0.03": "optim.warmup_steps=N|auto",
        "cosine_min_lr_ratio=0.1": "optim.final_lr_ratio=",
        "wandb_project=mine": "WANDB_PROJECT",
        "dataset_prepared_path=x": "data.cache=x",
        "adapter=lora": ADAPTERS,
    },
    "llama-factory": {
        "--cutoff_len 2048": "--seq-len 2048",
        "--template llama3": "data.chat_template=TEXT",
        "--val_size 0.1": "data.validation=",
        "--dataset mine.jsonl": "--data mine.jsonl",
        "--flash_attn fa2": "model.attention=sdpa",
        "--neat_packing": "data.packing=on",
        "--finetuning_type lora": ADAPTERS,
        "--quantization_bit 4": QUANTISED,
        "--stage sft": "docs/finetune.md",
        "--interleave_probs 0.5,0.5": "data.mixture=",
        "--preprocessing_num_workers 8": "nothing to set",
        "--overwrite_output_dir": "name another directory with --output",
    },
    "torchtune": {
        "optimizer.lr=2e-5": "optim.lr",
        "dataset.packed=True": "data.packing=on",
        "tokenizer.max_seq_len=2048": "data.seq_len=2048",
        "enable_activation_checkpointing=True": "model.activation_checkpointing=on",
        "enable_activation_offloading=True": "model.offload_activations=cpu",
        "clip_grad_norm=1.0": "optim.max_grad_norm=1.0",
        "save_every_n_steps=10": "save.every=10",
        "epochs=2": "train.epochs",
        "checkpointer.output_dir=out": "save.output=out",
        "device=cuda": "CUDA_VISIBLE_DEVICES",
        "compile=True": "model.compile",
    },
    "nanogpt": {
        "--block_size=256": "--seq-len 256",
        "--batch_size=12": "--micro-batch N",
        "--max_iters=5000": "--steps 5000",
        "--warmup_iters=100": "optim.warmup_steps=100",
        "--min_lr=6e-5": "optim.final_lr_ratio=",
        "--grad_clip=1.0": "optim.max_grad_norm=1.0",
        "--eval_interval=200": "train.eval_every=200",
        "--out_dir=out": "--output out",
        "--init_from=gpt2": "--model gpt2",
        "--n_layer=6": "model.overrides.n_layer=",
        "--wandb_log=True": "save.trackers=wandb",
        "--dtype=bfloat16": "use bf16",
    },
    "litgpt": {
        "--precision bf16-true": "--dtype bf16",
        "--train.global_batch_size 64": "train.tokens_per_step=N|auto",
        "--train.micro_batch_size 4": "train.micro_batch_size=4",
        "--train.lr_warmup_steps 100": "optim.warmup_steps=100",
        "--train.max_norm 1.0": "optim.max_grad_norm=1.0",
        "--train.max_seq_length 512": "--seq-len 512",
        "--train.save_interval 10": "--save-every 10",
        "--eval.interval 10": "train.eval_every=10",
        "--devices 4": "--gpus 4",
        "--quantize bnb.nf4": QUANTISED,
        "--resume true": "use auto",
        "--optimizer AdamW": "use optim.name=adamw",
    },
}
COMMANDS = {
    "finetune": "`offload-train train`",
    "pretrain": "`offload-train train`",
    "generate": "`offload-train sample`",
    "merge": "`offload-train export`",
    "convert": "`offload-train export`",
    "quantize": "convert_hf_to_gguf.py",
    "preprocess": "`offload-train prepare`",
    "estimate-memory": "`offload-train plan`",
    "benchmark": "`offload-train bench`",
    "list": "`offload-train ls`",
    "init": "`offload-train cp NAME`",
    "evaluate": "train.eval_every",
    "vllm-serve": "vLLM",
    "download": "--model OWNER/NAME",
    "version": "`offload-train --version`",
    "dpo": "docs/integrations.md",
    "gpt2-xl": "--model gpt2-xl",
    "trian": "did you mean train?",
}


SWITCHES = {"--version", "--help", *(name for command in command_names() for name in switches_of(command))}


def told(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(list(words))
    return str(caught.value)


@pytest.mark.parametrize(
    ("typed", "here"),
    [pytest.param(typed, here, id=f"{who} {typed}") for who, each in LEADS.items() for typed, here in each.items()],
)
def test_other_trainers_words_are_translated(typed: str, here: str) -> None:
    """Another trainer's option gives one error with the option to use here, which is valid."""
    message = told(*shlex.split(typed))
    assert message.startswith("1 mistake")
    assert here in message
    written = re.search(r"use (--[a-z-]+ [^ ;(]+|--[a-z-]+|[a-z]+\.[a-z_.]+=[^ ;(]+)", message)
    if written and not re.search(r"[A-Z|]", written[1].partition("=")[2] or written[1].partition(" ")[2]):
        more = ["--engine", "deepspeed"] if "--engine deepspeed" in message else []
        more += ["--nvme", "/x"] if "nvme" in written[1] else []
        load_config([*shlex.split(written[1]), *more])


def test_the_tables_have_enough_words() -> None:
    assert len(LEADS) == 8
    assert sum(map(len, LEADS.values())) >= 100


def test_the_words_exist_in_other_trainers() -> None:
    """The option names exist in the installed versions of the other trainers; others would prove nothing."""
    from transformers import TrainingArguments
    from trl import ModelConfig, ScriptArguments, SFTConfig

    known = {field.name for kind in (TrainingArguments, SFTConfig, ModelConfig, ScriptArguments) for field in _of(kind)}
    typed = {word.split()[0].lstrip("-").replace("-", "_") for who in ("transformers", "trl") for word in LEADS[who]}
    assert typed <= known
    folder = Path(str(find_spec("deepspeed").origin)).parent  # type: ignore[union-attr]
    text = "".join(path.read_text() for path in (folder / "runtime").rglob("*.py"))
    for word in LEADS["deepspeed"]:
        assert re.search(rf"\b{word.partition('=')[0].rpartition('.')[2]}\b", text), word


def _of(kind: type) -> tuple[dataclasses.Field[object], ...]:
    return dataclasses.fields(kind)  # type: ignore[arg-type]


def _known_words(text: str) -> list[str]:
    """Return the keys and flags in a sentence that do not exist."""
    named = re.findall(r"(?<![\w./-])(--[a-z][a-z-]+|[a-z]+\.[a-z][a-z_]+)\b(?!\.\w)", text)
    keys, sections = {*all_keys()}, {key.partition(".")[0] for key in all_keys()}
    return [
        word
        for word in named
        if (word.startswith("--") and word not in {*FLAGS, *SWITCHES})
        or (not word.startswith("--") and word.partition(".")[0] in sections and word not in keys)
    ]


@pytest.mark.parametrize(("here", "words", "note"), _TERMS, ids=[words.split()[0] for _, words, _ in _TERMS])
def test_each_target_exists(here: str, words: str, note: str) -> None:
    key, fixed, value = here.partition("=")
    if key and key != "parallel.pipeline":  # its message says that it is not implemented
        assert key in all_keys() or key.startswith("model.overrides.")
    if fixed:
        more = ["--engine", "deepspeed"] if here.startswith("deepspeed.") else []
        load_config([f"{key}={value}", *more])
    assert here or note
    assert not _known_words(note)
    for page in re.findall(r"docs/[a-z_/]+\.md", note):
        assert Path(page).exists()
    for command in re.findall(r"`offload-train ([a-z]+)", note):
        assert command in command_names()
    assert not set(words.split()) & {name.lstrip("-").replace("-", "_") for name in FLAGS} - {"optimizer"}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, each in _VALUES.items() for value in each])
def test_each_translated_value_is_allowed(key: str, value: str) -> None:
    here = _VALUES[key][value]
    words = [here] if "=" in here else [f"{key}={here}"]
    load_config([*words, "--nvme", "/x"])
    assert here in told(f"{key}={value}", "--nvme", "/x")


def test_no_word_has_two_meanings() -> None:
    for words in ([words for _, words, _ in _TERMS], [words for _, words, _ in _COMMANDS]):
        every = " ".join(words).split()
        assert sorted(every) == sorted(set(every))


@pytest.mark.parametrize(("word", "here"), COMMANDS.items())
def test_a_command_of_another_trainer(word: str, here: str) -> None:
    with pytest.raises(UserError, match="neither a command") as caught:
        take_command([word])
    assert here in str(caught.value)


def test_commands_lead_to_commands() -> None:
    for command, words, note in _COMMANDS:
        assert command in command_names() or (not command and note)
        assert not set(words.split()) & set(command_names())
        assert not _known_words(note)
    assert not [word for term in _FAMILIES.values() for word in _known_words(term.note)]


def test_only_misspellings_are_suggested() -> None:
    """No option of transformers and TRL is taken for a misspelling of a different option."""
    from transformers import TrainingArguments
    from trl import ModelConfig, SFTConfig

    guessed = []
    for field in {field.name for kind in (TrainingArguments, SFTConfig, ModelConfig) for field in _of(kind)}:
        if f"--{field.replace('_', '-')}" in FLAGS:
            continue
        message = told(f"--{field}")
        guessed += [message] if "did you mean" in message and "use_rslora" not in message else []
    assert not guessed


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--lrr 1", "--lr"),
        ("--stpes 3", "--steps"),
        ("--seq-length 3", "--seq-len"),
        ("--lerning-rate 3", "--lr 3"),
        ("--microbatch 3", "--micro-batch"),
        ("--weight-decy 3", "optim.weight_decay"),
        ("optim.weigth_decay=1", "optim.weight_decay"),
        ("plcement.nvme=/x", "placement.nvme"),
        ("optim.learing_rate=1", "optim.lr=1"),
        ("--optim.lr 1", "optim.lr=1"),
        ("--xyzzy 3", None),
        ("placement.foo=3", None),
        ("--lo 3", None),
    ],
)
def test_misspellings(typed: str, meant: str | None) -> None:
    message = told(*typed.split())
    assert (meant in message) if meant else ("did you mean" not in message and "here it is" not in message)


def test_suggestions_differ_by_at_most_two_letters() -> None:
    assert nearest("lora", ["lr"]) is None or _NEAR > 0.67
    for word in ("deepspeed_stage", "training_rate", "evaluation_rows", "warm_start"):
        assert nearest(word, [*FLAGS, *(key.rpartition(".")[2] for key in all_keys())]) is None


def test_a_file_of_another_trainer_is_read_to_its_end(tmp_path: Path) -> None:
    """One message lists every key of another trainer's file, flat or in sections, with its name here."""
    path = tmp_path / "axolotl.yaml"
    path.write_text(
        "base_model: gpt2\nlearning_rate: 2e-5\nadapter: lora\ndatasets:\n  - path: x\n"
        "zero_optimization: {stage: 3}\noptimizer: {lr: 3, weight_decay: 0.1}\ntrain: {max_steps: 100}\n"
    )
    message = told(str(path))
    assert message.startswith("8 mistakes")
    for here in (
        "base_model: unknown key; use model.name=gpt2",
        "learning_rate: unknown key; use optim.lr=2e-05",
        f"adapter: unknown key; this command trains all weights; {ADAPTERS}",
        "datasets: unknown key; use data.path=TEXT",
        "zero_optimization.stage: unknown key; use deepspeed.zero_stage=3 --engine deepspeed",
        "optimizer.lr: unknown key; did you mean optim.lr?",
        "optimizer.weight_decay: unknown key; did you mean optim.weight_decay?",
        "train.max_steps: unknown key; use train.steps=100",
    ):
        assert here in message
