"""The machine profile that plans are computed from: memory sizes, drives, links and measured rates, with their origin.

A profile is probed (`machine/probe.py`), benchmarked (`machine/bench.py`), or read from the output of `offload-train
bench --json` on another machine. Named machines are put together from the parts in machines.json (cards, buses, memory,
drives), whose numbers are published measurements, specifications or assumptions.
"""

import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import field
from functools import reduce
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from offload_trainer.common.errors import UserError
from offload_trainer.common.safe_files import Count, Flag, Line, Number, as_kind, exact_record, parsed, read_back

Origin = Literal["measured", "specified", "assumed"]
Speed = Annotated[Number, Field(ge=1, le=1e24)]
Several = Annotated[Count, Field(ge=1)]


@exact_record
class Rate:
    """A rate per second, with its origin."""

    value: Speed
    origin: Origin
    source: Line  # how it was measured, who specifies it, or why it is assumed


@exact_record
class DriveRates:
    """Bytes per second of a drive; `mixed_*` are the rates of simultaneous reading and writing."""

    read: Rate
    write: Rate
    mixed_read: Rate
    mixed_write: Rate
    computation_lost: Rate | None = None  # bytes moved while all cores lose one second of computation to transfers


@exact_record
class DriveFacts:
    """A directory that state can be placed in."""

    directory: Line
    free_bytes: Count
    filesystem: Line
    device: Count | None = None  # filesystem number; directories with the same one share free bytes; None: unshared
    disk: Line | None = None  # name of the disk; directories on the same one share its speed
    throttle: Line = ""  # the cgroup's limit for that disk, in the kernel's notation
    rotational: Flag = False
    network: Flag = False
    direct: Flag = True  # O_DIRECT works there
    endurance_bytes: Count | None = None  # rated bytes written over the drive's life
    rates: DriveRates | None = None


LayerKey = Annotated[str, Field(pattern=r"^\w+\.(attention|values|loss|weights|tables|orthogonalisation)\.\w+$")]


@exact_record
class Rates:
    """Rates of computation and of copies on one machine; None if not measured or given."""

    matmul: dict[Line, Rate] = field(default_factory=dict)  # FLOP/s by dtype of the matrices
    layers: dict[LayerKey, Rate] = field(default_factory=dict)  # rates of work other than products, by `layer_key`
    memory: Rate | None = None  # bytes/s of a STREAM triad on all cores
    update: dict[Line, Rate] = field(default_factory=dict)  # parameters/s by `update_key`, dtype conversions included
    sums: dict[Line, Rate] = field(default_factory=dict)  # bytes/s of adding gradients in RAM, by `sums_key`
    to_device: Rate | None = None  # bytes/s, from pinned memory
    from_device: Rate | None = None  # bytes/s, into pinned memory
    both_ways: Rate | None = None  # bytes/s into the device, pinned, while as much or more leaves it
    both_ways_out: Rate | None = None  # bytes/s out of it meanwhile; None: as fast as into it


def layer_key(dtype: str, part: str, phase: str) -> str:
    """Return the key of a rate in `Rates.layers`.

    `part` is attention (FLOP/s, over the whole row), values (elements/s), loss (logits/s) or, of an update,
    orthogonalisation (FLOP/s). On a CPU, for what a micro-batch takes however few tokens it has, also weights
    (elements/s of the blocks) and tables (elements/s of the gradients of embeddings and other large weights).
    """
    return f"{dtype}.{part}.{phase}"


def update_key(kernel: str, states: str) -> str:
    """Return the key of a rate in `Rates.update`. `states` is a StateFormat's name; "fp32" adds no suffix."""
    return kernel if states == "fp32" else f"{kernel}.{states}"


def sums_key(kernel: str, *, measured: bool) -> str:
    """Return the key of a rate in `Rates.sums`. `measured`: the norms of the sums are computed as well."""
    return f"{kernel}.norm" if measured else kernel


