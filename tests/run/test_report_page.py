"""Tests of report.html: it follows a run, no text is cut or overlaps another, and its advice matches plans."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from sample_plans import SHAPES
from test_telemetry import a_step

from offload_trainer.plan.machine import MachineProfile, Rates, read_machine
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import resolve_and_plan
from offload_trainer.plan.step_time import tokens_that_hide_the_update
from offload_trainer.run.planning import Planned
from offload_trainer.run.report import FASTER, SMALLER, advice, wear
from offload_trainer.settings import load_config
from offload_trainer.telemetry import sinks
from offload_trainer.telemetry.metrics import EvalRecord, StepRecord, read_metrics
from offload_trainer.telemetry.report import RELOAD, Series, report_page, write_comparison
from offload_trainer.telemetry.sinks import LiveReport, Screen, Telemetry
from offload_trainer.units import format_bytes, format_count

# Units of a chart's text on a desktop and on a phone, and the widest character's share of them.
SIZES, WIDEST = (12, 20), 0.62
WIDTH = 640


# -- the page --------------------------------------------------------------------------------------------------------


def faults(page: str) -> list[str]:
    """Return the texts of charts that are cut by their chart or overlap another, in the page style's font sizes."""
    found = []
    for height, chart in re.findall(rf'<svg viewBox="0 0 {WIDTH} (\d+)"[^>]*>(.*?)</svg>', page, re.DOTALL):
        if not re.search("<(polyline|rect|circle) ", chart):
            found.append("empty chart")
        texts = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"([^>]*)>([^<]*)</text>', chart)
        for size in SIZES:
            boxes = []
            for x, y, more, text in texts:
                wide = len(unescape(text)) * WIDEST * size
                left = float(x) - wide * (1 if '"end"' in more else 0.5 if '"middle"' in more else 0)
                boxes.append((left, left + wide, float(y) - 0.75 * size, float(y) + 0.25 * size, text))
            for number, (left, right, top, bottom, text) in enumerate(boxes):
                if left < 0 or right > WIDTH or top < 0 or bottom > int(height):
                    found.append(f"{size}: {text} is cut")
                for low, high, upper, lower, other in boxes[number + 1 :]:
                    if left < high and low < right and top < lower and upper < bottom:
                        found.append(f"{size}: {text} on {other}")
    return found


def page_of(rows: list[StepRecord], *, place: str, left: float | None = None) -> str:
    """Return the page of a run with everything possible: long names, large numbers, all tiers, many validations."""
    evaluations = [EvalRecord(step=s, validation_loss=3.123456, perplexity=1e9, bits_per_byte=1.1) for s in range(30)]
    plan = {
        "tiers": {place: {"need": 10**12, "have": 2 * 10**12}, "ram": {"need": 123 * 10**9, "have": 128 * 10**9}},
        "seconds": {"data": 0.0, "forward": 100.0, "backward": 222.0, "update": 1e5},
    }
    return report_page(
        title=f"gpt2-10b: params gpu, optimizer 6.4% gpu, 83.1% RAM, else nvme {place}",
        rows=rows,
        evaluations=evaluations,
        plan=plan,
        measured={"tiers": {place: 10**12, "ram": 10**11}, "seconds": {"forward": 90.0, "update": 9e4, "save": 3e4}},
        advice=[("Notes", [f"a step writes 13 GB to {place}"]), *wear(rows)],
        progress=(100_000, left),
    )


def full_step(step: int) -> StepRecord:
    """Return a step of a run that uses every tier."""
    memory = {"ram": 123 * 10**9, "gpu": 31 * 10**9, "drives": 987 * 10**9}
    row = a_step(step, memory=memory, nvme_written_bytes=10**9, device_peak_bytes=33 * 10**9, tokens=10**6 * step)
    return replace(row, loss=11.2 - step / 2000, phases={**row.phases, "wait": 0.4})


