"""Tests of the program's text: help of every command, messages for the machine, and no control codes from files."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from sample_plans import SHAPES, machine, wish

from offload_trainer import cli
from offload_trainer.config import PlacementSection
from offload_trainer.data.tokenizer import load_tokenizer
from offload_trainer.errors import UserError
from offload_trainer.export.model_card import model_card
from offload_trainer.help_text import flags_of, help_text, switches_of
from offload_trainer.machine.probe import probe_machine
from offload_trainer.plan.machine import read_machine
from offload_trainer.plan.planner import _slower, make_plan
from offload_trainer.run.directory import Log
from offload_trainer.settings import FLAGS, load_config
from offload_trainer.units import shown

WITHOUT_FLAGS = ("export", "sample", "chat", "runs", "report", "ls", "cp")
STEERING = "\x1b[2J\x1b]0;title\x07\x9b\u202e"


@pytest.mark.parametrize("command", [None, *cli._COMMANDS])
def test_help_of_every_command(command: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*([command] if command else []), "--help"]) == 0
    printed = capsys.readouterr().out
    assert printed == help_text(command) + "\n"
    assert command in printed if command else all(name in printed for name in cli._COMMANDS)
    shown_here = FLAGS if command in (None, "train") else flags_of(command)
    for name, flag in FLAGS.items():
        found = re.search(rf"^  {name}( {re.escape(flag.metavar)})?  +[^ ]", printed, re.MULTILINE)
        assert bool(found) == (name in shown_here) or name in switches_of(command or "train"), name
    assert bool(flags_of(command)) == (command not in WITHOUT_FLAGS) if command else "--version" in printed


@pytest.mark.parametrize(
    ("command", "flags"), [("bench", None), ("doctor", None), ("prepare", {"--data", "--seq-len"})]
)
def test_help_shows_the_flags_that_a_command_reads(command: str, flags: set[str] | None) -> None:
    """Help of `bench` and `doctor` shows the flags whose sections their code reads."""
    import inspect

    shown_here = set(flags_of(command))
    assert not shown_here & {"--lr", "--steps", "--epochs", "--seed", "--resume", "--save-every"}
    if flags is not None:
        assert flags <= shown_here
        return
    source = inspect.getsource(cli._COMMANDS[command])
    read = set(re.findall(r"config\.((?:placement|model|save|tiered)(?:\.\w+)?)", source))
    for name in shown_here:
        key = FLAGS[name].key
        assert key in read or key.partition(".")[0] in read or key == "placement.engine", name
    keyed = {name for name, flag in FLAGS.items() if flag.key in read}
    assert keyed <= shown_here


def test_the_program_without_arguments_prints_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program without arguments prints help and does not train; `train` alone starts the default run."""
    monkeypatch.setitem(cli._COMMANDS, "train", lambda words: None)
    assert cli.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == help_text() + "\n"
    assert "`offload-train train` trains" in printed.err
    assert cli.main(["train"]) == cli.main(["--nvme", "/ssd"]) == 0


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("h100", "8xh100-80gb"),
        ("A100", "4xa100-80gb-100gbe or 8xa100-80gb or"),
        ("v100-23gb", "v100-32gb"),
        ("tpu-v5p", None),
    ],
)
def test_an_unknown_machine(name: str, near: str | None) -> None:
    with pytest.raises(UserError) as caught:
        read_machine(name)
    assert (f"did you mean {near}" in str(caught.value)) if near else ("did you mean" not in str(caught.value))


