"""Tests of doctor: each state of each check, with given facts of a machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import ask

from offload_trainer.engine import op_builder
from offload_trainer.errors import TrainerError
from offload_trainer.plan.engines import engine_of
from offload_trainer.plan.machine import DriveFacts, read_machine
from offload_trainer.run.commands import doctor
from offload_trainer.settings import load_config


@pytest.mark.slow
def test_this_machine_passes(drive: Path, tmp_path: Path) -> None:
    done = ask("doctor", "--json", "--nvme", drive, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert {"threads", "torch", "memory", "GPU", f"drive {drive}"} <= set(checks)
    assert all(check["fix"] for check in checks.values() if check["state"] != "ok")


@pytest.mark.slow
def test_a_failure_ends_with_1(tmp_path: Path) -> None:
    done = ask("doctor", "--nvme", tmp_path / "nowhere")
    assert done.returncode == 1
    assert "failure  directories" in done.stdout
    assert "nowhere: no such directory" in done.stdout


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    for words, state in (([], "ok"), (["placement.threads=1"], "warning")):
        assert doctor._threads(load_config(words).placement).state == state


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({"filesystem": "ext4", "disk": "nvme0n1"}, "ok"),
        ({"filesystem": "tmpfs"}, "failure"),
        ({"filesystem": "nfs4", "network": True}, "warning"),
        ({"filesystem": "ext4", "rotational": True}, "warning"),
        ({"filesystem": "ext4", "direct": False}, "warning"),
        ({"filesystem": "ext4", "throttle": "io.max 1:2"}, "warning"),
    ],
)
def test_drives(facts: dict, state: str) -> None:
    checks = list(doctor._drive(DriveFacts("/ssd", 10**12, **facts)))
    assert checks[0].state == "ok"
    assert checks[-1].state == state
    assert state == "ok" or checks[-1].fix


def test_little_room_for_the_output_is_no_failure() -> None:
    """Little room for the output is a warning: small models need megabytes, and the plan checks what fits."""
    assert doctor._output(DriveFacts("/out", 10**12, filesystem="ext4")).state == "ok"
    check = doctor._output(DriveFacts("/out", 64 * 10**6, filesystem="ext4"))
    assert (check.state, bool(check.fix)) == ("warning", True)


def test_the_compilers_message_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise TrainerError("DeepSpeed's kernel cpu_adam could not be built: fatal error: omp.h: No such file")

    monkeypatch.setattr(op_builder, "load_cpu_adam", broken)
    config = load_config(["--engine", "deepspeed"])
    checks = doctor.examine(config.placement, config.model, output=config.save.output, engine=engine_of(config))
    found = next(check for check in checks if check.name == "kernel cpu_adam")
    assert found.state == "failure"
    assert "omp.h" in found.found


@pytest.mark.parametrize(
    ("words", "limit", "states"),
    [
        (["--engine", "deepspeed", "--nvme", "/ssd"], 8 << 20, ["warning"]),
        (["--engine", "deepspeed", "--nvme", "/ssd"], None, []),
        ([], 8 << 20, []),  # cudaHostRegister does not count against it
    ],
)
def test_locked_memory_limits_only_async_io(words: list[str], limit: int | None, states: list[str]) -> None:
    machine = replace(read_machine("v100-32gb"), memlock_bytes=limit)
    config = load_config(words)
    assert [check.state for check in doctor._memlock(config.placement, engine_of(config), machine)] == states
