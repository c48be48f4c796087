"""Compute ZeRO's buffer and bucket sizes from the model, and the weights that ZeRO-3 gathers. Pure arithmetic.

DeepSpeed's default sizes fail for NVMe (buffers run out) or take tens of gigabytes (a buffer of a billion elements).
`engine/ds_config.py` writes these sizes into DeepSpeed's configuration.

`gathers` follows DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py (`fetch_sub_module`,
`__params_to_release`), after its first step has recorded the order of modules. Before a module runs, its missing
weights are gathered. Then those of the next modules are, up to a prefetch bucket and `max_live_parameters`. After it
ran, its weights are released, except those that are used again within `max_reuse_distance` elements, or that the
prefetcher has already passed for a later use. So the last blocks of a forward are still gathered for their backward.
Small weights stay gathered, and are gathered once after each update (`_post_step` in stage3.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from offload_trainer.config import DeepSpeedSection
from offload_trainer.plan.shape import ModelShape, Weight, decay_groups
from offload_trainer.plan.tiers import Placement, TierKind

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


@dataclass(frozen=True)
class ZeroGathers:
    """Gathered elements: in forward and backward of each micro-batch, and once per step after the update."""

    forward: int
    backward: int
    update: int


@lru_cache(8)
def gathers(shape: ModelShape, sizes: ZeroSizes, *, checkpointing: bool) -> ZeroGathers:
    """Return the elements gathered by all ranks together; in a ring each rank receives all but its own shard."""
    forward = list(_modules(shape.weights))
    found = {True: 0, False: 0}
    walk = _Walk([*forward, *_backward(forward, checkpointing=checkpointing)], sizes)
    for step in range(len(walk.modules)):
        found[step < len(forward)] += walk.fetch(step)
        walk.release(step)
    once = sum(weight.numel for weight in shape.weights if weight.numel <= sizes.persistent)
    return ZeroGathers(found[True], found[False], once)


def _modules(weights: Sequence[Weight]) -> Iterator[list[Weight]]:
    """Yield the weights of each module in the order of the forward; a tied head comes last."""
    owned: dict[str, list[Weight]] = {}
    for weight in weights:
        owned.setdefault(weight.name.rpartition(".")[0], []).append(weight)
    yield from owned.values()
    tied = [weight for weight in weights if weight.uses > 1]
    if tied:
        yield tied


def _backward(forward: list[list[Weight]], *, checkpointing: bool) -> Iterator[list[Weight]]:
    """Yield the modules in the order of the backward; a checkpointed block's forward is repeated before it."""
    blocks: dict[str, list[list[Weight]]] = {}
    for place, module in enumerate(forward):
        blocks.setdefault(module[0].unit if module[0].block else f" {place}", []).append(module)
    for block in reversed(blocks.values()):
        if checkpointing and block[0][0].block:
            yield from block
        yield from reversed(block)


class _Walk:
    """The set of gathered weights, by name, while a micro-batch runs through `modules`."""

    def __init__(self, modules: list[list[Weight]], sizes: ZeroSizes) -> None:
        self.modules = modules
        self._sizes = sizes
        self._there = {weight.name for module in modules for weight in module if weight.numel <= sizes.persistent}
        self._persistent = frozenset(self._there)
        self._ahead = deque((weight, step) for step, module in enumerate(modules) for weight in module)
        self._passed = dict[str, int]()  # the last step for which the prefetcher has taken each weight
        self._live = 0

    def fetch(self, step: int) -> int:
        """Gather the weights of this step and prefetch those of later ones; return the number of elements."""
        module = self.modules[step]
        size = self._gather([weight for weight in module if weight.name not in self._there])
        wanted = {weight.name for weight in module if self._passed.get(weight.name, -1) < step}
        while wanted and self._ahead:
            wanted.discard(self._next().name)
        room = min(self._sizes.max_live - self._live, self._sizes.prefetch_bucket)
        coming: dict[str, Weight] = {}
        while self._ahead and sum(weight.numel for weight in coming.values()) < room:
            weight = self._next()
            if weight.name not in self._there:
                coming[weight.name] = weight
        return size + self._gather(list(coming.values()))

    def release(self, step: int) -> None:
        """Release the weights of this step's module that are not needed again soon."""
        going = {
            weight.name: weight.numel
            for weight in self.modules[step]
            if weight.name not in self._persistent and self._passed[weight.name] <= step + 1
        }
        seen = 0
        for later in self.modules[step + 1 :]:
            if not going or seen >= self._sizes.max_live:  # engine/ds_config.py sets max_reuse_distance to the same
                break
            for weight in later:
                going.pop(weight.name, None)
                seen += weight.numel
        self._there -= set(going)
        self._live -= sum(going.values())

    def _gather(self, weights: list[Weight]) -> int:
        size = sum(weight.numel for weight in weights)
        self._there |= {weight.name for weight in weights}
        self._live += size
        return size

    def _next(self) -> Weight:
        weight, step = self._ahead.popleft()
        self._passed[weight.name] = max(step, self._passed.get(weight.name, -1))
        return weight
