"""Tests of the plan's screen: what a person reads before a run starts, in 25 lines of 100 columns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sample_plans import GB, SHAPES, machine, timed, wish

from offload_trainer import cli
from offload_trainer.plan.machine import read_machine
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import make_plan
from offload_trainer.run.commands.plan import described
from offload_trainer.settings import load_config
from offload_trainer.units import format_bytes, format_seconds


def screen_of(plan: Plan, steps: int = 300) -> str:
    text = plan.describe(steps=steps)
    lines = text.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 100
    assert "--explain" in lines[-1]
    return " ".join(text.split())


@pytest.mark.parametrize("name", ["a100-40gb", "8xa100-80gb", "4xrtx4090-10gbe"])
def test_the_screen_of_a_named_machine(name: str) -> None:
    here, words = described(read_machine(name), ["--model", "gpt2-10b", "--save-every", "0"])
    plan = make_plan(load_config(words), SHAPES["gpt2-10b"], here, world=here.gpus)
    text, whole = screen_of(plan), plan.describe(full=True)
    assert "10.3 G parameters" in text
    assert " tokens/s" in text
    assert ("DOES NOT FIT" in text) != plan.fits
    assert all(f"{item.name:<26}" in whole and item.why in whole for item in plan.items if item.bytes)
    assert all(f"  rejected: {homes}: {why}\n" in f"{whole}\n" for homes, why in plan.rejected)


def test_the_command_prints_the_screen_or_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ["plan", "--model", "gpt2", "--machine", "v100-32gb"]
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 80
    assert cli.main([*words, "--explain"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > len(lines)


def test_the_screen_says_bytes_seconds_and_the_run_of_its_steps() -> None:
    plan = make_plan(wish("--ram-fraction", "0.5"), SHAPES["gpt2"], timed())
    text, step = screen_of(plan), plan.forecast.step
    assert step
    assert f"a step takes {format_seconds(step)}" in text
    assert f"{format_seconds(300 * step)} for 300 steps" in text
    assert plan.homes in text
    for tier, room in plan.tiers.items():
        if room["need"]:
            assert f"{tier} {format_bytes(room['need'])} of {format_bytes(room['have'])}" in text
        largest = max((item for item in plan.items if item.tier == tier), key=lambda item: item.bytes, default=None)
        assert largest is None or f"{largest.name} {format_bytes(largest.bytes)}" in text


def test_the_screen_of_a_machine_without_rates_names_the_command_that_measures() -> None:
    text = screen_of(make_plan(wish("--optimizer", "nvme"), SHAPES["gpt2"], machine()))
    assert "seconds a step: unknown" in text
    assert "run `offload-train bench --nvme /ssd` once" in text


def test_a_long_plan_ends_within_its_screen() -> None:
    plan = make_plan(wish(), SHAPES["gpt2"], replace(timed(), ram_bytes=GB))
    text = screen_of(replace(plan, notes=tuple(f"note {number} " + "word " * 60 for number in range(20))))
    assert "DOES NOT FIT" in text
    assert "note: note 0" in text
    assert "note 19" not in text
