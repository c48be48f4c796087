"""Tests of changing the update schedule after a run's first steps (`run/schedule_change.py`): when, and its bits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from commands import HELPERS, TINY, Run, call, run_script
from forked_ranks import call_ranks
from safetensors.torch import load_file
from sample_plans import SHAPES, wish

from offload_trainer.errors import LOST
from offload_trainer.plan.machine import DriveRates, MachineProfile, Rate, Rates
from offload_trainer.plan.planner import resolve_and_plan
from offload_trainer.retention import complete_checkpoints
from offload_trainer.run import schedule_change
from offload_trainer.run.planning import Planned, plan_run
from offload_trainer.run.schedule_change import ScheduleWatch, decide, may_change, schedule_in_words
from offload_trainer.settings import load_config
from offload_trainer.telemetry.metrics import StepRecord

SHAPE = SHAPES["gpt2-medium"]
# One relative speed, as drives have without rates; otherwise a machine with another rate would have another layout.
ALWAYS = ("--save-every", "100", "--params", "gpu", "tiered.drive_speeds=[1]", "tiered.io_threads=4")
HALF = ("--ram-fraction", "0.5", "--micro-batch", "2")
ALL = ("--ram-fraction", "0", "--micro-batch", "1", "--seq-len", "128")
OFF, FORWARD, BACKWARD = (f"tiered.overlap={how}" for how in ("off", "forward", "backward"))
SPLIT = "tiered.master_format=split"


def machine(*, drive: float, matmul: float, gpu: bool = False) -> MachineProfile:
    from sample_plans import machine as sample

    def rate(value: float) -> Rate:
        return Rate(value, "measured", "for a test")

    rates = DriveRates(read=rate(drive), write=rate(drive), mixed_read=rate(drive / 2), mixed_write=rate(drive / 2))
    here = sample(gpu=16 * 10**9 if gpu else 0)
    return replace(
        here,
        drives=(replace(here.drives[0], rates=rates),),
        rates=Rates(
            matmul={"bf16": rate(matmul)},
            memory=rate(50e9),
            update={"native": rate(1e9)},
            to_device=rate(12e9),
            from_device=rate(12e9),
            both_ways=rate(10e9),
        ),
    )


def planned(on: MachineProfile, *words: str) -> Planned:
    """Return the plan of a run, without a model that could be built."""
    config, plan = resolve_and_plan(wish(*ALWAYS, *words), SHAPE, on)
    return Planned(config, plan, on, SimpleNamespace(shape=SHAPE))


def schedule(one: Planned) -> str:
    return schedule_in_words(schedule_change.with_schedule(one, one.plan))


def record(step: int, phases: dict[str, float], *, grad_norm: float = 0.1) -> StepRecord:
    facts: dict[str, Any] = dict.fromkeys(("loss", "lr", "loss_scale", "tokens_per_second"), 1.0)
    facts |= dict.fromkeys(("nvme_read_bytes", "nvme_written_bytes", "host_rss_bytes", "device_peak_bytes"), 0)
    facts |= {"step": step, "tokens": step, "seconds": sum(phases.values()), "mfu": None, "skipped": False}
    return StepRecord(**facts, phases=phases, grad_norm=grad_norm)


def rows(truth: Planned, *, first: int = 3, count: int = 6) -> list[StepRecord]:
    """Return the records of steps that take as long as a plan says."""
    phases = {phase: seconds or 0.0 for phase, seconds in truth.plan.forecast.in_line.items()}
    return [record(first + number, phases) for number in range(count)]


def on_machine(one: Planned, on: MachineProfile) -> Planned:
    """Return the plan of the same schedule on a machine with other rates."""
    return schedule_change.planned_with(schedule_change.with_schedule(one, one.plan), on)


SPEEDS = [1 / 3, 1.0, 3.0]


# -- the decision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [HALF, ALL])
@pytest.mark.parametrize("gpu", [False, True])
def test_the_change_is_to_what_a_plan_with_the_true_rates_says(words: tuple[str, ...], gpu: bool) -> None:
    """The steps are those of a machine whose drive or processor is not as fast as was measured.

    A change always gains by the true rates, whichever resource was measured wrongly.
    """
    more = ("--gpu-fraction", "0") if gpu else ()
    changes = set()
    for drive, matmul in itertools.product((1e9, 2e10), (1e12, 1e13)):
        one = planned(machine(drive=drive, matmul=matmul, gpu=gpu), *words, *more)
        for faster, computing in itertools.product(SPEEDS, SPEEDS):
            true = machine(drive=drive * faster, matmul=matmul * computing, gpu=gpu)
            now = on_machine(one, true)
            assert schedule_change._layout(now.plan) == schedule_change._layout(one.plan)
            change = decide(one, rows(now), left=10**6, build_seconds=10.0)
            if change is None:
                continue
            before, after = (on_machine(each, true).plan.forecast.step or 0.0 for each in (one, change.planned))
            assert after <= 0.96 * before, (schedule(one), schedule(change.planned))
            changes.add((schedule(one), schedule(change.planned)))
    assert changes


def test_a_run_as_fast_as_planned_keeps_its_schedule() -> None:
    for words in (HALF, ALL):
        one = planned(machine(drive=1e9, matmul=1e12), *words)
        assert decide(one, rows(one), left=10**6, build_seconds=0.0) is None


def fast_drive() -> tuple[Planned, list[StepRecord]]:
    """Return a run whose drive is three times as fast as planned, so that the backward hides its update."""
    one = planned(machine(drive=1e9, matmul=1e13), *HALF)
    return one, rows(on_machine(one, machine(drive=3e9, matmul=1e13)))


def test_the_line_says_what_was_measured_what_changes_and_what_that_saves() -> None:
    one, taken = fast_drive()
    change = decide(one, taken, left=1000, build_seconds=10.0)
    assert change is not None
    before, after = schedule(one), schedule(change.planned)
    assert (before, after) == (f"{FORWARD} {SPLIT}", BACKWARD)
    assert change.told.startswith("steps 3-8 took ")
    assert f"changing from {before} to {after}" in change.told
    assert "in the 1 k steps left" in change.told
    assert "to save and load a checkpoint of 4." in change.told
    assert change.planned.config.tiered.overlap == "backward"
    assert change.planned.config.tiered.master_format == "fp32"
    assert not may_change(change.planned)


def test_corrections_of_compiled_blocks_are_found_by_their_plans() -> None:
    """Ratios of compiled blocks have keys of their own. A forecast with the corrections has the measured seconds."""
    one = planned(machine(drive=1e9, matmul=1e13), *HALF, "model.compile=on")
    taken = rows(on_machine(one, machine(drive=3e9, matmul=1e13)))
    found = schedule_change.machines_as_measured(one, taken)
    assert found
    assert on_machine(one, found[0]).plan.forecast.step == pytest.approx(sum(taken[0].phases.values()), rel=0.02)
    change = decide(one, taken, left=1000, build_seconds=10.0)
    assert change is not None
    assert schedule(change.planned) == BACKWARD


def test_a_change_must_be_earned_back() -> None:
    one, taken = fast_drive()
    change = decide(one, taken, left=1000, build_seconds=0.0)
    assert change is not None
    cost = schedule_change.seconds_of_change(change.planned, build_seconds=0.0)
    state = 12 * SHAPE.trainable
    assert cost > state / 200e6 * 2  # the output's drive was not timed
    steps = [on_machine(one, change.planned.machine).plan.forecast.step, change.planned.plan.forecast.step]
    least = int(cost / ((steps[0] or 0.0) - (steps[1] or 0.0))) + 1
    assert decide(one, taken, left=least, build_seconds=0.0) is not None
    assert decide(one, taken, left=least - 1, build_seconds=0.0) is None
    assert decide(one, taken, left=least, build_seconds=3600.0) is None


@pytest.mark.parametrize(
    ("words", "open_"),
    [
        ((), True),
        ((FORWARD,), True),
        ((SPLIT,), True),
        ((FORWARD, "tiered.master_format=fp32"), False),
        (("--save-every", "0"), False),
    ],
)
def test_only_what_the_user_left_open_changes(words: tuple[str, ...], open_: bool) -> None:
    on = machine(drive=1e9, matmul=1e12)
    one = planned(on, *HALF, *words)
    assert may_change(one) == open_
    for drive, matmul in itertools.product((0.3e9, 3e9), (0.3e12, 3e12)) if open_ else ():
        truth = on_machine(one, machine(drive=drive, matmul=matmul))
        change = decide(one, rows(truth), left=10**6, build_seconds=0.0)
        if change is not None:
            chosen = schedule(change.planned)
            assert all(word in chosen for word in words)


def test_ranks_of_one_machine_change_to_what_their_plans_allow() -> None:
    """Their plans allow the update during the forward, and no other schedule. Several machines change nothing."""
    changes = set()
    cases = ((7e8, False, ()), (1e9, True, ("--gpu-fraction", "0")))
    for (drive, gpu, more), faster, computing in itertools.product(cases, SPEEDS, SPEEDS):
        on = machine(drive=drive, matmul=1e12, gpu=gpu)
        config, plan = resolve_and_plan(wish(*ALWAYS, *ALL, *more, "--gpus", "2"), SHAPE, on, world=2)
        one = Planned(config, plan, on, SimpleNamespace(shape=SHAPE))
        assert may_change(one)
        assert not may_change(replace(one, plan=replace(plan, nodes=2)))
        true = machine(drive=drive * faster, matmul=1e12 * computing, gpu=gpu)
        change = decide(one, rows(on_machine(one, true)), left=10**6, build_seconds=10.0)
        if change is not None:
            before, after = (on_machine(each, true).plan.forecast.step or 0.0 for each in (one, change.planned))
            assert after <= 0.96 * before
            changes.add((gpu, schedule(one), schedule(change.planned)))
    assert changes == {(False, OFF, FORWARD), (True, OFF, FORWARD)}


def test_phases_far_from_the_plan_change_nothing() -> None:
    """Only a wrong rate explains them, and nothing is known about the other schedules."""
    one, _ = fast_drive()
    phases = rows(one)[0].phases
    for factor in (0.1, 10.0):
        taken = [record(3 + n, {phase: factor * seconds for phase, seconds in phases.items()}) for n in range(6)]
        assert decide(one, taken, left=10**6, build_seconds=0.0) is None
    assert decide(one, [record(3 + n, {"forward": 0.01}) for n in range(6)], left=10**6, build_seconds=0.0) is None


# -- when it is made ---------------------------------------------------------------------------------------------------


def watched(one: Planned, taken: Sequence[StepRecord], monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[str]]:
    """Return the steps after which a decision was made, with the steps that it counted."""
    setup: Any = SimpleNamespace(
        planned=one,
        plan=one.plan,
        train=SimpleNamespace(steps=10**6),
        optim=SimpleNamespace(max_grad_norm=1.0),
    )
    decided: list[str] = []
    monkeypatch.setattr(
        schedule_change,
        "decide",
        lambda _, counted, **more: decided.append(f"{counted[0].step}-{counted[-1].step}"),
    )
    watch = ScheduleWatch(setup, build_seconds=0.0, say=lambda _: None)
    steps = []
    for row in taken:
        before = len(decided)
        assert watch(row) is None
        steps += [row.step] * (len(decided) - before)
    return steps, decided


def test_a_run_decides_once_after_steady_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = fast_drive()
    steady = rows(one, first=1, count=30)
    assert watched(one, steady, monkeypatch) == ([8], ["3-8"])
    uneven = [replace(row, phases={"forward": 1.0 + 2 * (row.step % 2)}) if row.step < 12 else row for row in steady]
    steps, _ = watched(one, uneven, monkeypatch)
    assert len(steps) == 1
    assert 12 < steps[0] <= 17
    never = [record(step, {"forward": 1.0 + 2 * (step % 2)}) for step in range(1, 200)]
    assert watched(one, never, monkeypatch) == ([], [])
    two = replace(one, plan=replace(one.plan, world=2, nodes=2))
    assert watched(two, steady, monkeypatch) == ([], [])


def test_clipped_steps_do_not_count_where_the_update_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    one = planned(machine(drive=1e9, matmul=1e12), *HALF)
    ahead = replace(one, plan=replace(one.plan, sizes=replace(one.plan.sizes, ahead=True)))  # type: ignore[type-var]
    behind = replace(one, plan=replace(one.plan, sizes=replace(one.plan.sizes, ahead=False)))  # type: ignore[type-var]
    clipped = [replace(row, grad_norm=2.0 if row.step <= 5 else 0.5) for row in rows(one, first=1, count=40)]
    assert watched(ahead, clipped, monkeypatch) == ([19], ["14-19"])
    assert watched(behind, clipped, monkeypatch) == ([8], ["3-8"])


# -- the change itself -------------------------------------------------------------------------------------------------

STEPS = 8
WORDS = [
    *TINY,
    "--steps",
    STEPS,
    "--save-every",
    100,
    "train.eval_every=2",
    "tiered.page_size=16384",
    "--ram-fraction",
    0,
]
CHANGING, AFTER = HELPERS / "run_and_change.py", 3
KEYS = ("step", "tokens", "loss", "grad_norm", "lr", "loss_scale", "skipped", "validation_loss")


def lines(path: Path) -> list[list[Any]]:
    return [[json.loads(line).get(key) for key in KEYS] for line in path.read_text().splitlines()]


def left(output: Path) -> dict[str, Any]:
    """Return what runs are compared by: metrics, evaluations, and the last checkpoint's state."""
    saved = complete_checkpoints(output / "checkpoints")[-1]
    assert saved.name == f"step-{STEPS:08d}"
    tensors = {path.name: load_file(path) for path in saved.glob("*.safetensors")}
    return {
        "steps": lines(output / "metrics.jsonl"),
        "evaluations": lines(output / "evaluations.jsonl"),
        "engine": (saved / "engine.json").read_text(),
        "state": (saved / "state.json").read_text(),
        "tensors": tensors,
    }


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    found, expected = dict(found), dict(expected)
    tensors = [one.pop("tensors") for one in (found, expected)]
    assert found == expected
    assert tensors[0].keys() == tensors[1].keys() != set()
    for name, its in tensors[0].items():
        assert its.keys() == tensors[1][name].keys()
        assert all(torch.equal(value, tensors[1][name][key]) for key, value in its.items())


