"""Tests of report.html, which follows a run, and of `offload-train report`."""

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any
from xml.etree.ElementTree import Element, fromstring

import pytest
from sample_plans import SHAPES
from test_telemetry import a_step

from offload_trainer import cli
from offload_trainer.errors import UserError
from offload_trainer.plan.machine import read_machine
from offload_trainer.plan.planner import make_plan, resolved
from offload_trainer.run.commands.runs import compared, comparison
from offload_trainer.settings import dump_config, load_config
from offload_trainer.telemetry import sinks
from offload_trainer.telemetry.metrics import EvalRecord, StepRecord, read_metrics
from offload_trainer.telemetry.report import (
    RELOAD,
    Series,
    comparison_page,
    predicted_row,
    report_page,
)
from offload_trainer.telemetry.sinks import Screen, Telemetry
from offload_trainer.units import format_bytes, format_seconds

# -- the page --------------------------------------------------------------------------------------------------------


def page_of(rows: list[StepRecord], *, place: str, left: float | None = None) -> str:
    """Return the page of a run with everything possible: long names, large numbers, all tiers, many validations."""
    evaluations = [EvalRecord(step=s, validation_loss=3.123456, perplexity=1e9, bits_per_byte=1.1) for s in range(30)]
    return report_page(
        title=f"gpt2-10b: params gpu, optimizer 6.4% gpu, 83.1% RAM, else nvme {place}",
        rows=rows,
        evaluations=evaluations,
        progress=(100_000, left),
        predicted=predicted_row(place, 10**12, 10**12, format_bytes, 2 * 10**12),
        notes=[f"a step writes 13 GB to {place}"],
    )


def full_step(step: int) -> StepRecord:
    memory = {"ram": 123 * 10**9, "gpu": 31 * 10**9, "drives": 987 * 10**9}
    row = a_step(step, memory=memory, nvme_written_bytes=10**9, device_peak_bytes=33 * 10**9, tokens=10**6 * step)
    return replace(row, loss=11.2 - step / 2000, phases={**row.phases, "wait": 0.4})


def elements(page: str) -> list[Element]:
    return list(fromstring(re.sub("<!doctype html>|<meta[^>]*>", "", page)).iter())


def rows_of(page: str) -> list[list[str]]:
    return [["".join(cell.itertext()) for cell in row] for row in elements(page) if row.tag == "tr"]


def small_page(rows: Sequence[StepRecord], **changes: Any) -> str:
    content = {"title": "a run", "evaluations": [], "predicted": [], "progress": (10_000, None)}
    return report_page(**{**content, "rows": rows, **changes})  # type: ignore[arg-type]


def test_the_page_stands_alone_and_escapes() -> None:
    rows = [a_step(step) for step in range(1, 3001)]
    rows[5] = replace(rows[5], loss=None, skipped=True)
    evaluations = [EvalRecord(step=s, validation_loss=3.0, perplexity=20.1, bits_per_byte=1.1) for s in (10, 3000)]
    text = small_page(rows, title="<b>$x & co", evaluations=evaluations, notes=["<script>alert(1)</script>"])
    assert not {"script", "link", "img", "iframe", "b"} & {element.tag for element in elements(text)}
    attributes = [pair for element in elements(text) for pair in element.items()]
    assert not [value for name, value in attributes if name in ("src", "href")]
    assert "http" not in text.lower()
    assert "prefers-color-scheme: dark" in text
    assert "&lt;b&gt;$x &amp; co" in text
    assert "nan" not in [value for _, value in attributes]
    assert len(text) < 60_000
    lines = [value for name, value in attributes if name == "points"]
    assert 700 <= len(lines[0].split()) <= 800
    assert len(lines[1].split()) == 2
    # The first point is left of and above the last, since the loss falls and SVG's y axis points down.
    first, last = ([float(n) for n in lines[0].split()[i].split(",")] for i in (0, -1))
    assert first[0] < last[0]
    assert first[1] < last[1]


@pytest.mark.parametrize("rows", [[], [a_step(1)], [a_step(1, loss=None, grad_norm=None)]])
def test_a_run_that_hardly_began_has_a_page_of_its_values_alone(rows: list[StepRecord]) -> None:
    page = small_page(rows)
    assert elements(page)
    assert "NaN" not in page
    assert re.findall("<h2>(.*?)</h2>", page) == ["Loss"]
    assert "GPU memory" not in page


