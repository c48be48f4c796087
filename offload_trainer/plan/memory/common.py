"""Memory that every engine needs (process, CUDA context, activations, checkpoints), item by item. Pure arithmetic.

docs/benchmarks/predictions.md compares these numbers with measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.memory.activations import in_pieces, peak_of
from offload_trainer.plan.parallel.modes import Mode, kept_elements
from offload_trainer.plan.shape import estimated
from offload_trainer.plan.workload import Workload
from offload_trainer.units import format_bytes

CUDA_CONTEXT = 500_000_000  # GPU memory that the driver takes per process; a machine's free bytes include it
# The part of each GPU that no plan fills: cuBLAS workspaces, kernels that are loaded on first launch, rounding.
_RESERVE, _LEAST_RESERVE = 0.01, 500_000_000
ALLOCATOR = 0.05  # fragmentation and rounding, as a share of temporary GPU memory; assumed, not measured
PROCESS = 400_000_000  # interpreter, torch, transformers and their libraries (380 MB), and the allocator's overhead
LIBRARIES = 105_000_000  # the part of PROCESS that is file pages, which all processes of a machine share
PRODUCTS = 32_000_000  # oneDNN's and the allocator's memory after products of all shapes ran (20 MB AVX2, 40 AMX)
CUDA_PROCESS = 1_600_000_000  # CUDA's libraries in host memory, per process; estimated, not measured


@dataclass(frozen=True)
class Item:
    """Bytes on one tier, with a name and the reason."""

    tier: str  # "gpu", "ram" or a directory
    name: str
    bytes: int
    why: str


def gpu_reserve(machine: MachineProfile) -> int:
    """Return the bytes of each GPU that stay free: 1 %, at least 500 MB; 0 without a GPU."""
    return max(_LEAST_RESERVE, int(_RESERVE * machine.gpu_bytes)) if machine.gpu is not None else 0


def reserve_items(machine: MachineProfile, *, here: int) -> list[Item]:
    """Return the item for the GPU memory that stays free, for `here` ranks on the machine."""
    if machine.gpu is None:
        return []
    why = f"{_RESERVE:.0%} of each GPU, at least {format_bytes(_LEAST_RESERVE)}: workspaces and lazily loaded kernels"
    return [Item("gpu", "reserve", gpu_reserve(machine) * here, why)]


def cuda_process(device: str) -> int:
    """Return the bytes of RAM that a process needs in addition if a GPU computes."""
    return CUDA_PROCESS if device == "gpu" else 0


def process_items(
    device: str, *, here: int = 1, own: int = PROCESS, what: str = "torch and transformers"
) -> list[Item]:
    """Return the RAM of `here` processes on a machine; `own` is the bytes of a single one, shared pages included."""
    each = own - LIBRARIES + cuda_process(device)
    return [
        Item("ram", "process", each * here, f"interpreter, {what}, in each process"),
        Item("ram", "libraries", LIBRARIES, "code of torch and other libraries, shared by all processes"),
    ]


def activation_items(
    work: Workload, *, device: str, kept: Sequence[Item] = (), gradients: bool = False, waiting: int = 0
) -> list[Item]:
    """Return the activations at the peak of a micro-batch (`plan/memory/activations.py`), and the libraries' memory.

    Args:
        work: the step.
        device: the tier that computes: "gpu", or "ram" on a CPU.
        kept: items for the blocks' inputs, if the engine offloads them.
        gradients: count weight gradients from their computation until the engine takes them.
        waiting: bytes of a tied head's gradient; see `peak_of`.
    """
    shape, rows, world = work.shape, work.micro_batch, work.here
    whole, tiled = (shape.on_gpu, shape.tiled_on_gpu) if device == "gpu" else (shape.on_cpu, shape.tiled_on_cpu)
    counted = tiled if work.mlp_chunk else whole
    offloaded = bool(kept) or bool(work.inputs_away and device == "gpu")
    of_rank = counted or estimated(shape, work.item_bytes)
    if work.sequence > 1:
        more = work.item_bytes * kept_elements(Mode(sequence=work.sequence), shape)
        of_rank = in_pieces(of_rank, ranks=work.sequence, more=more)
    peak = peak_of(
        of_rank,
        rows=rows,
        length=work.length,
        chunk=work.loss_chunk,
        checkpointing=work.checkpointing,
        inputs_here=not offloaded,
        keepers=work.keepers,
        gradients=gradients,
        waiting=waiting,
        piece=work.mlp_chunk,
    )
    how = peak.when if counted else f"{peak.when}; a rough estimate for this architecture"
    items = list(kept)
    if offloaded:
        inputs = -(-shape.layers * rows * work.length * shape.hidden * work.item_bytes // work.keepers)
        if not kept:
            items.append(Item("ram", "block inputs", inputs * world, "saved by gradient checkpointing"))
        items.append(Item(device, "activations", peak.bytes * world, f"at their peak, {how}"))
    else:
        name = "block inputs" if work.checkpointing else "saved activations"
        parts = f"; 1 / {work.keepers} of each on each rank" if work.keepers > 1 else ""
        items.append(Item(device, name, peak.kept * world, f"saved for the backward{parts}"))
        items.append(Item(device, "activations", peak.rest * world, f"all other activations, at their peak, {how}"))
    if device == "gpu":
        items.append(Item(device, "CUDA context", CUDA_CONTEXT * world, "of the driver, in each process"))
        why = f"{ALLOCATOR:.0%} of the activations, for fragmentation; assumed"
        items.append(Item(device, "allocator", int(ALLOCATOR * peak.bytes) * world, why))
    else:
        items.append(
            Item(
                device,
                "matmul kernels",
                PRODUCTS * world,
                "compiled code and buffers for matrix products, in each process",
            )
        )
    return items


def saved_items(work: Workload, *, output: str) -> list[Item]:
    """Return the item for checkpoints on the output's drive, or for the export if the run makes no checkpoints.

    One checkpoint more than are kept is counted, since an old one is deleted only after the new one is complete.
    """
    if work.checkpoints is None:
        return []
    if work.checkpoints == 0:
        return [Item(output, "export", 4 * work.shape.parameters, "the weights in fp32, written at the end")]
    size, keep = checkpoint_bytes(work), work.checkpoints
    why = f"{keep} kept and the one being written, {format_bytes(size)} each: fp32 master weights and moments"
    return [Item(output, "checkpoints", (keep + 1) * size, why)]


def checkpoint_bytes(work: Workload) -> int:
    """Return the bytes of a checkpoint: masters and moments as stored, frozen weights in the run's dtype."""
    frozen = work.shape.parameters - work.shape.trainable
    return int(work.state.bytes_each * work.shape.trainable) + work.item_bytes * frozen