def changed(settings: str, *words: object, output: Path, helper: str = "-", check: bool = True) -> Run:
    done = run_script(CHANGING, AFTER, settings, helper, *words, "--output", output)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return Run(done.returncode, done.stdout + done.stderr, output)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of a run that is left alone, without overlap."""
    output, drive = tmp_path_factory.mktemp("alone") / "run", tmp_path_factory.mktemp("drive")
    run = call("--nvme", drive, *WORDS, OFF, "tiered.master_format=fp32", output=output)
    return left(run.output)


@pytest.mark.parametrize(
    ("start", "to"),
    [
        ("tiered.master_format=fp32", BACKWARD),
        ("tiered.master_format=fp32", OFF),
        (OFF, SPLIT),
        (BACKWARD, BACKWARD),
        (SPLIT, "tiered.master_format=fp32,tiered.overlap=forward"),
        ("tiered.io_threads=3", f"{FORWARD},{SPLIT}"),
    ],
)
def test_a_change_keeps_every_bit(start: str, to: str, drive: Path, tmp_path: Path, alone: dict[str, Any]) -> None:
    place = drive / tmp_path.name
    place.mkdir()
    run = changed(to, "--nvme", place, *WORDS, start, output=tmp_path / "run")
    assert_equal(left(run.output), alone)
    told = next(line for line in run.text.splitlines() if line.startswith("changing to "))
    assert all(word in told for word in to.split(",") if not word.endswith("=fp32"))
    assert run.text.count("resumed from") == 1
    assert run.text.count("engine ready after") == 2
    assert [path.name for path in complete_checkpoints(run.output / "checkpoints")] == [
        "step-00000003",
        "step-00000008",
    ]
    assert not list((place / "offload-trainer").iterdir())
    known = json.loads((run.output / "plan.json").read_text())
    assert told in known["notes"]
    assert told in (run.output / "report.html").read_text().replace("&#x27;", "'")
    section = yaml.safe_load((run.output / "config.yaml").read_text())["tiered"]
    assert all(
        section[key.removeprefix("tiered.")] == value for key, value in (one.split("=") for one in to.split(","))
    )


def test_settings_of_the_user_stay(drive: Path, tmp_path: Path) -> None:
    words = ["--nvme", drive, *WORDS, OFF, "tiered.master_format=fp32"]
    run = changed(BACKWARD, *words, output=tmp_path / "run")
    assert "changing to" not in run.text
    assert run.text.count("engine ready after") == 1


STAGES = [
    ("line", 3),  # before the decision
    ("saving", 1),
    ("saved", 3),
    ("ended", 1),
    ("dropped", 1),
    ("change", 1),
    ("build", 2),
    ("load", 1),
    ("loaded", 1),
    ("line", 4),
    ("line", 6),
]


@pytest.mark.parametrize(("where", "number"), STAGES)
@pytest.mark.parametrize("again", [True, False])
def test_a_kill_at_any_moment_of_a_change_changes_no_bit(
    where: str, number: int, again: bool, drive: Path, tmp_path: Path, alone: dict[str, Any]
) -> None:
    """The same command resumes with the new schedule, whether it would change again (`again`) or not."""
    place = drive / tmp_path.name
    place.mkdir()
    words = ["--nvme", place, *WORDS, "tiered.state_copies=2", "tiered.master_format=fp32"]
    dead = changed(BACKWARD, where, number, *words, output=tmp_path / "run", helper="run_and_kill.py", check=False)
    assert dead.code == -9, dead.text
    late = (where, number) not in STAGES[:2]
    run = changed(BACKWARD, *words, output=tmp_path / "run") if again else call(*words, output=tmp_path / "run")
    assert_equal(left(run.output), alone)
    assert ("changing to" in run.text) == (again and not late)
    if where == "line" and number > AFTER + 1:
        assert f"resuming from the page files in {place}" in run.text
        assert f"step {number - 1}; they are newer than the checkpoint of step 3" in run.text
    elif late:
        assert "step-00000003, step 3" in run.text
    section = yaml.safe_load((run.output / "config.yaml").read_text())["tiered"]
    assert (section["overlap"] == "backward") == (late or again)
    assert not list((place / "offload-trainer").iterdir())


@pytest.fixture(scope="module")
def two_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of a run of two ranks that is left alone, without overlap."""
    output, drive = tmp_path_factory.mktemp("two") / "run", tmp_path_factory.mktemp("drive")
    words = ("--nvme", drive, *WORDS, OFF, "tiered.master_format=fp32")
    runs = call_ranks(*words, output=output, count=2)
    assert [run.code for run in runs] == [0, 0], runs
    return left(output)


