"""Predict the seconds of each phase of a step from the machine's measured rates. Pure arithmetic.

A phase takes as long as its slowest bound: computation, the update's kernels, copies, a drive or a link. Phases run one
after the other, unless the update overlaps the backward or the next forward. A phase with a missing rate is None.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod

from offload_trainer.common.units import format_bytes, format_count
from offload_trainer.plan.machine import MachineProfile, Rate, layer_key, update_key
from offload_trainer.plan.memory import mapped_from
from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.tiered.layout import TierMap, first_block
from offload_trainer.plan.tiers import DEVICE, on_drive
from offload_trainer.plan.workload import Workload

DEVICE_COPIES = "device"  # the place of copies between host memory and a device


@dataclass(frozen=True)
class Traffic:
    """Bytes moved in one phase of one step. `place` is a drive's directory, or `DEVICE_COPIES`."""

    place: str
    phase: str
    read: int  # towards the device
    written: int


PHASES = ("forward", "backward", "update")
UPDATE_START = 0.005  # seconds that Python spends on iterating over pages and ranges
_OF_FP32_STATES = {"fp32": 1.0, "bf16": 0.75, "8bit": 0.56}  # relative update speed, if only fp32 was measured
_OF_FP32_STATES |= {"fp32_bf16_masters": 0.74, "bf16_bf16_masters": 0.65, "8bit_bf16_masters": 0.57}


@dataclass(frozen=True)
class Bound:
    """A lower bound on a phase's time: one resource that the phase waits for."""

    phase: str
    seconds: float | None  # None: no rate was measured
    what: str
    kind: str  # compute, turns, adamw, adamw_gpu, device, drive, memory, network, gpus or meeting
    place: str = ""  # the disk, if `kind` is "drive"
    lost: float = 0.0  # seconds of computation that all cores lose to a drive's transfers


@dataclass(frozen=True)
class Forecast:
    """The predicted seconds of each phase (None: unknown), and the bounds that they follow from."""

    seconds: dict[str, float | None]
    bounds: tuple[Bound, ...]
    behind: bool = False  # the update overlaps the next forward
    ahead: bool = False  # the update of pages on drives or with shadow memory also overlaps the backward
    hidden: float = 0.0  # seconds of the update that overlap hides
    if_clipped: float = 0.0  # extra seconds of a step whose speculative update has to be redone

    @property
    def step(self) -> float | None:
        """Return the seconds of a whole step, or None if a phase is unknown."""
        known = [seconds for seconds in self.seconds.values() if seconds is not None]
        return sum(known) - self.hidden if len(known) == len(self.seconds) else None

    @property
    def in_line(self) -> dict[str, float | None]:
        """Return the seconds of each phase without overlap; of an overlapped update, only the exposed part."""
        update = self.seconds.get("update")
        if not self.behind or update is None:
            return self.seconds
        return {**self.seconds, "update": 0.0, "wait": update - self.hidden}

    def slowest(self, phase: str) -> Bound:
        """Return the slowest bound of a phase whose seconds are known."""
        return max((one for one in self.bounds if one.phase == phase), key=lambda bound: bound.seconds or 0.0)


@dataclass(frozen=True)
class Costs:
    """The time that one placement of an engine takes in addition to the model's computation."""

    traffic: Sequence[Traffic]
    bounds: Sequence[Bound]  # bounds that do not follow from computation and traffic
    links: Sequence[Traffic]  # between ranks, for display; their time is in `bounds` and `on_top`
    on_top: Mapping[str, float]  # seconds of a phase in addition to its slowest bound
    stretch: float = 1.0  # the update's drive time exceeds simultaneous reading and writing of its bytes by this factor
    waits: Sequence[Bound] = ()  # waits between ranks that `on_top` includes, for display


