"""Tests of commands around a run: listing and copying recipes, and init."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment

from offload_trainer import cli
from offload_trainer.run.commands.recipes import recipes
from offload_trainer.settings import load_config

ROOT = Path(__file__).resolve().parents[2]
# Configurations; other tests run copies of the scripts and of the batch file.
NAMES = [recipe.name for recipe in recipes() if recipe.run.startswith(f"offload-train configs/{recipe.file}")]
ALL = sorted([*NAMES, "dpo", "llama_factory", "ms_swift", "qlora", "ray_job", "slurm"])
SMALL = ["model.overrides.n_layer=1", "model.overrides.n_embd=16", "--seq-len", "32", "--micro-batch", "2"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# -- recipes ---------------------------------------------------------------------------------------------------------


def test_recipes_are_listed_with_what_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line and line[0] not in " `"] == ALL
    told = " ".join(lines)
    for path in (ROOT / "configs").iterdir():
        heads = [line for line in path.read_text().splitlines() if line.startswith("# memory: ")]
        assert all(head.removeprefix("# memory: ") in told for head in heads)
    assert cli.main(["ls", "--json"]) == 0
    held = {recipe["name"]: recipe for recipe in json.loads(capsys.readouterr().out)}
    assert held["demo"]["run"] == "offload-train configs/demo.yaml --nvme /mnt/ssd"
    assert held["demo"]["memory"] is None


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_the_recipe_under_its_own_name(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    for words, path in (
        ([name], f"{name}.yaml"),
        ([f"{name}.yaml", "a b.yaml"], "a b.yaml"),
        ([name, "mine"], f"mine/{name}.yaml"),
    ):
        assert cli.main(["cp", *words]) == 0
        printed = capsys.readouterr().out
        text = (tmp_path / path).read_text()
        assert load_config([path]) == load_config([str(ROOT / f"configs/{name}.yaml")])
        assert "configs/" not in text + printed
        shell = f"'{path}'" if " " in path else path
        assert printed.startswith(f"{path}: written; offload-train {shell} ")
        assert f"# run:    offload-train {shell} " in text


@pytest.mark.parametrize("there", ["a file", "a link to nothing"])
def test_a_copy_overwrites_nothing(there: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "demo.yaml"
    path.write_text("mine") if there == "a file" else path.symlink_to("nowhere")
    assert cli.main(["cp", "demo"]) == 2
    assert "demo.yaml: already exists" in capsys.readouterr().err
    assert (path.read_text() == "mine") if there == "a file" else not (tmp_path / "nowhere").exists()


# -- three questions -------------------------------------------------------------------------------------------------


def answered(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_three_answers_make_a_configuration_with_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """init repeats a question until the answer is valid; its file trains what was answered, and shows the plan."""
    (tmp_path / "ssd").mkdir()
    (tmp_path / "books.txt").write_text("It was the best of times. " * 500)
    answered(monkeypatch, "no-such-model", "gpt2-mini", "nowhere.txt", "books.txt", "nowhere", "ssd")
    assert cli.main(["init", *SMALL, "--write", "mine.yaml"]) == 0
    printed = capsys.readouterr()
    for refused in (
        "no-such-model: neither a preset",
        "no such file or directory: nowhere.txt",
        "nowhere: no such",
    ):
        assert refused in printed.err
    assert "mine.yaml: written; `offload-train mine.yaml` trains" in printed.out
    words = [*SMALL, "--model", "gpt2-mini", "--data", "books.txt", "--nvme", "ssd"]
    assert load_config(["mine.yaml"]) == load_config(words)
    assert cli.main(["plan", "mine.yaml"]) == 0
    plan = capsys.readouterr().out
    text = (tmp_path / "mine.yaml").read_text()
    homes = next(line for line in plan.splitlines() if line.startswith("plan: "))
    assert f"# {homes}\n" in text
    assert text.count("\n# ") >= len(plan.splitlines())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["books.txt", "mine.yaml", "ssd"]


def test_given_answers_are_not_asked_and_an_empty_one_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.yaml").write_text("data:\n  path: [builtin]\n")
    answered(monkeypatch, "", "")
    assert cli.main(["init", "small.yaml", *SMALL]) == 0
    asked = [line for line in capsys.readouterr().err.splitlines() if "?" in line]
    assert [line.split("?")[0] for line in asked] == [
        "Which model",
        "A directory on an SSD, for what does not fit in memory",
    ]
    assert load_config(["train.yaml"]) == load_config(["small.yaml", *SMALL, "--model", "gpt2-mini"])


def test_a_configuration_that_does_not_fit_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answered(monkeypatch, "gpt2-10b", "builtin", "")
    assert cli.main(["init", "--micro-batch", "4000"]) == 2
    assert "this does not fit" in capsys.readouterr().err
    (tmp_path / "train.yaml").write_text("mine")
    answered(monkeypatch)  # it fails before the first question
    assert cli.main(["init"]) == 2
    assert "train.yaml: already exists" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["ls"], ["cp", "tiny"], ["init", "--write", "."]])
def test_quick_commands_load_nothing_large(words: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; from offload_trainer.cli import main; main(sys.argv[1:])\n"
        "assert not {'torch', 'numpy', 'transformers', 'pyarrow'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, env=environment())
    assert done.returncode == 0, done.stderr.decode()