@pytest.mark.parametrize(("start", "to"), [(OFF, FORWARD), (FORWARD, OFF), (OFF, BACKWARD)])
def test_two_ranks_change_in_the_same_step_and_keep_every_bit(
    start: str, to: str, drive: Path, tmp_path: Path, two_alone: dict[str, Any]
) -> None:
    place = drive / tmp_path.name
    place.mkdir()
    words = ("--nvme", place, *WORDS, start)
    first, second = call_ranks(*words, output=tmp_path / "run", count=2, script=[CHANGING, AFTER, to, "-"])
    assert (first.code, second.code) == (0, 0), first.text + second.text
    assert_equal(left(first.output), two_alone)
    assert f"changing to {to}" in first.text
    assert first.text.count("resumed from") == 1
    assert first.text.count("engine ready after") == 2
    assert not second.text
    saved = complete_checkpoints(first.output / "checkpoints")
    assert [path.name for path in saved] == ["step-00000003", "step-00000008"]
    assert not list((place / "offload-trainer").iterdir())


@pytest.mark.parametrize(("where", "number"), [("1:build", 2), ("1:load", 1), ("0:change", 1)])
def test_a_rank_that_dies_while_two_change_ends_the_other_and_changes_no_bit(
    where: str, number: int, drive: Path, tmp_path: Path, two_alone: dict[str, Any]
) -> None:
    place = drive / tmp_path.name
    place.mkdir()
    words = ("--nvme", place, *WORDS, "tiered.master_format=fp32")
    script = [CHANGING, AFTER, BACKWARD, "run_and_kill.py", where, number]
    dead = call_ranks(*words, output=tmp_path / "run", count=2, script=script)
    codes = [LOST, LOST]
    codes[int(where[0])] = -9
    assert [run.code for run in dead] == codes, dead
    assert not dead[1].text
    again = call_ranks(*words, output=tmp_path / "run", count=2)
    assert [run.code for run in again] == [0, 0], again
    assert "step-00000003, step 3" in again[0].text
    assert_equal(left(tmp_path / "run"), two_alone)
    section = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["tiered"]
    assert section["overlap"] == "backward"


