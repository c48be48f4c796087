"""Benchmarks of this machine's compute and copy rates, for the planner. Every rate says how it was measured.

    probe -> bench_machine -> the same profile with rates        leaves no files

Drives are timed through the run's own transfers, bypassing the page cache where that is possible, on random bytes,
since some drives store zeros without writing them. Links are timed by one process per rank, with all ranks active:
between GPUs with NCCL, else in host memory with gloo. A rate is the slowest rank's, since all ranks wait for it.
"""

import itertools
import json
import operator
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch.multiprocessing.spawn import ProcessException, spawn
from torch.nn import functional

from offload_trainer import ranks as all_ranks
from offload_trainer.common.errors import STORE, TrainerError, UserError
from offload_trainer.common.safe_files import parsed
from offload_trainer.common.units import format_bytes
from offload_trainer.offloading.pages.store import PageTable
from offload_trainer.optim.cross_entropy import cross_entropy
from offload_trainer.optim.cuda_adam import choose_cuda_kernel
from offload_trainer.optim.kernel_api import Kernel, PageUpdate, ParamRange
from offload_trainer.optim.kernels import CpuKernel, choose_kernel
from offload_trainer.optim.moments import Noise
from offload_trainer.optim.muon import Products, orthogonalised
from offload_trainer.optim.norms import Pieces
from offload_trainer.optim.rules import AdamW
from offload_trainer.plan.communication import piece_width
from offload_trainer.plan.machine import (
    DriveFacts,
    DriveRates,
    Links,
    MachineProfile,
    Rate,
    Rates,
    has_bf16,
    layer_key,
    sums_key,
    update_key,
)
from offload_trainer.plan.shape import loss_pieces
from offload_trainer.plan.step_time import RATE, products_of
from offload_trainer.plan.tiered.layout import Page
from offload_trainer.plan.tiered.state_formats import ADAMW_FORMATS, StateFormat
from offload_trainer.plan.tiers import RAM
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.owned_dirs import scratch
from offload_trainer.storage.scratch_dir import leased
from offload_trainer.storage.tensorfile import DTYPES
from offload_trainer.storage.transfer import DriveFile, Transfers, done

