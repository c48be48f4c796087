"""Memory that every engine needs, item by item: process, CUDA context, activations, block inputs, checkpoints.

docs/benchmarks/predictions.md compares these numbers with measurements. Pure arithmetic.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from offload_trainer.common.units import format_bytes
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.shape import KEPT, Activations, Growth, ModelShape, Part, Weight, estimated, loss_pieces
from offload_trainer.plan.tiered.layout import aligned
from offload_trainer.plan.tiers import GPU_NAME, RAM_NAME, Item
from offload_trainer.plan.workload import Workload

CUDA_CONTEXT = 500_000_000  # GPU memory that the driver takes per process; a machine's free bytes include it
# The part of each GPU that no plan fills: cuBLAS workspaces, kernels that are loaded on first launch, rounding.
_RESERVE, _LEAST_RESERVE = 0.01, 500_000_000
ALLOCATOR = 0.05  # fragmentation and rounding, as a share of temporary GPU memory; assumed, not measured
PROCESS = 400_000_000  # interpreter, torch, transformers and their libraries (380 MB), and the allocator's overhead
LIBRARIES = 105_000_000  # the part of PROCESS that is file pages, which all processes of a machine share
PRODUCTS = 32_000_000  # oneDNN's and the allocator's memory after products of all shapes ran (20 MB AVX2, 40 AMX)
_HOLES = 110_000_000  # bytes; see `heap_holes`
ACTIVATIONS = ("block inputs", "saved activations", "activations")  # names of items
CUDA_PROCESS = 1_600_000_000  # CUDA's libraries in host memory, per process with a GPU; estimated, not measured


def gpu_reserve(machine: MachineProfile) -> int:
    """Return the bytes of each GPU that stay free: 1 %, at least 500 MB, and what runs lacked; 0 without a GPU."""
    usual = max(_LEAST_RESERVE, int(_RESERVE * machine.gpu_bytes))
    return usual + machine.kept_free if machine.gpu is not None else 0


def reserve_items(machine: MachineProfile, *, here: int) -> list[Item]:
    """Return the item for the GPU memory that stays free, for `here` ranks on the machine."""
    if machine.gpu is None:
        return []
    why = f"{_RESERVE:.0%} of each GPU, at least {format_bytes(_LEAST_RESERVE)}: workspaces and lazily loaded kernels"
    if machine.kept_free:
        why += f"; and {format_bytes(machine.kept_free)}, since runs on this GPU ran out of memory"
    return [Item(GPU_NAME, "reserve", gpu_reserve(machine) * here, why)]


def process_items(machine: MachineProfile, *, here: int, what: str = "torch and transformers") -> list[Item]:
    """Return the RAM of `here` processes on a machine."""
    each = PROCESS - LIBRARIES + CUDA_PROCESS * (machine.gpu is not None)
    return [
        Item(RAM_NAME, "process", each * here, f"interpreter, {what}, in each process"),
        Item(RAM_NAME, "libraries", LIBRARIES, "code of torch and other libraries, shared by all processes"),
    ]


def activation_items(work: Workload, machine: MachineProfile, *, gradients: bool, sums_tied: bool) -> Iterator[Item]:
    """Yield the activations at the peak of a micro-batch, with the offloaded block inputs, and libraries.

    `gradients`: the engine takes each gradient when it is complete; a tied head's waits for the embedding's.
    `sums_tied`: autograd adds these two to a new tensor.
    """
    shape, world, gpu, device = work.shape, work.here, machine.gpu is not None, partial(Item, machine.device)
    counted = shape.on_gpu if gpu else shape.on_cpu
    pieces = loss_pieces(shape.vocabulary, chunk=work.loss_chunk, gpu=gpu)
    of_rank = counted or estimated(shape, work.item_bytes, pieces=pieces)
    if work.tensor > 1:
        of_rank = divided(of_rank, work.tensor)
    if shape.images:
        of_rank = replace(of_rank, images=image_part(work))
    tied = sum(weight.numel for weight in shape.weights if weight.trainable and weight.uses > 1)
    waiting = work.item_bytes * tied * gradients
    one = partial(peak_of, of_rank, work, gradients=gradients, waiting=waiting, tied_sum=waiting * sums_tied)
    peaks = [one(rank=rank) for rank in range(work.pipeline)]
    peak = max(peaks, key=lambda peak: peak.bytes)
    how = peak.when if counted else f"{peak.when}; a rough estimate for this architecture"
    if work.inputs_away:  # as `model.offload_activations` asks
        inputs, name = inputs_of(work), "block inputs"
        yield device(name, world * INPUTS_UNDER_WAY * inputs.size, f"{INPUTS_UNDER_WAY} in transfer")
        yield Item(RAM_NAME, name, world * inputs.count * inputs.size, "saved by gradient checkpointing")
    if work.pipeline > 1:  # a plan has room for the most on each GPU, but a CPU's ranks share their memory
        each = tuple(peak.bytes for peak in peaks)
        size = world * peak.bytes if gpu else world // work.pipeline * sum(each)
        yield replace(device("activations", size, f"at the peak of each rank, {how}"), of_ranks=each)
    elif work.inputs_away:
        yield device("activations", peak.bytes * world, f"at their peak, {how}")
    else:
        others = shape.layers - work.checkpointed
        name = "saved activations" if others else "block inputs"
        parts = f": the inputs of {work.checkpointed} blocks, all of {others}" if others and work.checkpointed else ""
        yield device(name, peak.kept * world, f"saved for the backward{parts}")
        yield device("activations", peak.rest * world, f"all other activations, at their peak, {how}")
    if gpu:
        yield device("CUDA context", CUDA_CONTEXT * world, "of the driver, in each process")
        why = f"{ALLOCATOR:.0%} of the activations, for fragmentation; assumed"
        yield device("allocator", int(ALLOCATOR * peak.bytes) * world, why)
    else:
        why = "compiled code and buffers for matrix products, in each process"
        yield device("matmul kernels", PRODUCTS * world, why)


def saved_items(work: Workload, *, output: str) -> list[Item]:
    """Return the item for checkpoints on the output's drive, or for the last weights if `save.every` is 0."""
    if work.checkpoints is None:
        return []
    if work.checkpoints == 0:
        return [Item(output, "final weights", 4 * work.shape.parameters, "in fp32, saved at the end")]
    size, keep = checkpoint_bytes(work), work.checkpoints
    masters = f"{work.state.masters.name} master weights and moments"
    why = f"{keep} kept and the one being written, {format_bytes(size)} each: {masters}"
    return [Item(output, "checkpoints", (keep + 1) * size, why)]