def test_two_ranks_go_on_without_the_change_where_one_of_them_cannot_write(
    drive: Path, tmp_path: Path, two_alone: dict[str, Any]
) -> None:
    """The disk is full for the second rank when the checkpoint of the change is written."""
    words = ("--nvme", drive, *WORDS)
    script = [CHANGING, 4, BACKWARD, "run_with_fault.py", "full-part", 1]
    first, second = call_ranks(*words, output=tmp_path / "run", count=2, script=script)
    assert (first.code, second.code) == (0, 0), first.text + second.text
    assert "note: the update schedule stays as it is, since no checkpoint could be written" in first.text
    assert first.text.count("engine ready after") == 1
    assert_equal(left(first.output), two_alone)


def test_a_run_goes_on_without_the_change_where_its_checkpoint_cannot_be_written(
    drive: Path, tmp_path: Path, alone: dict[str, Any]
) -> None:
    """The disk is full when the change is due."""
    run = changed(
        BACKWARD, "save-error", 1, "--nvme", drive, *WORDS, output=tmp_path / "run", helper="run_with_fault.py"
    )
    assert "note: the update schedule stays as it is, since no checkpoint could be written" in run.text
    assert run.text.count("engine ready after") == 1
    assert_equal(left(run.output), alone)


def test_a_resumed_run_may_be_told_another_schedule(drive: Path, tmp_path: Path) -> None:
    """The changed schedule is kept only where the command leaves it open and the run allows it."""
    words = ["--nvme", str(drive), *map(str, WORDS), "--output", str(tmp_path / "run")]
    changed(BACKWARD, *words[:-2], output=tmp_path / "run")

    def section(*more: str) -> Any:
        return plan_run(load_config([*words, *more])).config.tiered

    assert section().overlap == "backward"
    assert section("tiered.overlap=off").overlap == "off"
    assert section("tiered.state_copies=1").overlap == "auto"
    assert section(SPLIT).overlap == "auto"
    assert section("--resume", "never").overlap == "auto"