@pytest.mark.parametrize("command", cli._COMMANDS)
def test_help_knows_each_switch(command: str) -> None:
    """Help lists exactly the switches that a command's code reads."""
    import ast
    import inspect

    source = inspect.getsource(cli._COMMANDS[command])
    source += inspect.getsource(cli.parse_export_arguments) if command == "export" else ""
    source += inspect.getsource(cli.parse_sampling_arguments) if command in ("sample", "chat") else ""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    taken = {
        word.value
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in ("take_switches", "take_value", "take_count")
        for word in call.args
        if isinstance(word, ast.Constant) and str(word.value).startswith("--")
    }
    named = set(re.findall(r"^  (--[a-z-]+)", help_text(command), re.MULTILINE))
    assert named - (set(flags_of(command)) - taken) == taken


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian", "--steps", "3"]) == 2
    assert "neither a command" in (printed := capsys.readouterr().err)
    assert "did you mean train?" in printed
    assert cli.main(["absent.yaml"]) == 2
    assert "absent.yaml: No such file" in capsys.readouterr().err


def test_a_plan_without_a_gpu_mentions_none() -> None:
    told = make_plan(wish("--save-every", "5", "save.keep=2"), SHAPES["gpt2"], machine()).describe()
    assert "gpu" not in told.lower().replace("note: no gpu here", "")
    assert "2 kept and the one being written, 1.49 GB each" in told
    assert "offload-train bench" in told
    assert " 0 B " not in told[told.index("seconds a step") :]
    assert not re.search(r"\b\d{7,}\b", told)


@pytest.mark.parametrize("step", [1.6, 1.7, 1.701, 1.72, 3.0])
def test_why_a_slower_plan_was_not_chosen(step: float) -> None:
    """Two step times that round alike are not reported as different."""
    told = _slower(step, 1.7)
    assert "1.7 s, not 1.7 s" not in told
    assert ("longer" in told) == (step > 1.71)


def test_contents_of_files_are_escaped_for_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([f"--output={STEERING}x", f"optim.lr={STEERING}"]) == 2
    Log(loud=True).say(f"note: {STEERING}")
    printed = capsys.readouterr().err
    assert "\\x1b[2J" in printed
    assert all(letter.isprintable() for letter in printed.replace("\n", ""))
    assert shown("größer 日本\n") == "größer 日本\n"


def test_a_card_shows_names_unchanged(tmp_path: Path) -> None:
    config = {
        "model": {"name": f"a|b<img src=x>`{STEERING}", "dtype": "bf16", "overrides": {}},
        "optim": {
            "lr": 1.0,
            "betas": [0.9, 0.9],
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "schedule": "cosine",
            "moment_dtype": "fp32",
        },
        "data": {"path": ["[x](y)\n| Seed | 7 |"]},
        "train": {"steps": 3, "seed": 0},
    }
    card = model_card(tmp_path, dtype="fp32", source="a run", run={"config": config, "random": True})
    assert "a\\|b\\<img src=x\\>\\`" in card
    assert "\\[x\\](y) \\| Seed \\| 7 \\|" in card
    assert card.count("| Seed |") == 1
    assert all(letter.isprintable() for letter in card.replace("\n", ""))


def test_an_unavailable_hub_tokenizer_is_requested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def nothing(name: str, **_: object) -> str:
        asked.append(name)
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", nothing)
    with pytest.raises(UserError, match="neither a directory here nor available from the hub"):
        load_tokenizer("someone/something")
    assert asked == ["someone/something"]


def test_a_drive_whose_directory_for_page_files_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unusable page-file directory is reported by the probe, before any output is written."""
    here = tmp_path / "offload-trainer"
    here.touch()
    with pytest.raises(UserError, match="is a link or a file of yours"):
        probe_machine(PlacementSection(nvme=(str(tmp_path),)), output=str(tmp_path / "out"))
    here.unlink()
    here.mkdir()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != here and real(path, mode))
    with pytest.raises(UserError, match="offload-trainer: not writable for this user"):
        probe_machine(PlacementSection(nvme=(str(tmp_path),)), output=str(tmp_path / "out"))


def test_names_that_are_not_utf8_are_refused() -> None:
    for words in (["--output", "out\udcff"], ["--data", "\udcff.txt"]):
        with pytest.raises(UserError, match=r"\\udcff.*not UTF-8"):
            load_config(words)
    with pytest.raises(UserError, match="not UTF-8"):
        cli.parse_export_arguments(["run", "out\udcff"])
