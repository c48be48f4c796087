"""Ways to divide a step over N ranks, and the bytes that each moves between them. Pure arithmetic.

N = T S P D: T ranks share each product of a block (tensor), S the tokens of each row (sequence), P have some of the
blocks each (pipeline), D have rows of their own (data). W weights of e bytes on a rank, Z = D S ranks have the same
ones, between which ZeRO divides; M micro-batches of t tokens a step for each of D; h hidden elements;
r(n) = (n - 1) / n.
Bytes that leave each GPU, and come into it, in a step:

    ZeRO-1      r(Z) e W of gradients once, r(Z) e W of new weights (each rank's part reduced to it, and gathered)
    ZeRO-2      M r(Z) e W of gradients, r(Z) e W of new weights; twice the gradients where DeepSpeed is left to
                all-reduce whole buckets (0.19.8, stage_1_and_2.py, `average_tensor`), as engine/ds_config.py does not
    ZeRO-3      3 M r(Z) e W: gathered in forward and backward, scattered (Rajbhandari et al. 2020, section 7); less
                what DeepSpeed does not gather again (`zero_gathers.py`)
    tensor      2 r(T) e t h for each all-reduce, M times: 2 a block in the forward (Shoeybi et al. 2019, section 3);
                in the backward as many as its products that divide their outputs, since DeepSpeed's AutoTP adds up the
                gradient of each one's input by itself (Megatron: 2), and 1 more where the block is computed again,
                which ends with the last thing that autograd keeps; r(T) e t h M more for each block whose input each
                rank keeps a part of, which is gathered then (Rajbhandari et al. 2020, section 6.1)
    sequence    r(S) e t / S for each element of queries, keys, values and results of all heads, M times in each of
                forward, backward and recomputation (DeepSpeed Ulysses, Jacobs et al. 2023, section 3.2)
    pipeline    e t h to the next, as much back, M times; of M + P - 1 turns P - 1 are idle (Huang et al. 2019, 2.3)
    offload     e W / Z of gradients to the host, of ZeRO-2 and 3 M times, e W / Z of weights back

Ranks of a tensor group are neighbours, then those of a sequence, of data, of the pipeline. A ring that goes through a
node enters and leaves it once, and as many rings do as its ranks lie apart. ZeRO's collectives and a pipeline's sends
hide behind products, ZeRO-1's behind those of the last micro-batch; those of tensor and sequence do not
(`cost.py` has memory and seconds, `table.py` says which is the fastest).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from offload_trainer.plan.deepspeed.zero_gathers import ZeroGathers
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.memory.activations import Activations, Growth, Part
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.plan.workload import Workload

_PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Mode:
    """How N ranks divide a step. `stage`: ZeRO's, over the ranks that have the same weights."""

    data: int = 1
    stage: int = 1
    tensor: int = 1
    sequence: int = 1
    pipeline: int = 1

    @property
    def data_parallel(self) -> int:
        """Ranks with the same weights."""
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
        """What makes this package run it; nothing where nothing does."""
        if self.pipeline > 1:
            return ""
        if self.tensor > 1:
            return f"--engine deepspeed parallel.tensor={self.tensor}"
        return f"--engine deepspeed deepspeed.zero_stage={self.stage}" if self.data_parallel > 1 else ""


@dataclass(frozen=True)
class Collective:
    """One kind of collective, of a whole step: `bytes` each way through each GPU, in groups of `group` ranks."""

    what: str
    phase: str
    bytes: float
    count: int  # collectives
    group: int
    apart: int  # places between neighbours of a group
    kind: Literal["ring", "all-to-all", "send"] = "ring"
    hides: Literal["all", "last", "nothing"] = "all"  # behind the phase's products, those of the last micro-batch

    one_way: bool = False  # out of a rank, or into it, and in another phase the other way

    def network(self, here: int) -> float:
        """Bytes of it each way through the network of a node that has `here` ranks."""
        if self.group * self.apart <= here:
            return 0.0
        inside = max(1, here // self.apart)  # of a group's ranks on the node
        if self.kind == "all-to-all":
            return self.bytes * here * (self.group - inside) / (self.group - 1)
        return self.bytes * min(self.apart, here)


# -- which there are --------------------------------------------------------------------------------------------------


def modes(world: int) -> Iterator[Mode]:
    """Those that people run: each ZeRO alone, and each other division by itself and with the ZeRO that goes with it.

    Not sequence parallel, which is the tiered engine's and has its own plan.
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
    """Why the model, or the rows of a step, cannot be divided so; nothing where they can."""
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
    """Weights of the rank that has most: matrices of blocks divided by T, blocks by P; embeddings and head whole."""
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
    """Elements of it on a rank whose tensor group divides it, or all."""
    return -(-weight.numel // mode.tensor) if weight.block and _is_divided(weight) else weight.numel


def _is_divided(weight: Weight) -> bool:
    return weight.split in ("column", "row") or len(weight.shape) > 1


def columns(shape: ModelShape) -> int:
    """Of the largest block's matrices those that divide their outputs; all but two, where nobody knows."""
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
    """What a ring of so many moves through each, of all."""
    return (count - 1) / count


def flows(
    mode: Mode, work: Workload, *, held: int, trained: float, gathered: ZeroGathers | None = None
) -> Iterator[Collective]:
    """Of one rank in a step. `work`: micro-batches of a data-parallel rank; of `held` weights `trained` are trained.

    `gathered`: ZeRO-3's weights in a micro-batch; None: all in both passes, as its paper has it.
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
    """Elements of a token in queries, keys, values and results; heads of keys are repeated till ranks divide them."""
    return _of_all_heads(shape) * (2 + 2 * _sent(mode, shape))


def kept_elements(mode: Mode, shape: ModelShape) -> float:
    """Of those what a block keeps beside what it keeps of whole rows: the result once more, and keys as repeated."""
    own = shape.key_heads / shape.heads if shape.heads and shape.key_heads else 1.0
    return _of_all_heads(shape) * (1 + 2 * max(0.0, _sent(mode, shape) - own))


def _of_all_heads(shape: ModelShape) -> float:
    """Elements of a token in what attention gives."""
    return max(shape.attention, default=0) / 2 or shape.hidden


def _sent(mode: Mode, shape: ModelShape) -> float:
    """Elements of keys that are sent, as of values, for each of queries."""
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
    """What a rank of a tensor group, or a pipeline, holds of them: inside blocks 1 / T, and two hidden states whole."""
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
    """Inside a node and between nodes at once; inside by what `bench` found between ranks, where no file says."""
    measured = machine.links.all_gather if flow.kind == "ring" else machine.links.all_to_all
    inside = machine.links.between_gpus or measured or machine.rates.both_ways
    through = flow.network(here)
    if (flow.bytes and inside is None and here > 1) or (through and machine.links.network is None):
        return None
    seconds = flow.bytes / inside.value if inside is not None and here > 1 else 0.0
    return max(seconds, through / machine.links.network.value if through and machine.links.network else 0.0)
