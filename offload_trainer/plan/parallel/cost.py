"""Compute the cost of each parallelism mode: memory of a GPU and a node, bytes by link, and seconds. Pure arithmetic.

The memory model is stock ZeRO's: weights, gradients and activations are on the GPU. Masters and moments (12 bytes per
parameter) are there too, or in RAM together with fp32 gradients. `modes.py` has the bytes between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from offload_trainer.config import DeepSpeedSection
from offload_trainer.plan.deepspeed.candidate import stock_update_rate
from offload_trainer.plan.deepspeed.zero_buffers import zero_sizes
from offload_trainer.plan.deepspeed.zero_gathers import ZeroGathers, gathers
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.memory import ALLOCATOR, CUDA_CONTEXT, gpu_reserve, peak_of, process_items
from offload_trainer.plan.parallel.modes import Collective, Mode, divided, flows, link_seconds, weights_held
from offload_trainer.plan.shape import estimated
from offload_trainer.plan.step_time import forecast
from offload_trainer.plan.tiers import Placement, TierKind, tiers_of
from offload_trainer.plan.workload import Workload
from offload_trainer.units import format_bytes

_STATE = 12  # bytes per parameter: fp32 master, first and second moment
_BUCKET = 50_000_000  # elements, as in `zero_sizes`
_MOST_ROWS = 64  # largest number of rows in a micro-batch


@dataclass(frozen=True)
class ModeCost:
    """The cost of one mode at one micro-batch size. Bytes are per step, direction and GPU; `network` is per node."""

    mode: Mode
    home: Literal["gpu", "cpu"]  # tier of masters and moments
    micro_batch: int
    accumulate: int
    flows: tuple[Collective, ...]
    offload: tuple[int, int]  # bytes into the GPU and out of it
    memory: dict[str, int]  # bytes on a GPU by name
    ram: int  # bytes of a node
    gpu_room: int  # available bytes of a GPU
    ram_room: int  # available bytes of a node
    here: int  # ranks per node
    own_links: bool  # there are direct links between GPUs
    seconds: dict[str, float] | None  # seconds by phase; None if a rate is missing

    @property
    def step(self) -> float | None:
        return None if self.seconds is None else sum(self.seconds.values())

    @property
    def gpu(self) -> int:
        return sum(self.memory.values())

    @property
    def between(self) -> float:
        """Return the bytes through a GPU's direct links to other GPUs."""
        return self._sent if self.own_links else 0.0

    @property
    def pcie(self) -> float:
        """Return the bytes over a GPU's PCIe link in the busier direction, with all traffic if GPUs have no links."""
        return max(self.offload) + (0.0 if self.own_links or self.here == 1 else self._sent)

    @property
    def _sent(self) -> float:
        return sum(one.bytes / (2 if one.one_way else 1) for one in self.flows)

    @property
    def network(self) -> float:
        return sum(one.network(self.here) / (2 if one.one_way else 1) for one in self.flows)

    @property
    def collectives(self) -> int:
        return sum(one.count for one in self.flows)

    @property
    def lacks(self) -> str:
        """Return what does not fit, or ""."""
        found = []
        if self.gpu > self.gpu_room:
            found.append(f"needs {format_bytes(self.gpu)} on each GPU, which has {format_bytes(self.gpu_room)}")
        if self.ram > self.ram_room:
            found.append(f"needs {format_bytes(self.ram)} of RAM, and the machine has {format_bytes(self.ram_room)}")
        return "; ".join(found)


# -- what one takes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepRates:
    """The rates of a step that do not depend on the mode; None if not measured."""

    forward: float | None  # seconds of the matrix products of all tokens, divided over all ranks
    backward: float | None
    gpu_update: float  # parameters per second on one GPU; 0: its time is not counted
    cpu_update: float | None  # parameters per second of a node
    head: float  # share of the matrix products that is outside the blocks
    gathered: ZeroGathers  # ZeRO-3's all-gathers in a micro-batch


@dataclass(frozen=True)
class RankParameters:
    """Parameters of the rank with the most, before ZeRO partitions them."""

    all: int
    trained: float


def stock_rates(work: Workload, machine: MachineProfile) -> StepRates:
    """Return the rates of a step with the tokens of `work`."""
    products = forecast(work, machine, (), (), engine="deepspeed").seconds
    blocks, head = work.shape.block_flops(seq_len=work.seq_len), work.shape.head_flops()
    on_gpu = machine.rates.update.get("cuda")
    divided_weights = Placement(TierKind.GPU, TierKind.GPU, zero=3)
    sizes = zero_sizes(work.shape, DeepSpeedSection(), divided_weights, world=work.world, item_bytes=work.item_bytes)
    return StepRates(
        forward=products["forward"],
        backward=products["backward"],
        gpu_update=on_gpu.value if on_gpu else 0.0,
        cpu_update=stock_update_rate(work, machine),
        head=head / (blocks + head),
        gathered=gathers(work.shape, sizes, checkpointing=work.checkpointing),
    )