def test_predicted_and_measured_numbers() -> None:
    """None and 0 are dashes: a phase without a prediction is not shown as predicted to take 0 s. Wear is counted."""
    assert predicted_row("gpu", 2e9, 3e9, format_bytes, 8e9) == [("gpu", "8 GB", "2 GB", "3 GB", "1.50")]
    assert predicted_row("save", None, 5.0, format_seconds) == [("save", "-", "-", "5 s", "-")]
    assert predicted_row("gpu", 0, 0, format_bytes, 0) == []
    page = small_page([], predicted=predicted_row("/mnt/<ssd>", 1e12, None, format_bytes))
    assert ["/mnt/<ssd>", "-", "1 TB", "-", "-"] in rows_of(page)
    facts = facts_of(small_page([a_step(step, nvme_written_bytes=2 * 10**9) for step in (1, 2, 3)]))
    assert facts["written to drives, a step"] == "2 GB"
    assert facts["steps that wear 1 TB of a drive&#x27;s endurance (TBW)"] == "500"
    for few in (4096, None):
        assert "written" not in small_page([a_step(1, nvme_written_bytes=few)])


def test_memory_is_drawn_by_tier() -> None:
    rows = [a_step(step, memory={"ram": 10**8 * step, "drives": 5 * 10**9}, host_rss_bytes=10**9) for step in (1, 2, 3)]
    page = small_page(rows)
    assert re.findall('aria-label="(.*?) over steps"', page) == ["loss", "RAM", "drives"]
    now, most = re.findall('points="(.*?)"', page[page.index("RAM over steps") :])[:2]
    heights = [float(point.split(",")[1]) for point in now.split()]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.15)  # steps of 0.1 GB
    assert len({point.split(",")[1] for point in most.split()}) == 1
    assert len(re.findall('points="(.*?)"', page[page.index("drives over steps") :])) == 1


# -- while a run goes on ---------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a clock for Telemetry and Screen whose `now` moves only when told."""
    made = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(sinks.time, "monotonic", lambda: made.now)
    return made


def telemetry(folder: Path, *, total: int) -> tuple[Telemetry, list[str]]:
    """Return the outputs of a run in `folder`, with its page, and the lines that they print."""
    said: list[str] = []
    outputs = Telemetry(folder, done=0, screen=Screen(total, initial=0, say=said.append, bounds={}, drives=True))

    def page(left: float | None) -> str:
        return page_of(read_metrics(folder / "metrics.jsonl", most=800), place="/mnt", left=left)

    outputs.page = page
    return outputs, said


def facts_of(page: str) -> dict[str, str]:
    return dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page))


def test_the_page_follows_the_run(clock: SimpleNamespace, tmp_path: Path) -> None:
    """It is written after the first step and then once in ten seconds, and shows what a reader wants to know."""
    (outputs, _), shown = telemetry(tmp_path, total=100_000), []
    for step in range(1, 61):
        clock.now += 0.5
        outputs.step(full_step(step))
        page = (tmp_path / "report.html").read_text()
        if not shown or page != shown[-1]:
            shown.append(page)
    steps = [facts_of(page)["steps"] for page in shown]
    assert steps == [f"{step} of 100000" for step in (1, 21, 41)]
    facts = {"training loss": "11.1795", "a step": "0.5 s", "tokens a second": "1.02 k", "time left": "13 h 53 min"}
    assert facts.items() <= facts_of(shown[-1]).items()
    assert RELOAD in shown[-1]
    assert len(re.findall("<svg", shown[-1])) == 4
    assert sorted(os.listdir(tmp_path)) == ["evaluations.jsonl", "metrics.jsonl", "report.html"]
    outputs.end()
    ended = (tmp_path / "report.html").read_text()
    assert "refresh" not in ended
    assert "time left" not in facts_of(ended)
    outputs.close()


