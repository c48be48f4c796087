"""What a machine has: facts with where each comes from. Without torch, so that plans need nothing large.

A profile is probed (`machine/probe.py`), timed (`machine/bench.py`), or read from a file: one that `offload-train bench
--json` printed elsewhere, or one of the named machines beside this module, whose numbers are specified or assumed.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, with_config

from offload_trainer.errors import UserError
from offload_trainer.safe_files import EXACT, Count, Flag, Line, Number, as_kind, parsed, read_back

_AS_FAST = 0.95


def _io_words(words: str) -> str:
    found = re.fullmatch(r"tiered\.io_threads=([1-9]\d?) tiered\.io_block_bytes=([1-9]\d{3,9})", words)
    if words != "tiered.io=async_io" and (not found or int(found[2]) % 4096):
        raise ValueError("keys of the configuration, as a bench tries them")
    return words


Origin = Literal["measured", "specified", "assumed"]
Speed = Annotated[Number, Field(ge=1, le=1e24)]
Ratio = Annotated[Number, Field(ge=1e-6, le=1e6)]
_Words = Annotated[str, AfterValidator(_io_words)]
Several = Annotated[Count, Field(ge=1)]


@with_config(EXACT)
@dataclass(frozen=True)
class Rate:
    """Something per second."""

    value: Speed
    origin: Origin
    source: Line  # how it was measured, who specifies it, or why it is assumed


@with_config(EXACT)
@dataclass(frozen=True)
class DriveRates:
    """Bytes a second over as much as each rate's source says. `mixed_*`: while both go on at once."""

    read: Rate
    write: Rate
    mixed_read: Rate
    mixed_write: Rate
    tried: dict[_Words, Number] = field(default_factory=dict)  # bytes/s, both ways added, by the words that set it

    @property
    def words(self) -> str:
        """The fastest of what was tried with the default backend; nothing where nothing was."""
        return fastest_words(self.tried)


def fastest_words(tried: dict[Line, Number]) -> str:
    """Of the ways to move bytes that were timed, the fastest with the default backend; the first, if nearly as fast."""
    own = [words for words in tried if "tiered.io=" not in words]
    most = max((tried[words] for words in own), default=0.0)
    return next((words for words in own if tried[words] >= _AS_FAST * most), "")


@with_config(EXACT)
@dataclass(frozen=True)
class DriveFacts:
    """A directory that state may live in."""

    directory: Line
    free_bytes: Count
    filesystem: Line
    device: Count | None = None  # directories with the same one share its free bytes; None: nobody else's
    disk: Line | None = None  # name of the disk below; directories with the same one share its speed
    throttle: Line = ""  # what the process's cgroup allows of that disk, in the kernel's words
    rotational: Flag = False
    network: Flag = False
    direct: Flag = True  # whether O_DIRECT works there
    sector_bytes: Several = 512  # what its requests must be a multiple of
    endurance_bytes: Count | None = None  # what its maker rates it for, written over its life
    rates: DriveRates | None = None


@with_config(EXACT)
@dataclass(frozen=True)
class Rates:
    """How fast the machine computes and copies; None where nothing has been timed or said."""

    matmul: dict[Line, Rate] = field(default_factory=dict)  # FLOP/s by dtype of the matrices
    layers: dict[Line, Rate] = field(default_factory=dict)  # by `layer_key`: what of a layer is no product
    memory: Rate | None = None  # bytes/s of a triad on all cores
    update: dict[Line, Rate] = field(default_factory=dict)  # parameters/s by `update_key`, with casts in and out
    to_device: Rate | None = None  # bytes/s, from pinned memory
    from_device: Rate | None = None  # bytes/s, into pinned memory
    pageable_to_device: Rate | None = None
    pageable_from_device: Rate | None = None
    both_ways: Rate | None = None  # bytes/s each way, pinned, at once
    corrections: dict[Line, Ratio] = field(
        default_factory=dict
    )  # "engine.phase.bound" -> measured / predicted, earlier


def layer_key(dtype: str, part: str, phase: str) -> str:
    """`part`: attention (FLOP/s, over the whole row), values (a second) or loss (logits a second)."""
    return f"{dtype}.{part}.{phase}"


def update_key(kernel: str, states: str) -> str:
    """What a rate of the update is called, by the form of its moments: earlier versions timed fp32 alone."""
    return kernel if states == "fp32" else f"{kernel}.{states}"


@with_config(EXACT)
@dataclass(frozen=True)
class Latency:
    """What a small message takes."""

    seconds: Annotated[Number, Field(ge=0, le=10)]
    origin: Origin
    source: Line


@with_config(EXACT)
@dataclass(frozen=True)
class Links:
    """What ranks reach each other by, and memory when all do; None where there is nothing, or nothing is known.

    `bench` times what goes on between ranks of one machine.
    """

    between_gpus: Rate | None = None  # bytes/s each way of one GPU; None: through host memory
    network: Rate | None = None  # bytes/s each way of a machine to others like it, all its adapters together
    message: Latency | None = None  # from one rank to another, as ranks tell each other that they have come
    ranks: Several | None = None  # of one machine, that the following was timed with
    to_device_at_once: Rate | None = None  # bytes/s into each device from pinned memory, while all copy
    from_device_at_once: Rate | None = None  # bytes/s from each device into pinned memory, while all copy
    all_gather: Rate | None = None  # bytes/s that come to each device, from those of the other ranks
    all_to_all: Rate | None = None  # the same, of what each has for each


