"""Tests of the measurement at the start of a run (`run/machine_rates.py`): when it is due, and what it changes."""

import contextlib
import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from commands import FAULTY, TINY, Run
from forked_ranks import call_ranks
from sample_plans import SHAPES

import offload_trainer as ot
from offload_trainer.common.errors import LOST, TrainerError
from offload_trainer.machine import bench
from offload_trainer.machine.rate_cache import cache_file
from offload_trainer.optim import cpu_units
from offload_trainer.plan import step_time
from offload_trainer.plan.machine import read_machine
from offload_trainer.plan.plan import Plan
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


def with_work(found: Planned, **changes: Any) -> Planned:
    return replace(found, plan=replace(found.plan, work=replace(found.plan.work, **changes)))


@pytest.mark.slow
def test_a_long_run_on_a_drive_measures_what_its_plan_lacks(
    cache: Path, drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drive that fails meanwhile is a note."""
    before, messages = planned(drive, tmp_path / "run", *MANY), list[str]()
    assert before.plan.forecast.step is None
    assert machine_rates.is_due(before)
    with monkeypatch.context() as patched:
        patched.setattr(DriveFile, "__init__", MagicMock(side_effect=TrainerError("no space left")))
        assert machine_rates.rates_at_start(before, say=messages.append) == before.machine
    note = messages.pop()
    assert note.startswith("note: this machine's speed could not be measured")
    assert "no space left" in note
    assert not cache_file().exists()
    machine = machine_rates.rates_at_start(before, say=messages.append)
    assert [line.partition(" ")[0] for line in messages] == ["measured"]
    assert step_time.RATE not in machine.rates.layers  # Muon's rate
    assert not list((drive / "offload-trainer").glob("run-*"))
    after = plan_run(before.config, again=replace(before, machine=machine))
    assert all(bound.seconds is not None for bound in after.plan.forecast.bounds)
    assert after.plan.forecast.step is not None
    assert not machine_rates.is_due(after)
    assert not machine_rates.is_due(planned(drive, tmp_path / "run", *MANY))  # the rates are cached
    with_muon = planned(drive, tmp_path / "run", *MANY, "optim.name=muon")
    machine = machine_rates.rates_at_start(with_muon, say=messages.append)
    assert step_time.RATE in machine.rates.layers
    assert plan_run(with_muon.config, again=replace(with_muon, machine=machine)).plan.forecast.step is not None


def test_runs_that_start_at_once(cache: Path, drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    due = planned(drive, tmp_path / "run", *MANY)
    short = planned(drive, tmp_path / "run", "--steps", "20")
    in_ram = plan_run(load_config([*TINY, *MANY, "--output", str(tmp_path / "run")]))
    no_room = {tier: {"need": 2, "have": 1} for tier in due.plan.tiers}
    assert machine_rates.is_due(due)
    assert machine_rates.is_due(with_work(due, world=2))
    machines = with_work(due, world=2, nodes=2)
    stock = with_work(replace(due, plan=replace(due.plan, engine="deepspeed")), world=2)
    for one in (short, in_ram, replace(due, plan=replace(due.plan, tiers=no_room)), machines, stock):
        assert not machine_rates.is_due(one)
    gpu = replace(in_ram, machine=read_machine("v100-32gb"))
    assert machine_rates.is_due(replace(gpu, plan=replace(gpu.plan, traffic=due.plan.traffic)))
    # Without rates all blocks are recomputed, also where nothing moves: 6 * 1e9 * 4096 * 20000 operations.
    recomputes = with_work(gpu, checkpointed=2, shape=SHAPES["gpt2-large"], seq_len=4096)
    assert machine_rates.is_due(recomputes)
    assert not machine_rates.is_due(replace(recomputes, machine=in_ram.machine))
    assert not machine_rates.is_due(with_work(recomputes, checkpointed=0))
    # A run's 16-bit products in fp32 are not a session's, and must not be installed in the caller's process.
    monkeypatch.setattr(machine_rates, "_WORTH_BYTES", 1)
    in_bf16 = planned(drive, tmp_path / "run", "--dtype", "bf16")
    for native in (True, False):
        monkeypatch.setattr(cpu_units, "has_native_16bit", lambda _, native=native: native)
        assert machine_rates.is_due_in_session(in_bf16) == native


def test_the_layer_that_a_cpu_times_is_small() -> None:
    """A layer of a large model would take a CPU seconds each time; its rate is that of a smaller one."""
    rows, inner, outer = bench.ON_CPU.matrix
    assert 3 * 2 * rows * inner * outer <= 7e9
    assert 4 * bench.ON_CPU.tokens**2 * bench.ON_CPU.width <= 5e9


def test_memory_is_timed_on_arrays_beyond_the_caches_that_leave_room(
    cache: Path, drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each element takes up to 16 bytes, and 2 GiB are a container's limit, in which a model may be already."""
    due, timing = planned(drive, tmp_path / "run", *MANY), MagicMock(side_effect=TrainerError("not timed"))
    monkeypatch.setattr(bench, "bench_machine", timing)
    for threads, ram, elements in ((1, 10**12, 8 << 20), (64, 10**12, 64 << 20), (64, 2**31, 32 << 20)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        machine_rates.rates_at_start(replace(due, machine=replace(due.machine, ram_bytes=ram)), say=lambda _: None)
        budget = timing.call_args.kwargs["budget"]
        assert budget.memory_elements == elements
        assert budget.update_elements == max(elements, 2 * due.config.tiered.page_size)


@pytest.mark.slow
def test_a_session_measures_if_ten_steps_move_enough(cache: Path, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(worth: int) -> list[str]:
        """Open and close a session whose state is on the drive, which leaves torch's generator alone."""
        monkeypatch.setattr(machine_rates, "_WORTH_BYTES", worth)
        block = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        lines, before = list[str](), torch.get_rng_state()
        facts: dict[str, Any] = {"nvme": [str(drive)], "optimizer": "nvme", "ram_fraction": 0, "seq_len": 32}
        with ot.offload(block, say=lines.append, kernel="torch", **facts) as opened:
            plans.append(opened.plan)
        assert torch.equal(torch.get_rng_state(), before)
        return [line for line in lines if line.startswith(("measured", "plan:"))]

    plans = list[Plan]()
    assert len(told(machine_rates._WORTH_BYTES)) == 1
    assert plans[0].forecast.step is None
    moved = 10 * sum(one.read + one.written for one in plans[0].traffic)
    assert len(told(moved + 1)) == 1
    measured, plan = told(moved)
    assert measured.startswith("measured")
    assert "a step takes" in plan
    assert len(told(moved)) == 1


def two_ranks(drive: Path, output: Path, fault: str) -> list[Run]:
    state = ("--nvme", drive, "--optimizer", "nvme", "--ram-fraction", 0, "optim.kernel=torch", "--save-every", 0)
    return call_ranks(*TINY, *state, *MANY, output=output, count=2, script=[FAULTY, fault])


@pytest.mark.slow
def test_two_ranks_measure_once(cache: Path, drive: Path, tmp_path: Path) -> None:
    """Rank 0 measures before the plan is printed, and both ranks use it; the next start takes cached rates."""
    told = [tmp_path / "plan-0", tmp_path / "plan-1"]
    plans = ";".join(f"{rank}:plan~{path}@setup" for rank, path in enumerate(told))
    runs = two_ranks(drive, tmp_path / "first", f"0:TERM@step=1;1:kill@measure;{plans}")
    assert [run.code for run in runs] == [128 + signal.SIGTERM] * 2, runs
    lines = runs[0].text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("measured this machine in"))
    assert [line.partition(" ")[0] for line in lines[first : first + 2]] == ["measured", "plan:"]
    assert runs[0].text.count("plan: ") == 1
    assert not runs[1].text
    assert told[0].read_text() == told[1].read_text()
    (again, _) = two_ranks(drive, tmp_path / "second", "0:TERM@step=1")
    assert "measured this machine" not in again.text
    for name in ("first", "second"):
        assert None not in json.loads((tmp_path / name / "plan.json").read_text())["seconds"].values()


@pytest.mark.slow
def test_a_rank_that_dies_while_it_measures_ends_the_other(cache: Path, drive: Path, tmp_path: Path) -> None:
    runs = two_ranks(drive, tmp_path / "out", "0:kill@measure")
    assert [run.code for run in runs] == [-signal.SIGKILL, LOST], runs
    assert not runs[1].text
    assert not (tmp_path / "out").exists()


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
        thread.join()
        for number in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(number), every)