def test_a_long_run_stays_cheap(tmp_path: Path) -> None:
    """The page of 20,000 steps is made of a bounded number of them and of the last one: of each stretch of equal
    length one, which may be a long or a short step where these alternate.
    """
    row, made = full_step(1), range(1, 20_001)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(replace(row, step=step, seconds=1.0 + step % 2).to_json() + "\n" for step in made))
    found = read_metrics(path, most=800)
    steps = [one.step for one in found]
    assert 700 < len(steps) < 900
    assert steps[0] == 1
    assert steps[-1] == 20_000
    stretch = round(20_000 / (len(steps) - 1))
    assert len({(step - 1) // stretch for step in steps[:-1]}) == len(steps) - 1
    assert fmean(one.seconds for one in found) == pytest.approx(1.5, abs=0.02)


def test_slow_pages_are_fewer(clock: SimpleNamespace, tmp_path: Path) -> None:
    """At most a hundredth of the time goes into pages, however long one takes."""
    (outputs, said), written = telemetry(tmp_path, total=1000), []

    def page(*_: object) -> str:
        clock.now += 2.0
        written.append(clock.now)
        return ""

    outputs.page = page
    outputs.end(failed=True)
    assert not written  # no step was finished
    for step in range(1, 1001):
        clock.now += 1.0
        outputs.step(full_step(step))
    outputs.close()
    assert not [line for line in said if "report.html" in line]
    assert [after - before for before, after in pairwise(written)] == [202.0] * 4


def test_a_page_that_cannot_be_written_does_not_end_the_run(clock: SimpleNamespace, tmp_path: Path) -> None:
    """One line says so, once; the metrics are complete, and no temporary file is left."""
    outputs, said = telemetry(tmp_path, total=1000)
    (tmp_path / "report.html").mkdir()
    for step in range(1, 4):
        clock.now += 60
        outputs.step(replace(full_step(step), loss=math.nan))
    outputs.end()
    told = [line for line in said if "report.html" in line]
    assert told == [f"note: {tmp_path}/report.html cannot be written, and the run does not need it: Is a directory"]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    assert sorted(os.listdir(tmp_path)) == ["evaluations.jsonl", "metrics.jsonl", "report.html"]
    (tmp_path / "report.html").rmdir()
    clock.now += 60
    outputs.step(replace(full_step(4), loss=math.nan))
    assert "training loss" not in facts_of((tmp_path / "report.html").read_text())
    outputs.close()


# -- several runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [2, 20])
def test_runs_have_different_lines_and_their_names_below(runs: int) -> None:
    names = [f"run-{number}-{'x' * number}" for number in range(runs)]
    losses = [Series(name, [(1.0, 4.0), (100.0, 2.0 + number % 3 / 1000)]) for number, name in enumerate(names)]
    page = comparison_page(losses, [("", *names)])
    chart = page.partition('aria-label="loss over steps"')[2].partition("</svg>")[0]
    drawn = re.findall(r'<polyline class="line" style="stroke: ([^"]*)" [^>]*><title>(.*?)</title>', chart)
    assert [name for _, name in drawn] == names
    assert len({colour for colour, _ in drawn}) == runs
    assert re.findall(r'<span style="color: ([^"]*)">(.*?)</span>', page) == drawn


# -- `offload-train report RUN...`: the differences of runs and their effects ------------------------------------------


def a_run(directory: Path, *words: str, steps: int = 6, **row: Any) -> Path:
    machine = read_machine("h200")
    wished = load_config(["--model", "gpt2-xl", *words])
    plan = make_plan(wished, SHAPES["gpt2-xl"], machine)
    directory.mkdir()
    (directory / "config.yaml").write_text(dump_config(resolved(wished, plan)))
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
    expected = {
        "optim.lr": ("0.001", "0.002"),
        "model.name": ("gpt2-xl", "gpt2-xl"),  # equal, but always shown
        "train.gradient_accumulation_steps": ("1", "4"),
        "tokens a step": ("4.1 k", "16.4 k"),
        "training loss": ("3.9400", "3.9700"),
        "validation loss": ("3.5000", "-"),
        "a step": ("0.5 s", "2 s"),
        "a step, backward": ("0.2 s", "-"),
        "a step, update": ("0.1 s", "1.5 s"),
        "tokens a second": ("1.02 k", "256"),
        "a step, update hidden": ("-", "0.25 s"),
        "steps skipped": ("-", "3"),
    }
    assert expected.items() <= told.items()
    assert not {"optim.max_grad_norm", "save.output"} & told.keys()  # equal, and a place
    plan = json.loads((one / "plan.json").read_text())
    assert told["placement"][0] == plan["chosen"]["homes"]
    assert plan["hidden"] or told["a step, predicted"][0] == f"{sum(plan['seconds'].values()):.2g} s"
    told = rows(a_run(tmp_path / "three", steps=1, loss=None, nvme_written_bytes=0))
    assert not {"training loss", "validation loss", "GPU memory, peak", "on drives"} & told.keys()
    assert "written to drives, a step" not in told
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
    assert ["", "one", "another"] in rows_of(text)
    assert ["optim.lr", "0.001", "0.002"] in rows_of(text)
    assert text.count("<polyline") == 2


def test_directories_without_a_run_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no run: .*config\.yaml: No such file"):
        compared([tmp_path])
    broken = a_run(tmp_path / "broken")
    (broken / "plan.json").write_text("{}")
    with pytest.raises(UserError, match="was not written by a run"):
        compared([broken])
