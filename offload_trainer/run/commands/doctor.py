"""The `doctor` command: check everything that a run needs, and name a fix for each failure."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal, get_args

import psutil

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.common.packages import REQUIRED, is_installed, to_install, too_old
from offload_trainer.common.units import format_bytes
from offload_trainer.config import ModelSection, TrainConfig
from offload_trainer.machine.probe import UnusableGpu, available_ram_bytes, probe_machine
from offload_trainer.plan.deepspeed import DeepSpeed
from offload_trainer.plan.machine import DriveFacts, MachineProfile, card_mistakes
from offload_trainer.plan.planner import engine_of, with_dtype_of_card

State = Literal["ok", "warning", "failure"]

_LITTLE_RAM = 4_000_000_000


@dataclass(frozen=True)
class Check:
    """Result of one check. `fix` is empty if nothing needs to be done."""

    name: str
    state: State
    found: str
    fix: str = ""


def examine(config: TrainConfig) -> list[Check]:
    """Run all checks for a run with this configuration."""
    place, engine = config.placement, engine_of(config)
    stock, needed = isinstance(engine, DeepSpeed), [package for _, package in engine.packages]
    checks = [_torch(), *_packages(), _native_kernel(), *_stock_tools(needed=stock, drive=bool(place.nvme))]
    if "bitsandbytes" in needed and not is_installed("bitsandbytes"):
        checks.append(Check("bitsandbytes", "failure", "not installed", to_install("bitsandbytes")))
    try:
        machine = probe_machine(place, output=config.save.output)
    except UnusableGpu as error:
        return [*checks, Check("GPU", "failure", str(error), "repair or hide the GPU, then run this again")]
    except UserError as error:
        return [*checks, Check("directories", "failure", str(error), "name directories that exist and are writable")]
    free = available_ram_bytes()
    found = f"{format_bytes(free)} of {format_bytes(psutil.virtual_memory().total)} available"
    fix = "end other programs, raise the cgroup's limit, or use --params nvme" if free < _LITTLE_RAM else ""
    checks.append(Check("memory", "warning" if fix else "ok", found, fix))
    # RLIMIT_MEMLOCK limits the buffers that async_io locks, and not memory pinned by CUDA.
    if stock and place.nvme and (limit := machine.memlock_bytes) is not None:
        fix = "`ulimit -l unlimited`, or `* - memlock unlimited` in /etc/security/limits.conf"
        checks.append(Check("locked memory", "warning", f"{format_bytes(limit)} for async_io's buffers", fix))
    return [*checks, *_gpu(config.model, machine), *(check for drive in machine.drives for check in _drive(drive))]


def report(checks: list[Check]) -> str:
    """Format the checks as text, failures last."""
    lines = []
    for check in sorted(checks, key=lambda check: get_args(State).index(check.state)):
        lines.append(f"{check.state:<8} {check.name}: {check.found}")
        lines += [f"         fix: {check.fix}"] if check.fix else []
    return "\n".join(lines)


def _torch() -> Check:
    import torch

    found = torch.__version__
    hip, cuda, driver = torch.version.hip, torch.version.cuda, _driver()
    build = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "no build for a GPU"
    if torch.cuda.is_available():
        return Check("torch", "ok", f"{found}, {build}" + (f"; {driver}" if driver else ""))
    if driver is None:
        return Check("torch", "ok", f"{found}; no GPU driver here: training runs on the CPU")
    if not hip and not cuda:
        fix = "install torch for that GPU: https://pytorch.org/get-started/locally (README, Cards)"
        return Check("torch", "failure", f"{found} is {build}, and there is a driver: {driver}", fix)
    fix = (
        f"update the driver to one for {build}, install torch for an older one, or hide the GPU (CUDA_VISIBLE_DEVICES=)"
    )
    return Check("torch", "failure", f"{found} ({build}) cannot use the driver: {driver}", fix)


def _driver() -> str | None:
    """Return the GPU driver (NVIDIA, WSL2 or AMD) found without torch, if any."""
    version = Path("/proc/driver/nvidia/version")
    if version.exists():
        return version.read_text().splitlines()[0].strip()
    devices = {"/dev/dxg": "WSL2's (/dev/dxg)", "/dev/kfd": "AMD's (/dev/kfd)"}
    return next((name for path, name in devices.items() if Path(path).exists()), None)


def _packages() -> Iterator[Check]:
    """Check the versions of the required packages, which must be installed for this program to start at all."""
    found = {name: too_old(name) for name in REQUIRED}
    for name, old in found.items():
        if old:
            yield Check(f"package {name}", "failure", f"{old} is older than any tested version", to_install(name))
    if not any(found.values()):
        yield Check("packages", "ok", ", ".join(f"{name} {version(name)}" for name in REQUIRED if name != "torch"))


def _native_kernel() -> Check:
    from offload_trainer.optim.kernels import choose_kernel

    try:
        _, why = choose_kernel("native")
    except UserError as error:
        fix = "apt-get install g++, if that is missing (otherwise training uses torch's kernel, about half as fast)"
        return Check("native AdamW kernel", "warning", str(error), fix)
    return Check("native AdamW kernel", "ok", why)


def _stock_tools(*, needed: bool, drive: bool) -> Iterator[Check]:
    """Check DeepSpeed, and build its kernels if `needed`; an error names the tools that a build needs."""
    if not is_installed("deepspeed"):
        if needed:
            yield Check("deepspeed", "failure", "not installed", to_install("deepspeed", "ninja"))
        else:
            yield Check("deepspeed", "ok", "not installed (only --engine deepspeed needs it)")
        return
    yield Check("deepspeed", "ok", version("deepspeed"))
    try:
        from offload_trainer.engine.deepspeed import is_built, load_kernel
    except Exception:  # torch or transformers is too old or broken, which `_packages` has said
        return
    for name, wanted in (("cpu_adam", needed), ("async_io", needed and drive)):
        if not wanted:
            built = "built" if is_built(name) else "not built yet: minutes, at the first run with --engine deepspeed"
            yield Check(f"kernel {name}", "ok", built)
            continue
        try:
            load_kernel(name)
            yield Check(f"kernel {name}", "ok", "built and loaded")
        except TrainerError as error:
            yield Check(f"kernel {name}", "failure", str(error), "the compiler's output above names what is missing")


def _gpu(model: ModelSection, machine: MachineProfile) -> Iterator[Check]:
    if machine.gpu is None:
        yield Check("GPU", "warning", "none: training runs on the CPU", "nothing, if that is intended")
        return
    yield Check("GPU", "ok", f"{machine.gpu}, {format_bytes(machine.gpu_bytes)} free")
    for wrong, fix in card_mistakes(machine, dtype=with_dtype_of_card(model, machine).dtype):
        yield Check("GPU", "failure", wrong, fix)
    if machine.no_state_on_gpu:
        wrong = f"it cannot store optimizer state: {machine.no_state_on_gpu}"
        yield Check("GPU", "warning", wrong, "nothing, if all of it is meant to be in RAM and on drives")


def _drive(drive: DriveFacts) -> Iterator[Check]:
    name, kind = f"drive {drive.directory}", drive.filesystem
    yield Check(name, "ok", f"{format_bytes(drive.free_bytes)} free on {kind} ({drive.disk or 'no disk'})")
    if kind in ("tmpfs", "ramfs"):
        yield Check(name, "failure", f"{kind} is memory, not a drive", "name a directory on an SSD")
    if drive.network:
        yield Check(name, "warning", f"{kind} is a network filesystem", "use a local SSD")
    if drive.rotational:
        fix = "use an SSD; virtual disks may report this wrongly: check with `offload-train bench`"
        yield Check(name, "warning", f"{drive.disk} reports that it is a rotating disk", fix)
    if not drive.direct:
        yield Check(name, "warning", "no O_DIRECT: every byte goes through the page cache", "use ext4 or xfs")
    if drive.throttle:
        yield Check(name, "warning", f"the cgroup limits it: {drive.throttle}", "raise the limit, if not intended")
