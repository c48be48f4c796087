"""Memory of stock DeepSpeed, item by item (0.19.8: stage_1_and_2.py, stage3.py, swap_tensor/). Pure arithmetic.

Counts are per rank: P parameters, T of them trainable, e bytes per weight, g per element of the gradient sums, W ranks
with the same weights. A full gradient bucket has b elements, at most T. The largest weight has L elements, and the
largest part of a weight whose optimizer state the rank has is l elements. Allocated throughout a step:

    ZeRO-1, 2   e P of weights (parameters are views of flat buffers). With the state in RAM: 16 T / W of masters,
                moments and fp32 gradients, e T / W of new weights in transfer, and 2 e L of gradients in transfer.
                Several micro-batches need e T / W more for their sums, or 4 T / W in fp32
    ZeRO-3      e P / W of weights, e b of bucket, g T / W of gradients, and 16 T / W in RAM. An NVMe optimizer has
                these on the drive, with swap buffers, and 8 T / W of moments in RAM, which the first update creates
                and the second one frees

In addition, the largest of these moments counts:

    model               activations with the gradients that are being computed, and weights that ZeRO-3 has gathered
    full bucket         8 l for a gradient in fp64 (`set_norm_for_param_grad_in_gpu`), and e L if the largest weight
                        exceeds a bucket; or the communication copies, which gloo duplicates: 2 e times b or T / W,
                        whichever is less. ZeRO-3 has all three: e b even for W = 1, fp32 on the way to a drive, and
                        the last gathered weight. Activations are added if the largest gradient is not the last one
    start               AutoTP shards weights that were built whole: e P of the whole model

ZeRO-2 fills its bucket while gradients are computed, so the full bucket also counts at the model's moments; a peak at
the head of a wide model has less of it. docs/benchmarks/predictions.md has measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from offload_trainer.config import DeepSpeedSection
from offload_trainer.plan.memory import LONG, activation_items, mapped_from, process_items
from offload_trainer.plan.parallel.collectives import divided, part_held, weights_held
from offload_trainer.plan.shape import ModelShape, decay_groups
from offload_trainer.plan.tiers import Item, Placement, Tier, TierKind, Tiers
from offload_trainer.plan.workload import Workload
from offload_trainer.units import format_bytes

# Resident memory of a process while it trains, without tensors and matmul buffers; DeepSpeed imports more of itself at
# the start. Measured on 2 cores of an AMD EPYC with torch 2.13 for CPUs, shared library pages included.
PROCESS = 450_000_000
# Freed memory that the CPU's heap keeps (`mapped_from`), measured and not derived. With short rows it is a multiple of
# the weight gradients' bytes, by ZeRO stage. With long rows it is a constant.
_HOLES = {1: 1.3, 2: 1.3, 3: 0.8}
_HOLES_OF_LONG_ROWS = 20_000_000
_FP64 = 8
_ACTIVATIONS = ("saved activations", "block inputs", "activations")


@dataclass(frozen=True)
class StockBytes:
    """The memory of one placement of a workload."""

    work: Workload
    placement: Placement
    sizes: ZeroSizes
    tiers: Tiers

    @cached_property
    def held(self) -> int:
        """Return the weights of a rank in elements, divided by tensor parallelism only."""
        return weights_held(self.work.shape, self.work.tensor)

    @cached_property
    def held_trained(self) -> int:
        """Return the trained weights of a rank in elements."""
        return -(-self.held * self.work.shape.trainable // self.work.shape.parameters)

    @cached_property
    def trained(self) -> int:
        """Return the number of parameters whose optimizer state is on one node."""
        if self.work.tensor > 1:
            return -(-self.held_trained * self.work.here // self.work.data)
        return -(-self.work.shape.trainable // self.work.nodes)

    def items(self) -> list[Item]:
        """Return a node's memory at its peak."""
        work, shape = self.work, self.work.shape
        if work.tensor > 1 and shape.on_gpu is not None and shape.on_cpu is not None:
            on_gpu, on_cpu = divided(shape.on_gpu, work.tensor), divided(shape.on_cpu, work.tensor)
            work = replace(work, shape=replace(shape, on_gpu=on_gpu, on_cpu=on_cpu))
        # Stages 2 and 3 free a gradient when it is reduced, but a tied head's waits for the embedding's.
        reduced = self.placement.stage > 1
        tied = sum(weight.numel for weight in shape.weights if weight.trainable and weight.uses > 1)
        waiting = work.item_bytes * tied if reduced else 0
        model = activation_items(work, tiers=self.tiers, gradients=reduced, waiting=waiting, tied_sum=waiting)
        there = [item for item in model if item.tier == self.tiers.device.name and item.name in _ACTIVATIONS]
        return [
            *self._process(),
            *self._weights(),
            *self._gradients(),
            *self._state(),
            *model,
            self._beyond(sum(item.bytes for item in there), kept=sum(item.bytes for item in there[:-1])),
        ]

    @property
    def sums(self) -> int:
        """Return the bytes per element of the gradient sums over a rank's micro-batches."""
        return 4 if self.work.accumulate > 1 and self.work.sums == "fp32" else self.work.item_bytes

    @cached_property
    def _parts(self) -> list[int]:
        """Return the elements of each trained weight on a rank."""
        return [part_held(weight, self.work.tensor) for weight in self.work.shape.weights if weight.trainable]

    @property
    def _bucket(self) -> int:
        return min(self.sizes.reduce_bucket, self.held_trained)

    @property
    def _gathered(self) -> int:
        """Return the number of weight elements that ZeRO-3 has gathered at a time."""
        return min(self.work.shape.parameters, self.sizes.max_live + self.sizes.prefetch_bucket)

    def _tier(self, kind: TierKind) -> Tier:
        if kind == TierKind.DRIVES:
            return self.tiers.drives[0] if self.tiers.drives else Tier(kind, 0)
        return self.tiers.device if kind == TierKind.GPU else self.tiers.ram

    # -- held all the time --------------------------------------------------------------------------------------------

    def _process(self) -> list[Item]:
        here, row = self.work.here, self.work.seq_len
        items = process_items(self.tiers, here=here, what="torch, transformers and DeepSpeed")
        if not self.tiers.has_gpu and row >= LONG:
            why = f"measured: heap fragments of allocations below {format_bytes(mapped_from(row))}, in each process"
            items.append(self.tiers.ram.item("heap", _HOLES_OF_LONG_ROWS * here, why))
        elif not self.tiers.has_gpu:
            each = _HOLES[self.placement.stage]
            holes = int(each * self.work.item_bytes * self.held_trained) * here
            why = f"measured: heap fragments, {each} times the temporary gradients; peaks were up to 13 % higher"
            items.append(self.tiers.ram.item("heap", holes, why))
        return items

    def _weights(self) -> list[Item]:
        work, sizes, e, here = self.work, self.sizes, self.work.item_bytes, self.work.here
        if self.placement.stage < 3:
            how = "whole on each rank" if work.tensor == 1 else f"{self.held:,} parameters on each rank"
            return [self.tiers.device.item("weights", e * self.held * here, f"{e} B a parameter, {how}")]
        home, sharded = self._tier(self.placement.params), e * -(-work.shape.parameters // work.nodes)
        why = "gathered at the same time: max_live_parameters and a prefetch bucket"
        items = [
            home.item("weights", sharded, f"{e} B a parameter, sharded over the ranks"),
            self.tiers.device.item("weights in use", e * self._gathered * here, why),
        ]
        if self.placement.params == TierKind.DRIVES:
            buffers, why = sizes.weight_buffers, f"{sizes.weight_buffers} buffers for the largest weight"
            swap, write = buffers * sizes.weight_buffer_elements, sizes.largest_sub_group
            items.append(self.tiers.ram.item("weight swap buffers", e * swap * here, why))
            items.append(self.tiers.ram.item("weight write buffer", e * write * here, "one sub-group"))
        return items

    def _gradients(self) -> list[Item]:
        e, here, device, several = self.work.item_bytes, self.work.here, self.tiers.device, self.work.accumulate > 1
        of_bucket = self.sums if self.placement.stage == 1 else e
        count = 2 if self.tiers.has_gpu and self.placement.stage < 3 else 1
        buckets = count * of_bucket * self._bucket * here
        items = [device.item("gradient buckets", buckets, f"{count} of {self._bucket:,} elements")]
        if self.placement.stage == 3:
            tier = device if self.placement.optimizer == TierKind.GPU else self.tiers.ram
            why = f"{self.sums} B a parameter, sharded over the ranks"
            return [*items, tier.item("gradients", self.sums * self.trained, why)]
        if self.placement.stage == 1:
            each = self.sums * self.held_trained * here
            items.append(device.item("gradients", each, "whole on each rank"))
        elif self.placement.optimizer == TierKind.GPU:
            items.append(device.item("gradients", e * self.trained, f"{e} B a parameter, until the update"))
        if several and self.placement.stage == 2 and self.sums > e:
            why = "of the micro-batches' gradients, in fp32, sharded over the ranks"
            return [*items, device.item("sums", 4 * self.trained, why)]
        if several and self.placement.optimizer == TierKind.RAM:
            items.append(self.tiers.ram.item("sums", e * self.trained, "of the micro-batches' gradients"))
        return items

    def _state(self) -> list[Item]:
        e, trained, here, sizes = self.work.item_bytes, self.trained, self.work.here, self.sizes
        home = self._tier(self.placement.optimizer)
        items = [home.item("masters and moments", 12 * trained, "fp32 master, first and second moment")]
        if self.placement.optimizer == TierKind.DRIVES:
            buffers = 4 * sizes.optimizer_buffers * sizes.largest_sub_group * here
            why = f"{sizes.optimizer_buffers} buffers for the largest sub-group"
            first = "from the first update, which creates them, to the second"
            return [
                *items,
                home.item("gradients, fp32", 4 * trained, "DeepSpeed swaps them together with the state"),
                self.tiers.ram.item("optimizer swap buffers", buffers, why),
                self.tiers.ram.item("first moments", 8 * trained, first),
            ]
        items.append(home.item("gradients, fp32", 4 * trained, "the update reads them in fp32"))
        if self.placement.optimizer == TierKind.RAM and self.placement.stage < 3:
            through = e * max(self._parts, default=0) * here
            items.append(self.tiers.ram.item("new weights", e * trained, "output of the update"))
            items.append(self.tiers.ram.item("gradients in transfer", through, "the largest weight's"))
            items.append(self.tiers.device.item("gradients in transfer", through, "the largest weight's"))
        return items

    # -- the largest moment -------------------------------------------------------------------------------------------

    def _beyond(self, model: int, *, kept: int) -> Item:
        """Return what other moments need on the device in excess of the model's peak.

        The model's peak has `model` bytes, of which blocks keep `kept` until their backward.
        """
        e, here, parts = self.work.item_bytes, self.work.here, self._parts
        if self.placement.stage == 3:
            model += e * self._gathered * here
        of_each = sorted(map(self._full_bucket, self._largest_parts()))  # the ranks of the node that needs the most
        full = sum(of_each[-here:]) * (here // min(here, len(of_each)))
        if self.held_trained > self._bucket and max(parts[1:], default=0) >= parts[0]:
            full += kept  # the largest gradient is not the last one to be reduced
        whole = e * (self.work.shape.parameters - self.held) * here if self.work.tensor > 1 else 0
        if whole > max(model, full):
            why = "until AutoTP has split it; in addition to activations"
            return self.tiers.device.item("whole model", whole - model, why)
        why = "a bucket's gradients and the largest weight's norm in fp64, minus activations that are freed by then"
        return self.tiers.device.item("gradients reduced", max(0, full - model), why)

    def _full_bucket(self, part: int) -> int:
        """Return a rank's bytes at a full bucket's moment; it has the state of up to `part` elements of one weight."""
        e, bucket, alike = self.work.item_bytes, self._bucket, self.work.data
        largest = max(self._parts, default=0)
        norm = _FP64 * part + (e * largest if largest > self.sizes.reduce_bucket else 0)
        if self.placement.stage < 3:
            sent = 2 * e * min(bucket, -(-self.held_trained // alike)) if alike > 1 else 0
            return max(norm, sent)
        if self.placement.optimizer == TierKind.DRIVES:
            norm = max(norm, 4 * -(-bucket // alike))
        return e * bucket * min(2, alike) + norm + e * largest

    def _largest_parts(self) -> list[int]:
        """Return the largest part of a weight whose state each rank has, in elements, for ranks with equal weights."""
        alike = self.work.data
        if self.placement.stage == 3:
            return [max((-(-numel // alike) for numel in self._parts), default=0)] * alike
        largest = [0] * alike
        for group in decay_groups(self.work.shape.weights):
            numels = [part_held(weight, self.work.tensor) for weight in group]
            size, begin = max(1, -(-sum(numels) // alike)), 0
            for numel in numels:
                end = begin + numel
                for rank in range(begin // size, min(alike, -(-end // size))):
                    largest[rank] = max(largest[rank], min(end, (rank + 1) * size) - max(begin, rank * size))
                begin = end
        return largest


# -- ZeRO's buffer and bucket sizes, and the weights that ZeRO-3 gathers
#
# DeepSpeed's default sizes fail for NVMe (buffers run out) or take tens of gigabytes (a buffer of a billion elements).
# `engine/deepspeed.py` writes these sizes into DeepSpeed's configuration.

_SUB_GROUP = 20_000_000
_BUCKET = 50_000_000
_SWAPPABLE_BYTES = 1 << 20  # DeepSpeed leaves smaller weights in memory
_PERSISTENT = 100_000  # weights of up to this many elements are never partitioned away


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
    buffers = _weight_buffers(shape, window=live, world=world, item_bytes=item_bytes)
    return ZeroSizes(
        sub_group=sub_group,
        largest_sub_group=_largest_sub_group(shape, sub_group, world=world),
        optimizer_buffers=_given(section.optimizer_buffer_count, 4 * (1 + pipelines)),  # 4 of a sub-group for each
        reduce_bucket=_given(section.reduce_bucket_size, min(_BUCKET, max(shape.trainable, 1))),
        prefetch_bucket=_given(section.prefetch_bucket_size, prefetch),
        max_live=live,
        persistent=_PERSISTENT,
        weight_buffers=_given(section.param_buffer_count, buffers),
        weight_buffer_elements=-(-largest // world),
    )


def _given(setting: int | Literal["auto"], computed: int) -> int:
    return computed if setting == "auto" else setting


def _largest_sub_group(shape: ModelShape, size: int, *, world: int) -> int:
    """Return the elements of one rank's largest sub-group: shards of weights are added until `size` is reached."""
    largest = 0
    for group in decay_groups(shape.weights):
        held = 0
        for weight in group:
            held += -(-weight.numel // world)
            largest = max(largest, held)
            if held >= size:
                held = 0
    return largest


def _weight_buffers(shape: ModelShape, *, window: int, world: int, item_bytes: int) -> int:
    """Return the number of weight buffers: the most weights that are gathered at one time, one per buffer.

    DeepSpeed releases weights only when more than `max_live` elements are gathered, and fails if no buffer is free for
    the next module. This returns the largest number of swappable weights in any window of `window` elements, plus a
    margin for the module in use and for the head, which tied embeddings fetch at both ends.
    """
    sizes = [weight.numel for weight in shape.weights if weight.numel * item_bytes // world >= _SWAPPABLE_BYTES]
    most = first = held = 0
    for last, numel in enumerate(sizes):
        held += numel
        while held > window and first < last:
            held -= sizes[first]
            first += 1
        most = max(most, last - first + 1)
    return min(most, len(sizes)) + 4


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
