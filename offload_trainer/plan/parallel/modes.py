"""Enumerate the parallelism modes of N ranks, and compute the bytes that each moves between them. Pure arithmetic.

N = T S P D: T ranks share each matrix product of a block (tensor), S the tokens of each row (sequence), P have a part
of the blocks each (pipeline), D have different rows (data). A rank has W weights of e bytes. Z = D S ranks have the
same weights, and ZeRO partitions over them. Each of D takes M micro-batches of t tokens per step. There are h hidden
elements; r(n) = (n - 1) / n. Each GPU sends, and receives, this many bytes in a step:

    ZeRO-1      r(Z) e W of gradients once (reduce-scatter), r(Z) e W of new weights (all-gather)
    ZeRO-2      M r(Z) e W of gradients, r(Z) e W of new weights. Twice the gradients if DeepSpeed all-reduces whole
                buckets (0.19.8, stage_1_and_2.py, `average_tensor`), which engine/ds_config.py avoids
    ZeRO-3      3 M r(Z) e W: all-gather in forward and backward, reduce-scatter (Rajbhandari et al. 2020, section 7),
                less what DeepSpeed does not gather again (`zero_gathers.py`)
    tensor      2 r(T) e t h for each all-reduce, M times. The forward has 2 per block (Shoeybi et al. 2019, section 3).
                The backward has one per column-split product, since DeepSpeed's AutoTP reduces each product's input
                gradient separately (Megatron: 2). Recomputation adds 1, as it stops at the last tensor that autograd
                saves. r(T) e t h M more for each block whose checkpointed input is partitioned, since it is gathered
                again (Rajbhandari et al. 2020, section 6.1)
    sequence    r(S) e t / S for each element of queries, keys, values and results of all heads, M times in each of
                forward, backward and recomputation (DeepSpeed Ulysses, Jacobs et al. 2023, section 3.2)
    pipeline    e t h to the next stage and as much back, M times; P - 1 of M + P - 1 slots are idle (Huang et al. 2019,
                2.3)
    offload     e W / Z of gradients to the host (M times with ZeRO-2 and 3), e W / Z of weights back

Ranks of a tensor group are adjacent; then come those of a sequence, of data, and of the pipeline. A ring that spans
nodes enters and leaves each node once, and a node is crossed by as many rings as the rank distance within a group.
ZeRO's collectives and a pipeline's sends overlap matrix products, those of ZeRO-1 only the last micro-batch's; those of
tensor and sequence do not overlap. `cost.py` has memory and seconds, `table.py` the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from offload_trainer.plan.deepspeed.zero_gathers import ZeroGathers
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.shape import Activations, Growth, ModelShape, Part, Weight
from offload_trainer.plan.workload import Workload

_PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Mode:
    """A division of a step over ranks. `stage` is the ZeRO stage over the ranks with the same weights."""

    data: int = 1
    stage: int = 1
    tensor: int = 1
    sequence: int = 1
    pipeline: int = 1

    @property
    def data_parallel(self) -> int:
        """Return the number of ranks with the same weights."""
        return self.data * self.sequence

    @property
    def name(self) -> str:
        parts = [f"{what} {count}" for what, count in self._divided if count > 1]
        zero = [f"ZeRO-{self.stage} over {self.data_parallel}"] if self.data_parallel > 1 else []
        return " x ".join([*parts, *zero]) or "one rank"

    @property
    def _divided(self) -> tuple[tuple[str, int], ...]:
        return (("tensor", self.tensor), ("sequence", self.sequence), ("pipeline", self.pipeline))

    @property
    def words(self) -> str:
        """Return the command-line settings that run this mode, or "" if this package cannot run it."""
        if self.pipeline > 1:
            return ""
        if self.tensor > 1:
            return f"--engine deepspeed parallel.tensor={self.tensor}"
        return f"--engine deepspeed deepspeed.zero_stage={self.stage}" if self.data_parallel > 1 else ""


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a step."""

    what: str
    phase: str
    bytes: float  # total bytes each way through each GPU
    count: int  # number of collectives
    group: int  # ranks per group
    apart: int  # rank distance between neighbours of a group
    kind: Literal["ring", "all-to-all", "send"] = "ring"
    hides: Literal["all", "last", "nothing"] = "all"  # overlaps the phase's products, or only the last micro-batch's

    one_way: bool = False  # a rank only sends or only receives in this phase, and does the opposite in another one

    def network(self, here: int) -> float:
        """Return the bytes each way through the network of a node with `here` ranks."""
        if self.group * self.apart <= here:
            return 0.0
        inside = max(1, here // self.apart)  # ranks of one group on the node
        if self.kind == "all-to-all":
            return self.bytes * here * (self.group - inside) / (self.group - 1)
        return self.bytes * min(self.apart, here)


# -- which there are --------------------------------------------------------------------------------------------------


def modes(world: int) -> Iterator[Mode]:
    """Yield the modes in common use: each ZeRO stage alone, and tensor and pipeline parallelism combined with ZeRO-1.

    Sequence parallelism is left out: only the tiered engine has it, with plans computed separately.
    """
    for stage in (1, 2, 3):
        yield Mode(data=world, stage=stage)
    parts = [part for part in range(2, world + 1) if world % part == 0]
    for part in parts:
        yield Mode(tensor=part, data=world // part)
    for part in parts:
        yield Mode(pipeline=part, data=world // part)
    for tensor in parts:
        for pipeline in parts:
            if world % (tensor * pipeline) == 0:
                yield Mode(tensor=tensor, pipeline=pipeline, data=world // (tensor * pipeline))


def refusal(mode: Mode, shape: ModelShape, *, rows: int, seq_len: int) -> str:
    """Return why the model, or the rows of a step, cannot be divided in this mode, or "" if they can."""
    if rows % mode.data:
        return f"{rows} rows a step are not a multiple of {mode.data} data-parallel ranks"
    if mode.pipeline > shape.layers:
        return f"{shape.layers} blocks are too few for {mode.pipeline} pipeline stages"
    if mode.tensor > 1 and any(weight.block and len(weight.shape) > 2 for weight in shape.weights):
        return "its experts are stored in one tensor, which cannot be split by rows or columns"
    for what, count in (("tensor", mode.tensor), ("sequence", mode.sequence)):
        if count > 1 and shape.heads and shape.heads % count:
            return f"{shape.heads} attention heads are not a multiple of {count}"
        if what == "tensor" and count > 1 and shape.key_heads and shape.key_heads % count:
            return f"{shape.key_heads} key-value heads are not a multiple of {count}"
    if seq_len % mode.sequence:
        return f"rows of {seq_len} tokens are not a multiple of {mode.sequence}"
    return ""


# -- what one holds and moves ------------------------------------------------------------------------------------------


def weights_held(mode: Mode, shape: ModelShape) -> int:
    """Return the weights of the rank with the most, in elements, before ZeRO partitions them.

    Matrices of blocks are divided by T, blocks by P; embeddings and head are whole.
    """
    matrices = sum(weight.numel for weight in shape.weights if weight.block and _is_divided(weight))
    vectors = sum(weight.numel for weight in shape.weights if weight.block and not _is_divided(weight))
    blocks = -(-shape.layers // mode.pipeline) / shape.layers * (matrices / mode.tensor + vectors)
    outside = [weight for weight in shape.weights if not weight.block]
    if mode.pipeline == 1:
        return round(blocks) + sum(weight.numel for weight in outside)
    first = next((place for place, weight in enumerate(shape.weights) if weight.block), 0)
    before = list(shape.weights[:first])
    after = [weight for weight in outside if weight not in before or weight.uses > 1]
    return round(blocks) + max(sum(weight.numel for weight in end) for end in (before, after))


def part_held(mode: Mode, weight: Weight) -> int:
    """Return the elements of a weight on one rank of a tensor-parallel group."""
    return -(-weight.numel // mode.tensor) if weight.block and _is_divided(weight) else weight.numel


def _is_divided(weight: Weight) -> bool:
    return weight.split in ("column", "row") or len(weight.shape) > 1


def columns(shape: ModelShape) -> int:
    """Return the most column-split matrices in a block. If splits are unknown, assume that all but two are."""
    counts: dict[str, int] = {}
    for weight in shape.weights:
        if weight.split == "column" and len(weight.shape) > 1:
            counts[weight.unit] = counts.get(weight.unit, 0) + 1
    if counts:
        return max(counts.values())
    for weight in shape.weights:
        if weight.block and len(weight.shape) > 1 and weight.products:
            counts[weight.unit] = counts.get(weight.unit, 0) + 1
    return max(0, max(counts.values(), default=0) - 2)


def _part(count: int) -> float:
    """Return the share of a tensor that a ring of `count` ranks moves through each rank."""
    return (count - 1) / count


def flows(
    mode: Mode, work: Workload, *, held: int, trained: float, gathered: ZeroGathers | None = None
) -> Iterator[Collective]:
    """Yield the collectives of one rank in a step.

    Args:
        mode: the division over ranks.
        work: the micro-batches of a data-parallel rank.
        held: weights on the rank, in elements.
        trained: how many of them are trained.
        gathered: what ZeRO-3 gathers in a micro-batch; None: all weights in both passes, as in its paper.
    """
    yield from _of_zero(mode, work, trained=trained, gathered=gathered or ZeroGathers(held, held, 0))
    micro, e, blocks = work.accumulate, work.item_bytes, -(-work.shape.layers // mode.pipeline)
    tokens = work.micro_batch * work.seq_len
    again = int(work.checkpointing)
    if mode.tensor > 1:
        each = 2 * _part(mode.tensor) * e * tokens / mode.sequence * work.shape.hidden
        for phase, count in zip(_PASSES, (2, columns(work.shape) + again), strict=True):
            times = micro * blocks * count
            yield Collective("all-reduces", phase, times * each, times, mode.tensor, 1, hides="nothing")
        if again and work.partition:
            times = micro * blocks
            yield Collective("gathered inputs", "backward", times * each / 2, times, mode.tensor, 1, hides="nothing")
    if mode.sequence > 1:
        each = _part(mode.sequence) * e * tokens / mode.sequence * heads_elements(mode, work.shape) / 4
        for phase, count in zip(_PASSES, (4, 4 + 4 * again), strict=True):
            times = micro * blocks * count
            apart = mode.tensor
            yield Collective(
                "all-to-alls", phase, times * each, times, mode.sequence, apart, "all-to-all", hides="nothing"
            )
    if mode.pipeline > 1:
        size, apart = micro * e * tokens / mode.sequence * work.shape.hidden, mode.tensor * mode.data_parallel
        one_way = mode.pipeline == 2  # a stage in the middle receives as much as it sends
        for phase in _PASSES:
            yield Collective("sends", phase, size, micro, mode.pipeline, apart, "send", one_way=one_way)


def heads_elements(mode: Mode, shape: ModelShape) -> float:
    """Return the elements per token in queries, keys, values and results.

    Key and value heads are replicated until their number is a multiple of the sequence-parallel ranks.
    """
    return _of_all_heads(shape) * (2 + 2 * _sent(mode, shape))


def kept_elements(mode: Mode, shape: ModelShape) -> float:
    """Return the elements per token that a block keeps in addition for its backward under sequence parallelism.

    These are a second copy of the attention result, and the replicated keys and values.
    """
    own = shape.key_heads / shape.heads if shape.heads and shape.key_heads else 1.0
    return _of_all_heads(shape) * (1 + 2 * max(0.0, _sent(mode, shape) - own))


def _of_all_heads(shape: ModelShape) -> float:
    """Return the elements per token of attention's output."""
    return max(shape.attention, default=0) / 2 or shape.hidden


def _sent(mode: Mode, shape: ModelShape) -> float:
    """Return the elements of keys (and of values) that are sent, per element of queries."""
    known = shape.heads and shape.key_heads
    return min(1.0, math.lcm(shape.key_heads, mode.sequence) / shape.heads) if known else 1.0


def _of_zero(mode: Mode, work: Workload, *, trained: float, gathered: ZeroGathers) -> Iterator[Collective]:
    if mode.data_parallel == 1:
        return
    size, micro, apart = _part(mode.data_parallel) * work.item_bytes, work.accumulate, mode.tensor
    gradients = size * trained
    if mode.stage == 3:
        yield Collective("gathers", "forward", micro * size * gathered.forward, micro, mode.data_parallel, apart)
        yield Collective("gathers", "backward", micro * size * gathered.backward, micro, mode.data_parallel, apart)
        if gathered.update:
            yield Collective(
                "small weights", "update", size * gathered.update, 1, mode.data_parallel, apart, hides="nothing"
            )
    times = 1 if mode.stage == 1 else micro
    last: Literal["all", "last"] = "last" if mode.stage == 1 else "all"
    yield Collective("scattered gradients", "backward", times * gradients, times, mode.data_parallel, apart, hides=last)
    if mode.stage < 3:
        yield Collective("new weights", "update", gradients, 1, mode.data_parallel, apart, hides="nothing")


def divided(counted: Activations, mode: Mode) -> Activations:
    """Return the activations of one tensor- and pipeline-parallel rank.

    Inside blocks a rank has 1 / T, except for two hidden states, which are whole. It has 1 / P of the blocks.
    """
    left = (1 - 1 / mode.tensor) * 2

    def inside(one: Growth) -> Growth:
        if mode.tensor == 1:
            return one
        return Growth(*(value / mode.tensor for value in one.values())) + Growth(token=left * counted.hidden.token)

    kinds = tuple(
        Part(inside(kind.kept), tuple(map(inside, kind.forward)), tuple(map(inside, kind.backward)))
        for kind in counted.kinds
    )
    return replace(counted, kinds=kinds, blocks=counted.blocks[: -(-len(counted.blocks) // mode.pipeline)])


def link_seconds(flow: Collective, machine: MachineProfile, *, here: int) -> float | None:
    """Return the seconds of a collective, or None if a rate is unknown.

    Transfers within a node and between nodes overlap. Within a node this uses the machine's rate between GPUs, else
    the benchmark's rate of collectives, else copies through host memory.
    """
    measured = machine.links.all_gather if flow.kind == "ring" else machine.links.all_to_all
    inside = machine.links.between_gpus or measured or machine.rates.both_ways
    through = flow.network(here)
    if (flow.bytes and inside is None and here > 1) or (through and machine.links.network is None):
        return None
    seconds = flow.bytes / inside.value if inside is not None and here > 1 else 0.0
    return max(seconds, through / machine.links.network.value if through and machine.links.network else 0.0)