@exact_record
class Links:
    """Rates of communication between ranks, and of copies while all ranks copy; None if absent or unknown."""

    between_gpus: Rate | None = None  # bytes/s each way per GPU over NVLink or similar; None: through host memory
    network: Rate | None = None  # bytes/s each way of one machine, all its adapters together
    message: Rate | None = None  # small messages/s between two ranks, one after the other, such as a barrier sends
    ranks: Several | None = None  # number of ranks on one machine that the following rates were measured with
    to_device_at_once: Rate | None = None  # bytes/s into each device from pinned memory, while all copy
    from_device_at_once: Rate | None = None  # bytes/s from each device into pinned memory, while all copy
    all_gather: Rate | None = None  # bytes/s that each device receives from the other ranks


@exact_record
class MachineProfile:
    """One machine: its devices and the bytes that a run may use. A cluster is `nodes` such machines."""

    gpu: Line | None  # name of the GPU; None: the CPU computes
    gpu_bytes: Count  # free on each GPU
    ram_bytes: Count  # available, within the cgroup's limit
    cores: Several
    drives: tuple[DriveFacts, ...]
    output: DriveFacts  # the drive of the run directory
    origin: Origin = "measured"
    source: Line = "this machine"
    cpu: Line = "unknown"
    memlock_bytes: Count | None = None  # None: unlimited
    capability: tuple[Count, Count] | None = None  # CUDA compute capability; None: no NVIDIA GPU, or unknown
    no_state_on_gpu: Line | None = None  # why no optimizer state can be placed on the GPU; None: it can
    built_for: tuple[Line, ...] | None = None  # torch.cuda.get_arch_list() of the installed torch
    packages: tuple[Line, ...] | None = None  # the optional packages that are installed; None: unknown
    kept_free: Count = 0  # bytes of each GPU that no plan fills, beyond the usual reserve: runs ran out of memory
    gpus: Several = 1  # GPUs per node that a plan with --nodes assumes without --gpus
    nodes: Several = 1  # number of machines like this one that the links connect
    rates: Rates = field(default_factory=Rates)
    links: Links = field(default_factory=Links)
    notes: tuple[Line, ...] = ()  # sentences that every plan for this machine prints

    @property
    def device(self) -> str:
        """Return the tier that computes: "gpu", or "ram" if the CPU computes."""
        return "ram" if self.gpu is None else "gpu"

    def in_words(self, homes: str) -> str:
        """Return a placement's description for display: without a GPU, the device's memory is RAM."""
        return homes.replace(" gpu", " RAM") if self.gpu is None else homes

    def drive(self, directory: str) -> DriveFacts | None:
        return next((drive for drive in self.drives if drive.directory == directory), None)

    def write_rate(self, drive: DriveFacts) -> float:
        """Return the bytes per second written to a drive alone; 200 MB/s if it was not timed."""
        same = (one.rates for one in self.drives if one.rates and drive.disk and one.disk == drive.disk)
        rates = drive.rates or next(same, None)
        return rates.write.value if rates else 200e6

    def lacks(self, package: str) -> bool:
        """Return whether `package` is known to be missing on the machine."""
        return self.packages is not None and package not in self.packages


def _merged(one: Any, other: Any) -> Any:
    """Return `other` on top of `one`: mappings are merged at every depth, all else is replaced."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return other
    return one | {key: _merged(one.get(key), value) for key, value in other.items()}


def read_machine(name: str) -> MachineProfile:
    """Return a named machine's profile, or the one in the file `name`; raise UserError if there is neither."""
    catalogue = parsed((files(__package__) / "machines.json").read_bytes(), dict)
    if own := catalogue["machines"].get(name):
        parts = [catalogue["parts"][part] for part in own.pop("parts")]
        return as_kind(reduce(_merged, [*parts, own]), MachineProfile)
    path = Path(os.path.expanduser(name))
    if not os.path.exists(path):
        known = sorted(catalogue["machines"])
        near = [each for each in known if name.lower() in each] or difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"--machine {name}: neither a file nor a known machine ({', '.join(known)}){hint}")
    return read_back(path, MachineProfile, links=True, fix="It should be as `offload-train bench --json` prints it")


