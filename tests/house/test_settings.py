"""Tests of the configuration: it is strict, reports all mistakes together, and needs no torch."""

import json
import os
import re
import subprocess
import sys
from contextlib import chdir, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from offload_trainer import settings
from offload_trainer.cli import parse, take_command
from offload_trainer.config import TrainConfig
from offload_trainer.errors import UserError
from offload_trainer.settings import dump_config, literals_of, load_config
from offload_trainer.storage.owned_dirs import cache_directory


def mistakes(*words: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_config(list(words))
    first, *lines = str(caught.value).splitlines()
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
        # keys that determine each other
        ("", ["--epochs", "2"], {"train.steps": 300, "train.epochs": 2.0}),
        ("train: {steps: 50}", ["--epochs", "0.5"], {"train.steps": 300, "train.epochs": 0.5}),
        ("train: {epochs: 3}", ["--steps", "50"], {"train.steps": 50, "train.epochs": "auto"}),
        ("train: {steps: 50}", ["train.epochs=auto"], {"train.steps": 50, "train.epochs": "auto"}),
        ("train: {epochs: 3}", ["--steps", "50", "train.epochs=auto"], {"train.steps": 50, "train.epochs": "auto"}),
        ("", ["--epochs", "3", "optim.warmup_steps=500"], {"train.steps": 300, "train.epochs": 3.0}),
    ],
)
def test_values_of_the_file_and_then_of_words_in_order(
    file: str, words: list[str], expected: dict[str, Any], tmp_path: Path
) -> None:
    """A dump reads back."""
    path = tmp_path / "a.yaml"
    path.write_text(file)
    config = load_config([str(path), *words])
    for key, value in expected.items():
        found = attrgetter(key)(config)
        assert (found, type(found)) == (value, type(value)), key
    path.write_text(dump_config(config))
    assert load_config([str(path)]) == config


def test_an_invalid_list_is_refused_and_a_pattern_is_taken_unchanged() -> None:
    (told,) = mistakes(r'model.freeze=[wte,"h\.0\."]')
    assert told.startswith(r'model.freeze=[wte,"h\.0\."]: not YAML: ')
    assert "unknown escape character" in told
    assert load_config([r"model.freeze=[wte,'h\.0\.']"]).model.freeze == ("wte", r"h\.0\.")
    for pattern in (r"h\.0\.", "[wb]te.*", "*x"):
        assert load_config([f"model.freeze={pattern}"]).model.freeze == (pattern,)


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


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("optim.lr=abc", "a number"),
        ("train.epochs=abc", "a number or 'auto'"),
        ("train.steps=1.5", "a whole number"),
        ("optim.betas=[0.9]", "a list of all"),
        ("data.template_date=today", "a day, such as 2026-01-31, or auto"),
        # words are read within the limits of files
        ("optim.lr=&a 1", "a number"),
        ("optim.lr=!!timestamp a", "a number"),
        ("train.steps=" + "9" * 5000, "a whole number"),
    ],
)
def test_a_value_of_another_kind(word: str, wanted: str) -> None:
    (told,) = mistakes(word)
    assert f"is not allowed; it should be {wanted}" in told


# Files that are no configuration, or would take all memory or time: the mistake.
BOMBS = {
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


@pytest.mark.parametrize("name", BOMBS)
def test_a_file_that_is_no_configuration_is_one_mistake(name: str, tmp_path: Path) -> None:
    text, wrong = BOMBS[name]
    file = tmp_path / "a.yaml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    (told,) = mistakes(str(file))
    assert told.startswith(str(file))
    assert re.search(wrong, told)
    assert len(told) < 500
    assert told.isprintable()


def test_files_that_cannot_be_read_are_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    cases = {"pipe.yaml": "not a regular f", ".": "ends in .yaml", "/dev/zero": "not a reg", "no.yaml": "No such file"}
    for name, wrong in cases.items():
        (told,) = mistakes(str(tmp_path / name))
        assert wrong in told


# Text that YAML reads as a number, boolean, date, null or syntax, and text that is hard to write.
TEXTS = [
    *("1e3", "-.5E+2", "1.5", "0x10", "1_000", "12:30:00", "on", "Yes", "off", "true", "null", "~", "", "=", "<<"),
    *("2020-01-01", " a ", "a\nb\n", "# a", "- a", "a: b", "{", "[x", "'", '"', "!a", "%a", "@a", "`a", "&a", "*a"),
    *("ü", "\u4e2d", "\x07", "\x85", "\u2028", "\ufeff", "\U0001f600", "\\", "a" * 300, "a b " * 60),
]
NUMBERS = [0, 1, 2, 3, 4, 7, 4096, 8192, 10**15, 0.0, 0.25, 0.5, 1.0, 1e-8, 1e-05, 1e16, 1e-300, 123456.789]


def read_back(values: dict[str, Any], file: Path) -> None:
    """Assert that a configuration with these values loads as an equal one after it was dumped."""
    config = TrainConfig.model_validate_json(json.dumps(values))
    file.write_text(dump_config(config), encoding="utf-8")
    assert load_config([str(file)]) == config


def test_texts_and_numbers_read_back(tmp_path: Path) -> None:
    """Texts keep their type as values, as keys and in lists; so do numbers where text is allowed too."""
    overrides = {
        f"{kind}{number}": value
        for kind, some in (("t", TEXTS), ("n", [*NUMBERS, True, False]))
        for number, value in enumerate(some)
    }
    overrides |= {text: 1 for text in TEXTS if text != "<<"}
    read_back({"model": {"name": "123", "overrides": overrides}, "data": {"path": TEXTS}}, tmp_path / "a.yaml")


def test_every_kind_of_value_of_every_key_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each configuration below gives every key another of the values that its type allows, without regard to others."""
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
        read_back(values, tmp_path / "a.yaml")


def test_answers_without_torch(tmp_path: Path) -> None:
    """Help, mistakes and recipes load nothing heavy and write only a copy; a mistake exits with 2.

    A model, drive or file that is missing is named before torch is loaded.
    """
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
    """docs/config.md is the output of scripts/write_config_docs.py."""
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


def test_a_flag_of_one_command_names_that_command() -> None:
    for words, command in (
        (["--machine", "v100-32gb"], "plan"),
        (["--lr", "1", "--write=a"], "tune"),
        (["--check"], "export"),
    ):
        with pytest.raises(UserError, match=f"only `offload-train {command}` takes this flag"):
            parse("train", words)
    assert parse("train", ["--seed", "1", "--dtype", "bf16"])[1] == ["--seed", "1", "--dtype", "bf16"]