@with_config(EXACT)
@dataclass(frozen=True)
class MachineProfile:
    """Bytes that a run on this machine may use, and what computes. Of a cluster: one of `nodes` machines."""

    gpu: Line | None  # name of the device, None: the CPU computes
    gpu_bytes: Count  # free on the device, on each where there are several
    ram_bytes: Count  # available, within the cgroup's limit
    cores: Several
    drives: tuple[DriveFacts, ...]
    output: DriveFacts  # where the run directory will be
    origin: Origin = "measured"
    source: Line = "this machine"
    cpu: Line = "unknown"
    numa_nodes: Several = 1
    memlock_bytes: Count | None = None  # None: unlimited
    capability: tuple[Count, Count] | None = None  # CUDA's compute capability of the device; None: none, or not known
    no_state_on_gpu: Line | None = None  # why the device is no home of the optimizer state; None: it may be one
    built_for: tuple[Line, ...] | None = None  # what the installed torch has kernels for, in its words
    packages: tuple[Line, ...] | None = None  # of those that only some wishes need, the installed; None: not known
    gpus: Several = 1  # that a plan with --nodes takes where --gpus says nothing
    nodes: Several = 1  # machines like this one that the links join
    rates: Rates = field(default_factory=Rates)
    links: Links = field(default_factory=Links)
    notes: tuple[Line, ...] = ()  # what a plan for it should say

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def device(self) -> str:
        """The tier that computes: "gpu", or "ram" on a CPU."""
        return "ram" if self.gpu is None else "gpu"

    def in_words(self, homes: str) -> str:
        """`homes` as a person reads them. Without a GPU the device is the CPU, its memory RAM."""
        return homes.replace(" gpu", " RAM") if self.gpu is None else homes

    def drive(self, directory: str) -> DriveFacts | None:
        return next((drive for drive in self.drives if drive.directory == directory), None)

    def lacks(self, package: str) -> bool:
        """Whether it is known not to be installed there."""
        return self.packages is not None and package not in self.packages


def profile_from_json(values: Any) -> MachineProfile:
    """The inverse of `to_json`. Raises ValueError for what is none."""
    return as_kind(values, MachineProfile)


def named_machines() -> list[str]:
    """Names that `read_machine` knows."""
    return sorted(item.name.removesuffix(".json") for item in (files(__package__) / "machines").iterdir())


def read_machine(name: str) -> MachineProfile:
    """A named machine, or the profile in a file. Raises UserError for neither."""
    if name in named_machines():
        return parsed((files(__package__) / "machines" / f"{name}.json").read_bytes(), MachineProfile)
    path = Path(os.path.expanduser(name))
    if not os.path.exists(path):
        known = named_machines()
        near = [each for each in known if name.lower() in each] or difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"--machine {name}: neither a file nor a known machine ({', '.join(known)}){hint}")
    return read_back(path, MachineProfile, links=True, fix="It should be as `offload-train bench --json` prints it")


def describe_rates(machine: MachineProfile) -> str:
    """What was timed, as a person reads it."""
    rates = machine.rates
    lines = [f"{machine.gpu or machine.cpu}, {machine.cores} cores; {machine.source}"]

    def add(name: str, rate: Rate | None, scale: float, unit: str) -> None:
        if rate is not None:
            lines.append(f"  {name:<34}{rate.value / scale:>9.4g} {unit:<16}{rate.origin}: {rate.source}")

    for dtype, rate in rates.matmul.items():
        add(f"matrix products, {dtype}", rate, 1e9, "GFLOP/s")
    for key, rate in rates.layers.items():
        dtype, part, phase = key.split(".")
        units = {"attention": "GFLOP/s", "values": "G values/s", "loss": "G logits/s"}
        add(f"{part}, {phase}, {dtype}", rate, 1e9, units[part])
    add("memory", rates.memory, 1e9, "GB/s")
    for kernel, rate in rates.update.items():
        add(f"AdamW, {' with '.join(kernel.split('.'))}", rate, 1e6, "M parameters/s")
    for name in ("to_device", "from_device", "pageable_to_device", "pageable_from_device", "both_ways"):
        add(name.replace("_", " "), getattr(rates, name), 1e9, "GB/s")
    for name in ("to_device_at_once", "from_device_at_once", "all_gather", "all_to_all"):
        add(name.replace("_", " "), getattr(machine.links, name), 1e9, "GB/s")
    for drive in machine.drives:
        if drive.rates is None:
            continue
        lines.append(
            f"{drive.directory}: {drive.filesystem} on {drive.disk or 'no block device'} {drive.throttle}".rstrip()
        )
        for name in ("read", "write", "mixed_read", "mixed_write"):
            add(name.replace("_", " "), getattr(drive.rates, name), 1e9, "GB/s")
        lines += [
            f"  tried {words}: {speed / 1e9:.4g} GB/s, read and written together"
            for words, speed in drive.rates.tried.items()
        ]
    return "\n".join(lines)