def describe_rates(machine: MachineProfile) -> str:
    """Return as text, one line each, the rates that a reader can judge; the profile's JSON has all of them."""
    rates = machine.rates
    lines = [f"{machine.gpu or f'no GPU; {machine.cpu}'}, {machine.cores} cores; {machine.source}"]
    for dtype, rate in rates.matmul.items():
        lines += _line_of(f"matrix products, {dtype}", rate, 1e9, "GFLOP/s")
    lines += _line_of("memory", rates.memory, 1e9, "GB/s")
    for kernel, rate in rates.update.items():
        lines += _line_of(f"AdamW, {' with '.join(kernel.split('.'))}", rate, 1e6, "M parameters/s")
    for name in ("to_device", "from_device", "both_ways", "both_ways_out"):
        lines += _line_of(name.replace("_", " "), getattr(rates, name), 1e9, "GB/s")
    lines += describe_links(machine.links)
    for drive in (one for one in machine.drives if one.rates is not None):
        where = f"{drive.filesystem} on {drive.disk or 'no block device'} {drive.throttle}"
        lines.append(f"{drive.directory}: {where}".rstrip())
        for name, told in (("read", "alone"), ("write", "alone"), ("mixed_read", "both"), ("mixed_write", "both")):
            lines += _line_of(f"{name.removeprefix('mixed_')}, {told}", getattr(drive.rates, name), 1e9, "GB/s")
    return "\n".join(lines)


def describe_links(links: Links) -> list[str]:
    """Return the rates between ranks as text, one line each, with where each is from."""
    names = ("between_gpus", "network", "to_device_at_once", "from_device_at_once", "all_gather")
    found = [line for name in names for line in _line_of(name.replace("_", " "), getattr(links, name), 1e9, "GB/s")]
    return [*found, *_line_of("small messages in turn", links.message, 1e3, "k messages/s")]


def _line_of(name: str, rate: Rate | None, scale: float, unit: str) -> Iterator[str]:
    if rate is not None:
        source = "" if rate.origin == "measured" else f"{rate.origin}: {rate.source}"
        yield f"  {name:<37}{rate.value / scale:>9.4g} {unit:<16}{source}".rstrip()


# -- what a GPU can run, by its compute capability. A binary for sm_XY runs on GPUs of the same major version from XY
# on. compute_XY is PTX, which the driver compiles for any GPU from XY on. The suffix `a` restricts code to that
# capability, `f` to its family (CUDA's programming guide, "Compute capabilities"). AMD GPUs have no capability here.

BF16_FROM = (8, 0)  # Ampere; older GPUs emulate bf16
_CU126_UP_TO = (7, 5)  # since torch 2.11 only CUDA 12.6 wheels support Volta and older (pytorch #172352, #175253)
_CU126 = "pip install --force-reinstall 'torch<2.15' --index-url https://download.pytorch.org/whl/cu126"


def card_mistakes(machine: MachineProfile, *, dtype: str) -> Iterator[tuple[str, str]]:
    """Yield why the GPU cannot train in `dtype` with the installed torch, as pairs (what is wrong, what to do)."""
    capability, built = machine.capability, machine.built_for
    if machine.gpu is None or capability is None:
        return
    name = f"{machine.gpu} (sm_{capability[0]}{capability[1]})"
    if built and not any(runs(code, capability) for code in built):
        fix = _CU126 if capability < _CU126_UP_TO else "install a newer torch: https://pytorch.org/get-started/locally"
        yield f"the installed torch has no kernels for {name}; it has {', '.join(built)}", fix
    if dtype == "bf16" and capability < BF16_FROM:
        yield f"{name} has no bf16 units, which need sm_80 or newer", "use --dtype fp16"


def runs(code: str, capability: tuple[int, int]) -> bool:
    """Return whether a GPU of this capability can run `code`, an entry of torch.cuda.get_arch_list()."""
    if not (found := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", code)):
        return True  # an unknown kind of entry is not a reason to refuse the GPU
    kind, major, minor, only = found[1], int(found[2]), int(found[3]), found[4]
    if only == "a":
        return capability == (major, minor)
    if kind == "compute" and not only:
        return capability >= (major, minor)
    return capability[0] == major and capability[1] >= minor


def has_bf16(machine: MachineProfile) -> bool:
    """Return whether the device computes in bf16; True if its capability is unknown."""
    return machine.capability is None or machine.capability >= BF16_FROM
