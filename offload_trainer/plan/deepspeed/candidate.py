"""One placement of stock DeepSpeed as a plan candidate: its memory, traffic and time bounds.

With W ranks, w of them on this node, the node has w / W of everything that ZeRO partitions. `memory.py` computes the
memory items. The traffic follows counted bytes (docs/benchmarks/placements-354m.md); docs/benchmarks/predictions.md
compares both with measurements. A GPU's PCIe link carries only what its rank owns: the rest comes from other GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from offload_trainer.config import DeepSpeedSection
from offload_trainer.plan.deepspeed.memory import StockBytes
from offload_trainer.plan.deepspeed.zero_buffers import ZeroSizes, drive_stretch, zero_sizes
from offload_trainer.plan.deepspeed.zero_gathers import gathers
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.parallel.comm_cost import GPUS, NETWORK, zero_bounds
from offload_trainer.plan.parallel.modes import Collective, Mode, flows, link_seconds, weights_held
from offload_trainer.plan.step_time import (
    DEVICE_COPIES,
    PHASES,
    UPDATE_START,
    Bound,
    Forecast,
    Traffic,
    forecast,
    update_rate,
)
from offload_trainer.plan.tiers import Item, Placement, TierKind, tiers_of
from offload_trainer.plan.workload import Workload
from offload_trainer.units import format_count

# Measured (docs/benchmarks/step.md, predictions.md): seconds per parameter that DeepSpeed's hooks add to a backward on
# the CPU, and the speed of its optimizer step relative to the fused kernel.
_HOOKS = 8e-9
_SPEED = 0.47

# Settings of the NVMe optimizer. 12 buffers are the fewest that work with both pipelines.
TUNING_OF_DRIVES = (
    ("deepspeed.pipeline_read=false deepspeed.pipeline_write=false", "deepspeed.optimizer_buffer_count=16"),
    ("deepspeed.sub_group_size=20000000", "deepspeed.sub_group_size=100000000"),
    ("deepspeed.aio_threads=1", "deepspeed.aio_threads=4", "deepspeed.aio_threads=8"),
    ("deepspeed.aio_block_size=262144", "deepspeed.aio_block_size=8388608"),
    ("deepspeed.aio_queue_depth=8", "deepspeed.aio_queue_depth=128"),
)
_TUNING = ("deepspeed.reduce_bucket_size=20000000", "deepspeed.reduce_bucket_size=200000000")


def stock_update_rate(work: Workload, machine: MachineProfile) -> float | None:
    """Return the parameters per second of DeepSpeedCPUAdam on a node, or None if nothing was measured."""
    rate, stock = update_rate(work, machine), machine.rates.update.get("deepspeed")
    if rate is None:
        return None
    return stock.value if stock else rate * _SPEED


@dataclass(frozen=True)
class DeepSpeedCandidate:
    """One placement of DeepSpeed, with the buffer sizes computed for it."""

    work: Workload
    machine: MachineProfile
    placement: Placement
    section: DeepSpeedSection
    moments: str  # optim.moment_dtype; "8bit" means bitsandbytes on the GPU

    @cached_property
    def sizes(self) -> ZeroSizes:
        work = self.work
        return zero_sizes(work.shape, self.section, self.placement, world=work.world, item_bytes=work.item_bytes)

    @property
    def title(self) -> str:
        if self.work.tensor > 1:
            return f"DeepSpeed AutoTP over {self.work.tensor} ranks, ZeRO-1"
        return f"DeepSpeed ZeRO-{self.placement.stage}"

    @property
    def homes(self) -> str:
        return self.machine.in_words(str(self.placement))

    @property
    def uses_drives(self) -> bool:
        return TierKind.DRIVES in (self.placement.params, self.placement.optimizer)

    @property
    def cannot_save(self) -> str | None:
        if self.placement.optimizer == TierKind.DRIVES:
            return "stock DeepSpeed loses moments of an NVMe optimizer on resume, and cannot export its checkpoints"
        if self.moments == "8bit":
            return "the 8-bit moments are in DeepSpeed's flat buffers, which cannot be saved weight by weight"
        return None

    @property
    def _drive(self) -> str | None:
        return self.machine.drives[0].directory if self.machine.drives else None

    def _of_node(self, count: int) -> int:
        """Return one node's share of `count` elements that are partitioned over all ranks."""
        return -(-count // self.work.nodes)

    @property
    def _mode(self) -> Mode:
        return Mode(data=self.work.data, stage=self.placement.stage, tensor=self.work.tensor)

    @cached_property
    def _held(self) -> int:
        """Return the weights of a rank in elements, divided by tensor parallelism only."""
        return weights_held(self._mode, self.work.shape)

    @property
    def _held_trained(self) -> int:
        return -(-self._held * self.work.shape.trainable // self.work.shape.parameters)

    @property
    def _trained(self) -> int:
        """Return the number of parameters whose optimizer state is on one node."""
        if self.work.tensor > 1:
            return -(-self._held_trained * self.work.here // self.work.data)
        return self._of_node(self.work.shape.trainable)

    # -- bytes --------------------------------------------------------------------------------------------------------

    def items(self) -> list[Item]:
        """Return stock DeepSpeed's memory at its peak."""
        return StockBytes(
            work=self.work,
            placement=self.placement,
            sizes=self.sizes,
            mode=self._mode,
            held=self._held,
            held_trained=self._held_trained,
            trained=self._trained,
            tiers=tiers_of(self.machine),
        ).items()

    # -- a step -------------------------------------------------------------------------------------------------------

    def traffic(self) -> list[Traffic]:
        """Return the bytes that a step moves.

        With an NVMe optimizer that is 16 bytes per parameter each way, since fp32 gradients are swapped with the state.
        """
        work, e, micro, drive = self.work, self.work.item_bytes, self.work.accumulate, self._drive
        trained, total = self._trained, self._of_node(work.shape.parameters)
        own_trained, own = -(-trained // work.here), -(-work.shape.parameters // work.world)
        micro_out = 1 if self.placement.stage == 1 else micro
        found = []
        if self.placement.optimizer != TierKind.GPU:
            found.append(Traffic(DEVICE_COPIES, "backward", 0, e * own_trained * micro_out))
            found.append(Traffic(DEVICE_COPIES, "update", e * own_trained, 0))
        if self.placement.optimizer == TierKind.DRIVES and drive:
            found.append(Traffic(drive, "update", 16 * trained, 16 * trained))
        if self.placement.params != TierKind.GPU:
            found += [Traffic(DEVICE_COPIES, phase, e * own * micro, 0) for phase in ("forward", "backward")]
        if self.placement.params == TierKind.DRIVES and drive:
            found += [Traffic(drive, phase, e * total * micro, 0) for phase in ("forward", "backward")]
            found.append(Traffic(drive, "update", 0, e * total))
        return found

    def links(self) -> tuple[Traffic, ...]:
        return tuple(_as_traffic(self._flows, here=self.work.here))

    @cached_property
    def _flows(self) -> list[Collective]:
        gathered = None
        if self.placement.stage == 3 and self.work.world > 1:
            gathered = gathers(self.work.shape, self.sizes, checkpointing=self.work.checkpointing)
        return list(flows(self._mode, self.work, held=self._held, trained=self._held_trained, gathered=gathered))

    def bounds(self) -> list[Bound]:
        """Return the bounds of AdamW, on the CPU or on the GPU, and of the collectives that overlap computation."""
        hidden = _as_traffic([one for one in self._flows if one.hides != "nothing"], here=self.work.here)
        return [*self._update(), *zero_bounds(list(hidden), self.machine)]  # `on_top` has the other collectives

    def _update(self) -> list[Bound]:
        if self.machine.gpu is not None and self.placement.optimizer == TierKind.GPU:
            return [Bound("update", 0.0, "AdamW on the GPU", "adamw")]
        count, rate = self._trained, stock_update_rate(self.work, self.machine)
        seconds = None if rate is None else count / rate + UPDATE_START
        return [Bound("update", seconds, f"AdamW on {format_count(count)} parameters", "adamw")]

    def stretch(self) -> float:
        return drive_stretch(self.work.shape, self.section, self.sizes)

    def on_top(self) -> Mapping[str, float]:
        if self.machine.gpu is None:
            return {"backward": _HOOKS * self.work.shape.trainable}
        waits = dict.fromkeys(PHASES, 0.0) | self._head_again()
        for one in self._flows:
            if one.hides == "nothing":
                waits[one.phase] += link_seconds(one, self.machine, here=self.work.here) or 0.0
        return waits

    def _head_again(self) -> dict[str, float]:
        """Return the extra seconds because every tensor-parallel rank computes all of what is outside the blocks."""
        if self.work.tensor == 1:
            return {}
        found = forecast(self.work, self.machine, (), (), engine="deepspeed").seconds
        head, blocks = self.work.shape.head_flops(), self.work.shape.block_flops(seq_len=self.work.seq_len)
        times = (self.work.tensor - 1) * head / (blocks + head)
        return {phase: times * (found[phase] or 0.0) for phase in ("forward", "backward")}

    def settled(self, found: Forecast) -> tuple[ZeroSizes, Forecast]:
        return self.sizes, found

    def notes(self) -> list[str]:
        notes = [
            "the RAM that heap fragmentation costs under DeepSpeed is a measured value, not computed (predictions.md)"
        ]
        if self.work.checkpoints == 0:
            notes.append("no checkpoints (--save-every 0): a killed run starts over; weights are exported at the end")
        if self.work.tensor > 1:
            notes.append(
                f"parallel.tensor={self.work.tensor}: {self.work.data} data-parallel group(s); the activations that "
                "AutoTP stores were measured only on a CPU"
            )
        if self.work.keepers > 1:
            notes.append(
                f"parallel.partition_activations: each rank stores 1 / {self.work.keepers} of a block's input, and "
                "the ranks gather it when the block is recomputed"
            )
        return notes

    def tunable(self) -> list[tuple[str, ...]]:
        return [_TUNING, *(TUNING_OF_DRIVES if self.placement.optimizer == TierKind.DRIVES else ())]


def _as_traffic(moved: Sequence[Collective], *, here: int) -> Iterator[Traffic]:
    """Yield the bytes of each phase through each GPU, and through each node's network."""
    found: dict[tuple[str, str], float] = {}
    for one in moved:
        for place, size in ((GPUS, one.bytes), (NETWORK, one.network(here))):
            if size:
                found[place, one.phase] = found.get((place, one.phase), 0.0) + size
    for (place, phase), size in found.items():
        yield Traffic(place, phase, round(size), round(size))
