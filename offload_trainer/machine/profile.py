"""What a machine has: facts with where each comes from. Standard library only, so that plans need nothing else.

A profile is probed (`machine/probe.py`), timed (`machine/bench.py`), or read from a file: one that `offload-train bench
--json` printed elsewhere, or one of the named machines beside this module, whose numbers are specified or assumed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from offload_trainer.errors import UserError

_AS_FAST = 0.95

Origin = Literal["measured", "specified", "assumed"]


@dataclass(frozen=True)
class Rate:
    """Something per second."""

    value: float
    origin: Origin
    source: str  # how it was measured, who specifies it, or why it is assumed


@dataclass(frozen=True)
class DriveRates:
    """Bytes a second over as much as each rate's source says. `mixed_*`: while both go on at once."""

    read: Rate
    write: Rate
    mixed_read: Rate
    mixed_write: Rate
    tried: dict[str, float] = field(default_factory=dict)  # bytes/s, both ways added, by the words that set it

    @property
    def words(self) -> str:
        """The fastest of what was tried with the default backend; nothing where nothing was."""
        return fastest_words(self.tried)


def fastest_words(tried: dict[str, float]) -> str:
    """Of the ways to move bytes that were timed, the fastest with the default backend; the first, if nearly as fast."""
    own = [words for words in tried if "tiered.io=" not in words]
    most = max((tried[words] for words in own), default=0.0)
    return next((words for words in own if tried[words] >= _AS_FAST * most), "")


@dataclass(frozen=True)
class DriveFacts:
    """A directory that state may live in."""

    directory: str
    free_bytes: int
    filesystem: str
    device: int | None = None  # directories with the same one share its free bytes; None: nobody else's
    disk: str | None = None  # name of the disk below; directories with the same one share its speed
    throttle: str = ""  # what the process's cgroup allows of that disk, in the kernel's words
    rotational: bool = False
    network: bool = False
    direct: bool = True  # whether O_DIRECT works there
    sector_bytes: int = 512  # what its requests must be a multiple of
    endurance_bytes: int | None = None  # what its maker rates it for, written over its life
    rates: DriveRates | None = None


@dataclass(frozen=True)
class Rates:
    """How fast the machine computes and copies; None where nothing has been timed or said."""

    matmul: dict[str, Rate] = field(default_factory=dict)  # FLOP/s by dtype of the matrices
    memory: Rate | None = None  # bytes/s of a triad on all cores
    update: dict[str, Rate] = field(default_factory=dict)  # parameters/s by kernel, with casts in and out
    to_device: Rate | None = None  # bytes/s, from pinned memory
    from_device: Rate | None = None  # bytes/s, into pinned memory
    pageable_to_device: Rate | None = None
    pageable_from_device: Rate | None = None
    both_ways: Rate | None = None  # bytes/s each way, pinned, at once
    corrections: dict[str, float] = field(
        default_factory=dict
    )  # "engine.phase" -> measured / predicted in earlier runs


@dataclass(frozen=True)
class MachineProfile:
    """Bytes that a run on this machine may use, and what computes."""

    gpu: str | None  # name of the device, None: the CPU computes
    gpu_bytes: int  # free on the device
    ram_bytes: int  # available, within the cgroup's limit
    cores: int
    drives: tuple[DriveFacts, ...]
    output: DriveFacts  # where the run directory will be
    origin: Origin = "measured"
    source: str = "this machine"
    cpu: str = "unknown"
    numa_nodes: int = 1
    memlock_bytes: int | None = None  # None: unlimited
    rates: Rates = field(default_factory=Rates)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def drive(self, directory: str) -> DriveFacts | None:
        return next((drive for drive in self.drives if drive.directory == directory), None)


def profile_from_json(values: dict[str, Any]) -> MachineProfile:
    """The inverse of `to_json`. Raises UserError for a file that is none."""
    try:
        values = dict(values)
        rates = rates_from_json(values.pop("rates", {}))
        drives, output = tuple(_drive(drive) for drive in values.pop("drives")), _drive(values.pop("output"))
        return MachineProfile(**values, drives=drives, output=output, rates=rates)
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"not a machine profile as `offload-train bench --json` prints it: {error}") from error


def _drive(values: dict[str, Any]) -> DriveFacts:
    rates = values.get("rates")
    return DriveFacts(
        **{key: value for key, value in values.items() if key != "rates"},
        rates=drive_rates(rates) if rates else None,
    )


def rates_from_json(values: dict[str, Any]) -> Rates:
    """The inverse of `asdict`; what is missing is not known."""
    found = dict(values)
    for name in ("matmul", "update"):
        found[name] = {key: Rate(**rate) for key, rate in values.get(name, {}).items()}
    found |= {key: Rate(**value) for key, value in values.items() if isinstance(value, dict) and "value" in value}
    return Rates(**found)


def drive_rates(values: dict[str, Any]) -> DriveRates:
    """From JSON."""
    single = {key: Rate(**rate) for key, rate in values.items() if key != "tried"}
    return DriveRates(**single, tried=values.get("tried", {}))


def named_machines() -> list[str]:
    """Names that `read_machine` knows."""
    return sorted(item.name.removesuffix(".json") for item in (files(__package__) / "machines").iterdir())


def read_machine(name: str) -> MachineProfile:
    """A named machine, or the profile in a file. Raises UserError for neither."""
    if name in named_machines():
        text = (files(__package__) / "machines" / f"{name}.json").read_text(encoding="utf-8")
    else:
        try:
            text = Path(name).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"--machine {name}: neither a file ({error.strerror}) nor one of {', '.join(named_machines())}"
            ) from error
    try:
        values = json.loads(text)
        return profile_from_json(values)
    except (ValueError, UserError) as error:
        raise UserError(f"--machine {name}: {error}") from error


def describe_rates(machine: MachineProfile) -> str:
    """What was timed, as a person reads it."""
    rates = machine.rates
    lines = [f"{machine.gpu or machine.cpu}, {machine.cores} cores; {machine.source}"]

    def add(name: str, rate: Rate | None, scale: float, unit: str) -> None:
        if rate is not None:
            lines.append(f"  {name:<34}{rate.value / scale:>9.4g} {unit:<16}{rate.origin}: {rate.source}")

    for dtype, rate in rates.matmul.items():
        add(f"products, {dtype}", rate, 1e9, "GFLOP/s")
    add("memory", rates.memory, 1e9, "GB/s")
    for kernel, rate in rates.update.items():
        add(f"AdamW, {kernel}", rate, 1e6, "M parameters/s")
    for name in ("to_device", "from_device", "pageable_to_device", "pageable_from_device", "both_ways"):
        add(name.replace("_", " "), getattr(rates, name), 1e9, "GB/s")
    for drive in machine.drives:
        if drive.rates is None:
            continue
        lines.append(
            f"{drive.directory}: {drive.filesystem} on {drive.disk or 'no block device'} {drive.throttle}".rstrip()
        )
        for name in ("read", "write", "mixed_read", "mixed_write"):
            add(name.replace("_", " "), getattr(drive.rates, name), 1e9, "GB/s")
        lines += [
            f"  tried {words}: {speed / 1e9:.4g} GB/s, both ways added" for words, speed in drive.rates.tried.items()
        ]
    return "\n".join(lines)
