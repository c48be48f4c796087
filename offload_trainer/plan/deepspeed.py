"""Planning for the stock DeepSpeed engine: check its settings, and compute each placement's memory and time.

Memory is counted from DeepSpeed's source (0.19.8: stage_1_and_2.py, stage3.py, swap_tensor/). A node has the share of
its ranks of everything that ZeRO partitions, and a GPU's PCIe link carries only what its rank owns: the rest comes from
other GPUs. docs/benchmarks/predictions.md compares bytes and seconds with measurements.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Literal

from offload_trainer.common.errors import UserError
from offload_trainer.common.units import format_bytes, format_count
from offload_trainer.config import DeepSpeedSection, PlacementSection
from offload_trainer.plan import communication, step_time
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.memory import ACTIVATIONS, LONG, activation_items, mapped_from, process_items
from offload_trainer.plan.shape import ModelShape, decay_groups
from offload_trainer.plan.step_time import DEVICE_COPIES, Bound, Costs, Traffic, computing_bounds, update_rate
from offload_trainer.plan.tiers import RAM_NAME, Item, Placement, TierKind, kind_asked
from offload_trainer.plan.workload import Workload

# From the fastest to the one that needs the least memory.
_HOMES = ("gpu", "gpu"), ("gpu", "cpu"), ("cpu", "cpu"), ("gpu", "nvme"), ("cpu", "nvme"), ("nvme", "nvme")
_PLACEMENTS = tuple(Placement(TierKind(params), TierKind(optimizer)) for params, optimizer in _HOMES)

# Measured (docs/benchmarks/step.md): seconds per parameter that DeepSpeed's hooks add to a backward on the CPU, and the
# speed of its optimizer step relative to the fused kernel.
_HOOKS = 8e-9
_SPEED = 0.47
# Freed memory that the CPU's heap keeps (`mapped_from`), measured and not derived. With short rows it is a multiple of
# the weight gradients' bytes, by ZeRO stage. With long rows it is a constant.
_HOLES = {1: 1.3, 2: 1.3, 3: 0.8}
_HOLES_OF_LONG_ROWS = 20_000_000
_FP64 = 8


@dataclass(frozen=True)
class DeepSpeed:
    """The settings of the DeepSpeed engine."""

    place: PlacementSection
    section: DeepSpeedSection
    moments: str  # optim.moment_dtype; "8bit" means bitsandbytes on the GPU
    tensor: int = 1  # AutoTP ranks

    name = "deepspeed"

    def mistakes(self) -> list[str]:
        """Return the mistakes in the configuration, one sentence each."""
        place, stage = self.place, self.section.zero_stage
        params, optimizer = kind_asked(place.params), kind_asked(place.optimizer)
        off_gpu = params not in (None, TierKind.GPU) or optimizer == TierKind.DRIVES
        tensor, on_gpu = f"parallel.tensor={self.tensor}", "use --params gpu, and --optimizer gpu or cpu"
        found = {
            f"DeepSpeed swaps to one drive and {len(place.nvme)} --nvme were given: keep one": len(place.nvme) > 1,
            f"optim.moment_dtype=8bit with --engine deepspeed and --optimizer {place.optimizer}: bitsandbytes' 8-bit "
            "AdamW runs on the GPU; use --optimizer gpu, or --engine tiered": (
                self.moments == "8bit" and optimizer in (TierKind.RAM, TierKind.DRIVES)
            ),
            # Seen with DeepSpeed 0.19.8, which prefetches a weight twice (`zero_sizes`).
            "deepspeed.prefetch_bucket_size with --params nvme: DeepSpeed's prefetch from NVMe fails in the second "
            "step (`already assigned swap buffer`); leave it at auto, which is 0 there": (
                params == TierKind.DRIVES and self.section.prefetch_bucket_size not in ("auto", 0)
            ),
            f"{tensor} divides the weights over GPUs and keeps the state there or in RAM: {on_gpu}": (
                self.tensor > 1 and off_gpu
            ),
            f"deepspeed.zero_stage={stage} keeps whole weights on each GPU, and the state there or in RAM: {on_gpu}": (
                self.tensor == 1 and stage in (1, 2) and off_gpu
            ),
            f"{tensor} works with ZeRO-1 only: leave deepspeed.zero_stage out": (
                self.tensor > 1 and stage not in ("auto", 1)
            ),
            f"{tensor} with optim.moment_dtype=8bit is untested: use fp32": self.tensor > 1 and self.moments == "8bit",
        }
        return [sentence for sentence, wrong in found.items() if wrong]

    @property
    def packages(self) -> list[tuple[str, str]]:
        """Return (setting, package) for each package that the settings need and that is not always installed."""
        eight = [("optim.moment_dtype=8bit with --engine deepspeed", "bitsandbytes")] if self.moments == "8bit" else []
        return [("--engine deepspeed", "deepspeed"), *eight]

    def refuse(self, work: Workload, machine: MachineProfile) -> None:
        """Raise UserError for settings that this machine, this step, the ranks or the model make impossible."""
        tensor, several = f"parallel.tensor={self.tensor}", self.tensor > 1
        reason = communication.refusal(work.shape, tensor=self.tensor)
        on_gpu = kind_asked(self.place.optimizer) == TierKind.GPU or self.moments == "8bit"
        found = {
            "--dtype fp16 without a GPU: DeepSpeed's CPU accelerator has no fp16; use --dtype bf16, or --engine "
            "tiered": machine.gpu is None and work.dtype == "fp16",
            f"{tensor if several else 'deepspeed.zero_stage=1'} --optimizer gpu with fp32 sums of several bf16 "
            "micro-batches: DeepSpeed uses another optimizer then, which is untested; use --optimizer cpu or "
            "--accumulate 1": self._sums_need_ram(work) and on_gpu,
            f"{tensor} with {work.world} rank(s): a multiple of {self.tensor} is needed (--gpus)": (
                several and work.world % self.tensor
            ),
            f"{tensor}: transformers has no tensor-parallel plan for this architecture that splits each matrix of a "
            "block by rows or columns only; use 1": several and not any(weight.split for weight in work.shape.weights),
            f"{tensor}: {reason}": several and reason,
        }
        if wrong := next((sentence for sentence, is_wrong in found.items() if is_wrong), ""):
            raise UserError(wrong)

    @property
    def _zero(self) -> int | None:
        if self.tensor > 1:  # AutoTP runs with ZeRO-1
            return 1
        return None if self.section.zero_stage == "auto" else self.section.zero_stage

    def _sums_need_ram(self, work: Workload) -> bool:
        """Return whether the state must be in RAM: elsewhere DeepSpeed has another class for ZeRO-1 with fp32 sums."""
        return self._zero == 1 and work.dtype == "bf16" and work.accumulate > 1

    def candidates(self, work: Workload, machine: MachineProfile) -> list[DeepSpeedCandidate]:
        """Return the candidates, from the fastest to the one that needs the least memory."""
        params = kind_asked(self.place.params)
        optimizer = TierKind.GPU if self.moments == "8bit" else kind_asked(self.place.optimizer)
        found = [
            one
            for one in _PLACEMENTS
            if params in (None, one.params)
            and optimizer in (None, one.optimizer)
            and (self.place.nvme or TierKind.DRIVES not in (one.params, one.optimizer))
            # Without a GPU that means host memory, and DeepSpeed's path for an optimizer there is slower than for RAM.
            and (machine.gpu is not None or one.optimizer != TierKind.GPU or optimizer == TierKind.GPU)
        ]
        # A requested combination that is not in the list, such as weights off the GPU and the optimizer on it, is used.
        if not found or (params and optimizer):
            found = [Placement(params or TierKind.GPU, optimizer or TierKind.RAM)]
        if self._zero is not None:
            found = [replace(one, zero=self._zero) for one in found if self._zero == 3 or one.stage == 2]
        if not found or self._sums_need_ram(work):
            found = [Placement(TierKind.GPU, TierKind.RAM, zero=self._zero)]
        return [DeepSpeedCandidate(work, machine, placement, self.section) for placement in found]


class DeepSpeedCandidate:
    """One placement of DeepSpeed, with the buffer sizes computed for it. Counts are elements."""

    engine = "deepspeed"

    def __init__(
        self, work: Workload, machine: MachineProfile, placement: Placement, section: DeepSpeedSection
    ) -> None:
        self.work, self.machine, self.placement, self._section = work, machine, placement, section
        shape = work.shape
        self.sizes = zero_sizes(shape, section, placement, world=work.world, item_bytes=work.item_bytes)
        how = f"AutoTP over {work.tensor} ranks, ZeRO-1" if work.tensor > 1 else f"ZeRO-{placement.stage}"
        self.title = f"DeepSpeed {how}"
        self.homes = machine.in_words(f"params {placement.params}, optimizer {placement.optimizer}")
        self.uses_drives = TierKind.DRIVES in (placement.params, placement.optimizer)
        why: str | None = None
        if placement.optimizer == TierKind.DRIVES:
            why = "stock DeepSpeed loses moments of an NVMe optimizer on resume, and cannot export its checkpoints"
        elif work.state.moments.name == "8bit":
            why = "the 8-bit moments are in DeepSpeed's flat buffers, which cannot be saved weight by weight"
        self.cannot_save = why
        held = [(communication.part_held(weight, work.tensor), weight.trainable) for weight in shape.weights]
        self._held = sum(count for count, _ in held)  # weights of a rank, divided by tensor parallelism only
        self._held_trained = sum(count for count, trained in held if trained)
        self._trained = -(-self._held_trained * work.here // work.data)  # parameters with their state on a node
        self._largest = max((count for count, trained in held if trained), default=0)
        self._bucket = min(self.sizes.reduce_bucket, self._held_trained)
        # Elements that ZeRO-3 gathers at a time.
        self._gathered = min(shape.parameters, self.sizes.max_live + self.sizes.prefetch_bucket)
        # Bytes of the gradient sums over a rank's micro-batches.
        self._sums = 4 if work.accumulate > 1 else work.item_bytes
        sent = gathered(shape, self.sizes) if placement.stage == 3 else {}
        zero = communication.zero_collectives(work, stage=placement.stage, trained=self._held_trained, gathered=sent)
        self._collectives = [*zero, *communication.tensor_collectives(work)]

    def costs(self) -> Costs:
        """Return the bytes that a step moves, and the time that it takes in addition to the model's computation."""
        work, machine, traffic, collectives = self.work, self.machine, list(self._traffic()), self._collectives
        update, on_top = Bound("update", 0.0, "AdamW on the GPU", "adamw"), dict.fromkeys(step_time.PHASES, 0.0)
        if machine.gpu is None or self.placement.optimizer != TierKind.GPU:
            count, rate = self._trained, update_rate(work, machine)  # parameters, and those per second of a node
            seconds = rate and count / (_SPEED * rate) + step_time.UPDATE_START
            update = Bound("update", seconds, f"AdamW on {format_count(count)} parameters", "adamw")
        bounds = [update, *communication.zero_bounds(collectives, machine, here=work.here)]  # others are in `on_top`
        if machine.gpu is None:
            on_top["backward"] = _HOOKS * work.shape.trainable
        elif work.tensor > 1:  # every rank computes all of what is outside the blocks
            head, blocks = work.shape.head_flops(), work.shape.block_flops(seq_len=work.seq_len)
            times = (work.tensor - 1) * head / (blocks + head)
            on_top |= {bound.phase: times * (bound.seconds or 0.0) for bound in computing_bounds(work, machine)}
        if copies := self._copies_in_turn(traffic):
            what = "gradients out of the device, back in and out again, one copy after the other"
            bounds.append(Bound("backward", copies[0], what, "device"))
            on_top["backward"] += copies[1]
        for one in collectives if machine.gpu is not None else ():
            if not one.hides:
                on_top[one.phase] += communication.link_seconds(one, machine, here=work.here) or 0.0
        # The first sub-group is read, and the last one is written, without traffic in the other direction. Without
        # pipelining that holds for every sub-group.
        alone = min(1.0, self.sizes.largest_sub_group / max(1, work.shape.trainable))
        stretch = 1 + (alone if self._section.pipeline_read or self._section.pipeline_write else 1.0)
        links = list(communication.as_traffic(collectives, here=work.here))
        return Costs(traffic, bounds, links, stretch=stretch, on_top=on_top)

    def _traffic(self) -> Iterator[Traffic]:
        """Yield the bytes that a step moves; an NVMe optimizer's fp32 gradients are swapped with its state."""
        work, e, micro = self.work, self.work.item_bytes, self.work.accumulate
        trained, total, drives = self._trained, -(-work.shape.parameters // work.nodes), self.machine.drives
        own = -(-work.shape.parameters // work.world)
        if self.placement.optimizer != TierKind.GPU:
            yield self._gradient_copies
            if self.placement.params == TierKind.GPU or self.machine.gpu is None:
                yield Traffic(DEVICE_COPIES, "update", e * -(-trained // work.here), 0)
        if self.placement.optimizer == TierKind.DRIVES:
            yield Traffic(drives[0].directory, "update", 16 * trained, 16 * trained)
        if self.placement.params != TierKind.GPU:
            yield from (Traffic(DEVICE_COPIES, phase, e * own * micro, 0) for phase in ("forward", "backward"))
        if self.placement.params == TierKind.DRIVES:
            moved = {"forward": (e * total * micro, 0), "backward": (e * total * micro, 0), "update": (0, e * total)}
            yield from (Traffic(drives[0].directory, phase, *size) for phase, size in moved.items())

    @property
    def _gradient_copies(self) -> Traffic:
        """Return the copies of a rank's gradients between the device and host memory.

        On a GPU the last gradients leave in fp32 (`_offload_grad_partition_at_boundary`). Before that ZeRO-3 writes the
        gradients of each micro-batch, or their sums, to host memory and reads them back (`partition_grads`). ZeRO-2
        does so if weights are fp32 as the sums are, and reads the sums from the second micro-batch on. Copies overlap
        with the backward; before DeepSpeed 0.19.5 it waited for those of ZeRO-3, which follow each other on one stream.
        """
        work, stage, sums = self.work, self.placement.stage, self._sums
        own = -(-self._trained // work.here)
        if self.machine.gpu is None:
            return Traffic(DEVICE_COPIES, "backward", 0, work.item_bytes * own * (1 if stage == 1 else work.accumulate))
        several = stage == 2 and work.accumulate > 1 and sums == work.item_bytes
        written = work.accumulate if stage == 3 or several else 0
        return Traffic(DEVICE_COPIES, "backward", sums * own * (written - several), (sums * written + 4) * own)

    def _copies_in_turn(self, traffic: Sequence[Traffic]) -> tuple[float, float] | None:
        """Return the seconds of the copies in a backward with ZeRO-3, and of those that follow its last gradient.

        Other placements have None. `partition_grads` queues the copies of a gradient on one stream: out, in, and out
        again. Weights come in on another. The step waits for the copies of the last bucket, which has at least the
        first weight's gradient (`independent_gradient_partition_epilogue`).
        """
        into, shape, copies = self.machine.rates.to_device, self.work.shape, self._gradient_copies
        on_gpu = self.machine.gpu is None or self.placement.optimizer == TierKind.GPU
        if on_gpu or self.placement.stage < 3 or into is None or not shape.trainable:
            return None
        moved = sum(one.read for one in traffic if (one.place, one.phase) == (DEVICE_COPIES, "backward"))
        back = copies.read / into.value
        whole, alone = (step_time.copy_seconds(read, copies.written, self.machine) for read in (moved - copies.read, 0))
        if whole is None or alone is None:
            return None
        last = next(weight.numel for weight in shape.weights if weight.trainable) / shape.trainable
        return whole + back, (alone + back) * last / self.work.accumulate

    def notes(self, _: Costs) -> Iterator[str]:
        """Yield the sentences of the plan about this placement."""
        yield "the RAM that heap fragmentation costs under DeepSpeed is a measured value, not computed (predictions.md)"
        if self.work.checkpoints == 0:
            yield "no checkpoints (--save-every 0): a killed run starts over; weights are saved at the end"
        if self.work.tensor > 1:
            groups = f"parallel.tensor={self.work.tensor}: {self.work.data} data-parallel group(s)"
            yield f"{groups}; the activations that AutoTP stores were measured only on a CPU"

    @property
    def items(self) -> list[Item]:
        """Return a node's memory at its peak: what is allocated throughout a step, and the largest of these moments.

        - The model's: activations with gradients that are being computed, and weights that ZeRO-3 has gathered.
        - A full bucket: the largest weight's gradient in fp64 (`set_norm_for_param_grad_in_gpu`), and again if it
          exceeds a bucket; or the communication copies, which gloo duplicates. ZeRO-3 has all three, also for one rank,
          fp32 on the way to a drive, and the last gathered weight.
        - The start with AutoTP, which shards weights that were built whole.
        """
        work, e, here, row = self.work, self.work.item_bytes, self.work.here, self.work.seq_len
        # Stages 2 and 3 free a gradient when it is reduced.
        model = [*activation_items(work, self.machine, gradients=self.placement.stage > 1, sums_tied=True)]
        items = process_items(self.machine, here=here, what="torch, transformers and DeepSpeed")
        if self.machine.gpu is None:
            each, why = _HOLES_OF_LONG_ROWS, f" of allocations below {format_bytes(mapped_from(row))}, in each process"
            if row < LONG:
                times = _HOLES[self.placement.stage]
                each = int(times * e * self._held_trained)
                why = f", {times} times the temporary gradients; peaks were up to 13 % higher"
            items.append(Item(RAM_NAME, "heap", each * here, f"measured: heap fragments{why}"))
        # The largest other moment, in excess of the model's peak. Only the last of these activations are not kept.
        peaks = [item.bytes for item in model if item.tier == self.machine.device and item.name in ACTIVATIONS]
        peak, alike, largest, bucket = sum(peaks), work.data, self._largest, self._bucket
        whole_gradient = e * largest * (largest > self.sizes.reduce_bucket)
        if self.placement.stage < 3:
            full = _FP64 * min(largest, -(-self._held_trained // alike)) + whole_gradient
            full = max(full, 2 * e * bucket * (alike > 1))
        else:
            peak += e * self._gathered * here
            full = max(_FP64 * -(-largest // alike) + whole_gradient, 4 * -(-bucket // alike))
            full += e * bucket * min(2, alike) + e * largest
        full = here * full + sum(peaks[:-1]) * (self._held_trained > bucket)
        whole, name = e * (work.shape.parameters - self._held) * here, "gradients reduced"
        why = "a bucket's gradients and the largest weight's norm in fp64, minus activations that are freed by then"
        if whole > max(peak, full):
            full, name, why = whole, "whole model", "until AutoTP has split it; in addition to activations"
        beyond = Item(self.machine.device, name, max(0, full - peak), why)
        return [*items, *self._throughout(), *model, beyond]

    def _throughout(self) -> Iterator[Item]:
        """Yield what is allocated throughout a step: weights, their gradients, and the optimizer's state."""
        work, sizes, e, here, trained = self.work, self.sizes, self.work.item_bytes, self.work.here, self._trained
        stage, params, optimizer = self.placement.stage, self.placement.params, self.placement.optimizer
        device, ram, several = partial(Item, self.machine.device), partial(Item, RAM_NAME), work.accumulate > 1
        swapped = optimizer == TierKind.DRIVES
        tiers = {TierKind.GPU: device, TierKind.RAM: ram}
        if self.uses_drives:
            tiers[TierKind.DRIVES] = partial(Item, self.machine.drives[0].directory)
        if stage < 3:
            how = "whole on each rank" if work.tensor == 1 else f"{self._held:,} parameters on each rank"
            yield device("weights", e * self._held * here, f"{e} B a parameter, {how}")
        else:
            sharded, how = e * -(-work.shape.parameters // work.nodes), f"{e} B a parameter, sharded over the ranks"
            yield tiers[params]("weights", sharded, how)
            how = "gathered at the same time: max_live_parameters and a prefetch bucket"
            yield device("weights in use", e * self._gathered * here, how)
        if params == TierKind.DRIVES:
            size, how = sizes.weight_buffer_elements, f"{sizes.weight_buffers} buffers for the largest weight"
            yield ram("weight swap buffers", e * sizes.weight_buffers * size * here, how)
            yield ram("weight write buffer", e * sizes.largest_sub_group * here, "one sub-group")
        count = 2 if self.machine.gpu is not None and stage < 3 else 1
        size = count * (self._sums if stage == 1 else e) * self._bucket * here
        yield device("gradient buckets", size, f"{count} of {self._bucket:,} elements")
        if stage == 1:
            yield device("gradients", self._sums * self._held_trained * here, "whole on each rank")
        elif stage == 3:
            tier, how = device if optimizer == TierKind.GPU else ram, f"{self._sums} B a parameter, sharded"
            yield tier("gradients", self._sums * trained, f"{how} over the ranks")
        elif optimizer == TierKind.GPU:
            yield device("gradients", e * trained, f"{e} B a parameter, until the update")
        if several and stage == 2 and self._sums > e:
            yield device("sums", 4 * trained, "of the micro-batches' gradients, in fp32, sharded over the ranks")
        elif several and stage < 3 and optimizer == TierKind.RAM:
            yield ram("sums", e * trained, "of the micro-batches' gradients")
        yield tiers[optimizer]("masters and moments", 12 * trained, "fp32 master, first and second moment")
        how = "DeepSpeed swaps them together with the state" if swapped else "the update reads them in fp32"
        yield tiers[optimizer]("gradients, fp32", 4 * trained, how)
        if swapped:
            size, how = sizes.largest_sub_group, f"{sizes.optimizer_buffers} buffers for the largest sub-group"
            yield ram("optimizer swap buffers", 4 * sizes.optimizer_buffers * size * here, how)
            yield ram("first moments", 8 * trained, "from the first update, which creates them, to the second")
        elif optimizer == TierKind.RAM and stage < 3:
            yield ram("new weights", e * trained, "output of the update")
            for tier in (ram, device):
                yield tier("gradients in transfer", e * self._largest * here, "the largest weight's")


# -- ZeRO's buffer and bucket sizes, and the weights that ZeRO-3 gathers
#
# DeepSpeed's default sizes fail for NVMe (buffers run out) or take tens of gigabytes (a buffer of a billion elements).
# `engine/deepspeed.py` writes these sizes into DeepSpeed's configuration.

_SUB_GROUP = 20_000_000
_BUCKET = 50_000_000
_SWAPPABLE_BYTES = 1 << 20  # DeepSpeed leaves smaller weights in memory


@dataclass(frozen=True)
class ZeroSizes:
    """Element and buffer counts of a run, each computed below or given by the user."""

    sub_group: int  # parameters updated at a time (ZeRO-3)
    largest_sub_group: int  # the actual maximum, since a sub-group ends with a whole weight
    optimizer_buffers: int  # NVMe optimizer: fp32 buffers of the largest sub-group
    reduce_bucket: int  # gradient elements
    prefetch_bucket: int  # weight elements (ZeRO-3)
    max_live: int  # weight elements (ZeRO-3)
    persistent: int  # weights of up to this many elements stay gathered (ZeRO-3)
    weight_buffers: int  # NVMe weights: buffers of the largest weight
    weight_buffer_elements: int


def zero_sizes(
    shape: ModelShape, section: DeepSpeedSection, placement: Placement, *, world: int, item_bytes: int
) -> ZeroSizes:
    """Return all sizes for `world` ranks and weights of `item_bytes` bytes per element.

    With weights on NVMe nothing is prefetched: DeepSpeed 0.19.8 prefetches a weight twice and stops in the second step
    with `already assigned swap buffer`.
    """
    largest = shape.largest
    block = max(1, (shape.parameters - largest) // shape.layers)  # approximately one block
    sub_group = _given(section.sub_group_size, max(_SUB_GROUP, largest))
    prefetch = 0 if placement.params == TierKind.DRIVES else min(_BUCKET, block)
    live = _given(section.max_live_parameters, 2 * max(largest, block))
    pipelines = section.pipeline_read + section.pipeline_write
    largest_sub_group = 0  # elements of one rank: weights' shards are added until `sub_group` is reached
    for group in decay_groups(shape.weights):
        held = 0
        for weight in group:
            held += -(-weight.numel // world)
            largest_sub_group = max(largest_sub_group, held)
            if held >= sub_group:
                held = 0
    # There is a buffer for each of the most swappable weights in any window of `live` elements: DeepSpeed releases none
    # before more are gathered, and fails if no buffer is free for the next module. The margin is for the module in use
    # and the head, which tied embeddings fetch at both ends.
    sizes = [weight.numel for weight in shape.weights if weight.numel * item_bytes // world >= _SWAPPABLE_BYTES]
    ends = [0, *accumulate(sizes)]
    counts = (bisect_right(ends, begin + live) - 1 - first for first, begin in enumerate(ends[:-1]))
    buffers = max((max(1, count) for count in counts), default=0) + 4
    return ZeroSizes(
        sub_group=sub_group,
        largest_sub_group=largest_sub_group,
        optimizer_buffers=_given(section.optimizer_buffer_count, 4 * (1 + pipelines)),  # 4 of a sub-group for each
        reduce_bucket=_given(section.reduce_bucket_size, min(_BUCKET, max(shape.trainable, 1))),
        prefetch_bucket=_given(section.prefetch_bucket_size, prefetch),
        max_live=live,
        persistent=100_000,
        weight_buffers=_given(section.param_buffer_count, buffers),
        weight_buffer_elements=-(-largest // world),
    )


def _given(setting: int | Literal["auto"], computed: int) -> int:
    return computed if setting == "auto" else setting


def gathered(shape: ModelShape, sizes: ZeroSizes) -> dict[str, int]:
    """Return the elements that ZeRO-3 gathers: in forward and backward of a micro-batch, and once after the update.

    In DeepSpeed 0.19.8 (runtime/zero/partitioned_param_coordinator.py) a tied head comes once for each use. The last
    weights of a forward stay for their backward: with prefetching `max_live` elements, without it those that are used
    again within as many. Small weights stay gathered, and come once after each update (`_post_step` in stage3.py). With
    DeepSpeed's default sizes the sum is within 4 % of a simulation of `fetch_sub_module`, with others within a third.
    """
    small = sum(weight.numel for weight in shape.weights if weight.numel <= sizes.persistent)
    tied = sum(weight.numel for weight in shape.weights if weight.uses > 1 and weight.numel > sizes.persistent)
    moving = shape.parameters - small + tied
    stays = sizes.max_live if sizes.prefetch_bucket else sizes.max_live // 2
    return {"forward": moving, "backward": max(0, moving - stays), "update": small}