def test_no_text_is_cut_or_on_another() -> None:
    page = page_of([full_step(step) for step in range(9_990, 12_345, 5)], place="/mnt/a-drive/" + "directory" * 9)
    assert faults(page) == []
    assert len(re.findall("<svg", page)) == 5
    for broken, told in (
        ('<svg viewBox="0 0 640 20"></svg>', "empty chart"),
        ('<svg viewBox="0 0 640 40"><rect /><text x="630" y="20">far out</text></svg>', "12: far out is cut"),
        (
            '<svg viewBox="0 0 640 40"><rect /><text x="9" y="20">a</text><text x="9" y="30">b</text></svg>',
            "20: a on b",
        ),
    ):
        assert told in faults(page + broken)


# -- while a run goes on ---------------------------------------------------------------------------------------------


class Clock:
    """A clock for LiveReport and Screen that moves only when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(sinks.time, "monotonic", lambda: self.now)


def telemetry(folder: Path, *, total: int, done: int = 0) -> tuple[Telemetry, list[str]]:
    """Return the outputs of a run in `folder`, with its page, and the lines that they print."""
    said: list[str] = []
    outputs = Telemetry(folder, done=done, screen=Screen(total, initial=done, say=said.append, live=False))

    def page(rows: Sequence[StepRecord], evaluations: Sequence[EvalRecord], left: float) -> str:
        return page_of(list(rows), place="/mnt", left=left)

    outputs.report = LiveReport(folder, page, say=outputs.say)
    return outputs, said


def facts_of(page: str) -> dict[str, str]:
    """Return the figures at the top of a page."""
    return dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page))


def test_the_page_follows_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written after the first step and then once in ten seconds, and shows what a reader wants to know."""
    clock, (outputs, _) = Clock(monkeypatch), telemetry(tmp_path, total=100_000)
    shown = []
    for step in range(1, 61):
        clock.now += 0.5
        outputs.step(full_step(step))
        page = (tmp_path / "report.html").read_text()
        if not shown or page != shown[-1]:
            shown.append(page)
    steps = [facts_of(page)["steps"] for page in shown]
    assert steps == [f"{step} of 100000" for step in (1, 21, 41)]
    facts = facts_of(shown[-1])
    assert facts["training loss"] == "11.18"
    assert facts["time per step (median)"] == "0.5 s"
    assert facts["tokens/s (of that step)"] == "1.02 k"
    assert facts["time left"] == "13 h 53 min"
    assert RELOAD in shown[-1]
    assert faults(shown[-1]) == []
    assert sorted(os.listdir(tmp_path)) == ["evaluations.jsonl", "metrics.jsonl", "report.html"]
    outputs.report.write(lambda: page_of([full_step(60)], place="/mnt"))  # type: ignore[union-attr]
    ended = (tmp_path / "report.html").read_text()
    assert "refresh" not in ended
    assert "time left" not in facts_of(ended)
    outputs.close()


def test_a_resumed_run_shows_its_earlier_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    (tmp_path / "metrics.jsonl").write_text("".join(full_step(step).to_json() + "\n" for step in range(1, 3601)))
    outputs, _ = telemetry(tmp_path, total=100_000, done=3590)
    clock.now += 1
    outputs.step(full_step(3591))
    page = (tmp_path / "report.html").read_text()
    outputs.close()
    points = page.partition(' points="')[2].partition('"')[0].split()
    assert 500 < len(points) <= 800
    assert facts_of(page)["steps"] == "3591 of 100000"


def test_a_long_run_stays_cheap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of 100,000 steps are made of a bounded number of them, evenly spaced, and of the last one."""
    clock, pages = Clock(monkeypatch), []
    report = LiveReport(tmp_path, lambda rows, *_: pages.append([row.step for row in rows]) or "", say=pytest.fail)
    row = full_step(1)
    for step in range(1, 100_001):
        clock.now += 2e-3 if step % 1000 else 10.0  # a page is due once in a thousand steps
        report.step(replace(row, step=step), left=1.0)
    assert len(pages) == 101
    assert pages[1] == list(range(1, 1001))
    assert all(len(steps) <= 1601 for steps in pages)
    assert pages[-1][-1] == 100_000
    assert {after - before for before, after in pairwise(pages[-1][:-1])} == {64}


def test_slow_pages_are_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a hundredth of the time goes into pages, however long one takes."""
    clock, written = Clock(monkeypatch), []

    def page(*_: object) -> str:
        clock.now += 2.0
        written.append(clock.now)
        return ""

    report = LiveReport(tmp_path, page, say=pytest.fail)
    for step in range(1, 1001):
        clock.now += 1.0
        report.step(full_step(step), left=1.0)
    assert [after - before for before, after in pairwise(written)] == [202.0] * 4


