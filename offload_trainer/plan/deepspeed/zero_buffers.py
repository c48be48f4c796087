"""Compute the buffer and bucket sizes of DeepSpeed's ZeRO from the model, so that every placement runs.

DeepSpeed's defaults fail for NVMe (buffers run out) or take tens of gigabytes (a buffer of a billion elements).
`engine/ds_config.py` writes these sizes into DeepSpeed's configuration. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offload_trainer.config import DeepSpeedSection
from offload_trainer.plan.shape import ModelShape, Weight
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
    sub_group = _given(section.sub_group_size, max(_SUB_GROUP, largest))
    bucket = _given(section.reduce_bucket_size, min(_BUCKET, max(shape.trainable, 1)))
    block = max(largest, _block(shape))
    ahead = 0 if placement.params == TierKind.DRIVES else min(_BUCKET, _block(shape))
    prefetch = _given(section.prefetch_bucket_size, ahead)
    live = _given(section.max_live_parameters, 2 * block)
    return ZeroSizes(
        sub_group=sub_group,
        largest_sub_group=_largest_sub_group(shape, sub_group, world=world),
        optimizer_buffers=_given(section.optimizer_buffer_count, _optimizer_buffers(section)),
        reduce_bucket=bucket,
        prefetch_bucket=prefetch,
        max_live=live,
        persistent=_PERSISTENT,
        weight_buffers=_given(
            section.param_buffer_count,
            _weight_buffers(shape, window=live, world=world, item_bytes=item_bytes),
        ),
        weight_buffer_elements=-(-largest // world),
    )


def drive_stretch(shape: ModelShape, section: DeepSpeedSection, sizes: ZeroSizes) -> float:
    """Return the factor by which the optimizer's drive time exceeds simultaneous reading and writing of its bytes.

    The first sub-group is read, and the last one is written, without traffic in the other direction. Without
    pipelining that holds for every sub-group.
    """
    if not (section.pipeline_read or section.pipeline_write):
        return 2.0
    return 1 + min(1.0, sizes.largest_sub_group / max(1, shape.trainable))


def _given(wish: int | Literal["auto"], computed: int) -> int:
    return computed if wish == "auto" else wish


def _block(shape: ModelShape) -> int:
    """Return the approximate elements of one block: all weights except the largest one, divided by the layers."""
    return max(1, (shape.parameters - shape.largest) // shape.layers)


def _optimizer_buffers(section: DeepSpeedSection) -> int:
    """Return the buffer count: 4 for a sub-group and 4 more for each pipelined direction."""
    return 4 * (1 + section.pipeline_read + section.pipeline_write)


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


def decay_groups(weights: Sequence[Weight]) -> tuple[list[Weight], list[Weight]]:
    """Return the trainable weights with and without weight decay, in the model's order."""
    trainable = [weight for weight in weights if weight.trainable]
    return [w for w in trainable if w.decays], [w for w in trainable if not w.decays]


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