_PIECE = 32 << 20  # bytes of one transfer, about the size of a page of the tiered engine
_BUFFERS = 6
_HEAD = 64  # size of an attention head
_COLD, _MOST_BLOCKS = 48 << 20, 16  # elements of weights that no cache holds, and the blocks that have them
_TABLE = 24 << 20  # elements of an embedding; malloc maps its gradient again each time
_VOCABULARY = 50257  # logits per token
_ROWS, _SIDE = 256, 1024  # sizes of the product that is timed while a drive works
_TIMES = 8  # repetitions of a transfer between ranks
VALUES = 16  # times the width: values per token that enter and leave a layer's products (`ModelShape.widths`)
_ADAMW = AdamW(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, decay=0.1)
_PATTERN = 1 << 18  # elements of typical masters and gradients, which are repeated


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of the layer whose computation is timed: those of no model, since plans of all models use the rates."""

    matrix: tuple[int, int, int]  # (tokens, inputs, outputs) of a linear layer
    tokens: int  # length of a row, which attention depends on
    width: int  # hidden size


ON_CPU = LayerSizes((256, 1024, 4096), tokens=1024, width=1024)
ON_GPU = LayerSizes((4096, 4096, 4096), tokens=4096, width=4096)


@dataclass(frozen=True)
class Budget:
    """Limits on the time and the bytes that a benchmark may spend."""

    drive_bytes: int = 3 << 30  # maximum written to each drive in one measurement
    drive_seconds: float = 8.0  # per measured rate of a drive
    contention_seconds: float = 4.0  # products while a drive is read and written; as long again without
    product_seconds: float = 2.0  # per dtype
    layer_seconds: float = 1.0  # per dtype, each for attention, values and the loss
    memory_elements: int = 64 << 20  # length of each of three fp32 arrays
    update_seconds: float = 1.5  # per kernel
    update_elements: int = 20_000_000
    update_page: int = 4 << 20  # elements
    copy_seconds: float = 0.5  # per rate of memory, and per direction between host memory and a GPU


@dataclass(frozen=True)
class TimedUpdate:
    """AdamW with a kernel and a format of its state, from 16-bit gradients to 16-bit weights."""

    kernel: Kernel
    format: StateFormat = ADAMW_FORMATS[0]

    @property
    def name(self) -> str:
        """Return the key of its rate in `Rates.update`."""
        return update_key(self.kernel.name, self.format.name)


def beyond_caches(machine: MachineProfile) -> int:
    """Return the elements of an fp32 array that caches do not hold: 16 MiB for each thread, from 32 to 256 MiB.

    Measurements take up to 16 bytes for each, at most a quarter of the available memory.
    """
    return min((4 << 20) * min(max(torch.get_num_threads(), 2), 16), machine.ram_bytes // 64)


def bench_machine(
    machine: MachineProfile,
    updates: Sequence[TimedUpdate],
    *,
    dtypes: Sequence[str],
    matrices: bool,
    budget: Budget,
    say: Callable[[str], None],
) -> MachineProfile:
    """Return `machine` with the rates that it lacks, and its drives with theirs; others are not measured again.

    `updates`: those to time, and also what their CPU kernels take to add gradients in RAM. `dtypes`: of products.
    `matrices`: also time the products that orthogonalise a matrix. Raises TrainerError if a drive fails or has too
    little room.
    """
    before, gpu = machine.rates, machine.gpu is not None
    matmul, layers, sums, update = (dict(it) for it in (before.matmul, before.layers, before.sums, before.update))
    layer, seconds = ON_GPU if gpu else ON_CPU, budget.layer_seconds
    lacking = [dtype for dtype in dtypes if dtype not in matmul]
    say("bench: products")
    matmul |= {dtype: _matmul(DTYPES[dtype], layer, gpu=gpu, seconds=budget.product_seconds) for dtype in lacking}
    say("bench: layers and the loss")
    for dtype in lacking:
        layers |= _layer_rates(dtype, layer, gpu=gpu, seconds=seconds)
        if not gpu:
            layers |= _rates_of_few_tokens(dtype, layer, known=Rates(matmul, layers), seconds=seconds)
    if matrices and RATE not in layers:
        say("bench: orthogonalising matrices")
        layers[RATE] = _orthogonalising(layer.width, gpu=gpu, seconds=seconds)
    say("bench: memory")
    memory = before.memory or _triad(budget.memory_elements, seconds=budget.copy_seconds)
    for kernel in (timed.kernel for timed in updates):
        if isinstance(kernel, CpuKernel) and sums_key(kernel.name, measured=True) not in sums:
            say(f"bench: adding gradients, {kernel.name}")
            size = 2 * budget.memory_elements
            sums |= _rates_of_adding(kernel, size, layer.width, halving=gpu, seconds=budget.copy_seconds)
    say("bench: AdamW")
    update |= {timed.name: _update(timed, budget) for timed in updates if timed.name not in update}
    copies = _copies(budget.copy_seconds) if gpu and before.to_device is None else before
    rates = replace(copies, matmul=matmul, layers=layers, memory=memory, update=update, sums=sums)
    drives = tuple(replace(drive, rates=drive.rates or _drive(drive, budget, say)) for drive in machine.drives)
    return replace(machine, rates=rates, drives=drives)


def dtypes_to_time(machine: MachineProfile, wish: str) -> list[str]:
    """Return the dtypes to time: on a GPU all that its hardware supports, on a CPU the configured one and fp32."""
    if machine.gpu is None:
        return list(dict.fromkeys((wish, "fp32")))
    return ["bf16", "fp16", "fp32"] if has_bf16(machine) else ["fp16", "fp32"]


def _repeat(work: Callable[[], object], *, seconds: float, least: int = 3) -> list[float]:
    """Return the seconds of each repetition, for about `seconds` in total, without the first one."""
    work()
    taken: list[float] = []
    while len(taken) < least or sum(taken) < seconds:
        start = _now()
        work()
        taken.append(_now() - start)
    return taken


def _rate(count: float, taken: Sequence[float], what: str) -> Rate:
    return Rate(count / median(taken), "measured", f"{what}, median of {len(taken)}")


def _now() -> float:
    """Return the time after all queued device work has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _matmul(dtype: torch.dtype, layer: LayerSizes, *, gpu: bool, seconds: float) -> Rate:
    """Time the three matrix products of a linear layer: the forward and both gradients."""
    rows, inner, columns = layer.matrix
    device = "cuda" if gpu else "cpu"
    given = torch.randn(rows, inner, device=device).to(dtype)
    weight = torch.randn(inner, columns, device=device).to(dtype)
    gradient = torch.randn(rows, columns, device=device).to(dtype)

    def products() -> None:
        given @ weight
        gradient @ weight.t()
        given.t() @ gradient

    what = f"three products of a layer, {rows} x {inner} x {columns}"
    return _rate(3 * 2 * rows * inner * columns, _repeat(products, seconds=seconds), what)


