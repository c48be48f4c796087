"""Compute the collectives of ZeRO, tensor and sequence parallelism in a step, and their seconds. Pure arithmetic.

N = T S D ranks: T ranks share each matrix product of a block (tensor), S the tokens of each row (sequence), D have
different rows (data). A rank has W weights of e bytes. Z = D S ranks have the same weights, and ZeRO partitions over
them. Each of D takes M micro-batches of t tokens per step. There are h hidden elements; r(n) = (n - 1) / n. Each GPU
sends, and receives, this many bytes in a step:

    ZeRO-1      r(Z) e W of gradients once (reduce-scatter), r(Z) e W of new weights (all-gather)
    ZeRO-2      M r(Z) e W of gradients, r(Z) e W of new weights. Twice the gradients if DeepSpeed all-reduces whole
                buckets (0.19.8, stage_1_and_2.py, `average_tensor`), which engine/deepspeed.py avoids
    ZeRO-3      3 M r(Z) e W: all-gather in forward and backward, reduce-scatter (Rajbhandari et al. 2020, section 7),
                less what DeepSpeed does not gather again (`gathered` in plan/deepspeed.py)
    tensor      2 r(T) e t h for each all-reduce, M times. The forward has 2 per block (Shoeybi et al. 2019, section 3).
                The backward has one per column-split product, since DeepSpeed's AutoTP reduces each product's input
                gradient separately (Megatron: 2). Recomputation adds 1, as it stops at the last tensor that autograd
                saves
    sequence    r(S) e t / S for each element of queries, keys, values and results of all heads, M times in each of
                forward, backward and recomputation (DeepSpeed Ulysses, Jacobs et al. 2023, section 3.2)

Ranks of a tensor group are adjacent; then come those of a sequence, and of data. A ring that spans nodes enters and
leaves each node once, and a node is crossed by as many rings as the rank distance within a group. ZeRO's collectives
overlap matrix products (those of ZeRO-1 only the last micro-batch's, which the plan does not tell apart); those of
tensor and sequence do not overlap.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.shape import Activations, Growth, ModelShape, Weight
from offload_trainer.plan.workload import Workload


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a step."""

    phase: str
    bytes: float  # total bytes each way through each GPU
    count: int  # number of collectives
    group: int  # ranks per group
    stride: int  # rank distance between neighbours of a group
    kind: Literal["ring", "all-to-all"] = "ring"
    hides: bool = False  # it overlaps the phase's products

    def network(self, here: int) -> float:
        """Return the bytes each way through the network of a node with `here` ranks."""
        if self.group * self.stride <= here:
            return 0.0
        inside = max(1, here // self.stride)  # ranks of one group on the node
        if self.kind == "all-to-all":
            return self.bytes * here * (self.group - inside) / (self.group - 1)
        return self.bytes * min(self.stride, here)


def zero_collectives(
    work: Workload, *, stage: int, trained: float, gathered: Mapping[str, int] = MappingProxyType({})
) -> Iterator[Collective]:
    """Yield ZeRO's collectives of a rank with `trained` trained weights; `gathered`: by ZeRO-3, in each phase."""
    alike = work.data * work.sequence  # ranks with the same weights
    if alike == 1:
        return
    size, micro, stride = (alike - 1) / alike * work.item_bytes, work.accumulate, work.tensor
    for phase, count in gathered.items():
        if phase == "update":
            yield Collective(phase, size * count, 1, alike, stride)
        else:
            yield Collective(phase, micro * size * count, micro, alike, stride, hides=True)
    times = 1 if stage == 1 else micro
    yield Collective("backward", times * size * trained, times, alike, stride, hides=True)
    if stage < 3:
        yield Collective("update", size * trained, 1, alike, stride)


def tensor_collectives(work: Workload) -> Iterator[Collective]:
    """Yield the all-reduces of tensor parallelism on each rank."""
    if work.tensor == 1:
        return
    again, blocks = int(work.checkpointing), work.accumulate * work.shape.layers
    each = 2 * (work.tensor - 1) / work.tensor * work.item_bytes * work.micro_batch * work.length * work.shape.hidden
    for phase, count in (("forward", 2), ("backward", column_products(work.shape) + again)):
        yield Collective(phase, blocks * count * each, blocks * count, work.tensor, 1)


def all_to_alls(work: Workload) -> Iterator[Collective]:
    """Yield the all-to-alls of sequence parallelism on each rank.

    Queries, keys, values and results of attention pass through them (`model/attention.py`). Buffers during the
    all-to-alls are smaller than what an MLP needs (tests/plan/test_gpu_bytes.py).
    """
    if work.sequence == 1:
        return
    each = (work.sequence - 1) / work.sequence * work.item_bytes * work.micro_batch * work.length
    each *= _attention_elements(work.shape) * (2 + 2 * _sent_keys(work.shape, work.sequence)) / 4
    layers = work.shape.layers
    for phase, blocks in (("forward", layers), ("backward", layers + work.checkpointed)):
        times = 4 * work.accumulate * blocks
        yield Collective(phase, times * each, times, work.sequence, work.tensor, "all-to-all")


def link_seconds(one: Collective, machine: MachineProfile, *, here: int) -> float | None:
    """Return the seconds of a collective, or None if a rate is unknown.

    Transfers within a node and between nodes overlap. Within a node this uses the machine's rate between GPUs, else
    the benchmark's rate of collectives, else copies through host memory.
    """
    measured = machine.links.all_gather if one.kind == "ring" else machine.links.all_to_all
    inside = machine.links.between_gpus or measured or machine.rates.both_ways
    through = one.network(here)
    if (one.bytes and inside is None and here > 1) or (through and machine.links.network is None):
        return None
    seconds = one.bytes / inside.value if inside is not None and here > 1 else 0.0
    return max(seconds, through / machine.links.network.value if through and machine.links.network else 0.0)


# -- what a rank of a group has ---------------------------------------------------------------------------------------


def refusal(shape: ModelShape, *, tensor: int = 1, sequence: int = 1, seq_len: int = 0) -> str:
    """Return why the model or its rows of `seq_len` tokens cannot be divided, or "" if they can."""
    if tensor > 1 and any(weight.block and len(weight.shape) > 2 for weight in shape.weights):
        return "its experts are stored in one tensor, which cannot be split by rows or columns"
    if shape.heads % (tensor * sequence):
        return f"{shape.heads} attention heads are not a multiple of {tensor * sequence}"
    if shape.key_heads % tensor:
        return f"{shape.key_heads} key-value heads are not a multiple of {tensor}"
    if seq_len % sequence:
        return f"rows of {seq_len} tokens are not a multiple of {sequence}"
    return ""


def weights_held(shape: ModelShape, tensor: int) -> int:
    """Return the weights of a rank in elements, before ZeRO partitions them; embeddings and head are whole."""
    divided = sum(weight.numel for weight in shape.weights if _is_divided(weight))
    return round(divided / tensor) + sum(weight.numel for weight in shape.weights if not _is_divided(weight))


def part_held(weight: Weight, tensor: int) -> int:
    """Return the elements of a weight on one rank of a tensor-parallel group."""
    return -(-weight.numel // tensor) if _is_divided(weight) else weight.numel


def _is_divided(weight: Weight) -> bool:
    return weight.block and (weight.split in ("column", "row") or len(weight.shape) > 1)


def column_products(shape: ModelShape) -> int:
    """Return the most column-split matrices in a block. If splits are unknown, assume that all but two are."""
    matrices = [weight for weight in shape.weights if len(weight.shape) > 1]
    if counts := Counter(weight.unit for weight in matrices if weight.split == "column"):
        return max(counts.values())
    counts = Counter(weight.unit for weight in matrices if weight.block and weight.products)
    return max(0, max(counts.values(), default=0) - 2)


def divided(counted: Activations, tensor: int) -> Activations:
    """Return the activations of one tensor-parallel rank: 1 / T inside blocks, except for two whole hidden states."""

    def inside(one: Growth) -> Growth:
        whole = Growth(token=(1 - 1 / tensor) * 2 * counted.hidden.token)
        return Growth(*(value / tensor for value in one.values())) + whole

    return replace(counted, kinds=tuple(kind.each(inside) for kind in counted.kinds))


def kept_elements(shape: ModelShape, sequence: int) -> float:
    """Return the elements per token that a block keeps in addition for its backward under sequence parallelism.

    These are a second copy of the attention result, and the keys and values that are replicated until the number of
    their heads is a multiple of the ranks.
    """
    own = shape.key_heads / shape.heads if shape.heads and shape.key_heads else 1.0
    return _attention_elements(shape) * (1 + 2 * max(0.0, _sent_keys(shape, sequence) - own))


def _attention_elements(shape: ModelShape) -> float:
    """Return the elements per token of attention's output."""
    return max(shape.attention, default=0) / 2 or shape.hidden


def _sent_keys(shape: ModelShape, sequence: int) -> float:
    """Return the elements of keys (and of values) that are sent, per element of queries."""
    known = shape.heads and shape.key_heads
    return min(1.0, math.lcm(shape.key_heads, sequence) / shape.heads) if known else 1.0
