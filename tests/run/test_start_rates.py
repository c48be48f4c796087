"""Tests of the measurement at the start of a run (`run/machine_rates.py`): when it is due, and what it changes."""

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import HELPERS, TINY, Run
from forked_ranks import call_ranks
from sample_plans import SHAPES

import offload_trainer as ot
from offload_trainer.errors import LOST
from offload_trainer.machine.rate_cache import cache_file
from offload_trainer.optim import cpu_units
from offload_trainer.plan import step_time
from offload_trainer.plan.machine import read_machine
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import resolve_and_plan
from offload_trainer.run import machine_rates
from offload_trainer.run.planning import Planned, plan_run
from offload_trainer.settings import load_config
from offload_trainer.storage.transfer import DriveFile

MANY = ("--steps", "20000")  # a tiny model moves 64 GB in so many steps


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache of rates, in this process and in those that it starts."""
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "cache"


def planned(drive: Path, output: Path, *words: str) -> Planned:
    state = ("--nvme", str(drive), "--optimizer", "nvme", "--ram-fraction", "0", "--output", str(output))
    return plan_run(load_config([*TINY, *state, *words]))


@pytest.mark.slow
def test_a_long_run_on_a_drive_measures_what_its_plan_lacks(cache: Path, drive: Path, tmp_path: Path) -> None:
    before = planned(drive, tmp_path / "run", *MANY)
    assert before.plan.forecast.step is None
    assert machine_rates.is_due(before)
    messages: list[str] = []
    machine = machine_rates.rates_at_start(before, say=messages.append)
    assert [line.partition(" ")[0] for line in messages] == ["measured"]
    assert not list((drive / "offload-trainer").glob("run-*"))
    after = plan_run(before.config, again=replace(before, machine=machine))
    assert all(bound.seconds is not None for bound in after.plan.forecast.bounds)
    assert after.plan.forecast.step is not None
    assert not machine_rates.is_due(after)
    assert not machine_rates.is_due(planned(drive, tmp_path / "run", *MANY))  # the rates are cached


def test_a_run_that_rates_do_not_change_starts_at_once(cache: Path, drive: Path, tmp_path: Path) -> None:
    due = planned(drive, tmp_path / "run", *MANY)
    short = planned(drive, tmp_path / "run", "--steps", "20")
    in_ram = plan_run(load_config([*TINY, *MANY, "--output", str(tmp_path / "run")]))
    no_room = {tier: {"need": 2, "have": 1} for tier in due.plan.tiers}
    assert machine_rates.is_due(due)
    assert machine_rates.is_due(replace(due, plan=replace(due.plan, world=2)))
    machines = replace(due, plan=replace(due.plan, world=2, nodes=2))
    stock = replace(due, plan=replace(due.plan, world=2, engine="deepspeed"))
    for one in (short, in_ram, replace(due, plan=replace(due.plan, tiers=no_room)), machines, stock):
        assert not machine_rates.is_due(one)
    gpu = replace(in_ram, machine=read_machine("v100-32gb"))
    moves = replace(gpu, plan=replace(gpu.plan, traffic=due.plan.traffic))
    assert machine_rates.is_due(moves)


@pytest.mark.slow
def test_the_products_of_muon_are_measured_for_muon_alone(cache: Path, drive: Path, tmp_path: Path) -> None:
    for rule in ("adamw", "muon"):
        before = planned(drive, tmp_path / "run", *MANY, f"optim.name={rule}")
        measured = machine_rates.rates_at_start(before, say=lambda line: None)
        assert (step_time.RATE in measured.rates.layers) == (rule == "muon")
    after = plan_run(before.config, again=replace(before, machine=measured))
    assert after.plan.forecast.step is not None


def test_the_layer_that_a_cpu_times_is_small_whatever_the_model() -> None:
    """A layer of a large model would take a CPU seconds each time; its rate is that of a smaller one."""
    shape = SHAPES["gpt2-xl"]
    _, plan = resolve_and_plan(load_config(["--model", "gpt2-xl"]), shape, read_machine("v100-32gb"))
    of_cpu, of_gpu = (machine_rates._layer_of(shape, plan, gpu=gpu) for gpu in (False, True))
    assert max(of_gpu.matrix) > 4096
    rows, inner, outer = of_cpu.matrix
    assert 3 * 2 * rows * inner * outer <= 7e9
    assert 4 * of_cpu.tokens**2 * of_cpu.width <= 5e9


# -- sessions ----------------------------------------------------------------------------------------------------------


def session(drive: Path, told: list[str], **keys: object) -> Plan:
    """Open and close a session whose state is on the drive; return its plan. It leaves torch's generator alone."""
    block = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    before = torch.get_rng_state()
    facts = {"nvme": [str(drive)], "optimizer": "nvme", "ram_fraction": 0, "seq_len": 32, "kernel": "torch", **keys}
    with ot.offload(block, say=told.append, **facts) as opened:  # type: ignore[arg-type]
        plan: Plan = opened.plan
    assert torch.equal(torch.get_rng_state(), before)
    return plan