def checkpoint_bytes(work: Workload) -> int:
    """Return the bytes of a checkpoint: masters and moments as stored, frozen weights in the run's dtype."""
    frozen = work.shape.parameters - work.shape.trainable
    return int(work.state.mean_bytes(work.shape) * work.shape.trainable) + work.item_bytes * frozen


# -- the block inputs that activation checkpointing keeps; `offloading/model.py` allocates by these numbers

INPUTS_UNDER_WAY = 2  # inputs on the device that are being copied out or back


@dataclass(frozen=True)
class BlockInputs:
    """The inputs of `count` blocks, `size` bytes each; `size` is a multiple of 4096."""

    count: int
    size: int


def inputs_of(work: Workload) -> BlockInputs:
    """Return the inputs of checkpointed blocks that are kept at a time: one micro-batch's, or breadth-first all."""
    return BlockInputs(work.side_by_side * -(-work.checkpointed // work.pipeline), aligned(work.hidden_bytes))


def slots_of(work: Workload) -> BlockInputs:
    """Return the slots through which a pipeline's ranks pass inputs of blocks, and the states of torch's generators."""
    return BlockInputs(work.accumulate, inputs_of(work).size + aligned(5056 + 16))  # RNG states of CPU and GPU


LONG = 8192  # tokens in a row from which on the lower threshold applies


def mapped_from(row: int) -> int:
    """Return glibc's mmap threshold in bytes for rows of `row` tokens; `storage/host_memory.py` sets it on CPUs.

    glibc maps allocations of this size and more separately and returns them to the system when they are freed. Smaller
    ones are reused, which saves fresh pages but leaves a fragmented heap. For long rows the arithmetic (attention
    alone) outweighs fresh pages from 1 MiB on.
    """
    return (1 if row >= LONG else 10) << 20


def heap_holes(work: Workload, items: Sequence[Item]) -> int:
    """Return the bytes of holes to expect in a heap that keeps freed memory (`storage/host_memory.py`).

    Eleven runs of GPT-2 (39 to 354 M parameters, 128 and 1,024 tokens, glibc 2.36) needed 140 to 490 MB more than
    `items`, their plan without this. With it, plans of later runs were at most 9 % too high.
    """
    activations = sum(item.bytes for item in items if item.name in ACTIVATIONS)
    return activations // 2 + min(_HOLES, 2 * work.item_bytes * work.shape.largest)


def heap_limit(items: Sequence[Item]) -> int:
    """Return the private memory from which on a heap that keeps freed memory is trimmed: the plan's, and 2 % more."""
    return sum(item.bytes for item in items if item.tier == RAM_NAME and item.name != "libraries") * 51 // 50


@dataclass(frozen=True)
class Peak:
    """The moment with the most memory: what blocks keep, everything else, and a description."""

    kept: int  # inputs of the preceding blocks that are checkpointed, and activations of the others
    rest: int
    when: str

    @property
    def bytes(self) -> int:
        return self.kept + self.rest


def peak_of(
    counted: Activations,
    work: Workload,
    *,
    rank: int = 0,
    gradients: bool = True,
    waiting: int = 0,
    tied_sum: int = 0,
) -> Peak:
    """Return the peak of a micro-batch on the device, in bytes and without weights.

    Each moment that `counted` has for a part of the model counts with what earlier parts have saved for the backward.
    Breadth-first, each micro-batch has its masks and block inputs there. While one is in a block, each of the others
    also has the block's output or that output's gradient; its input too, in a forward that has offloaded it.
    A `rank` of a pipeline has its own blocks, and if it is not the first one also what the paused forwards pass to the
    first block. Outputs leave for other ranks at once, and come from them one by one.

    `gradients`: count weight gradients from their computation until the engine takes them. `waiting`: bytes of a tied
    head's gradient of one micro-batch, which waits for the embedding's. `tied_sum`: bytes of the sum of both, if
    autograd adds them to a new tensor.
    """
    rows, length, chunk, micro_batches = work.micro_batch, work.seq_len, work.loss_chunk, work.side_by_side
    checkpointed = len(counted.blocks) if work.checkpointed == work.shape.layers else work.checkpointed
    inputs_here = not work.inputs_away  # inputs of checkpointed blocks stay on the device

    def most(moments: Iterable[Growth]) -> int:
        return max((moment.at(rows, length, gradients=gradients) for moment in moments), default=0)

    def now(growth: Growth) -> int:
        return growth.at(rows, length)

    hidden = now(counted.hidden)
    seen = now(counted.images.kept) if counted.images else 0  # stays until the backward of the parts for images
    beside = micro_batches * (now(counted.before) - hidden + seen)
    alike = others = (micro_batches - 1) * hidden
    own = [number for number in range(len(counted.blocks)) if work.pipeline == 1 or work.owners[number] == rank]
    has_head = work.owners[-1] == rank
    if work.pipeline > 1 and inputs_here and not (has_head and own[-1:] == [len(counted.blocks) - 1]):
        others = 0
    waiting *= has_head
    waits = micro_batches * waiting
    # Memory kept by the blocks below each block, including its own input. If inputs are offloaded, only its own counts.
    below = [
        micro_batches * hidden * (place + 1 + (rank > 0)) if inputs_here else hidden
        for place in range(min(checkpointed, len(own)) + 1)
    ]
    for number in own[checkpointed:]:
        below.append(below[-1] + now(counted.kinds[counted.blocks[number]].kept))
    peaks, of_kind = list[Peak](), {kind: counted.kinds[kind] for kind in set(counted.blocks)}
    ways = {kind: (most(part.forward), most(part.backward)) for kind, part in of_kind.items()}
    for kept, number in zip(below, own, strict=False):
        forward, backward = ways[counted.blocks[number]]
        if number < checkpointed:  # the recomputed forward coexists with the gradient of the block's output
            backward = max(backward, forward + hidden)
        forward, backward = forward + (others if inputs_here else 2 * others), backward + waits + others
        when = f"in the {'backward' if backward > forward else 'forward'} of block {number}"
        peaks.append(Peak(kept, beside + max(forward, backward), when))
    top, norm = below[-1] + (others - alike if inputs_here else 2 * others), counted.norm
    rest = max(most(norm.forward), most(norm.backward) + waits)
    after = [Peak(top, beside + rest, "in the final norm")]
    # The head: one forward and backward, or one chunk at a time. During the backward of the last chunk, the hidden
    # states' gradients of all other chunks and the sum of the head's gradient are in memory. Autograd adds to that sum
    # out of place at least once. Afterwards the chunks are concatenated.
    tokens, moments = rows * length, (*counted.head.forward, *counted.head.backward)
    head = max(moment.at(1, min(tokens, chunk), gradients=gradients) for moment in moments)
    if tokens > chunk:
        summed = int(max(moment.fixed for moment in counted.head.backward)) if gradients else 0
        head = max(hidden * (tokens - chunk) // tokens + summed + head, hidden + 3 * summed, 2 * hidden)
    head += (micro_batches - 1) * waiting
    after.append(Peak(top, beside + now(norm.kept) + head, f"in the loss of {min(chunk, tokens)} tokens"))
    peaks += after if has_head else []
    if counted.images:
        rest = max(most(counted.images.forward), most(counted.images.backward)) + waits
        peaks.append(Peak(0, beside + hidden - seen + rest + others, "in the parts for images"))
    last = most(counted.embedding) + waits + micro_batches * seen + alike + tied_sum
    peaks += [Peak(0, last, "in the embedding's backward")] if rank == 0 else []
    return max(peaks, key=lambda peak: peak.bytes)


def divided(counted: Activations, tensor: int) -> Activations:
    """Return the activations of one tensor-parallel rank: 1 / T inside blocks, except for two whole hidden states."""
    whole = Growth(token=(1 - 1 / tensor) * 2 * counted.hidden.token)
    kinds = [part.each(lambda one: Growth(*(size / tensor for size in one.values())) + whole) for part in counted.kinds]
    return replace(counted, kinds=tuple(kinds))


# -- the parts of a model that only images pass through: architectures differ in their image inputs, so these parts are
# not run on meta tensors, but estimated from the widths of their products, for a number of patches in each row

_MORE_IN_BACKWARD = 0.3  # at its peak, the largest block needs this share of what it keeps in addition (`estimated`)


def with_rate(shape: ModelShape, seq_len: int) -> ModelShape:
    """Return the shape with products and attention of the parts for images per token of a row of `seq_len` tokens."""
    images = shape.images
    if images is None or not images.units:
        return shape
    rate = images.patches(seq_len) / seq_len
    change, inside = rate / images.rate, set(images.units)
    weights = tuple(replace(w, products=w.products * change) if w.unit in inside else w for w in shape.weights)
    # Each patch attends to all patches of the row, and the planner multiplies by the tokens of a row.
    of_blocks = zip(shape.blocks, shape.attention, strict=False)
    attention = tuple(round(width * change**2) if block in inside else width for block, width in of_blocks)
    return replace(shape, weights=weights, attention=attention, images=replace(images, rate=rate))


def image_part(work: Workload) -> Part:
    """Return the memory of the parts for images, and of the images' features among the embeddings of a row.

    From the first trained weight on a block keeps its input if it is checkpointed, and otherwise `KEPT` times the
    inputs and outputs of its products, as in `estimated`. Moments include what is kept.
    """
    shape, images, e = work.shape, work.shape.images, work.item_bytes
    assert images is not None
    patches = images.patches(work.seq_len)
    # Some towers pack the images of all rows into one row, with a mask between them (Pixtral).
    mask = e * work.micro_batch * patches**2 if images.masked and images.units else 0
    of_unit = shape.by_unit()
    kept, largest, gradient, frozen = 0.0, 0.0, 0, images.frozen(shape.weights)
    has_backward = len(frozen) < len(images.units)
    checkpointed = set(images.layers) if work.checkpointed else set()
    for unit in images.units:
        weights = of_unit[unit]
        whole = KEPT * e * sum(map(_width, weights))
        if any(weight.block for weight in weights):  # scores in the run's dtype, and their softmax in fp32 too
            whole += (2 * e + 4) * images.eager_heads * patches
        largest = max(largest, whole)
        if unit not in frozen:
            kept += e * images.hidden if unit in checkpointed else whole
            gradient = max([gradient, *(e * weight.numel for weight in weights if weight.trainable)])
    # The features and the embeddings that they replace, and a mask over the tokens with a copy in the run's dtype.
    features = Growth(token=2 * e * shape.hidden, pair=1 + e)
    again = (1 + _MORE_IN_BACKWARD if checkpointed else _MORE_IN_BACKWARD) * largest
    return Part(
        kept=Growth(row=patches * kept + mask * has_backward) + features,
        forward=(Growth(row=patches * (kept + largest) + mask) + features,),
        backward=(Growth(fixed=gradient, row=patches * (kept + again) + mask) + features,) if has_backward else (),
    )


def _width(weight: Weight) -> float:
    """Return the inputs and outputs per patch of the product with this weight; 0 for a weight without a product."""
    if not weight.products:
        return 0.0
    if len(weight.shape) > 3:  # a convolution over patches, which do not overlap
        return float(weight.shape[0] + math.prod(weight.shape[1:]))
    return float(sum(weight.shape[-2:]) * math.prod(weight.shape[:-2]))


def image_note(work: Workload) -> str:
    """Return the sentence of a plan on what it counts for images."""
    images = work.shape.images
    assert images is not None
    if not images.units:
        return "images: no part of this model is known to be for images alone, so they count as tokens of a row only"
    part = image_part(work)
    moments = [one.at(work.micro_batch, work.seq_len) for one in (part.kept, *part.forward, *part.backward)]
    kept, most = format_bytes(moments[0]), format_bytes(max(moments[1:]))
    return (
        f"images: {images.patches(work.seq_len)} patches a row are counted, {images.why}; their activations "
        f"take {most} and keep {kept} until the backward, estimated from the widths of matrix products. "
        "Another number: image_patches=N"
    )
