"""Tests of the command line and its keys: a strict configuration, other trainers' words, help, and messages."""

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import chdir, suppress
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from commands import TINY
from forked_child import in_a_fork
from pydantic import ValidationError
from sample_plans import SHAPES, machine, wish

from offload_trainer import cli, settings
from offload_trainer import config as schema
from offload_trainer.cli import COMMANDS, parse, take_command
from offload_trainer.common.errors import UserError
from offload_trainer.common.units import shown
from offload_trainer.config import DeepSpeedSection, TrainConfig
from offload_trainer.engine.deepspeed import deepspeed_config
from offload_trainer.plan.deepspeed import zero_sizes
from offload_trainer.plan.planner import _why_not, make_plan, workload
from offload_trainer.plan.tiers import Placement
from offload_trainer.run.directory import Log
from offload_trainer.run.process_setup import prepare_process
from offload_trainer.run.train import train_run
from offload_trainer.settings import FLAGS, all_keys, dump_config, literals_of, load_config, synonyms
from offload_trainer.storage.owned_dirs import cache_directory


def told(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(list(words))
    return str(caught.value)


def mistakes(*words: str) -> list[str]:
    first, *lines = told(*words).splitlines()
    assert first.startswith(str(len(lines)))
    return [line.removeprefix("  - ") for line in lines]


def test_several_texts_after_one_flag_and_texts_by_a_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that the shell has not expanded means its files, sorted, in flags, keys and files alike."""
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "c.md", "[d].txt"):
        Path(name).touch()
    Path("of.yaml").write_text("data:\n  path: [c.md, '?.txt']\n")
    for words, expected in (
        (["--data", "b.txt", "a.txt", "--lr", "1e-3"], ("b.txt", "a.txt")),
        (["--data", "?.txt"], ("a.txt", "b.txt")),
        (["--data", "c.md", "?.txt", "--data", "b.*"], ("c.md", "a.txt", "b.txt", "b.txt")),
        (["data.path=['?.txt']"], ("a.txt", "b.txt")),
        (["of.yaml"], ("c.md", "a.txt", "b.txt")),
        (["--data", "[d].txt"], ("[d].txt",)),
        (["--data", "none*.txt"], ("none*.txt",)),
    ):
        assert load_config(words).data.path == expected, words
    assert load_config(["--validation-data", "*.md"]).data.validation_path == ("c.md",)


@pytest.mark.parametrize(
    ("file", "words", "expected"),
    [
        (
            "optim: {lr: 1e-3, max_grad_norm: 0.5}\ndata: {path: [x, y]}",
            ["--lr", "2e-3", "optim.eps=1e-6", "--data", "a", "--data", "b"],
            {"optim.lr": 2e-3, "optim.max_grad_norm": 0.5, "optim.eps": 1e-6, "data.path": ("a", "b")},
        ),
        ("optim: {lr: 1e-4}", ["--steps", "1e3"], {"optim.lr": 1e-4, "train.steps": 1000}),
        ("train: {steps: 1e3}\ndata: {seq_len: 1000.0}", [], {"train.steps": 1000, "data.seq_len": 1000}),
        ("train: {steps: 1000}", ["--seq-len", "1000", "optim.lr=.1E-3"], {"data.seq_len": 1000, "optim.lr": 1e-4}),
        ("optim: {lr: .1E-3}", ["--steps", "1000.0"], {"optim.lr": 1e-4, "train.steps": 1000}),
        ("model: {activation_checkpointing: off}", [], {"model.activation_checkpointing": "off"}),
        ("", ["model.activation_checkpointing=on"], {"model.activation_checkpointing": "on"}),
        # keys of text take it unchanged
        ("", ["--model", "123", "data.text_field=1e3"], {"model.name": "123", "data.text_field": "1e3"}),
        ("", ["data.chat_template=null: [x"], {"data.chat_template": "null: [x"}),
        # a list of patterns, and patterns that YAML would refuse
        ("", [r"model.freeze=[wte,'h\.0\.']"], {"model.freeze": ("wte", r"h\.0\.")}),
        ("", [r"model.freeze=h\.0\."], {"model.freeze": (r"h\.0\.",)}),
        ("", ["model.freeze=[wb]te.*"], {"model.freeze": ("[wb]te.*",)}),
        ("", ["model.freeze=*x"], {"model.freeze": ("*x",)}),
        # keys that determine each other
        ("", ["--epochs", "2"], {"train.steps": 300, "train.epochs": 2.0}),
        ("train: {steps: 50}", ["--epochs", "0.5"], {"train.steps": 300, "train.epochs": 0.5}),
        ("train: {epochs: 3}", ["--steps", "50"], {"train.steps": 50, "train.epochs": "auto"}),
        ("train: {steps: 50}", ["train.epochs=auto"], {"train.steps": 50, "train.epochs": "auto"}),
        ("train: {epochs: 3}", ["--steps", "50", "train.epochs=auto"], {"train.steps": 50, "train.epochs": "auto"}),
        ("", ["--epochs", "3", "optim.warmup_steps=500"], {"train.steps": 300, "train.epochs": 3.0}),
    ],
)
def test_words_come_after_the_file(file: str, words: list[str], expected: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(file)
    config = load_config([str(path), *words])
    for key, value in expected.items():
        found = attrgetter(key)(config)
        assert (found, type(found)) == (value, type(value)), key
    path.write_text(dump_config(config))
    assert load_config([str(path)]) == config


def test_all_mistakes_in_one_message(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("optimm:\n  lr: 1\nmodel:\n  dtypo: bf16\n")
    found = mistakes(str(file), "--lrr", "1", "--modle", "x", "--steps", "x", "optim.lr=-1", "train.lr=1", "--gpus")
    text = "\n".join(found)
    for expected in (
        "optimm: unknown key; did you mean optim?",
        "model.dtypo: unknown key; did you mean model.dtype?",
        "--lrr: unknown flag; did you mean --lr?",
        "--modle: unknown flag; did you mean --model?",
        "train.lr=1: unknown key; did you mean optim.lr?",
        "--gpus: needs a value",
        "train.steps: 'x' is not allowed",
        "optim.lr: -1 is not allowed",
    ):
        assert expected in text, text
    assert len(found) == 8


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--params nvme", "add --nvme DIR"),
        ("optim.moment_dtype=8bit --engine deepspeed --optimizer cpu", "runs on the GPU"),
        ("--ram-fraction 0.5 --optimizer cpu --nvme /a", "leave one out"),
        ("placement.gradients=nvme --engine deepspeed", "belongs to --engine tiered"),
        ("optim.moment_dtype=bf16 --gpus 2 --engine deepspeed", "belongs to --engine tiered"),
        ("--gpus 2 --gpu-fraction 0.5 --nvme /a", "state must be in RAM or on dr"),
        ("--gpus 2 --optimizer gpu", "--optimizer gpu with 2 ranks"),
        ("--gpus 2 placement.gradients=gpu", "placement.gradients=gpu with 2 ranks"),
        ("--gpu-fraction 0.5 --engine deepspeed", "only --engine tiered divides it"),
        ("--gpu-fraction 0.7 --ram-fraction 0.4 --nvme /a", "add up to 1.1 of the state: lower one"),
        ("--gpu-fraction 0.7 --ram-fraction 0.2", "leaves 0.1 of the state for a drive: add --nvme DIR"),
        ("--ram-fraction 0.2", "add --nvme DIR, or --gpu-fraction 0.8"),
        ("deepspeed.sub_group_size=5000", "add --engine deepspeed"),
        ("tiered.page_buffers=2 --engine deepspeed", "add --engine tiered"),
        ("--engine deepspeed --nvme /a --nvme /b", "keep one"),
        ("deepspeed.prefetch_bucket_size=5 --engine deepspeed --params nvme --nvme /a", "leave it at auto"),
        ("parallel.tensor=2", "add --engine deepspeed"),
        ("parallel.tensor=2 --engine deepspeed --nvme /a --params nvme", "use --params gpu"),
        ("parallel.tensor=2 --engine deepspeed --nvme /a --optimizer nvme", "--optimizer gpu or cpu"),
        ("parallel.tensor=2 --engine deepspeed optim.moment_dtype=8bit", "is untested"),
        ("parallel.pipeline=2 --engine deepspeed", "belongs to --engine tiered, not to deepspeed"),
        ("optim.decay_steps=5", "belongs to optim.schedule=wsd"),
        ("optim.warmup_steps=500", "more than train.steps"),
        ("model.offload_activations=true model.activation_checkpointing=off", "needs checkpointed activations"),
        ("optim.betas=[0.9,1.0]", "both must be below 1"),
        ("optim.name=muon --engine deepspeed", "optim.name=muon belongs to --engine tiered, not to deepspeed"),
        ("optim.name=muon optim.moment_dtype=8bit", "use fp32"),
        ("optim.name=muon optim.master_dtype=bf16", "rounded masters; use fp32"),
        ("optim.master_dtype=bf16 --engine deepspeed", "belongs to --engine tiered"),
        ("--epochs 3 --steps 50", "determines the steps: leave train.steps (--steps) out"),
        ("both.yaml", "determines the steps: leave train.steps (--steps) out"),
        ("--data stream:a/b c.txt", "a stream is neither mixed nor joined with other text"),
        ("--validation-data stream:a/b", "name hub:OWNER/NAME:SPLIT or a path"),
        ("--data stream:a/b --epochs 1", "the length of a stream is not known, so train.epochs"),
        ("data.shuffle=9", "data.shuffle=9 is for --data stream:NAME"),
        ("--data a b data.mixture=[1]", "has 1 weights, and data.path 2 texts: give one for each"),
        ("--data a b data.mixture=[1,1] data.shuffle=false", "leave data.shuffle=false out"),
    ],
)
def test_impossible_combinations(words: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("both.yaml").write_text("train: {epochs: 3, steps: 50}")
    assert expected in "\n".join(mistakes(*words.split()))


def test_a_wrong_name_of_the_file_leads_to_the_file_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text("optim: {lr: 0.5}\ntrain: {steps: 7}\n")
    assert f"No such file or directory; did you mean {file}?" in mistakes(str(tmp_path / "tiny.yml"))[0]
    with pytest.raises(UserError, match=r"tiny: neither a command .*; did you mean tiny.yaml\?"), chdir(tmp_path):
        take_command(["tiny"])
    for long in ("x" * 300, f"{'x' * 300}.yaml"):
        assert f"{long}: File name too long" in mistakes(long)[0]
        with pytest.raises(UserError, match="neither a command"):
            take_command(["x" * 300])


def test_a_value_of_another_kind() -> None:
    for word, wanted in {
        "train.epochs=abc": "a number or 'auto'",
        "optim.betas=[0.9]": "a list of all",
        "data.template_date=today": "a day, such as 2026-01-31, or auto",
        "optim.lr=&a 1": "a number",
        "optim.lr=!!timestamp a": "a number",
        "train.steps=" + "9" * 5000: "a whole number",
    }.items():
        (told,) = mistakes(word)
        assert f"is not allowed; it should be {wanted}" in told
    (told,) = mistakes(r'model.freeze=[wte,"h\.0\."]')
    assert re.match(r'model.freeze=\[wte,"h\\.0\\."\]: not YAML: .*unknown escape character', told)


def test_a_file_that_is_no_configuration_or_cannot_be_read_is_one_mistake(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    # Files that are no configuration, or would take all memory or time: the mistake.
    cases = {
        "an open list": ("a: [", "not YAML"),
        "a list": ("- a\n- b\n", "expected sections such as `optim:`, found list"),
        "a value for a section": ("optim: 3\n", "optim must hold keys, found 3"),
        "a key twice": ("optim:\n  lr: 1\n  lr: 2\n", "'lr' is given twice"),
        "aliases": ("".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)), "anchors and aliases"),
        "an alias in itself": ("optim: &a\n  lr: *a\n", "anchors and aliases"),
        "brackets": ("[" * 100_000, "nested too deeply"),
        "a large file": ("#" * (1 << 20) + "\n", "has 1048577 bytes"),
        "a long integer": ("train: {steps: " + "9" * 5000 + "}", "a number of 5000 characters"),
        "a number in sixties": ("optim: {lr: " + ":".join("1" * 300) + ".5}", "a number of 601 characters"),
        "a tag": ("optim: {lr: !!timestamp a}", "tags such as .*timestamp are not read"),
        "no UTF-8": ("\udcff", "byte 0 is not UTF-8"),
        "a letter that is not seen": ("m\ufeffodel: {name: gpt2}", r"m\\ufeffodel: unknown key; did you mean model\?"),
    }
    for text, wrong in cases.values():
        file.write_bytes(text.encode(errors="surrogateescape"))
        (told,) = mistakes(str(file))
        assert told.startswith(str(file))
        assert re.search(wrong, told)
        assert len(told) < 500
        assert told.isprintable()
    os.mkfifo(tmp_path / "pipe.yaml")
    others = {"pipe.yaml": "not a regular f", ".": "ends in .yaml", "/dev/zero": "not a reg", "no.yaml": "No such file"}
    for name, wrong in others.items():
        (told,) = mistakes(str(tmp_path / name))
        assert wrong in told


# Text that YAML reads as a number, boolean, date, null or syntax, and text that is hard to write.
TEXTS = [
    *("1e3", "-.5E+2", "1.5", "0x10", "1_000", "12:30:00", "on", "Yes", "off", "true", "null", "~", "", "=", "<<"),
    *("2020-01-01", " a ", "a\nb\n", "# a", "- a", "a: b", "{", "[x", "'", '"', "!a", "%a", "@a", "`a", "&a", "*a"),
    *("ü", "\u4e2d", "\x07", "\x85", "\u2028", "\ufeff", "\U0001f600", "\\", "a" * 300, "a b " * 60),
]
NUMBERS = [0, 1, 2, 3, 4, 7, 4096, 8192, 10**15, 0.0, 0.25, 0.5, 1.0, 1e-8, 1e-05, 1e16, 1e-300, 123456.789]


def test_texts_numbers_and_every_kind_of_value_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each configuration of the last loop gives every key another value that its type allows, whatever the others."""

    def read_back(values: dict[str, Any]) -> None:
        config = TrainConfig.model_validate_json(json.dumps(values))
        (tmp_path / "a.yaml").write_text(dump_config(config), encoding="utf-8")
        assert load_config([str(tmp_path / "a.yaml")]) == config

    overrides = {
        f"{kind}{number}": value
        for kind, some in (("t", TEXTS), ("n", [*NUMBERS, True, False]))
        for number, value in enumerate(some)
    }
    overrides |= {text: 1 for text in TEXTS if text != "<<"}
    read_back({"model": {"name": "123", "overrides": overrides}, "data": {"path": TEXTS}})
    monkeypatch.setattr(settings, "combination_mistakes", lambda _: [])
    tried = [True, False, *NUMBERS, "a", ["1e3"], [0.5, 0.25], {"n": 2}]
    allowed: dict[tuple[str, str], list[Any]] = {}
    for section, info in TrainConfig.model_fields.items():
        for name, field in info.annotation.model_fields.items():
            if name == "epochs":  # a dump leaves out the steps, which it determines
                continue
            for value in [*literals_of(field.annotation), *tried]:
                with suppress(ValidationError):
                    info.annotation.model_validate_json(json.dumps({name: value}))
                    allowed.setdefault((section, name), []).append(value)
    for number in range(max(map(len, allowed.values()))):
        values: dict[str, Any] = {}
        for (section, name), some in allowed.items():
            values.setdefault(section, {})[name] = some[number % len(some)]
        read_back(values)


def test_answers_without_torch(tmp_path: Path) -> None:
    """Help, mistakes, recipes (`cp` only copies) and a missing model, drive or file are answered without torch."""
    code = (
        "import sys; from offload_trainer.cli import main\n"
        "words = (['--help'], ['optim.lrr=1'], ['plan', '--stepz', '3'], ['--print-config'], ['ls'],\n"
        "         ['cp', 'tiny'])\n"
        "codes = [main(each) for each in words]\n"
        "assert codes == [0, 2, 2, 0, 0, 0], codes\n"
        "heavy = {'torch', 'transformers', 'deepspeed', 'numpy', 'tqdm', 'psutil', 'wandb', 'trackio', 'pyarrow'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "missing = [[command, flag, 'nowhere'] for command in ('train', 'prepare') for flag in ('--model', '--nvme',\n"
        "           '--data', '--validation-data')] + [['plan', '--model', 'nowhere'], ['plan', '--nvme', 'nowhere']]\n"
        "assert {main(each) for each in missing} == {2}\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("did you mean") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_documentation_of_keys_is_current() -> None:
    from write_config_docs import page

    assert Path("docs/config.md").read_text() == page()


def test_the_cache_has_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFLOAD_TRAINER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/offload-trainer")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "offload-trainer"
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", "~/here")
    assert cache_directory() == Path.home() / "here"


def test_a_flag_of_one_command_names_that_command_and_configuration_words_keep_their_order() -> None:
    """A command takes its own switches from anywhere; all other words, values among them, are configuration."""
    for words, command in (
        (["--machine", "v100-32gb"], "plan"),
        (["--lr", "1", "--write=a"], "tune"),
        (["--check"], "export"),
    ):
        with pytest.raises(UserError, match=f"only `offload-train {command}` takes this flag"):
            parse("train", words)
    assert parse("train", ["--seed", "1", "--dtype", "bf16"])[1] == ["--seed", "1", "--dtype", "bf16"]
    words = ["a.yaml", "--lr", "-1e-4", "--seed", "-1", "x.y=--json", "--data", "a b", "c", "--no-such", "--lr=2"]
    given, rest = parse("plan", [*words[:2], "--machine", "h200", *words[2:], "--json", "--nodes=2"])
    assert rest == words
    assert (given.machine, given.nodes, given.json, given.parallel) == ("h200", 2, True, False)


# Keys are what a user types; values are the equivalent here, or a part of the message if nothing is equivalent.
LEADS: dict[str, str] = {
    "--gradient_checkpointing": "model.activation_checkpointing=on",  # transformers and TRL
    "--gradient_checkpointing false": "model.activation_checkpointing=off",
    "--lr_scheduler_type constant_with_warmup": "optim.schedule=constant",
    "--adam_beta1 0.9": "optim.betas=",
    "--optim adamw_8bit": "optim.moment_dtype=8bit",
    "--deepspeed ds.json": "--engine deepspeed",
    "--push_to_hub": "hf upload USER/NAME DIR",
    "--logging_steps 10": "metrics.jsonl",
    "--attn_implementation flash_attention_2": "model.attention=sdpa",
    "train_batch_size=64": "train.gradient_accumulation_steps=N",  # DeepSpeed
    "zero_optimization.offload_param.device=nvme": "placement.params=nvme",
    "aio.block_size=1048576": "deepspeed.aio_block_size=1048576",  # `block_size` alone means data.seq_len elsewhere
    "--eval.max_iters 100": "train.eval_rows",
    "warmup_ratio=0.03": "optim.warmup_steps=N|auto",
    "--stage sft": "docs/tutorial.md",
    "--wandb_log=True": "save.trackers=wandb",
    "--dtype=bfloat16": "use bf16",
    "--precision bf16-true": "--dtype bf16",  # LitGPT
    "--quantize bnb.nf4": "never quantised",
    "--resume true": "use auto",
    "--optimizer AdamW": "use optim.name=adamw",
    "--gpu 0": "CUDA_VISIBLE_DEVICES",
    "--config x.yaml": "the configuration file is the first word",
}


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
    switches = {"--version", "--help", *(name for command in COMMANDS.values() for name in command.arguments)}
    return [word for word in named if word.startswith(beginnings) and word not in {*FLAGS, *switches, *all_keys()}]


def test_each_target_exists_and_no_word_has_two_meanings() -> None:
    for table in (synonyms._TERMS, synonyms._COMMANDS):
        every = [word for word, _ in synonyms._terms(table)]
        assert sorted(every) == sorted(set(every))
    assert not synonyms._BY_WORD.keys() & ({synonyms.plain(name) for name in FLAGS} - {"optimizer"})
    for term in {*synonyms._BY_WORD.values(), *synonyms._FAMILIES.values()}:
        key, fixed, _ = term.here.partition("=")
        assert not key or key in all_keys() or key.startswith("model.overrides.")
        if fixed:
            load_config([term.here, *(["--engine", "deepspeed"] if key.startswith("deepspeed.") else [])])
        assert term.here or term.note
        assert not _unknown_words(term.note)
        assert all(Path(page).exists() for page in re.findall(r"docs/[a-z_/]+\.md", term.note))
        assert COMMANDS.keys() >= set(re.findall(r"`offload-train ([a-z]+)", term.note))
    for key, values in synonyms._BY_VALUE.items():
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


def test_commands_of_other_trainers_lead_to_commands() -> None:
    for word, here in {
        "finetune": "`offload-train train`",
        "merge": "`offload-train export`",
        "quantize": "convert_hf_to_gguf.py",
        "init": "`offload-train cp NAME`",
        "evaluate": "train.eval_every",
        "version": "`offload-train --version`",
        "gpt2-xl": "--model gpt2-xl",
        "trian": "did you mean train?",
    }.items():
        with pytest.raises(UserError, match=f"neither a command.*{re.escape(here)}"):
            take_command([word])
    assert not synonyms._BY_COMMAND.keys() & COMMANDS.keys()
    for term in synonyms._BY_COMMAND.values():
        assert term.here in COMMANDS or (not term.here and term.note)
        assert not _unknown_words(term.note)


def test_misspellings() -> None:
    for typed, meant in {
        "--lerning-rate 3": "--lr 3",
        "--weight-decy 3": "optim.weight_decay",
        "plcement.nvme=/x": "placement.nvme",
        "optim.learing_rate=1": "optim.lr=1",
        "--optim.lr 1": "optim.lr=1",
    }.items():
        assert meant in told(*typed.split())
    assert all("did you mean" not in told(word, "3") for word in ("--xyzzy", "--lo"))
    for word in ("deepspeed_stage", "training_rate", "evaluation_rows", "warm_start"):
        assert synonyms.nearest(word, [*FLAGS, *(key.rpartition(".")[2] for key in all_keys())]) is None


def test_a_file_of_another_trainer_is_read_to_its_end(tmp_path: Path) -> None:
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
        "adapter: unknown key; this command trains all weights; for adapters (PEFT) use the Python library",
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


def test_help_of_every_command_and_of_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    for command in (None, *COMMANDS):
        assert cli.main([*([command] if command else []), "--help"]) == 0
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= 90
        if command is None:
            assert all(re.search(rf"^ *offload-train {name}\b|^  {name}\b", printed, re.MULTILINE) for name in COMMANDS)
            continue
        about = COMMANDS[command]
        for name in {*FLAGS, *(name for name in about.arguments if name.startswith("-"))}:
            expected = name in about.arguments or (name in FLAGS and about.configured)
            assert bool(re.search(rf"^  {name}\b", printed, re.MULTILINE)) == expected, name
    monkeypatch.setitem(COMMANDS, "train", replace(COMMANDS["train"], run=lambda *_: None))
    assert cli.main([]) == 2
    without = capsys.readouterr()
    assert without.out.startswith("usage: offload-train [COMMAND]")
    assert "`offload-train train` trains" in without.err
    assert cli.main(["train"]) == cli.main(["--nvme", "/ssd"]) == 0


def test_sizes_that_users_write() -> None:
    for text, size in {"5GB": 5 * 10**9, "1.5 kB": 1500, "2GiB": 2 << 30, "77": 77}.items():
        assert parse("export", ["run", "out", "--max-shard-size", text])[0].max_shard_size == size
    for text in ("-3GB", "5XB", "0", "much", "1,5GB", "2.GB", "5-GB", "5Gbit"):
        with pytest.raises(UserError, match="500MB or 5GB"):
            parse("export", ["run", "out", f"--max-shard-size={text}"])


def test_a_plan_without_a_gpu_mentions_none() -> None:
    told = make_plan(wish("--save-every", "5", "save.keep=2"), SHAPES["gpt2"], machine()).describe(full=True)
    assert "gpu" not in told.lower().replace("note: no gpu here", "")
    assert "2 kept and the one being written, 1.49 GB each" in told
    assert "offload-train bench" in told
    assert " 0 B " not in told[told.index("seconds a step") :]
    assert not re.search(r"\b\d{7,}\b", told)


def test_why_a_slower_plan_was_not_chosen() -> None:
    chosen, alike, slower = (Mock(fits=True, forecast=Mock(step=step)) for step in (1.7, 1.701, 1.72))
    assert [("longer" in _why_not(plan, chosen)) for plan in (alike, slower)] == [False, True]


def test_words_are_escaped_for_the_terminal_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    steering = "\x1b[2J\x1b]0;title\x07\x9b\u202e"
    assert cli.main([f"--output={steering}x", f"optim.lr={steering}"]) == 2
    Log(loud=True).say(f"note: {steering}")
    printed = capsys.readouterr().err
    assert "\\x1b[2J" in printed
    assert all(letter.isprintable() for letter in printed.replace("\n", ""))
    assert shown("größer 日本\n") == "größer 日本\n"
    for read in (lambda: load_config(["--data", "\udcff.txt"]), lambda: parse("export", ["run", "out\udcff"])):
        with pytest.raises(UserError, match=r"\\udcff.*not UTF-8"):
            read()


# -- every key is used: runs read it, or a named test elsewhere sets it ------------------------------------------------

# Keys that no run of this file reads: the tests that set them.
ELSEWHERE = {
    "model.random_init": "model/test_model.py",
    "data.train_on": "data/test_conversations.py",
    "optim.betas": "run/test_import.py",
    "optim.eps": "offload/test_against_torch.py",
    "optim.weight_decay": "run/test_import.py",
    "optim.on_nonfinite_grad": "offload/test_nonfinite.py",
    "train.stop_within": "run/test_ends.py",
}

# Sizes for DeepSpeed: the test checks only that DeepSpeed receives them. engine/test_deepspeed_engine.py has its stage.
STOCK = {key: None for key in DeepSpeedSection.model_fields if key != "zero_stage"}
STOCK |= {"pipeline_read": "false", "pipeline_write": "false", "max_live_parameters": "45678901"}


@pytest.mark.slow
def test_runs_read_every_key(tmp_path: Path) -> None:
    """A key that nothing but the check of combinations reads has no effect."""
    checks = ("engine_of", "combination_mistakes", "_settings_of_others", "mistakes_of_length")  # plan/planner.py
    sections = {info.annotation: name for name, info in TrainConfig.model_fields.items()}
    read = set()

    def recording(section: Any, name: str) -> Any:
        here, reader = type(section), sys._getframe(1).f_code.co_qualname.partition(".")[0]
        if here in sections and name in here.model_fields and reader not in checks:
            read.add(f"{sections[here]}.{name}")
        return object.__getattribute__(section, name)

    def work() -> None:
        schema._Section.__getattribute__ = recording
        wsd = ["--dtype", "fp16", "optim.schedule=wsd", "optim.decay_steps=1"]
        for number, words in enumerate((["--ram-fraction", "0.5", "--save-every", "1"], wsd)):
            where = ["--nvme", str(tmp_path), "--output", str(tmp_path / f"out-{number}")]
            config = load_config([*TINY, "--steps", "2", "optim.warmup_steps=0", *where, *words])
            prepare_process(config)
            train_run(config)
        unread = {key for key in set(all_keys()) - read if not key.startswith("deepspeed.")}
        assert unread == ELSEWHERE.keys(), unread ^ ELSEWHERE.keys()

    assert in_a_fork(work) == 0
    for key, file in ELSEWHERE.items():
        assert key.partition(".")[2] in (Path(__file__).parents[1] / file).read_text()


@pytest.mark.parametrize("name", STOCK)
def test_keys_reach_deepspeed(name: str) -> None:
    def told(*words: str) -> dict[str, Any]:
        config = load_config(["--engine", "deepspeed", "--nvme", "/ssd", "--save-every", "0", *words])
        params = "cpu" if name == "prefetch_bucket_size" else "nvme"
        placement = Placement(params, "nvme")
        work, section = workload(config, SHAPES["gpt2-medium"]), config.deepspeed
        sizes = zero_sizes(work.shape, section, placement, world=1, item_bytes=2)
        words = {"accelerator": "cuda", "swap_directory": "/ssd/run"}
        return deepspeed_config(work, config.optim, section, placement, sizes, **words)

    value = STOCK[name] or "123457"
    assert value in json.dumps(told(f"deepspeed.{name}={value}"))
    assert told(f"deepspeed.{name}={value}") != told()


def test_force_lets_a_plan_pass_that_does_not_fit() -> None:
    plan = make_plan(load_config(["--save-every", "0"]), SHAPES["gpt2-10b"], machine(ram=10**9))
    plan.refuse(force=load_config(["--force"]).placement.force)
    with pytest.raises(UserError, match="does not fit"):
        plan.refuse(force=load_config([]).placement.force)