@pytest.mark.slow
def test_a_session_measures_if_ten_steps_move_enough(cache: Path, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = list[str](), list[str]()
    plan = session(drive, few)
    assert not [line for line in few if line.startswith("measured")]
    assert plan.forecast.step is None
    moved = 10 * sum(one.read + one.written for one in plan.traffic)
    monkeypatch.setattr(machine_rates, "_WORTH_BYTES", moved + 1)
    session(drive, few)
    assert not [line for line in few if line.startswith("measured")]
    monkeypatch.setattr(machine_rates, "_WORTH_BYTES", moved)
    session(drive, many)
    starts = [line.partition(" ")[0] for line in many]
    first = starts.index("measured")
    assert starts[first : first + 2] == ["measured", "plan:"]
    assert "estimated step" in many[first + 1]
    session(drive, again := list[str]())
    assert not [line for line in again if line.startswith("measured")]


@pytest.mark.slow
def test_a_session_does_not_measure_where_torch_computes_otherwise_than_a_run(
    cache: Path, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's 16-bit products in fp32 are not a session's, and must not be installed in the caller's process."""
    monkeypatch.setattr(machine_rates, "_WORTH_BYTES", 1)
    monkeypatch.setattr(cpu_units, "has_native_16bit", lambda dtype: dtype is torch.float32)
    told: list[str] = []
    session(drive, told, dtype="bf16")
    assert not [line for line in told if line.startswith("measured")]
    session(drive, told)
    assert [line for line in told if line.startswith("measured")]


@pytest.mark.slow
def test_a_drive_that_fails_leaves_the_defaults(
    cache: Path, drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = planned(drive, tmp_path / "run", *MANY)
    messages: list[str] = []

    def full(self: DriveFile, path: Path, size: int) -> None:
        raise machine_rates.TrainerError(f"{path}: no space left")

    monkeypatch.setattr(DriveFile, "__init__", full)
    assert machine_rates.rates_at_start(before, say=messages.append) == before.machine
    assert "no space left" in messages[0]
    assert messages[0].startswith("note: this machine's speed could not be measured")
    assert not cache_file().exists()


# -- several ranks -----------------------------------------------------------------------------------------------------


def two_start(folder: Path, fault: str, *words: object) -> tuple[list[Run], list[Any]]:
    """Start two ranks that measure first; return how they ended, and the plan that each has told."""
    folder.mkdir()
    script = [HELPERS / "start_and_measure.py", folder, fault]
    runs = call_ranks(*words, output=folder / "run", count=2, script=script)
    return runs, [json.loads(path.read_text()) for path in sorted(folder.glob("plan-*.json"))]


def short(drive: Path) -> tuple[object, ...]:
    state = ("--nvme", drive, "--optimizer", "nvme", "--ram-fraction", 0, "optim.kernel=torch")
    return (*TINY, *state, "--steps", 2, "--save-every", 0, "train.eval_every=0")


@pytest.mark.slow
def test_two_ranks_measure_once_and_start_with_one_plan(cache: Path, drive: Path, tmp_path: Path) -> None:
    """Rank 0 measures with the threads of both, and the next start takes the rates from the cache."""
    runs, told = two_start(tmp_path / "first", "-", *short(drive))
    assert [run.code for run in runs] == [0, 0], runs
    assert (tmp_path / "first" / "measured").read_text() == "0 2\n"
    assert told[0] == told[1]
    assert told[0]["threads"] == 1
    assert None not in told[0]["plan"]["seconds"].values()
    lines = runs[0].text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("measured this machine in"))
    assert [line.partition(" ")[0] for line in lines[first : first + 2]] == ["measured", "plan:"]
    assert runs[0].text.count("plan: ") == 1
    assert not runs[1].text
    _, kept = two_start(tmp_path / "second", "-", *short(drive))
    assert not (tmp_path / "second" / "measured").exists()
    assert kept[0] == kept[1]
    assert kept[0]["machine"]["rates"] == told[0]["machine"]["rates"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "codes", "line"),
    [
        ("kernel", [2, 2], "offload-train: the kernel cannot be had"),
        ("kill", [-signal.SIGKILL, LOST], ""),
    ],
)
def test_a_rank_that_fails_while_it_measures_ends_the_other(
    fault: str, codes: list[int], line: str, cache: Path, drive: Path, tmp_path: Path
) -> None:
    runs, told = two_start(tmp_path / "two", fault, *short(drive))
    assert [run.code for run in runs] == codes, runs
    assert not told
    assert runs[0].text.count(line) == 1 or not line
    assert not runs[1].text
    assert not (tmp_path / "two" / "run").exists()


def test_measuring_takes_the_processors_and_threads_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are bound to NUMA nodes. A thread that was started before moves too, and all of them return."""
    every, threads = os.sched_getaffinity(0), torch.get_num_threads()
    own = {min(every)}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    os.sched_setaffinity(0, own)
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        with machine_rates._threads_of_all_ranks(read_machine("v100-32gb"), every):
            assert torch.get_num_threads() == 6
            assert [os.sched_getaffinity(number) for number in (0, thread.native_id or 0)] == [every, every]
        assert torch.get_num_threads() == threads
        assert [os.sched_getaffinity(number) for number in (0, thread.native_id or 0)] == [own, own]
    finally:
        ended.set()
        machine_rates._move_threads(every)