def forecast(work: Workload, machine: MachineProfile, costs: Costs) -> Forecast:
    """Predict the seconds of a step."""
    every, found = [*computing_bounds(work, machine), *costs.bounds], dict[str, float | None](data=0.0)
    for phase in PHASES:
        moving = _traffic_bounds(costs.traffic, machine, phase, stretch=costs.stretch if phase == "update" else 1.0)
        if phase != "update" and machine.gpu is None:  # computation takes longer by what it loses to drives
            lost, computing = sum(bound.lost for bound in moving), (phase, "compute")
            every = [
                replace(one, seconds=one.seconds and one.seconds + lost) if (one.phase, one.kind) == computing else one
                for one in every
            ]
            moving = [replace(bound, lost=0.0) for bound in moving]
        every += moving
        known = _longest([bound for bound in every if bound.phase == phase])
        found[phase] = None if known is None else known + costs.on_top[phase]
    return Forecast(found, tuple(every))


def in_turn(work: Workload, machine: MachineProfile, traffic: Sequence[Traffic]) -> Iterator[Bound]:
    """Yield the bounds of forward and backward with a single weight buffer, where copies and computation alternate."""
    for one in computing_bounds(work, machine):
        copies = transfer_seconds(traffic, machine, phase=one.phase)
        seconds = None if one.seconds is None or copies is None else one.seconds + copies
        what = f"{one.what}, alternating with weight transfers, since there is only one buffer"
        yield Bound(one.phase, seconds, what, "turns")


def transfer_seconds(traffic: Sequence[Traffic], machine: MachineProfile, *, phase: str) -> float | None:
    """Return the seconds of the slowest drive or link in a phase; None if a rate is unknown."""
    bounds = _traffic_bounds(traffic, machine, phase)
    return _longest(bounds) if bounds else 0.0


def _longest(bounds: Sequence[Bound]) -> float | None:
    """Return the largest bound, or None if any is unknown, since the unknown one may be the largest."""
    known = [bound.seconds for bound in bounds if bound.seconds is not None]
    return max(known) if known and len(known) == len(bounds) else None


def kernels_of(work: Workload) -> tuple[str, ...]:
    """Return the CPU update kernels that the run may use, the first one that was measured first."""
    return ("native", "torch") if work.kernel == "auto" else (work.kernel,)


def update_rate(work: Workload, machine: MachineProfile) -> float | None:
    """Return the parameters per second of the CPU update kernel that the run will use, for its format of state."""
    rates, states = machine.rates.update, work.state.name
    for name in kernels_of(work):
        if timed := rates.get(update_key(name, states)):
            return timed.value
        if whole := rates.get(name):
            return whole.value * _OF_FP32_STATES[states]
    return None


def _traffic_bounds(
    traffic: Sequence[Traffic], machine: MachineProfile, phase: str, *, stretch: float = 1.0
) -> list[Bound]:
    """Return one bound for each disk, and one for copies to and from the device; `stretch`: see `Costs`."""
    bounds, by_disk = list[Bound](), defaultdict[str, list[Traffic]](list)
    for one in (moved for moved in traffic if moved.phase == phase):
        drive = machine.drive(one.place)
        by_disk[(drive.disk if drive else None) or one.place].append(one)
    for disk, parts in by_disk.items():
        read, written = sum(part.read for part in parts), sum(part.written for part in parts)
        if not read and not written:
            continue
        lost, title, ways = 0.0, "", ((read, "to the device"), (written, "from the device"))
        if disk == DEVICE_COPIES:
            seconds = copy_seconds(read, written, machine)
        else:
            title, ways = f"{parts[0].place}: ", ((read, "read"), (written, "written"))
            timed = next((drive.rates for part in parts if (drive := machine.drive(part.place))), None)
            seconds = None
            if timed:
                rates = timed.read, timed.write, timed.mixed_read, timed.mixed_write
                seconds = _at_once(read, written, *rates, stretch=stretch)
                lost = (read + written) / timed.computation_lost.value if timed.computation_lost else 0.0
        what = title + ", ".join(f"{format_bytes(count)} {way}" for count, way in ways if count)
        bounds.append(Bound(phase, seconds, what, "drive" if title else "device", disk, lost))
    return bounds


