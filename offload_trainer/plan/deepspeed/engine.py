"""Planning for the stock DeepSpeed engine: check its settings, and price each placement that they allow.

With W ranks, w of them on this node, the node has w / W of everything that ZeRO partitions. `memory.py` computes the
memory items. The traffic follows counted bytes; docs/benchmarks/predictions.md compares both with measurements. A GPU's
PCIe link carries only what its rank owns: the rest comes from other GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from offload_trainer.config import DeepSpeedSection, PlacementSection
from offload_trainer.errors import UserError
from offload_trainer.plan.deepspeed.memory import StockBytes, ZeroSizes, gathered, zero_sizes
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.parallel.collectives import (
    Collective,
    link_seconds,
    refusal,
    tensor_collectives,
    zero_collectives,
)
from offload_trainer.plan.parallel.comm_cost import as_traffic, zero_bounds
from offload_trainer.plan.step_time import (
    DEVICE_COPIES,
    PHASES,
    UPDATE_START,
    Bound,
    Costs,
    Traffic,
    computing_bounds,
    copy_seconds,
    update_rate,
)
from offload_trainer.plan.tiers import Item, Placement, TierKind, kind_asked, tiers_of
from offload_trainer.plan.workload import Workload
from offload_trainer.units import format_count

# From the fastest to the one that needs the least memory.
_PLACEMENTS = (
    Placement(TierKind.GPU, TierKind.GPU),
    Placement(TierKind.GPU, TierKind.RAM),
    Placement(TierKind.RAM, TierKind.RAM),
    Placement(TierKind.GPU, TierKind.DRIVES),
    Placement(TierKind.RAM, TierKind.DRIVES),
    Placement(TierKind.DRIVES, TierKind.DRIVES),
)

# Measured (docs/benchmarks/step.md): seconds per parameter that DeepSpeed's hooks add to a backward on the CPU, and the
# speed of its optimizer step relative to the fused kernel.
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


@dataclass(frozen=True)
class DeepSpeed:
    """The settings of the DeepSpeed engine.

    `moments` is optim.moment_dtype; "8bit" means bitsandbytes on the GPU. `tensor` is the number of AutoTP ranks.
    """

    place: PlacementSection
    section: DeepSpeedSection
    moments: str
    tensor: int = 1

    name = "deepspeed"

    def mistakes(self) -> list[str]:
        """Return the mistakes in the configuration, one sentence each."""
        place, mistakes = self.place, []
        params, optimizer = kind_asked(place.params), kind_asked(place.optimizer)
        if len(place.nvme) > 1:
            mistakes.append(f"DeepSpeed swaps to one drive and {len(place.nvme)} --nvme were given: keep one")
        if self.moments == "8bit" and optimizer in (TierKind.RAM, TierKind.DRIVES):
            mistakes.append(
                f"optim.moment_dtype=8bit with --engine deepspeed and --optimizer {place.optimizer}: bitsandbytes' "
                "8-bit AdamW runs on the GPU; use --optimizer gpu, or --engine tiered"
            )
        if params == TierKind.DRIVES and self.section.prefetch_bucket_size not in ("auto", 0):
            # Seen with DeepSpeed 0.19.8, which prefetches a weight twice (`zero_sizes`).
            mistakes.append(
                "deepspeed.prefetch_bucket_size with --params nvme: DeepSpeed's prefetch from NVMe fails in the second "
                "step (`already assigned swap buffer`); leave it at auto, which is 0 there"
            )
        off_gpu = params not in (None, TierKind.GPU) or optimizer == TierKind.DRIVES
        if self.tensor > 1 and off_gpu:
            mistakes.append(
                f"parallel.tensor={self.tensor} divides the weights over GPUs and keeps the state there or in RAM: use "
                "--params gpu, and --optimizer gpu or cpu"
            )
        if self.tensor == 1 and self.section.zero_stage in (1, 2) and off_gpu:
            mistakes.append(
                f"deepspeed.zero_stage={self.section.zero_stage} keeps whole weights on each GPU, and the state there "
                "or in RAM: use --params gpu, and --optimizer gpu or cpu"
            )
        if self.tensor > 1 and self.section.zero_stage not in ("auto", 1):
            mistakes.append(f"parallel.tensor={self.tensor} works with ZeRO-1 only: leave deepspeed.zero_stage out")
        if self.tensor > 1 and self.moments == "8bit":
            mistakes.append(f"parallel.tensor={self.tensor} with optim.moment_dtype=8bit is untested: use fp32")
        return mistakes

    def packages(self) -> list[tuple[str, str]]:
        """Return (setting, package) for each package that the settings need and that is not always installed."""
        eight = [("optim.moment_dtype=8bit with --engine deepspeed", "bitsandbytes")] if self.moments == "8bit" else []
        return [("--engine deepspeed", "deepspeed"), *eight]

    def refuse(self, work: Workload, machine: MachineProfile) -> None:
        """Raise UserError for settings that this machine or this step makes impossible."""
        if machine.gpu is None and work.dtype == "fp16":
            raise UserError(
                "--dtype fp16 without a GPU: DeepSpeed's CPU accelerator has no fp16; use --dtype bf16, or --engine "
                "tiered"
            )
        if self._sums_need_ram(work) and (kind_asked(self.place.optimizer) == TierKind.GPU or self.moments == "8bit"):
            setting = "deepspeed.zero_stage=1" if self.tensor == 1 else f"parallel.tensor={self.tensor}"
            raise UserError(
                f"{setting} --optimizer gpu with fp32 sums of several bf16 micro-batches: DeepSpeed uses another "
                "optimizer then, which is untested; use --optimizer cpu, --accumulate 1, or "
                "optim.accumulate_dtype=model"
            )
        if self.tensor > 1:
            self._refuse_dividing(work)

    @property
    def _zero(self) -> int | None:
        """Return the requested ZeRO stage, or None for `auto`; tensor parallelism implies stage 1."""
        if self.tensor > 1:
            return 1
        return None if self.section.zero_stage == "auto" else self.section.zero_stage

    def _refuse_dividing(self, work: Workload) -> None:
        """Raise UserError if the ranks or the model cannot be divided by `tensor`."""
        setting = f"parallel.tensor={self.tensor}"
        if work.world % self.tensor:
            raise UserError(f"{setting} with {work.world} rank(s): a multiple of {self.tensor} is needed (--gpus)")
        if not any(weight.split for weight in work.shape.weights):
            raise UserError(
                f"{setting}: transformers has no tensor-parallel plan for this architecture that splits each matrix of "
                "a block by rows or columns only; use 1"
            )
        if reason := refusal(work.shape, tensor=self.tensor):
            raise UserError(f"{setting}: {reason}")

    def _sums_need_ram(self, work: Workload) -> bool:
        """Return whether the state must be in RAM: elsewhere DeepSpeed has another class for ZeRO-1 with fp32 sums."""
        return self._zero == 1 and work.dtype == "bf16" and work.accumulate > 1 and work.sums == "fp32"

    def candidates(self, work: Workload, machine: MachineProfile) -> list[DeepSpeedCandidate]:
        """Return the candidates, from the fastest to the one that needs the least memory."""
        found = self._placements(machine)
        if self._zero is not None:
            found = [replace(one, zero=self._zero) for one in found if self._zero == 3 or one.stage == 2]
        if not found or self._sums_need_ram(work):
            found = [Placement(TierKind.GPU, TierKind.RAM, zero=self._zero)]
        return [DeepSpeedCandidate(work, machine, placement, self.section, self.moments) for placement in found]

    def _placements(self, machine: MachineProfile) -> list[Placement]:
        params, optimizer = kind_asked(self.place.params), kind_asked(self.place.optimizer)
        if self.moments == "8bit":
            optimizer = TierKind.GPU
        if params and optimizer:
            return [Placement(params, optimizer)]
        found = [
            one
            for one in _PLACEMENTS
            if params in (None, one.params)
            and optimizer in (None, one.optimizer)
            and (self.place.nvme or TierKind.DRIVES not in (one.params, one.optimizer))
            # Without a GPU that means host memory, and DeepSpeed's path for an optimizer there is slower than for RAM.
            and (machine.gpu is not None or one.optimizer != TierKind.GPU or optimizer == TierKind.GPU)
        ]
        # A requested combination that is not in the list, such as weights off the GPU and the optimizer on it, is used.
        return found or [Placement(params or TierKind.GPU, optimizer or TierKind.RAM)]


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

    @cached_property
    def _bytes(self) -> StockBytes:
        return StockBytes(self.work, self.placement, self.sizes, tiers_of(self.machine))

    @property
    def items(self) -> list[Item]:
        """Return stock DeepSpeed's memory at its peak."""
        return self._bytes.items()

    # -- a step -------------------------------------------------------------------------------------------------------

    def costs(self) -> Costs:
        links = list(as_traffic(self._collectives, here=self.work.here))
        return Costs(self._traffic(), self._bounds(), links, stretch=self._stretch(), on_top=self._on_top())

    def _traffic(self) -> list[Traffic]:
        """Return the bytes that a step moves.

        With an NVMe optimizer that is 16 bytes per parameter each way, since fp32 gradients are swapped with the state.
        """
        work, e, micro = self.work, self.work.item_bytes, self.work.accumulate
        drive = self.machine.drives[0].directory if self.machine.drives else None
        trained, total = self._bytes.trained, -(-work.shape.parameters // work.nodes)
        own = -(-work.shape.parameters // work.world)
        found = []
        if self.placement.optimizer != TierKind.GPU:
            found.append(self._gradient_copies)
            if self.placement.params == TierKind.GPU or self.machine.gpu is None:
                found.append(Traffic(DEVICE_COPIES, "update", e * -(-trained // work.here), 0))
        if self.placement.optimizer == TierKind.DRIVES and drive:
            found.append(Traffic(drive, "update", 16 * trained, 16 * trained))
        if self.placement.params != TierKind.GPU:
            found += [Traffic(DEVICE_COPIES, phase, e * own * micro, 0) for phase in ("forward", "backward")]
        if self.placement.params == TierKind.DRIVES and drive:
            found += [Traffic(drive, phase, e * total * micro, 0) for phase in ("forward", "backward")]
            found.append(Traffic(drive, "update", 0, e * total))
        return found

    @property
    def _gradient_copies(self) -> Traffic:
        """Return the copies of a rank's gradients between the device and host memory.

        On a GPU the last gradients leave in fp32 (`_offload_grad_partition_at_boundary`). Before that ZeRO-3 writes the
        gradients of each micro-batch, or their sums, to host memory and reads them back (`partition_grads`); ZeRO-2
        does so for 16-bit sums, which it reads from the second micro-batch on. Copies overlap with the backward; before
        DeepSpeed 0.19.5 it waited for those of ZeRO-3, which follow each other on one stream.
        """
        work, stage, sums = self.work, self.placement.stage, self._bytes.sums
        own = -(-self._bytes.trained // work.here)
        if self.machine.gpu is None:
            return Traffic(DEVICE_COPIES, "backward", 0, work.item_bytes * own * (1 if stage == 1 else work.accumulate))
        several = stage == 2 and work.accumulate > 1 and sums == work.item_bytes
        written = work.accumulate if stage == 3 or several else 0
        return Traffic(DEVICE_COPIES, "backward", sums * own * (written - several), (sums * written + 4) * own)

    @cached_property
    def _copies_in_turn(self) -> tuple[float, float] | None:
        """Return the seconds of the copies in a backward with ZeRO-3, and of those that follow its last gradient.

        Other placements have None. `partition_grads` queues the copies of a gradient on one stream: out, in, and out
        again. Weights come in on another. The step waits for the copies of the last bucket, which has at least the
        first weight's gradient (`independent_gradient_partition_epilogue`).
        """
        into, shape = self.machine.rates.to_device, self.work.shape
        on_gpu = self.machine.gpu is None or self.placement.optimizer == TierKind.GPU
        if on_gpu or self.placement.stage < 3 or into is None or not shape.trainable:
            return None
        moved = [one for one in self._traffic() if (one.place, one.phase) == (DEVICE_COPIES, "backward")]
        copies = self._gradient_copies
        weights, back = sum(one.read for one in moved) - copies.read, copies.read / into.value
        whole, alone = (copy_seconds(read, copies.written, self.machine) for read in (weights, 0))
        if whole is None or alone is None:
            return None
        last = next(weight.numel for weight in shape.weights if weight.trainable) / shape.trainable
        return whole + back, (alone + back) * last / self.work.accumulate

    @cached_property
    def _collectives(self) -> list[Collective]:
        work, stage = self.work, self.placement.stage
        sent = gathered(work.shape, self.sizes) if stage == 3 else {}
        zero = zero_collectives(work, stage=stage, trained=self._bytes.held_trained, gathered=sent)
        return [*zero, *tensor_collectives(work)]

    def _bounds(self) -> list[Bound]:
        """Return the bounds of AdamW, on the CPU or on the GPU, and of the collectives that overlap computation."""
        hidden = as_traffic([one for one in self._collectives if one.hides != "nothing"], here=self.work.here)
        update = Bound("update", 0.0, "AdamW on the GPU", "adamw")
        if self.machine.gpu is None or self.placement.optimizer != TierKind.GPU:
            count, rate = self._bytes.trained, update_rate(self.work, self.machine)  # parameters per second of a node
            if rate is not None:
                stock = self.machine.rates.update.get("deepspeed")
                rate = stock.value if stock else rate * _SPEED
            seconds = None if rate is None else count / rate + UPDATE_START
            update = Bound("update", seconds, f"AdamW on {format_count(count)} parameters", "adamw")
        bounds = [update, *zero_bounds(list(hidden), self.machine)]  # `_on_top` has the other collectives
        if copies := self._copies_in_turn:
            what = "gradients out of the device, back in and out again, one copy after the other"
            bounds.append(Bound("backward", copies[0], what, "device"))
        return bounds

    def _stretch(self) -> float:
        """Return the factor by which the drive's time exceeds simultaneous reading and writing of the state.

        The first sub-group is read, and the last one is written, without traffic in the other direction. Without
        pipelining that holds for every sub-group.
        """
        if not (self.section.pipeline_read or self.section.pipeline_write):
            return 2.0
        return 1 + min(1.0, self.sizes.largest_sub_group / max(1, self.work.shape.trainable))

    def _on_top(self) -> Mapping[str, float]:
        work, machine = self.work, self.machine
        if machine.gpu is None:
            return {"backward": _HOOKS * work.shape.trainable}
        waits = dict.fromkeys(PHASES, 0.0)
        if work.tensor > 1:  # every rank computes all of what is outside the blocks
            head, blocks = work.shape.head_flops(), work.shape.block_flops(seq_len=work.seq_len)
            times = (work.tensor - 1) * head / (blocks + head)
            waits |= {bound.phase: times * (bound.seconds or 0.0) for bound in computing_bounds(work, machine)}
        if copies := self._copies_in_turn:
            waits["backward"] += copies[1]
        for one in self._collectives:
            if one.hides == "nothing":
                waits[one.phase] += link_seconds(one, machine, here=work.here) or 0.0
        return waits

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
        return notes

    def tunable(self) -> list[tuple[str, ...]]:
        return [_TUNING, *(TUNING_OF_DRIVES if self.placement.optimizer == TierKind.DRIVES else ())]
