"""Tests of report.html: no browser cuts or overlaps a text, on desktop or phone, and its advice matches plans."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import escape
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
from offload_trainer.telemetry.metrics import EvalRecord
from offload_trainer.telemetry.report import write_report
from offload_trainer.units import format_bytes, format_count

WIDTHS = (1200, 400)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

_ANYWHERE = "overflow-wrap: anywhere"

# Lists texts that are cut by the window, their chart or their table, overlap another, or are too small.
MEASURE = """
const found = [];
for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument, wide = frame.width;
  const say = (what, node) => found.push(`${wide}: ${what}: ${(node.textContent || "").trim().slice(0, 60)}`);
  if (page.documentElement.scrollWidth > frame.clientWidth) say("wider than the window", page.documentElement);
  for (const box of page.querySelectorAll(".wide")) if (box.scrollWidth > box.clientWidth + 1) say("table cut", box);
  for (const head of page.querySelectorAll("table:not(.names *) th")) {
    const range = page.createRange(), words = head.textContent.trim().split(/\\s+/);
    range.selectNodeContents(head);
    const lines = new Set([...range.getClientRects()].map((line) => Math.round(line.top)));
    if (lines.size > words.length) say("word cut", head);
  }
  for (const chart of page.querySelectorAll("svg")) {
    const edge = chart.getBoundingClientRect(), texts = [...chart.querySelectorAll("text")];
    if (!chart.querySelector("polyline, rect, circle")) say("empty chart", chart);
    const boxes = texts.map((text) => text.getBoundingClientRect());
    boxes.forEach((box, i) => {
      const beside = box.left < edge.left - 1 || box.right > edge.right + 1;
      if (beside || box.top < edge.top - 1 || box.bottom > edge.bottom + 1) say("text cut", texts[i]);
      if (box.height < 10) say("text too small", texts[i]);
      for (const other of boxes.slice(i + 1)) {
        const meets = box.left < other.right && other.left < box.right;
        if (meets && box.top + 2 < other.bottom && other.top + 2 < box.bottom) say("text on text", texts[i]);
      }
    });
  }
}
document.body.textContent = "MEASURED" + JSON.stringify(found) + "END";
"""


def seen(page: str, folder: Path, *, script: str = MEASURE) -> list[str]:
    """Return the layout faults of the page in windows of each width in WIDTHS."""
    frames = "".join(f'<iframe width="{wide}" height="3000" srcdoc="{escape(page)}"></iframe>' for wide in WIDTHS)
    (folder / "frames.html").write_text(
        f"<!doctype html><body>{frames}<script>window.onload = () => {{{script}}}</script></body>"
    )
    assert BROWSER
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    words += [f"--user-data-dir={folder / 'browser'}", f"--window-size={max(WIDTHS)},3000"]
    done = subprocess.run([*words, str(folder / "frames.html")], capture_output=True, text=True, timeout=300)
    printed = re.search("MEASURED(.*)END", done.stdout, re.DOTALL)
    assert printed, done.stdout[-500:] + done.stderr[-2000:]
    return json.loads(printed[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def page_of(folder: Path) -> str:
    """Return the page of a run with everything possible: long names, large numbers, all tiers, many validations."""
    memory = {"ram": 123 * 10**9, "gpu": 31 * 10**9, "drives": 987 * 10**9}
    rows = [
        a_step(step, memory=memory, nvme_written_bytes=10**9, device_peak_bytes=33 * 10**9, tokens=10**6 * step)
        for step in range(9_990, 12_345, 5)
    ]
    rows = [replace(row, loss=11.2 - row.step / 2000, phases={**row.phases, "wait": 0.4}) for row in rows]
    evaluations = [EvalRecord(step=s, validation_loss=3.123456, perplexity=1e9, bits_per_byte=1.1) for s in range(30)]
    place = "/mnt/a-drive/with-a-long-name/" + "directory" * 9
    plan = {
        "tiers": {place: {"need": 10**12, "have": 2 * 10**12}, "ram": {"need": 123 * 10**9, "have": 128 * 10**9}},
        "seconds": {"data": 0.0, "forward": 100.0, "backward": 222.0, "update": 1e5},
    }
    write_report(
        folder / "report.html",
        title=f"gpt2-10b: params gpu, optimizer 6.4% gpu, 83.1% RAM, else nvme {place}",
        rows=rows,
        evaluations=evaluations,
        plan=plan,
        measured={"tiers": {place: 10**12, "ram": 10**11}, "seconds": {"forward": 90.0, "update": 9e4, "save": 3e4}},
        advice=[("Notes", [f"a step writes 13 GB to {place}"]), *wear(rows)],
    )
    return (folder / "report.html").read_text()


@pytest.mark.skipif(not BROWSER, reason="no chromium here")
def test_nothing_is_cut_or_empty(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    assert seen(page, tmp_path) == []
    for broken, told in (
        ('<div style="width: 1500px">much</div></html>', "wider than the window"),
        ('<svg viewBox="0 0 640 20"></svg></html>', "empty chart"),
        ('<svg viewBox="0 0 640 40"><rect/><text x="630" y="20">far out</text></svg></html>', "text cut: far out"),
        (
            f"<table style='table-layout: fixed; width: 1em; {_ANYWHERE}'><tr><th>head</th></tr></table></html>",
            "word cut",
        ),
        ('<div class="wide"><div style="width: 1500px">much</div></div></html>', "table cut"),
    ):
        assert any(told in line for line in seen(page.replace("</html>", broken), tmp_path)), told


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