def priced(mode: Mode, work: Workload, machine: MachineProfile, stock: StepRates) -> ModeCost:
    """Return a mode with the fastest micro-batch size and placement of the state (GPU or RAM) that fits.

    If nothing fits, return the one that lacks the fewest bytes. The caller has checked with `refusal` that the step's
    rows can be divided.
    """
    rows, held = work.tokens // work.seq_len // mode.data, weights_held(mode, work.shape)
    of_rank = RankParameters(held, held * work.shape.trainable / work.shape.parameters)
    sizes = [size for size in range(1, min(rows, _MOST_ROWS) + 1) if rows % size == 0]
    found = [
        _one(mode, replace(work, micro_batch=size, accumulate=rows // size), machine, stock, home=home, held=of_rank)
        for home in (("gpu", "cpu") if machine.gpu is not None else ("gpu",))
        for size in sizes
    ]
    fits = [one for one in found if not one.lacks]
    if not fits:
        return min(found, key=lambda one: (max(0, one.gpu - one.gpu_room) + max(0, one.ram - one.ram_room), one.gpu))
    return min(fits, key=lambda one: (one.step if one.step is not None else 0.0, one.accumulate))


def _one(
    mode: Mode,
    work: Workload,
    machine: MachineProfile,
    stock: StepRates,
    *,
    home: Literal["gpu", "cpu"],
    held: RankParameters,
) -> ModeCost:
    """Return the cost of a mode; `work` has the micro-batches of each data-parallel rank."""
    share, times = held.trained / mode.data_parallel, work.accumulate if mode.stage > 1 else 1
    own = round(work.item_bytes * share)
    offload = (own, times * own) if home == "cpu" else (0, 0)
    memory = _memory(mode, work, held, state=home == "gpu", device=machine.device)
    if machine.gpu is not None:
        memory["reserve"] = gpu_reserve(machine)
    process = sum(item.bytes for item in process_items(tiers_of(machine), here=work.here))
    ram = process + (round((_STATE + 4) * share) * work.here if home == "cpu" else 0)
    room = machine.gpu_bytes if machine.gpu is not None else machine.ram_bytes // work.here
    known = ModeCost(
        mode=mode,
        home=home,
        micro_batch=work.micro_batch,
        accumulate=work.accumulate,
        flows=tuple(flows(mode, work, held=held.all, trained=held.trained, gathered=stock.gathered)),
        offload=offload,
        memory=memory,
        ram=ram,
        gpu_room=room,
        ram_room=machine.ram_bytes,
        here=work.here,
        own_links=machine.links.between_gpus is not None,
        seconds=None,
    )
    return replace(known, seconds=_seconds(known, work, machine, stock, share=share))


# -- bytes ------------------------------------------------------------------------------------------------------------


def _memory(mode: Mode, work: Workload, held: RankParameters, *, state: bool, device: str) -> dict[str, int]:
    """Return the bytes by name on the GPU that needs the most; `state`: masters and moments are there."""
    e, shape = work.item_bytes, work.shape
    sums = 4 if work.accumulate > 1 and work.sums == "fp32" else e
    found = {"weights": e * held.all, "gradients": round(sums * held.trained)}
    if mode.stage == 3 and mode.data_parallel > 1:
        block = max(shape.largest, (shape.parameters - shape.largest) // shape.layers)
        found["weights"] = -(-e * held.all // mode.data_parallel) + 2 * e * block
    if mode.stage > 1:
        found["gradients"] = -(-found["gradients"] // mode.data_parallel)
    if mode.data_parallel > 1:
        found["gradient buckets"] = 2 * e * min(_BUCKET, round(held.trained))
    if state:
        found["masters and moments"] = round(_STATE * held.trained / mode.data_parallel)
    counted = (shape.on_gpu if device == "gpu" else shape.on_cpu) or estimated(shape, e)
    peak = peak_of(
        divided(counted, mode),
        rows=work.micro_batch,
        length=work.seq_len,
        chunk=work.loss_chunk,
        checkpointing=work.checkpointing,
        keepers=mode.tensor if work.partition else 1,
    )
    waiting = min(mode.pipeline, work.accumulate)  # micro-batches whose backward has not reached the first stage
    found["activations"] = peak.kept * waiting + peak.rest
    if device == "gpu":
        found["CUDA context and allocator"] = CUDA_CONTEXT + int(ALLOCATOR * found["activations"])
    return found


# -- seconds ----------------------------------------------------------------------------------------------------------


def _seconds(
    one: ModeCost, work: Workload, machine: MachineProfile, stock: StepRates, *, share: float
) -> dict[str, float] | None:
    """Return the seconds of each phase, or None if a rate is unknown."""
    mode = one.mode
    whole = 1 + (mode.tensor - 1) * stock.head  # each rank of a tensor group computes all of the head
    idle = (work.accumulate + mode.pipeline - 1) / work.accumulate
    found = {}
    for phase, computing in (("forward", stock.forward), ("backward", stock.backward)):
        if computing is None:
            return None
        moved = _moved(one, machine, phase=phase, computing=(own := computing * whole * idle), micro=work.accumulate)
        if moved is None:
            return None
        found[phase] = max(own, moved[0]) + moved[1]
    on_gpu = one.home == "gpu" and machine.gpu is not None
    rate = stock.gpu_update if on_gpu else stock.cpu_update
    moved = _moved(one, machine, phase="update", computing=0.0, micro=work.accumulate)
    if rate is None or moved is None:
        return None
    count = share if on_gpu else share * work.here
    found["update"] = max(count / rate if rate else 0.0, moved[0]) + moved[1]
    return found


def _moved(
    one: ModeCost, machine: MachineProfile, *, phase: str, computing: float, micro: int
) -> tuple[float, float] | None:
    """Return the communication seconds that overlap the phase's products, and those that add to it.

    Return None if the rate of a link is unknown.
    """
    hidden = on_top = 0.0
    for flow in one.flows:
        if flow.phase != phase:
            continue
        took = link_seconds(flow, machine, here=one.here)
        if took is None:
            return None
        if flow.hides == "all":
            hidden += took
        else:
            on_top += max(0.0, took - (computing / micro if flow.hides == "last" else 0.0))
    into, out = one.offload
    size = {"backward": out, "update": into}.get(phase, 0)
    if size:
        rate = machine.rates.from_device if phase == "backward" else machine.rates.to_device
        if rate is None:
            return None
        hidden += size / rate.value
    return hidden, on_top