def copy_seconds(read: int, written: int, machine: MachineProfile) -> float | None:
    """Return the seconds of copies to (`read`) and from (`written`) the device that run at the same time."""
    rates = machine.rates
    if machine.gpu is None:  # a copy on a CPU reads and writes each byte
        return None if rates.memory is None else 2 * (read + written) / rates.memory.value
    out = rates.both_ways_out or rates.both_ways
    return _at_once(read, written, rates.to_device, rates.from_device, rates.both_ways, out)


def _at_once(read: int, written: int, *rates: Rate | None, stretch: float = 1.0) -> float | None:
    """Return the seconds of both ways in parallel, then of the rest; `rates`: in, out, and both in parallel."""
    known = [rate.value for rate in rates if rate is not None]
    if len(known) < len(rates):
        return None
    alone_in, alone_out, in_, out = known
    together = min(read / in_, written / out)
    left_in, left_out = read - together * in_, written - together * out
    return stretch * (together + max(left_in / alone_in, left_out / alone_out, 0.0))


def tokens_that_hide_the_update(found: Forecast, *, tokens: int) -> int:
    """Return the tokens per step, by accumulation, from which on the update is at most a tenth of it, as forecast."""
    share = 0.1
    forward, backward, update = (found.seconds[phase] or 0.0 for phase in PHASES)
    return -int(-tokens * (update - found.hidden) * (1 - share) / share // (forward + backward))


# -- computation: a count per token (`ModelShape`) divided by a measured rate

# What is counted of one token: floating-point operations of products and of attention, values that elementwise layers
# process, and logits of the loss; and of each micro-batch, the elements of large gradients ("tables").
_COUNTS = ("products", "attention", "values", "loss", "tables")


def computing_bounds(work: Workload, machine: MachineProfile) -> list[Bound]:
    """Return the computation bounds of forward and backward: one GPU per rank, or one CPU for all ranks of a node."""
    each = _seconds_of_token(work, machine)
    tokens = work.tokens // (work.world if machine.gpu is not None else work.nodes)
    what = f"computing {format_count(work.tokens)} tokens"
    if work.pipeline > 1 and each is not None:
        longer = _longer_in_turn(work, machine, *each)
        tokens = round(longer * tokens)
        what += f", {longer - 1:.0%} longer since ranks wait for blocks, the head and copies"
    seconds = (None, None) if each is None else (tokens * each[0], tokens * each[1])
    return [Bound(phase, one, what, "compute") for phase, one in zip(PHASES, seconds, strict=False)]


def _seconds_of_token(work: Workload, machine: MachineProfile) -> tuple[float, float] | None:
    """Return the seconds of a token's forward and backward on one GPU or all cores; None if no rate is known."""
    if (timed := stands_for(work.dtype, machine)) is None:
        return None
    again, forward, backward = _work_of_token(work)
    seconds = partial(_seconds, machine=machine, timed=timed, tokens=work.micro_batch * work.seq_len)
    return seconds(forward, phase="forward"), seconds(again, phase="forward") + seconds(backward, phase="backward")


def _longer_in_turn(work: Workload, machine: MachineProfile, forward: float, backward: float) -> float:
    """Return how much longer a pipeline computes than ranks that neither wait nor copy; seconds are of a token."""
    outside = replace(work, shape=work.shape.without(set(work.shape.blocks)))
    _, head = _seconds_of_token(outside, machine) or (0.0, 0.0)
    tokens = work.micro_batch * work.seq_len * (1 if machine.gpu is not None else work.here)  # ranks share a CPU
    each, size = tokens / len(work.shape.blocks), work.hidden_bytes
    seconds = pipeline_seconds(
        work.owners,
        micro_batches=work.accumulate,
        forward=each * forward,
        backward=each * (backward - head),
        head=tokens * head,
        copies=(copy_seconds(0, size, machine) or 0.0, copy_seconds(size, 0, machine) or 0.0),
        in_order=not work.inputs_away,
    )
    return seconds * work.pipeline / (work.accumulate * tokens * (forward + backward))


@cache
def pipeline_seconds(
    owners: tuple[int, ...],
    *,
    micro_batches: int,
    forward: float,
    backward: float,
    head: float,
    copies: tuple[float, float],
    in_order: bool = True,
) -> float:
    """Return the seconds in which a pipeline's ranks compute the forward and the backward of a step.

    `owners` are the ranks of the blocks, and last that of the head. All seconds are those of one micro-batch: in a
    block (the `backward` recomputes it), in the `head` both ways, and for `copies` to host memory, which are made while
    the rank computes, and back, for which it waits. `in_order`: the forward does not take the micro-batches in reverse.
    """
    (*blocks, last), (out, back) = owners, copies
    passes = [*((rank, forward) for rank in blocks), (last, head), *((rank, backward) for rank in reversed(blocks))]
    free, ready = dict.fromkeys(owners, 0.0), [0.0] * micro_batches  # times when ranks are free, micro-batches ready
    before = blocks[0]
    for place, (rank, seconds) in enumerate(passes):
        numbers = range(micro_batches)
        for number in numbers if in_order or place >= len(blocks) else numbers[::-1]:
            begin = max(free[rank], ready[number] + out * (rank != before))
            free[rank] = ready[number] = begin + back * (rank != before) + seconds
        before = rank
    return max(free.values())


def _work_of_token(work: Workload) -> list[dict[str, float]]:
    """Return the `_COUNTS` of the backward's recomputation, of the forward, and of the backward itself."""
    shape, seq_len = work.shape, work.seq_len

    def of_blocks(model: ModelShape) -> dict[str, float]:
        products = model.block_flops(seq_len=0)
        attention = model.block_flops(seq_len=seq_len) - products
        return {"products": products, "attention": attention, "values": model.widths}

    blocks, head = of_blocks(shape), dict[str, float](products=shape.head_flops(), loss=shape.vocabulary)
    whole, products = blocks["products"] + head["products"], shape.backward_flops(seq_len=0)
    # Gradients that each micro-batch of a CPU writes to newly mapped memory, unless freed memory is reused. Each use of
    # a tied weight has one, and their sum is one more.
    mapped = [w for w in shape.weights if w.trainable and w.numel * work.item_bytes >= mapped_from(work.seq_len)]
    tables = 0 if work.keeps_heap else sum(w.numel * (w.uses + (w.uses > 1)) for w in mapped)
    backward = dict[str, float](
        products=products,
        attention=shape.backward_flops(seq_len=seq_len) - products,
        values=shape.widths * min(1.0, products / max(1.0, 2 * whole)),  # frozen layers need less
        loss=shape.vocabulary,
        tables=tables,
    )
    # Breadth-first, the loss is computed in the backward.
    forward, again = ([blocks], [head]) if work.breadth_first else ([blocks, head], [])
    count = work.checkpointed
    recomputed = shape if count >= shape.layers else shape.without(set(shape.blocks[count:]))
    if recomputed.images:  # activation checkpointing does not recompute frozen parts for images
        recomputed = recomputed.without(recomputed.images.frozen(recomputed.weights))
    if count:
        again.append(of_blocks(recomputed))
    if work.micro_batch * work.seq_len > work.loss_chunk:
        again.append(head)
    every = again, forward, [backward]
    return [{name: sum(part.get(name, 0.0) for part in parts) for name in _COUNTS} for parts in every]


def _seconds(work: dict[str, float], *, machine: MachineProfile, timed: str, phase: str, tokens: int) -> float:
    """Return the seconds of one of `tokens` tokens that are computed together, at the rates of the dtype `timed`."""
    rates, products = machine.rates.layers, machine.rates.matmul[timed].value
    seconds = work["products"] / products
    for part in ("attention", "values", "loss"):
        if (rate := rates.get(layer_key(timed, part, phase))) is None:  # a whole model reaches 80 % on a GPU
            return (work["products"] + work["attention"]) / (0.8 * products)
        seconds += work[part] / rate.value
    for part, whole in (("weights", work["products"] / 2), ("tables", work["tables"])):
        if rate := rates.get(layer_key(timed, part, phase)):
            seconds += whole / tokens / rate.value
    return seconds


def stands_for(dtype: str, machine: MachineProfile) -> str | None:
    """Return the measured dtype whose matrix products are as fast as those of `dtype`, or None.

    On a GPU, bf16 and fp16 share their units from sm_80 on. A CPU without 16-bit units computes in fp32.
    """
    others = {"bf16": "fp16", "fp16": "bf16"} if machine.gpu is not None else {"bf16": "fp32", "fp16": "fp32"}
    return next((name for name in (dtype, others.get(dtype)) if name in machine.rates.matmul), None)


# -- orthogonalising matrices, for an update rule such as Muon

ITERATIONS = 5  # Newton-Schulz iterations, as in torch.optim.Muon
RATE = layer_key("bf16", "orthogonalisation", "update")  # FLOP/s of the iteration in `Rates.layers`


def products_of(shape: tuple[int, int]) -> int:
    """Return the floating-point operations for one matrix."""
    less, more = sorted(shape)
    return ITERATIONS * (4 * less * less * more + 2 * less**3)


def seconds_of_matrices(model: ModelShape, machine: MachineProfile) -> float | None:
    """Return the seconds for all matrices of a model, on the GPU if there is one; None if no rate is known.

    Pages that the CPU updates move each matrix to the GPU and back with 16 bits an element, which is not overlapped.
    """
    rates = machine.rates
    if (timed := rates.layers.get(RATE) or rates.matmul.get(stands_for("bf16", machine) or "")) is None:
        return None
    matrices = [(weight.numel, weight.matrix) for weight in model.weights if weight.matrix]
    seconds = sum((count // prod(shape) * products_of(shape) / timed.value for count, shape in matrices), start=0.0)
    if machine.gpu is not None and rates.to_device is not None and rates.from_device is not None:
        moved = 2 * sum(count for count, _ in matrices)
        seconds += moved / rates.to_device.value + moved / rates.from_device.value
    return seconds


# -- the seconds of an update that overlap the backward and the next forward (docs/design_update.md)
#
#     update    unit 0, 1, 2, ...        in the order in which the forward needs them
#     forward          0, 1, 2, ...      each unit when it has its new weights
#     backward  head, last block, ...    early pages of each unit whose gradients are complete (speculative update)
#
# Update and forward are a flow shop with two machines and the same job order on both. Its length is the maximum over k
# of the update up to unit k plus the forward from k on (S. M. Johnson, 1954). The device and the CPU update at the same
# time, and the forward waits for a unit's pages on both. Work on the same resource (a drive, the bus, the CPU) adds up.
# Only the forward of the step's first micro-batch can hide an update, because its backward overwrites the sums.
# Early pages, on drives or with shadow memory, overlap the step's last backward from its first complete block on.


@dataclass(frozen=True)
class UnitShare:
    """A unit's share of the update's time and of the forward's time."""

    update: float  # share of the update of pages whose state is not on the device
    forward: float
    on_device: float = 0.0  # share of the device's own update
    block: bool = False


def parts_of(homes: TierMap) -> list[UnitShare]:
    """Return the shares in the order of the forward. Modules before the blocks are lookups; a tied head is added."""
    units, first, there = homes.units, first_block(homes.units), Counter[int]()
    for one in homes.cut.groups:
        there[one.page.unit] += one.elements * (one.page.home == DEVICE)
    inside = there.total() or 1
    outside = sum(unit.trained for unit in units) - there.total() or 1
    tied = sum(place.weight.numel for unit in units[:first] for place in unit.places if place.weight.uses > 1)
    computed = (sum(unit.elements for unit in units[first:]) + tied) or 1
    parts = [
        UnitShare(
            (unit.trained - there[unit.index]) / outside,
            unit.elements / computed * (unit.index >= first),
            there[unit.index] / inside,
            unit.block,
        )
        for unit in units
    ]
    return [*parts, UnitShare(0.0, tied / computed)]


@dataclass(frozen=True)
class EarlyPages:
    """Pages that may be updated during the last backward, as shares of the elements whose state is not on the GPU."""

    on_drives: float
    in_ram: float = 0.0  # share of the pages with shadow memory
    last: float = 0.0  # share of those on drives that belong to units before the blocks, whose gradients come last
    read: float = 0.0  # share of those on drives that page buffers read for the next forward during the backward
    copying: float = 0.0  # seconds of the CPU that copying the old bytes to shadow memory takes

    @property
    def share(self) -> float:
        return self.on_drives + self.in_ram


def early_pages(homes: TierMap, *, copying: float, buffers: int) -> EarlyPages:
    """Return the pages that a layout lets the backward update. Half of the `buffers` read for the next forward."""
    outside = sum(one.elements for one in homes.cut.groups if one.page.home != DEVICE) or 1
    on_drives = [one for one in homes.cut.groups if on_drive(one.page.home)]
    away, first = sum(one.elements for one in on_drives), first_block(homes.units)
    return EarlyPages(
        away / outside,
        sum(homes.pages[number].elements for number in homes.shadows) / outside,
        last=sum(one.elements for one in on_drives if one.page.unit < first) / (away or 1),
        read=min(1.0, buffers // 2 / (sum(one.count for one in on_drives) or 1)),
        copying=copying,
    )


@dataclass(frozen=True)
class Overlap:
    """An estimate of how much of a step's update other work can hide."""

    found: Forecast  # forecast of the step without overlap
    parts: Sequence[UnitShare]  # shares of each unit, in the order of the forward
    micro_batches: int = 1
    gpu: bool = False  # a GPU computes the model

    def hidden(self, *, read: float = 0.0, after: float = 0.0) -> float:
        """Return the seconds of the update that the first micro-batch's forward hides; 0 if a phase is unknown.

        `read`: share of the update for which drives need no time before the weights are ready, because page buffers
        have read the state when the update begins. `after`: seconds of drives after the forward in which the last state
        may be written.
        """
        found, update, forward = self.found, self.found.seconds["update"], self.found.seconds["forward"]
        if update is None or forward is None:
            return 0.0
        forward /= self.micro_batches
        on_device, apart = self._longest("update", "adamw_gpu"), ("drive", "adamw_gpu")
        others = [each.seconds or 0.0 for each in found.bounds if each.phase == "update" and each.kind not in apart]
        computed = min(update, max(others, default=0.0))  # seconds of an update whose state has been read
        done, there, left = 0.0, 0.0, 1.0
        ways = [update - after]
        for part in self.parts:
            done, there = done + part.update, there + part.on_device
            ways.append(max(update * (done - read), computed * done, on_device * there) + forward * left)
            left -= part.forward
        asked = self._resources("update")
        for of, seconds in self._resources("forward").items():
            asked[of] += seconds / self.micro_batches
        for of in {bound.place for bound in found.bounds if bound.kind == "drive"}:
            asked[of] -= after
        return max(0.0, update + forward - max([*ways, *asked.values()]))

    def read_before_update(self, pages: int, *, buffers: int) -> float:
        """Return the share of the `pages` on drives that page buffers have read when the update begins.

        They are read while the last backward leaves the drives idle. All later pages arrive `buffers - 1` earlier.
        """
        share = (buffers - 1) / pages if pages > buffers else 1.0
        needed, backward = self._longest("update", "drive"), self.found.seconds["backward"] or 0.0
        free = max(0.0, backward - self._longest("backward", "drive")) / self.micro_batches
        return min(share, free / needed) if needed else 0.0

    def ahead(self, early: EarlyPages) -> tuple[float, float, float]:
        """Return the seconds of the update that are done during the last backward, and those that this saves.

        Shared resources make the backward longer, so it may save less than 0. Return also the seconds before the first
        page is updated in which drives are not busy.
        """
        found, update, backward = self.found, self.found.seconds["update"], self.found.seconds["backward"]
        if not update or backward is None or not early.share:
            return 0.0, 0.0, 0.0
        backward /= self.micro_batches
        first = backward * (1.0 - sum([part.forward for part in self.parts if part.block][:-1]))  # the head and a block
        asked = defaultdict[str, float](float)  # seconds of each resource that early pages use
        for bound in found.bounds:
            if bound.phase == "update" and bound.kind != "adamw_gpu":
                share = (1 - early.last) * (1.0 if bound.kind == "drive" and early.on_drives > 0 else early.share)
                asked[self._resource(bound)] += share * (bound.seconds or 0.0)
        others = {of: seconds / self.micro_batches for of, seconds in self._resources("backward").items()}
        could = min((1 - early.last) * update, max(asked.values(), default=0.0))
        lost = sum(bound.lost for bound in found.bounds if bound.phase == "update") if early.on_drives else 0.0
        asked["cpu"] += early.copying + (1 - early.last) * lost
        longest = max(could, *asked.values())
        part, both = 0.0, backward
        for _ in range(100):  # fixed point: a longer backward hides more, which makes it longer
            part = min(1.0, (both - first) / longest) if longest else 0.0
            both = max(backward, *(others.get(of, 0.0) + part * seconds for of, seconds in asked.items()))
        busy = self._longest("backward", "drive") / self.micro_batches
        idle = max(0.0, 1 - busy / backward) if backward else 0.0
        return part * could, backward + part * could - both, first * idle

    def left_after(self, done: float, early: EarlyPages) -> Overlap:
        """Return the rest of the update after the clipping factor is known; the backward has `done` seconds of it."""
        found, update = self.found, self.found.seconds["update"] or 0.0
        waits = {"drive": 0.0, "adamw_gpu": 1.0}  # share of a bound's work that waits; of others all but early pages
        of_update = [bound for bound in found.bounds if bound.phase == "update"]
        inside = [waits.get(bound.kind, 1 - early.share) * (bound.seconds or 0.0) for bound in of_update]
        left = max([update - done, *inside])
        rest = left / update if update else 1.0

        def scaled(bound: Bound) -> Bound:
            by = max(rest, waits.get(bound.kind, 1 - early.share)) if bound.phase == "update" else 1.0
            return replace(bound, seconds=bound.seconds and bound.seconds * by, lost=bound.lost * by)

        after = replace(found, seconds={**found.seconds, "update": left}, bounds=tuple(map(scaled, found.bounds)))
        first = next((number for number, part in enumerate(self.parts) if part.block), 0)
        before = sum(part.update for part in self.parts[:first])
        waiting = max(early.last * update, before * self._longest("update", "adamw"))
        share = min(1.0, waiting / left) if left else 0.0
        scales = share / (before or 1.0), (1 - share) / (1 - before or 1.0)  # units before the blocks, other units
        parts = [replace(one, update=one.update * scales[number >= first]) for number, one in enumerate(self.parts)]
        return replace(self, found=after, parts=parts)

    def _longest(self, phase: str, kind: str) -> float:
        bounds = [bound for bound in self.found.bounds if (bound.phase, bound.kind) == (phase, kind)]
        return max((bound.seconds or 0.0 for bound in bounds), default=0.0)

    def _resources(self, phase: str) -> dict[str, float]:
        """Return the seconds that a phase takes of each resource.

        What it takes on top of its slowest bound (`Costs.on_top`) is the time of the cores if the CPU computes the
        model, which also lose computation to the transfers of drives.
        """
        asked = defaultdict[str, float](float)
        bounds = [bound for bound in self.found.bounds if bound.phase == phase]
        for bound in bounds:
            asked[self._resource(bound)] += bound.seconds or 0.0
            asked["cpu"] += bound.lost
        whole, longest = self.found.seconds[phase], _longest(bounds)
        if not self.gpu and whole is not None and longest is not None:
            asked["cpu"] += whole - longest
        return asked

    def _resource(self, bound: Bound) -> str:
        """Return the resource that a bound uses. Adding gradients takes the memory bandwidth that AdamW needs."""
        if bound.kind in ("adamw", "compute", "memory"):
            return "gpu" if self.gpu and bound.kind == "compute" else "cpu"
        return {"adamw_gpu": "gpu", "drive": bound.place}.get(bound.kind, bound.kind)
