"""Tests of the program's text: help of every command, messages for the machine, and no control codes from files."""

import os
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from sample_plans import SHAPES, machine, wish

from offload_trainer import cli
from offload_trainer.cli import COMMANDS, parse
from offload_trainer.config import PlacementSection
from offload_trainer.errors import UserError
from offload_trainer.machine.probe import probe_machine
from offload_trainer.plan.machine import read_machine
from offload_trainer.plan.planner import _why_not, make_plan
from offload_trainer.run.directory import Log
from offload_trainer.settings import FLAGS, load_config
from offload_trainer.units import shown

STEERING = "\x1b[2J\x1b]0;title\x07\x9b\u202e"


def test_help_of_every_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Help fits the terminal; commands show their switches, and every flag if they take a configuration."""
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


def test_configuration_words_keep_their_order() -> None:
    """A command takes its own switches from anywhere; all other words, values among them, are configuration."""
    words = ["a.yaml", "--lr", "-1e-4", "--seed", "-1", "x.y=--json", "--data", "a b", "c", "--no-such", "--lr=2"]
    given, rest = parse("plan", [*words[:2], "--machine", "h200", *words[2:], "--json", "--nodes=2"])
    assert rest == words
    assert (given.machine, given.nodes, given.json, given.parallel) == ("h200", 2, True, False)


def test_sizes_that_users_write() -> None:
    for text, size in {"5GB": 5 * 10**9, "1.5 kB": 1500, "2GiB": 2 << 30, "77": 77}.items():
        assert parse("export", ["run", "out", "--max-shard-size", text])[0].max_shard_size == size
    for text in ("-3GB", "5XB", "0", "much", "1,5GB", "2.GB", "5-GB", "5Gbit"):
        with pytest.raises(UserError, match="500MB or 5GB"):
            parse("export", ["run", "out", f"--max-shard-size={text}"])


def test_the_program_without_arguments_prints_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program without arguments prints help and does not train; `train` alone starts the default run."""
    monkeypatch.setitem(COMMANDS, "train", replace(COMMANDS["train"], run=lambda *_: None))
    assert cli.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("usage: offload-train [COMMAND]")
    assert "`offload-train train` trains" in printed.err
    assert cli.main(["train"]) == cli.main(["--nvme", "/ssd"]) == 0


@pytest.mark.parametrize(("name", "near"), [("h100", "8xh100-80gb"), ("v100-23gb", "v100-32gb"), ("tpu-v5p", None)])
def test_an_unknown_machine(name: str, near: str | None) -> None:
    with pytest.raises(UserError) as caught:
        read_machine(name)
    assert (f"did you mean {near}" in str(caught.value)) if near else ("did you mean" not in str(caught.value))


def test_a_plan_without_a_gpu_mentions_none() -> None:
    told = make_plan(wish("--save-every", "5", "save.keep=2"), SHAPES["gpt2"], machine()).describe(full=True)
    assert "gpu" not in told.lower().replace("note: no gpu here", "")
    assert "2 kept and the one being written, 1.49 GB each" in told
    assert "offload-train bench" in told
    assert " 0 B " not in told[told.index("seconds a step") :]
    assert not re.search(r"\b\d{7,}\b", told)


def test_why_a_slower_plan_was_not_chosen() -> None:
    chosen, alike, slower = (Mock(fits=True, forecast=Mock(step=step)) for step in (1.7, 1.701, 1.72))
    assert "1.7 s, not 1.7 s" not in _why_not(alike, chosen)
    assert [("longer" in _why_not(plan, chosen)) for plan in (alike, slower)] == [False, True]


def test_contents_of_files_are_escaped_for_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([f"--output={STEERING}x", f"optim.lr={STEERING}"]) == 2
    Log(loud=True).say(f"note: {STEERING}")
    printed = capsys.readouterr().err
    assert "\\x1b[2J" in printed
    assert all(letter.isprintable() for letter in printed.replace("\n", ""))
    assert shown("größer 日本\n") == "größer 日本\n"


def test_a_drive_whose_directory_for_page_files_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        parse("export", ["run", "out\udcff"])
