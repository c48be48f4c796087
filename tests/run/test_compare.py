"""Tests of `offload-train report RUN...`: the differences of runs and their effects, read from their directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from sample_plans import SHAPES
from test_report_page import Page, faults
from test_telemetry import a_step

from offload_trainer import cli
from offload_trainer.errors import UserError
from offload_trainer.plan.machine import read_machine
from offload_trainer.plan.planner import resolve_and_plan
from offload_trainer.run.commands.runs import compared, comparison
from offload_trainer.settings import dump_config, load_config
from offload_trainer.telemetry.metrics import EvalRecord


def a_run(directory: Path, *words: str, steps: int = 6, **row: Any) -> Path:
    """Write the files of a gpt2-xl run."""
    machine = read_machine("h200")
    config, plan = resolve_and_plan(load_config(["--model", "gpt2-xl", *words]), SHAPES["gpt2-xl"], machine)
    directory.mkdir()
    (directory / "config.yaml").write_text(dump_config(config))
    (directory / "plan.json").write_text(json.dumps(plan.to_json()))
    lines = [a_step(step, **row).to_json() for step in range(1, steps + 1)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def rows(*runs: Path) -> dict[str, tuple[str, ...]]:
    head, *rest = comparison(compared(runs))
    assert head == ("", *(run.name for run in runs))
    return {row[0]: row[1:] for row in rest}


def test_differing_settings_and_their_results(tmp_path: Path) -> None:
    one = a_run(tmp_path / "one", "--lr", "1e-3")
    evaluation = EvalRecord(step=6, validation_loss=3.5, perplexity=33.1, bits_per_byte=1.25)
    (one / "evaluations.jsonl").write_text(evaluation.to_json() + "\n")
    slow = {"seconds": 2.0, "tokens_per_second": 256.0, "phases": {"forward": 0.5, "update": 1.5}, "skipped": True}
    two = a_run(tmp_path / "two", "--lr", "2e-3", "--accumulate", "4", steps=3, hidden=0.25, **slow)
    told = rows(one, two)
    assert told["optim.lr"] == ("0.001", "0.002")
    assert told["placement"][0] == json.loads((one / "plan.json").read_text())["chosen"]["homes"]
    assert told["model.name"] == ("gpt2-xl", "gpt2-xl")  # equal, but always shown
    assert told["train.gradient_accumulation_steps"] == ("1", "4")
    assert "optim.max_grad_norm" not in told  # equal
    assert "save.output" not in told
    assert told["tokens a step"] == ("4.1 k", "16.4 k")
    assert told["training loss"] == ("3.9400", "3.9700")
    assert told["validation loss"] == ("3.5000", "-")
    assert told["a step"] == ("0.5 s", "2 s")
    assert told["a step, backward"] == ("0.2 s", "-")
    assert told["a step, update"] == ("0.1 s", "1.5 s")
    assert told["tokens a second"] == ("1.02 k", "256")
    assert told["a step, update hidden"] == ("-", "0.25 s")
    assert told["steps skipped"] == ("-", "3")
    plan = json.loads((one / "plan.json").read_text())
    assert plan["hidden"] or told["a step, predicted"][0] == f"{sum(plan['seconds'].values()):.2g} s"


def test_rows_without_a_value_are_left_out(tmp_path: Path) -> None:
    told = rows(a_run(tmp_path / "one", steps=1, loss=None, nvme_written_bytes=0))
    for name in ("training loss", "validation loss", "GPU memory, peak", "on drives", "written to drives, a step"):
        assert name not in told
    assert told["steps"] == ("1",)
    assert not [cells for cells in told.values() if set(cells) == {"-"}]


def test_in_columns_as_json_and_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(a_run(tmp_path / name, "--lr", rate)) for name, rate in (("one", "1e-3"), ("another", "2e-3"))]
    assert cli.main(["report", *runs]) == 0
    lines = capsys.readouterr().out.splitlines()
    second = lines[0].index("another")
    (rate,) = [line for line in lines if line.startswith("optim.lr ")]
    assert rate[second:] == "0.002"
    assert cli.main(["report", runs[0], "--json", *runs[1:]]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["directory"] for one in found] == runs
    assert [one["optim.lr"] for one in found] == [1e-3, 2e-3]
    assert "GPU memory, peak" not in found[0]
    assert cli.main(["report", *runs, "--html", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert ["one", "another"] in page.rows
    assert ["optim.lr", "0.001", "0.002"] in page.rows
    assert text.count("<polyline") == 2
    assert faults(text) == []


def test_directories_without_a_run_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no run: .*config\.yaml: No such file"):
        compared([tmp_path])
    broken = a_run(tmp_path / "broken")
    (broken / "plan.json").write_text("{}")
    with pytest.raises(UserError, match="was not written by a run"):
        compared([broken])
    assert yaml.safe_load((broken / "config.yaml").read_text())