def test_a_page_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says so, once; the metrics are complete, and no temporary file is left."""
    clock, (outputs, said) = Clock(monkeypatch), telemetry(tmp_path, total=1000)
    (tmp_path / "report.html").mkdir()
    for step in range(1, 4):
        clock.now += 60
        outputs.step(replace(full_step(step), loss=math.nan))
    outputs.report.write(lambda: page_of([full_step(3)], place="/mnt"))  # type: ignore[union-attr]
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


def luminance(colour: str) -> float:
    """Return WCAG's relative luminance of #rrggbb."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("runs", [2, 8, 20])
def test_runs_have_different_colours_and_their_names_beside_the_lines(runs: int, tmp_path: Path) -> None:
    names = [f"run-{number}-{'x' * number}" for number in range(runs)]
    losses = [Series(name, [(1.0, 4.0), (100.0, 2.0 + number % 3 / 1000)]) for number, name in enumerate(names)]
    phases = {name: {"forward": 1.0} for name in names}
    write_comparison(tmp_path / "page.html", title="Runs", losses=losses, phases=phases, table=[("", *names)])
    page = (tmp_path / "page.html").read_text()
    assert faults(page) == []
    chart = page.partition('aria-label="loss over steps"')[2].partition("</svg>")[0]
    drawn = re.findall(r'<polyline class="line" style="([^"]*)" [^>]*><title>(.*?)</title>', chart)
    assert [name for _, name in drawn] == names
    assert len({style for style, _ in drawn}) == runs
    beside = re.findall(r'<text x="[\d.]+" y="[\d.]+" style="fill: (var\(--c\d\))">(.*?)</text>', chart)
    assert [name.lstrip("…") for _, name in beside] == [name if len(name) <= 12 else name[-11:] for name in names]
    assert all(colour in style for (colour, _), (style, _) in zip(beside, drawn, strict=True))


