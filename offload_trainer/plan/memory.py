"""Bytes that a placement needs, item by item, with the reason for each. Pure arithmetic.

Derivations: P parameters, T trainable ones, e bytes a weight, W ranks on this machine. DeepSpeed's items are what its
source allocates (0.19.8, stage_1_and_2.py, stage3.py, swap_tensor/); docs/benchmarks/predictions.md holds them against
measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload_trainer.config import TrainConfig
from offload_trainer.plan.activations import peak_of
from offload_trainer.plan.formats import state_format
from offload_trainer.plan.shape import ModelShape, estimated
from offload_trainer.plan.zero import Placement, ZeroSizes
from offload_trainer.units import format_bytes

CUDA_CONTEXT = 500_000_000  # what the driver takes of a GPU for a process; free bytes are asked before there is one
ALLOCATOR = 0.05  # of what comes and goes on a GPU: holes that fit nothing, sizes rounded up; assumed, not measured
PROCESS = 400_000_000  # interpreter, torch, transformers and their libraries (380 MB), and what the allocator keeps
PRODUCTS = 32_000_000  # what oneDNN and the allocator keep once products of all shapes ran (20 MB AVX2, 40 AMX)
STOCK_PROCESS = 650_000_000  # with DeepSpeed's
CUDA_PROCESS = 1_600_000_000  # more where a GPU computes: CUDA's libraries in host memory; estimated, not measured


@dataclass(frozen=True)
class Item:
    """Bytes on one tier, and what they are."""

    tier: str  # "gpu", "ram" or a directory
    name: str
    bytes: int
    why: str


def cuda_process(device: str) -> int:
    """What a process takes of RAM beside the usual where `device` computes."""
    return CUDA_PROCESS if device == "gpu" else 0


def item_bytes(dtype: str) -> int:
    return 4 if dtype == "fp32" else 2


def deepspeed_items(
    config: TrainConfig,
    shape: ModelShape,
    placement: Placement,
    sizes: ZeroSizes,
    *,
    device: str,
    drive: str | None,
    world: int,
    checkpointing: bool,
    seq_len: int,
) -> list[Item]:
    """What stock DeepSpeed holds at its peak. `device` is the tier that computes: "gpu", or "ram" on a CPU."""
    e = item_bytes(config.model.dtype)
    total, trained = shape.parameters, shape.trainable
    homes = {"gpu": device, "cpu": "ram", "nvme": drive or "nvme"}
    process = (STOCK_PROCESS + cuda_process(device)) * world
    items = [Item("ram", "process", process, "interpreter, torch and DeepSpeed, in each process")]

    def add(tier: str, name: str, size: int, why: str) -> None:
        items.append(Item(tier, name, size, why))

    # Weights
    if placement.stage == 2:
        add(device, "weights", e * total * world, f"{e} B a parameter, whole on each rank")
        add(
            device,
            "weights, flattened",
            e * trained * world,
            "ZeRO-2 copies them into one buffer at the start",
        )
    else:
        add(homes[placement.params], "weights", e * total, f"{e} B a parameter, divided over the ranks")
        live = min(total, sizes.max_live + sizes.prefetch_bucket)
        add(
            device,
            "weights in use",
            e * live * world,
            "gathered at a time: max_live_parameters and a prefetch bucket",
        )
    if placement.params == "nvme":
        buffers = e * sizes.weight_buffers * sizes.weight_buffer_elements
        add("ram", "weight swap buffers", buffers * world, f"{sizes.weight_buffers} of the largest weight")
        add("ram", "weight write buffer", e * sizes.largest_sub_group * world, "one sub-group")

    # Gradients
    add(device, "gradients", e * trained, f"{e} B a parameter before they are handed over")
    add(device, "gradient buckets", 2 * e * sizes.reduce_bucket * world, "2 reduce buckets")

    # Optimizer state
    state_home = homes[placement.optimizer]
    add(state_home, "masters and moments", 12 * trained, "fp32 master, first and second moment")
    if placement.optimizer == "nvme":
        add(state_home, "gradients, fp32", 4 * trained, "DeepSpeed swaps them with the state")
        buffers = 4 * sizes.optimizer_buffers * sizes.largest_sub_group
        add(
            "ram",
            "optimizer swap buffers",
            buffers * world,
            f"{sizes.optimizer_buffers} of the largest sub-group",
        )
    else:
        add(state_home, "gradients, fp32", 4 * trained, "the update reads them in fp32")

    add("ram", "seen beyond these", _seen(placement, trained), "measured (predictions.md); what it holds is not known")
    items += activation_items(config, shape, device=device, world=world, checkpointing=checkpointing, seq_len=seq_len)
    return items


def _seen(placement: Placement, trained: int) -> int:
    """What the peak was above the items, for 124 and 354 M parameters with the CPU as the accelerator (0.19.8)."""
    if placement.optimizer == "nvme":
        return int(11.5 * trained)
    return 3 * trained if placement.stage == 3 else 380_000_000


def plain_items(
    config: TrainConfig, shape: ModelShape, *, device: str, checkpointing: bool, seq_len: int
) -> list[Item]:
    """What the plain engine holds at its peak: all on one device."""
    e = item_bytes(config.model.dtype)
    return [
        Item("ram", "process", PROCESS + cuda_process(device), "interpreter, torch and transformers"),
        Item(device, "weights", e * shape.parameters, f"{e} B a parameter"),
        Item(device, "gradients", (e + 4) * shape.trainable, f"{e} B a parameter, and their fp32 sums"),
        Item(device, "masters and moments", 12 * shape.trainable, "fp32 master, first and second moment"),
        *activation_items(config, shape, device=device, world=1, checkpointing=checkpointing, seq_len=seq_len),
    ]


def activation_items(
    config: TrainConfig,
    shape: ModelShape,
    *,
    device: str,
    world: int,
    checkpointing: bool,
    seq_len: int,
    kept: Sequence[Item] = (),
    gradients: bool = False,
    waiting: int = 0,
) -> list[Item]:
    """What a micro-batch holds at its largest moment (`plan/activations.py`), and what the device's libraries take.

    `kept`: the blocks' inputs, where they have homes of their own. `gradients`: whether those of weights are counted
    there, where they do not stay; `waiting`: as `peak_of` has it.
    """
    counted = shape.on_gpu if device == "gpu" else shape.on_cpu
    offloaded = bool(kept) or bool(checkpointing and config.model.offload_activations and device == "gpu")
    rows = config.train.micro_batch
    peak = peak_of(
        counted or estimated(shape, item_bytes(config.model.dtype)),
        rows=rows,
        length=seq_len,
        chunk=config.model.loss_chunk,
        checkpointing=checkpointing,
        inputs_here=not offloaded,
        gradients=gradients,
        waiting=waiting,
    )
    how = peak.when if counted else f"{peak.when}; an estimate, this architecture could not be counted"
    items = list(kept)
    if offloaded:
        inputs = shape.layers * rows * seq_len * shape.hidden * item_bytes(config.model.dtype)
        if not kept:
            items.append(Item("ram", "block inputs", inputs * world, "kept by gradient checkpointing"))
        items.append(Item(device, "activations", peak.bytes * world, f"at their largest, {how}"))
    else:
        name = "block inputs" if checkpointing else "activations kept"
        items.append(Item(device, name, peak.kept * world, "of the blocks, until their backward"))
        items.append(Item(device, "activations", peak.rest * world, f"beside those at the largest moment, {how}"))
    if device == "gpu":
        items.append(Item(device, "CUDA context", CUDA_CONTEXT * world, "the driver's, in each process"))
        why = f"{ALLOCATOR:.0%} of the activations, for what the allocator cannot use of its memory; assumed"
        items.append(Item(device, "allocator", int(ALLOCATOR * peak.bytes) * world, why))
    else:
        items.append(Item(device, "products", PRODUCTS * world, "their code and buffers, in each process"))
    return items


def saved_items(config: TrainConfig, shape: ModelShape, *, output: str) -> list[Item]:
    """Checkpoints on the output's drive: one more than are kept, since the old goes after the new is whole.

    Where none are made the weights are exported at the end.
    """
    if config.save.every == 0:
        return [Item(output, "export", 4 * shape.parameters, "the weights in fp32, at the end")]
    size, keep = checkpoint_bytes(config, shape), config.save.keep
    why = f"{keep} kept and the one being written, {format_bytes(size)} each: masters and moments"
    return [Item(output, "checkpoints", (keep + 1) * size, why)]


def checkpoint_bytes(config: TrainConfig, shape: ModelShape) -> int:
    """Bytes of one checkpoint's tensors: masters and moments as they are stored, frozen weights in the run's dtype."""
    frozen = shape.parameters - shape.trainable
    stored = state_format(config.optim.name, config.optim.states)
    return int(stored.bytes_each * shape.trainable) + item_bytes(config.model.dtype) * frozen
