"""Tests of commands around a run: listing and copying recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offload_trainer import cli
from offload_trainer.run.commands.recipes import recipes
from offload_trainer.settings import load_config

ROOT = Path(__file__).resolve().parents[2]
# Configurations; other tests run copies of the scripts and of the batch file.
NAMES = [recipe.name for recipe in recipes() if recipe.run.startswith(f"offload-train configs/{recipe.file}")]
ALL = sorted([*NAMES, "dpo", "llama_factory", "ms_swift", "qlora", "slurm"])


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