def test_colours_are_readable_in_light_and_dark() -> None:
    """Every colour of a line and its name has a contrast of 4.5 to the page, as WCAG asks of text."""
    page = page_of([full_step(1)], place="/mnt")
    light, dark = re.findall(r":root {(.*?)}", page, re.DOTALL)
    for style in (light, dark):
        colours = dict(re.findall(r"--(\w+): (#\w{6})", style))
        lines = [colour for name, colour in colours.items() if re.fullmatch(r"c\d", name)]
        assert len(set(lines)) == 8
        for colour in lines:
            low, high = sorted((luminance(colour), luminance(colours["page"])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, colour


# -- what it advises -------------------------------------------------------------------------------------------------


def machine(*, gpu: int, ram: int) -> MachineProfile:
    """Return a V100 machine with this much memory, in GB."""
    return replace(read_machine("v100-32gb"), gpu_bytes=gpu * 10**9, ram_bytes=ram * 10**9)


def planned(here: MachineProfile, *words: str) -> Planned:
    drives = [word for drive in here.drives for word in ("--nvme", drive.directory)]
    config = load_config(["--model", "gpt2-xl", *drives, *words])
    settled, plan = resolve_and_plan(config, SHAPES["gpt2-xl"], here)
    return Planned(settled, plan, here, SimpleNamespace(shape=SHAPES["gpt2-xl"]))


def words_of(line: str) -> str:
    """Return the arguments in the last brackets of a line of advice."""
    return re.findall(r"\(([^()]*)\): ", line)[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("here", "given"),
    [
        (machine(gpu=8, ram=24), ("--ram-fraction", "0.25")),
        (machine(gpu=8, ram=24), ("train.tokens_per_step=3072",)),
        (machine(gpu=40, ram=64), ("--accumulate", "4")),
    ],
)
def test_each_number_is_that_of_a_separate_plan(here: MachineProfile, given: tuple[str, ...]) -> None:
    run = planned(here, *given)
    now, told = run.plan, dict(advice(run))
    assert SMALLER in told
    fixed = [word for word in given if "tokens_per_step" not in word]  # the number of rows replaces it
    kept = f"model.activation_checkpointing={run.config.model.activation_checkpointing}"  # the run's own choice
    for heading, lines in told.items():
        for line in lines:
            words = words_of(line).split()
            other = planned(here, kept, *(fixed if "--accumulate" in words else given), *words).plan
            _is_told(line, other, now)
            gain = other.tokens_per_step / other.forecast.step / (now.tokens_per_step / now.forecast.step)
            needs = [(other.tiers[tier]["need"], now.tiers[tier]["need"]) for tier in ("gpu", "ram")]
            assert gain > 1.01 if heading == FASTER else any(new < old for new, old in needs)


def _is_told(line: str, other: Plan, now: Plan) -> None:
    """Check a line's seconds or tokens a second, its bytes, and whether it fits."""
    assert other.fits == ("; it fits" in line)
    whole, before = other.forecast.step, now.forecast.step
    assert whole
    assert before
    if "tokens/s" in line:
        speeds = format_count(other.tokens_per_step / whole), format_count(now.tokens_per_step / before)
        assert "{} tokens/s instead of {}, ".format(*speeds) in line
    else:
        assert f"{whole:.3g} s a step instead of {before:.3g} s" in line
    for tier, room in other.tiers.items():
        if (shown := re.search(rf"{tier} ([\d.]+ \w+) instead of ([\d.]+ \w+)", line)) is not None:
            assert shown.groups() == (format_bytes(room["need"]), format_bytes(now.tiers[tier]["need"]))


@pytest.mark.slow
def test_more_state_in_ram_is_advised_with_its_gain() -> None:
    told = dict(advice(planned(machine(gpu=8, ram=24), "--ram-fraction", "0.25")))[FASTER]
    (line,) = [line for line in told if "--ram-fraction" in line]
    assert re.search(r"^\d+% of the optimizer state in RAM .*s a step instead of .* s, .* s less; .*it fits", line)
    now = planned(machine(gpu=8, ram=24), "--ram-fraction", "0.25").plan
    hidden = tokens_that_hide_the_update(now.forecast, tokens=now.tokens_per_step)
    assert hidden
    tokens, later = format_count(4 * now.tokens_per_step), format_count(hidden)
    said = f"4 x the tokens a step, {tokens} (from {later} on, a step waits for the update at most 10% of its time)"
    assert any(line.startswith(f"{said} (--micro-batch") for line in told)


@pytest.mark.slow
def test_a_share_that_does_not_fit_says_how_much_is_missing() -> None:
    lines = dict(advice(planned(machine(gpu=8, ram=12), "--ram-fraction", "0.25")))[FASTER]
    (line,) = [one for one in lines if "it does not fit" in one]
    assert re.search(r"--ram-fraction .*it does not fit: ram needs [\d.]+ GB and has 12 GB$", line)


def test_without_a_timed_machine_advice_is_about_bytes() -> None:
    here = replace(machine(gpu=8, ram=24), rates=Rates())
    here = replace(here, drives=tuple(replace(drive, rates=None) for drive in here.drives))
    run = planned(here)
    assert run.plan.forecast.step is None
    told = dict(advice(run))
    assert told[FASTER] == ["unknown: time this machine first, with `offload-train bench` and the same arguments"]
    assert told[SMALLER]
    assert not [line for line in told[SMALLER] if "a step instead of" in line]


def test_wear_is_the_counted_bytes() -> None:
    rows = [a_step(step, nvme_written_bytes=2 * 10**9) for step in (1, 2, 3)]
    ((heading, (line,)),) = wear(rows)
    assert heading == "Wear of the drives"
    assert "6 GB were written in these 3 steps, 2 GB a step" in line
    assert line.endswith("lasts 500 such steps")
    assert wear([a_step(1, nvme_written_bytes=4096)]) == []
    assert wear([a_step(1, nvme_written_bytes=None)]) == []
