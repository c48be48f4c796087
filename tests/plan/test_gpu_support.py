"""Tests of GPU models: which compiled kernels run on them, what their units compute, and what plan, bench and doctor
report.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sample_plans import SHAPES

from offload_trainer.cli import main
from offload_trainer.config import PlacementSection
from offload_trainer.errors import TrainerError, UserError
from offload_trainer.machine import probe
from offload_trainer.machine.bench import dtypes_to_time
from offload_trainer.optim import cuda_adam
from offload_trainer.plan.machine import MachineProfile, Rate, card_mistakes, read_machine, runs
from offload_trainer.plan.memory import CUDA_CONTEXT
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import make_plan, resolve_and_plan
from offload_trainer.run import process_setup
from offload_trainer.run.commands import doctor
from offload_trainer.safe_files import parsed
from offload_trainer.settings import load_config

CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")  # torch 2.11's wheels for CUDA 13.0


@pytest.mark.parametrize(
    ("code", "capability", "works"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),  # the same major version, and a later minor one
        ("sm_86", (8, 0), False),
        ("sm_75", (7, 0), False),
        ("sm_75", (8, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("compute_70", (12, 0), True),  # PTX runs on later cards
        ("compute_80", (7, 5), False),
        ("compute_90a", (10, 0), False),
        ("sm_100", (10, 0), True),
        ("gfx90a", (7, 0), True),  # not a CUDA architecture
    ],
)
def test_code_and_cards(code: str, capability: tuple[int, int], works: bool) -> None:
    assert runs(code, capability) == works


def card(capability: tuple[int, int], built_for: tuple[str, ...] | None = CU130) -> MachineProfile:
    return replace(read_machine("a100-40gb"), gpu="NVIDIA X", capability=capability, built_for=built_for)


def test_a_card_that_the_installed_torch_has_no_kernels_for() -> None:
    ((told, fix),) = card_mistakes(card((7, 0)), dtype="fp16")
    assert told.startswith("the installed torch has no kernels for NVIDIA X (sm_70); it has sm_75, sm_80")
    assert fix.endswith("--index-url https://download.pytorch.org/whl/cu126")
    assert "--force-reinstall" in fix  # pip takes another build of the same version for the same version
    assert not card_mistakes(card((7, 0), ("sm_50", "sm_60", "sm_70")), dtype="fp16")
    assert not card_mistakes(card((12, 1)), dtype="bf16")
    ((_, fix),) = card_mistakes(card((12, 1), ("sm_80", "sm_90")), dtype="bf16")
    assert "newer torch" in fix
    assert not card_mistakes(replace(card((7, 0)), gpu=None), dtype="bf16")


@pytest.mark.parametrize(("capability", "refused"), [((7, 0), True), ((7, 5), True), ((8, 0), False), ((9, 0), False)])
def test_bf16_is_refused_by_name_below_sm_80(capability: tuple[int, int], refused: bool) -> None:
    machine, shape = card(capability, None), SHAPES["gpt2"]
    make_plan(load_config(["--model", "gpt2", "--dtype", "fp16"]), shape, machine)
    config = load_config(["--model", "gpt2", "--dtype", "bf16"])
    checks = [check.state for check in doctor._gpu(config.model, machine)]
    if not refused:
        make_plan(config, shape, machine)
        assert checks == ["ok"]
        return
    assert checks == ["ok", "failure"]
    with pytest.raises(UserError, match=r"NVIDIA X \(sm_7[05]\) has no bf16 units, .*: use --dtype fp16"):
        make_plan(config, shape, machine)


def test_auto_dtype_depends_on_the_card() -> None:
    for words, capability, dtype in (
        ([], (7, 0), "fp16"), ([], (8, 0), "bf16"), (["--dtype", "fp32"], (7, 0), "fp32"), ([], None, "bf16"),
    ):  # fmt: skip
        config = load_config(["--model", "gpt2", *words])
        settled, plan = resolve_and_plan(config, SHAPES["gpt2"], replace(card((8, 0), None), capability=capability))
        assert settled.model.dtype == dtype
        assert ("has no bf16 units: training in fp16 with dynamic loss scaling" in "".join(plan.notes)) == (
            dtype == "fp16"
        )


def missing(_: torch.device, **__: bool) -> None:
    raise TrainerError("no Triton")


def faked(
    monkeypatch: pytest.MonkeyPatch,
    *,
    hip: str | None = None,
    cuda: str | None = "13.0",
    capability: tuple[int, int] = (7, 0),
) -> None:
    """Fake what torch reports for a GPU without any driver files."""
    there = {
        "is_available": lambda: True,
        "mem_get_info": lambda: (30 << 30, 32 << 30),
        "get_device_name": lambda: "a card",
        "get_device_capability": lambda _=None: capability,
        "get_arch_list": lambda: ["sm_75", "sm_80", "sm_90"],
        "current_device": lambda: 0,
    }
    for name, told in there.items():
        monkeypatch.setattr(torch.cuda, name, told)
    monkeypatch.setattr(cuda_adam, "CudaKernel", missing)  # nothing can run on a fake card
    monkeypatch.setattr(torch.version, "cuda", None if hip else cuda)
    monkeypatch.setattr(torch.version, "hip", hip)


def test_a_gpu_is_found_wherever_torch_finds_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU is found although WSL2 has no /dev/nvidiactl and ROCm has no NVIDIA device at all."""
    faked(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine = probe.probe_machine(PlacementSection(), output=str(tmp_path))
    assert (machine.gpu, machine.gpu_bytes, machine.capability) == ("a card", (30 << 30) + 500_000_000, (7, 0))
    assert machine.built_for == ("sm_75", "sm_80", "sm_90")
    assert machine.no_state_on_gpu == "no Triton"
    assert "it cannot store optimizer state: no Triton" in " ".join(
        check.found for check in doctor._gpu(load_config(["--model", "gpt2"]).model, machine)
    )
    assert parsed(json.dumps(machine.to_json()), MachineProfile) == machine
    assert doctor._torch().state == "ok"


def test_free_bytes_are_those_before_the_context_that_asking_makes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Plans count the CUDA context, and use every other free byte except the reserve."""
    faked(monkeypatch)
    config, free = load_config(["--model", "gpt2", "--dtype", "fp16"]), 30 << 30
    for used in (400 * 10**6, 700 * 10**6):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda used=used: (free, free + used))
        machine = replace(probe.probe_machine(PlacementSection(), output=str(tmp_path)), built_for=None)
        assert machine.gpu_bytes == min(free + used, free + CUDA_CONTEXT)
        plan = make_plan(config, SHAPES["gpt2"], machine)
        items = {item.name: item.bytes for item in plan.items if item.tier == "gpu"}
        assert items["CUDA context"] == CUDA_CONTEXT
        assert items["reserve"] == max(500 * 10**6, machine.gpu_bytes // 100)
        assert machine.gpu_bytes - items["CUDA context"] <= free


@pytest.mark.parametrize("gpu", [16 * 10**9, 150 * 10**9])
def test_auto_leaves_a_reserve_free(gpu: int) -> None:
    """The reserve is the larger of 1 % and 500 MB, for cuBLAS workspaces, kernels that are loaded late,
    and rounding.
    """
    machine = replace(read_machine("v100-32gb"), gpu_bytes=gpu, ram_bytes=10**12)
    shape = SHAPES["gpt2-10b" if gpu > 10**11 else "gpt2-xl"]
    plan = make_plan(load_config(["--model", "gpt2-10b", "--dtype", "fp16", "--engine", "tiered"]), shape, machine)
    reserve = max(500 * 10**6, gpu // 100)
    assert plan.fits
    assert 0 < plan.sizes.gpu_fraction < 1 or gpu > 10**11
    assert plan.tiers["gpu"]["have"] == gpu
    used = sum(item.bytes for item in plan.items if item.tier == "gpu" and item.name != "reserve")
    assert used <= gpu - reserve
    assert next(item.bytes for item in plan.items if item.name == "reserve") == reserve
    on_cpu = make_plan(load_config(["--model", "gpt2"]), shape, replace(machine, gpu=None))
    assert "reserve" not in [item.name for item in on_cpu.items]


def test_an_unusable_gpu_is_refused_in_one_line_and_the_doctor_continues(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def busy() -> None:
        raise RuntimeError(
            "CUDA error: all CUDA-capable devices are busy or unavailable\nCompile with TORCH_USE_CUDA_DSA"
        )

    faked(monkeypatch, capability=(9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", busy)
    assert main(["plan", "--model", "gpt2", "--output", str(tmp_path / "run")]) == 2
    printed = capsys.readouterr().err
    assert "torch finds a GPU but cannot use it: CUDA error: all CUDA-capable devices are busy" in printed
    assert "CUDA_VISIBLE_DEVICES=" in printed
    assert len(printed.strip().splitlines()) == 1
    config = load_config(["--model", "gpt2", "--output", str(tmp_path / "run")])
    checks = doctor.examine(config)
    assert [(check.name, check.state) for check in checks if check.state == "failure"] == [("GPU", "failure")]


@pytest.mark.parametrize(
    "error", [AttributeError("no attribute 'sqrt_rn'"), OSError("invalid ELF header"), RuntimeError("no C compiler")]
)
def test_without_a_usable_triton_plan_and_doctor_work(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: torch.device, **__: bool) -> None:
        raise error

    faked(monkeypatch, capability=(9, 0))
    monkeypatch.setattr(cuda_adam, "CudaKernel", broken)
    assert main(["plan", "--model", "gpt2", "--output", str(tmp_path / "run")]) == 0
    assert f"this GPU cannot store optimizer state: {type(error).__name__}: {error}" in capsys.readouterr().out
    assert main(["doctor", "--output", str(tmp_path / "run")]) == 0
    assert f"it cannot store optimizer state: {type(error).__name__}: {error}" in capsys.readouterr().out


def test_cuda_variables_are_set_before_its_start_unless_the_user_has(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS")

    def prepared(**environment: str) -> list[str | None]:
        monkeypatch.setattr(process_setup, "end_without_launcher", lambda say: None)
        kept = {key: value for key, value in os.environ.items() if key not in names}
        monkeypatch.setattr(os, "environ", kept | environment)
        process_setup.prepare_process(load_config([]))
        return [os.environ.get(name) for name in names]

    # Both names are set: torch 2.9 and later read the first, and warn if they must read the second.
    grows = "expandable_segments:True"
    assert prepared() == [grows, grows, "32"]
    own = "max_split_size_mb:128"
    assert prepared(PYTORCH_ALLOC_CONF=own) == [own, None, "32"]
    assert prepared(PYTORCH_CUDA_ALLOC_CONF=own, CUDA_DEVICE_MAX_CONNECTIONS="1") == [None, own, "1"]


def test_a_card_of_amd_is_not_judged_by_nvidias_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    faked(monkeypatch, hip="7.1")
    machine = probe.probe_machine(PlacementSection(), output=str(tmp_path))
    assert (machine.gpu, machine.capability, machine.built_for) == ("a card", None, None)
    assert not card_mistakes(machine, dtype="bf16")
    assert "built for ROCm" in machine.no_state_on_gpu
    assert "ROCm 7.1" in doctor._torch().found


@pytest.mark.parametrize(
    ("driver", "cuda", "state"),
    [(None, None, "ok"), ("AMD's (/dev/kfd)", None, "failure"), ("WSL2's (/dev/dxg)", "13.0", "failure")],
)
def test_a_driver_that_torch_does_not_use(
    driver: str | None, cuda: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faked(monkeypatch, cuda=cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_driver", lambda: driver)
    check = doctor._torch()
    assert check.state == state
    assert (driver or "") in check.found
    assert bool(check.fix) == (state == "failure")


# -- 16 bits ---------------------------------------------------------------------------------------------------------


def test_a_bench_times_the_cards_dtypes() -> None:
    assert dtypes_to_time(card((7, 0)), "fp16") == ["fp16", "fp32"]
    assert dtypes_to_time(card((9, 0)), "fp32") == ["bf16", "fp16", "fp32"]
    assert dtypes_to_time(replace(card((9, 0)), gpu=None), "bf16") == ["bf16", "fp32"]


def timed(**speeds: float) -> MachineProfile:
    """Return an A100 whose matrix products were timed in these dtypes only."""
    rates = {dtype: Rate(speed, "measured", "here") for dtype, speed in speeds.items()}
    machine = card((8, 0))
    return replace(machine, rates=replace(machine.rates, matmul=rates))


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ({"bf16": 2e14, "fp16": 1e14, "fp32": 1e13}, 1e14),
        ({"bf16": 2e14, "fp32": 1e13}, 2e14),  # fp16 has the same units; fp32 would be 15 times too slow
        ({"fp32": 1e13}, None),
    ],
)
def test_the_forecast_of_fp16(speeds: dict[str, float], expected: float | None) -> None:
    config = load_config(["--model", "gpt2", "--dtype", "fp16"])
    plan = make_plan(config, SHAPES["gpt2"], timed(**speeds))
    if expected is None:
        assert forward_seconds(plan) is None
        assert any("no time can be forecast: run `offload-train bench`" in note for note in plan.notes)
        return
    assert forward_seconds(plan) == forward_seconds(make_plan(config, SHAPES["gpt2"], timed(fp16=expected)))
    told = "matrix products in fp16 were not timed on NVIDIA X and are assumed to be as fast as bf16: run "
    noted = [note for note in plan.notes if "not timed" in note]
    assert noted == ([] if "fp16" in speeds else [f"{told}`offload-train bench`"])


def forward_seconds(plan: Plan) -> float | None:
    """Return the seconds in which a plan computes the forward."""
    return next(one.seconds for one in plan.forecast.bounds if (one.phase, one.kind) == ("forward", "compute"))


def test_a_cpu_multiplies_in_fp32() -> None:
    """A CPU without 16-bit units computes products in fp32 and rounds them."""
    cpu = replace(timed(fp32=1e12), gpu=None)
    assert forward_seconds(make_plan(load_config(["--model", "gpt2", "--dtype", "fp16"]), SHAPES["gpt2"], cpu))


@pytest.mark.parametrize("engine", ["tiered", "deepspeed"])
def test_a_process_with_cuda_takes_two_gigabytes(engine: str) -> None:
    config = load_config(["--model", "gpt2", "--engine", engine])
    plans = (make_plan(config, SHAPES["gpt2"], replace(card((8, 0)), gpu=gpu)) for gpu in ("NVIDIA X", None))
    held = [sum(item.bytes for item in plan.items if item.name in ("process", "libraries")) for plan in plans]
    assert held[0] - held[1] == 1_600_000_000
    assert 2e9 <= held[0] < 2.5e9
