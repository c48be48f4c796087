"""Compute ZeRO's buffer and bucket sizes from the model, and the weights that ZeRO-3 gathers. Pure arithmetic.

DeepSpeed's default sizes fail for NVMe (buffers run out) or take tens of gigabytes (a buffer of a billion elements).
`engine/ds_config.py` writes these sizes into DeepSpeed's configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offload_trainer.config import DeepSpeedSection
from offload_trainer.plan.shape import ModelShape, decay_groups
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


def gathered(shape: ModelShape, sizes: ZeroSizes) -> dict[str, int]:
    """Return the elements that ZeRO-3 gathers: in forward and backward of a micro-batch, and once after the update.

    In DeepSpeed 0.19.8 (runtime/zero/partitioned_param_coordinator.py) the last weights of a forward stay for their
    backward: with prefetching up to `max_live` elements, without it those that are used again within as many. Small
    weights stay gathered, and are gathered once after each update (`_post_step` in stage3.py). For GPT-2 and Qwen3 this
    is at most 3 % less than a simulation of `fetch_sub_module`, since a tied or recomputed weight may come once more.
    """
    small = sum(weight.numel for weight in shape.weights if weight.numel <= sizes.persistent)
    moving = shape.parameters - small
    stays = sizes.max_live if sizes.prefetch_bucket else sizes.max_live // 2
    return {"forward": moving, "backward": max(0, moving - stays), "update": small}