def _triad(size: int, *, seconds: float) -> Rate:
    one, two, three = (torch.ones(size) for _ in range(3))
    taken = _repeat(lambda: torch.add(one, two, alpha=3.0, out=three), seconds=seconds)
    return _rate(12 * size, taken, f"triad of {4 * size >> 20} MiB arrays")


def _rates_of_adding(kernel: CpuKernel, size: int, width: int, *, halving: bool, seconds: float) -> dict[str, Rate]:
    """Return bytes/s of adding 16-bit gradients to fp32 sums in RAM, without and with norms, by `sums_key`.

    The gradients are of square weights `width` wide, with `size` elements in total, which caches do not hold.
    `halving`: as on a machine with a GPU.
    """
    weight = width**2
    count = max(1, min(256, size // weight))
    total, more = torch.ones(count, weight), torch.ones(count, weight, dtype=torch.bfloat16)
    found = {}
    for pieces in (None, Pieces(piece_width(weight, ordered=halving), halving=halving)):

        def add_all(pieces: Pieces | None = pieces) -> None:
            for sums, gradient in zip(total, more, strict=True):
                kernel.add(sums, gradient, pieces=pieces)

        taken = _repeat(add_all, seconds=seconds)
        what = f"16-bit gradients of {count} weights of {width} x {width} added to fp32 sums"
        found[sums_key(kernel.name, measured=pieces is not None)] = _rate(10 * total.numel(), taken, what)
    return found


def _orthogonalising(width: int, *, gpu: bool, seconds: float) -> Rate:
    products = Products(None if gpu else torch.get_num_threads())
    matrix = torch.randn(width, width, device="cuda" if gpu else "cpu").bfloat16()
    taken = _repeat(lambda: orthogonalised(matrix.clone(), products), seconds=seconds)
    return _rate(products_of((width, width)), taken, f"a matrix of {width} x {width}")


def _copies(seconds: float) -> Rates:
    size = 256 << 20
    pinned, pinned_out = host_buffer(size, pinned=True), host_buffer(size, pinned=True)
    device, other = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    side = torch.cuda.Stream()

    def timed(work: Callable[[], object], how: str) -> Rate:
        return _rate(size, _repeat(work, seconds=seconds, least=5), f"{format_bytes(size)}, {how}")

    def both() -> None:
        device.copy_(pinned, non_blocking=True)
        with torch.cuda.stream(side):
            pinned_out.copy_(other, non_blocking=True)

    return Rates(
        to_device=timed(lambda: device.copy_(pinned, non_blocking=True), "pinned"),
        from_device=timed(lambda: pinned.copy_(device, non_blocking=True), "pinned"),
        both_ways=timed(both, "pinned, both ways at once"),
    )


# -- updates -----------------------------------------------------------------------------------------------------------


def _update(update: TimedUpdate, budget: Budget) -> Rate:
    elements, page, steps = budget.update_elements, budget.update_page, itertools.count(1)
    device = "cuda" if update.kernel.name == "cuda" else "cpu"
    updates = make_pages(elements, page=page, format=update.format, device=device)

    def run() -> None:
        step = next(steps)
        noise = Noise(0, step) if update.format.stochastic else None
        for one in updates:
            parts = [ParamRange(0, len(one.grad), _ADAMW, step)]
            update.kernel.update_page(replace(one, parts=parts, noise=noise))

    taken = _repeat(run, seconds=budget.update_seconds, least=5)
    pages = f"pages of {page / 1e6:.3g} M" if page < elements else "one call"
    return _rate(elements, taken, f"{elements / 1e6:.0f} M parameters in {pages}, casts in and out")


def make_pages(elements: int, *, page: int, format: StateFormat, device: str = "cpu") -> list[PageUpdate]:
    """Return updates of `elements` parameters in pages of at most `page`, without their ranges.

    Moments are zero; the first step, which is not timed, fills them.
    """
    table = PageTable([Page(0, at, min(page, elements - at), RAM) for at in range(0, elements, page)], format)
    memory, sizes = host_buffer(sum(table.sizes)).split(table.sizes), [one.elements for one in table.pages]
    narrow = [host_buffer(2 * elements).view(torch.bfloat16).split(sizes) for _ in range(2)]
    master, gradient = 0.02 * torch.randn(2, _PATTERN, generator=torch.Generator().manual_seed(0))
    pages = []
    for number, (data, grad, out) in enumerate(zip(memory, *narrow, strict=True)):
        fields = table.fields(number, data)
        for values, field in ((master, fields["master"]), (gradient, grad)):
            for part in field.split(_PATTERN):
                part.copy_(values[: part.numel()])
        there = {name: field.to(device) for name, field in fields.items()}
        start = table.pages[number].start
        pages.append(PageUpdate(there, grad.to(device), out.to(device), [], format, 0.7, None, first=start))
    return pages


def timed_updates(
    names: Sequence[str], formats: Sequence[StateFormat], *, say: Callable[[str], None]
) -> list[TimedUpdate]:
    """Return the updates that can run here: by the CPU kernels `names`, the fastest with each format, and on the GPU.

    `say` receives the reason for each kernel that is left out.
    """
    found: list[TimedUpdate] = []
    for name in names:
        try:
            kernel, _ = choose_kernel(name)
        except UserError as error:
            say(f"bench: {name} kernel left out: {error}")
            continue
        found += [TimedUpdate(kernel, format) for format in formats[: 1 if found else None]]
    if torch.cuda.is_available():
        there, words = choose_cuda_kernel(torch.device("cuda"))
        if there is None:
            say(f"bench: the update on the GPU is left out: {words}")
        else:
            found += [TimedUpdate(there, format) for format in formats]
    return found


# -- the parts of a layer that are not matrix products, and the loss ---------------------------------------------------


def _layer_rates(dtype: str, layer: LayerSizes, *, gpu: bool, seconds: float) -> dict[str, Rate]:
    """Return FLOP/s of attention, values/s of element-wise work and logits/s of the loss, by `layer_key`."""
    tokens, width, device = layer.tokens, layer.width, torch.device("cuda" if gpu else "cpu")
    # A GPU that computes one row only waits for the next kernel to be called.
    rows, lost = (max(1, layer.matrix[0] // tokens), 1024) if gpu else (1, 256)  # `lost`: tokens of the loss
    of_layer = f"{rows} x {tokens} tokens of a layer, width {width}"
    of_loss = f"{lost} tokens, {_VOCABULARY} logits each"

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(DTYPES[dtype]).requires_grad_()

    # Causal attention, as models call it without padding. Its operations are counted for the full square of a row, as
    # in the planner. A backward takes twice as many.
    query, key, value = heads = [drawn(rows, max(1, width // _HEAD), tokens, _HEAD) for _ in range(3)]
    operations = 4.0 * rows * tokens * tokens * width
    # A GPT-2 layer without its products: two norms, two sums and its activation function of eight operations. Llama's
    # norms, rotations and gate take about as many.
    narrow, wide = (drawn(rows * tokens, size) for size in (width, 4 * width))
    scale, shift = drawn(width), drawn(width)
    logits, targets = drawn(lost, _VOCABULARY), torch.arange(lost, device=device)
    pieces = loss_pieces(_VOCABULARY, chunk=lost, gpu=gpu)

    def attention() -> Sequence[torch.Tensor]:
        return [functional.scaled_dot_product_attention(query, key, value, is_causal=True)]

    def values() -> Sequence[torch.Tensor]:
        attended = narrow + functional.layer_norm(narrow, (width,), scale, shift)
        return [attended + functional.layer_norm(attended, (width,), scale, shift), _activated(wide)]

    parts = {
        "attention": (heads, attention, (operations, 2 * operations), of_layer),
        "values": ([narrow, wide, scale, shift], values, (VALUES * rows * tokens * width,) * 2, of_layer),
        "loss": ([logits], lambda: [cross_entropy(logits, targets, pieces=pieces)], (lost * _VOCABULARY,) * 2, of_loss),
    }
    rates = {}
    for part, (inputs, forward, counts, what) in parts.items():
        taken = _timed((inputs, forward), seconds=seconds)
        for phase, count, times in zip(("forward", "backward"), counts, taken, strict=True):
            rates[layer_key(dtype, part, phase)] = _rate(count, times, what)
    return rates


def _rates_of_few_tokens(dtype: str, layer: LayerSizes, *, known: Rates, seconds: float) -> dict[str, Rate]:
    """Return the rates of what a CPU spends on a micro-batch however few tokens it has, by `layer_key`.

    `weights` are weights/s of blocks beyond what the rates in `known` say: weights come from memory, every operation
    has to be called, and attention is slower on short rows. A backward uses each weight twice: for the gradient of its
    input, and for its own. `tables` are elements/s of the gradient of an embedding, which goes to new memory.
    """
    rows, width = min(layer.matrix[0], 128), layer.width  # 128 tokens: a short micro-batch
    weights, count = 12 * width * width, max(2, min(_MOST_BLOCKS, _COLD // (12 * width * width)))
    taken = _timed(_blocks(rows, width, count, DTYPES[dtype]), seconds=seconds)
    rates = {}
    for phase, times, uses in zip(("forward", "backward"), taken, (1, 2), strict=True):
        rate = {part: known.layers[layer_key(dtype, part, phase)].value for part in ("attention", "values")}
        of_block = uses * (2 * rows * weights / known.matmul[dtype].value + 4 * rows * rows * width / rate["attention"])
        of_block += VALUES * rows * width / rate["values"]
        more = max(median(times) - count * of_block, 0.01 * median(times))
        how = f"{count} blocks of width {width}, {rows} tokens, median of {len(times)}"
        rates[layer_key(dtype, "weights", phase)] = Rate(uses * count * weights / more, "measured", how)
    table, ids = torch.zeros(_TABLE // width, width, dtype=DTYPES[dtype], requires_grad=True), torch.arange(rows)
    _, fresh = _timed(([table], lambda: [functional.embedding(ids, table)]), seconds=seconds / 4)
    of_table = _rate(table.numel(), fresh, f"gradient of {_TABLE >> 20} Mi elements")
    return {**rates, layer_key(dtype, "tables", "backward"): of_table}


_Work = tuple[list[torch.Tensor], Callable[[], Sequence[torch.Tensor]]]  # the inputs that get gradients, and a forward


def _activated(wide: torch.Tensor) -> torch.Tensor:
    """Return GPT-2's activation function, in the eight operations of transformers."""
    return 0.5 * wide * (1.0 + torch.tanh(0.7978845608 * (wide + 0.044715 * torch.pow(wide, 3.0))))


def _blocks(tokens: int, width: int, count: int, dtype: torch.dtype) -> _Work:
    """Return `count` blocks of GPT-2, one after the other."""
    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    blocks = [[torch.full(shape, 1 / width, dtype=dtype).requires_grad_() for shape in shapes] for _ in range(count)]
    given = torch.randn(tokens, width).to(dtype).requires_grad_()
    heads = 1 if width % _HEAD else width // _HEAD

    def normed(hidden: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(hidden, (width,))

    def forward() -> Sequence[torch.Tensor]:
        hidden = given
        for attending, projecting, widening, narrowing in blocks:
            query, key, value = (normed(hidden) @ attending).view(1, tokens, 3, heads, -1).transpose(1, 3).unbind(2)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            hidden = hidden + mixed.transpose(1, 2).reshape(tokens, width) @ projecting
            hidden = hidden + _activated(normed(hidden) @ widening) @ narrowing
        return [hidden]

    return [given, *(weight for block in blocks for weight in block)], forward


def _timed(work: _Work, *, seconds: float) -> list[tuple[float, ...]]:
    """Return the seconds of each forward and of each backward, without the first of each."""
    inputs, forward = work
    taken: list[tuple[float, float]] = []
    began = time.perf_counter()
    while len(taken) < 4 or time.perf_counter() - began < seconds:
        for one in inputs:
            one.grad = None
        start = _now()
        outputs = forward()
        between = _now()
        torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
        taken.append((between - start, _now() - between))
    return list(zip(*taken[1:], strict=True))


# -- drives ------------------------------------------------------------------------------------------------------------


def _drive(drive: DriveFacts, budget: Budget, say: Callable[[str], None]) -> DriveRates:
    say(f"bench: {drive.directory}")
    size = min(budget.drive_bytes, drive.free_bytes // 2) // _PIECE * _PIECE
    noise = torch.frombuffer(bytearray(os.urandom(1 << 20)), dtype=torch.uint8)
    buffers = [host_buffer(_PIECE) for _ in range(_BUFFERS)]
    for buffer in buffers:
        buffer.view(-1, 1 << 20)[:] = noise

    def move(seconds: float, *, read: bool = False, write: bool = False) -> tuple[int, float]:
        """Move pieces each way, in turn, for about `seconds`. Return the bytes moved each way and the time."""
        with closing(Transfers()) as mover:
            ways = [mover.read] * read + [mover.write] * write
            moved, each, futures = 0, len(buffers) // len(ways), [done() for _ in buffers]
            start = time.perf_counter()
            for number in range(len(places)):
                if time.perf_counter() - start > seconds:
                    break
                for way, transfer in enumerate(ways):
                    slot = way * each + number % each
                    futures[slot].wait()
                    # The second direction starts half a file away, so that no piece is read that was just written.
                    at = places[(number + way * (len(places) // 2)) % len(places)]
                    futures[slot] = transfer(file, at, buffers[slot])
                moved += _PIECE
            for future in futures:
                future.wait()
            return moved, time.perf_counter() - start

    def rate(moved: int, taken: float, what: str) -> Rate:
        return Rate(moved / taken, "measured", f"{format_bytes(moved)} in {taken:.1f} s, {what}")

    with (
        leased(Path(drive.directory), say=say) as folder,
        closing(DriveFile(folder / "bench", max(size, 2 * _BUFFERS * _PIECE))) as file,
    ):
        places = list(range(0, file.size, _PIECE))
        written = move(budget.drive_seconds, write=True)
        # Parts that were never written are left out: they read as zeros without access to the drive.
        places = places[: max(2, written[0] // _PIECE)]
        read = move(budget.drive_seconds, read=True)
        both = move(budget.drive_seconds, read=True, write=True)
        seconds = budget.contention_seconds
        lost = _computation_lost(lambda: move(seconds, read=True, write=True), seconds=seconds)
    return DriveRates(
        read=rate(*read, "reading alone"),
        write=rate(*written, "writing alone"),
        mixed_read=rate(*both, "read while as much was written"),
        mixed_write=rate(*both, "written while as much was read"),
        computation_lost=lost,
    )


def _computation_lost(move: Callable[[], tuple[int, float]], *, seconds: float) -> Rate:
    """Return the bytes, read and written, that `move` moves while all cores lose one second of computation to it.

    `move` returns the bytes each way and the time. The computation is a matrix product, timed for half of `seconds`
    before and after it. A product waits for the slowest of its threads, so it loses more than transfers take of a core.
    """
    product = partial(operator.matmul, torch.randn(_ROWS, _SIDE), torch.randn(_SIDE, _SIDE))
    alone, count = _repeat(product, seconds=seconds / 2), 0
    with ThreadPoolExecutor(1) as other:
        moving = other.submit(move)
        while not moving.done():
            product()
            count += 1
        moved, taken = moving.result()
    alone += _repeat(product, seconds=seconds / 2)
    lost = max(taken - count * median(alone), 0.001 * taken)
    how = f"{format_bytes(2 * moved)} read and written in {taken:.1f} s, {lost / taken:.0%} of them lost"
    return Rate(2 * moved / lost, "measured", f"{how}; products of {_ROWS} x {_SIDE} x {_SIDE}")


# -- links between ranks -----------------------------------------------------------------------------------------------


def bench_links(known: Links, *, ranks: int, say: Callable[[str], None]) -> Links:
    """Return `known` with the rates that `ranks` processes measure together. Raises TrainerError if one fails."""
    say(f"bench: links between {ranks} ranks")
    with scratch("offload-trainer-links-") as folder:
        try:
            spawn(run_rank, (ranks, folder), nprocs=ranks, daemon=True)  # ends the other ranks if one fails
        except ProcessException as error:
            first, *lines = str(error).rpartition('  File "')[2].splitlines()  # lines of the last frame, if any
            said = " ".join([line for line in lines if line and line[0] != " "] or [first])
            why = f"rank {error.error_index}: {said}"
            raise TrainerError(f"links between {ranks} ranks could not be timed: {why}") from error
        found = parsed((folder / "links.json").read_bytes(), Links)
    return replace(found, between_gpus=known.between_gpus, network=known.network, message=known.message)


def run_rank(rank: int, ranks: int, folder: Path) -> None:
    """Run the benchmark as one rank together with the others, of which the first writes the rates to `links.json`."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {STORE: str(folder / "store"), **{name: str(value) for name, value in place.items()}}
    torch.set_num_threads(1)
    all_ranks.join()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(rank)
    size, between = (256 if gpu else 32) << 20, all_ranks.group_of(gpus=gpu)
    host = host_buffer(size, pinned=gpu)
    device = torch.zeros(size, dtype=torch.uint8, device="cuda" if gpu else "cpu")
    part = size // ranks
    whole = ranks * part

    def timed(work: Callable[[], object], moved: int, what: str) -> Rate:
        """Return the bytes/s of the slowest rank; all ranks must call."""
        taken = []
        for _ in range(_TIMES + 1):  # the first is not counted
            all_ranks.wait_for_all()
            start = _now()
            work()
            taken.append(max(all_ranks.all_gather_json(_now() - start)))
        return _rate(moved, taken[1:], f"{what}: {format_bytes(moved)} for each of {ranks} ranks at once, the slowest")

    gather = partial(all_ranks.all_gather_parts, device[:whole], rank, group=between)
    found = Links(
        ranks=ranks,
        to_device_at_once=timed(lambda: device.copy_(host, non_blocking=True), size, "copies"),
        from_device_at_once=timed(lambda: host.copy_(device, non_blocking=True), size, "copies"),
        all_gather=timed(gather, whole - part, f"all-gather, {'NCCL' if gpu else 'gloo'}"),
    )
    if rank == 0:
        (folder / "links.json").write_text(json.dumps(asdict(found)))
