"""Stock DeepSpeed in a plan: what it can be asked for, where it may put things, what that takes and how long.

Derivations: P parameters, T trainable ones, e bytes a weight, W ranks, w of them on this node, which holds w / W of
what is divided. Items are what its source allocates (0.19.8, stage_1_and_2.py, stage3.py, swap_tensor/), traffic is
what was counted (docs/benchmarks/placements-354m.md); docs/benchmarks/predictions.md holds both against measurements.
A GPU's way to the host carries what its rank owns: the rest comes from the other ranks' GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from offload_trainer.config import DeepSpeedSection, PlacementSection
from offload_trainer.errors import UserError
from offload_trainer.plan.exchange import GPUS, NETWORK, zero_bounds, zero_links
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.memory import Item, activation_items, cuda_process
from offload_trainer.plan.parallel import Flow, Mode, divided, flows, link_seconds, refusal, weights_held
from offload_trainer.plan.time import PHASES, UPDATE_START, Bound, Forecast, update_rate
from offload_trainer.plan.traffic import Traffic
from offload_trainer.plan.workload import Workload
from offload_trainer.plan.zero import Placement, ZeroSizes, drive_stretch, zero_sizes
from offload_trainer.units import format_count

# From the fastest to the roomiest.
_PLACEMENTS = (
    Placement("gpu", "gpu"),
    Placement("gpu", "cpu"),
    Placement("cpu", "cpu"),
    Placement("gpu", "nvme"),
    Placement("cpu", "nvme"),
    Placement("nvme", "nvme"),
)
_PROCESS = 650_000_000  # interpreter, torch and transformers, with DeepSpeed's libraries
# By docs/benchmarks/step.md and predictions.md: seconds a parameter that its hooks add to a backward on the CPU, and
# the speed of its step, of the fused kernel's.
_HOOKS = 8e-9
_SPEED = 0.47

# Keys that steer its NVMe optimizer. 12 buffers are the fewest that work with both pipelines.
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
    """What is wished for. `moments`: bitsandbytes' on the GPU where they are 8-bit ones. `tensor`: AutoTP's ranks."""

    place: PlacementSection
    section: DeepSpeedSection
    moments: str
    tensor: int = 1

    name = "deepspeed"

    def mistakes(self) -> list[str]:
        """Of the configuration, one sentence each."""
        place, mistakes = self.place, []
        if len(place.nvme) > 1:
            mistakes.append(f"DeepSpeed swaps to one drive and {len(place.nvme)} --nvme were given: keep one")
        if self.moments == "8bit" and place.optimizer in ("cpu", "nvme"):
            mistakes.append(
                f"optim.states=8bit with --engine deepspeed and --optimizer {place.optimizer}: bitsandbytes' 8-bit "
                "AdamW runs on the GPU; use --optimizer gpu, or --engine tiered"
            )
        if place.params == "nvme" and self.section.prefetch_bucket_size not in ("auto", 0):
            # Seen with DeepSpeed 0.19.8; docs/log.md has the numbers.
            mistakes.append(
                "deepspeed.prefetch_bucket_size with --params nvme: DeepSpeed's prefetch from NVMe fails in the second "
                "step (`already assigned swap buffer`); leave it at auto, which is 0 there"
            )
        if self.tensor > 1 and (place.params not in ("auto", "gpu") or place.optimizer == "nvme"):
            mistakes.append(
                f"parallel.tensor={self.tensor} divides the weights over GPUs, with the state there or in RAM: use "
                "--params gpu, and --optimizer gpu or cpu"
            )
        if self.tensor > 1 and self.moments == "8bit":
            mistakes.append(f"parallel.tensor={self.tensor} with optim.states=8bit was never tried: use fp32")
        return mistakes

    def packages(self) -> list[tuple[str, str]]:
        """(wish, package) of what is not part of every installation."""
        eight = [("optim.states=8bit with --engine deepspeed", "bitsandbytes")] if self.moments == "8bit" else []
        return [("--engine deepspeed", "deepspeed"), *eight]

    def refuse(self, work: Workload, machine: MachineProfile) -> None:
        """UserError for what only the machine makes impossible."""
        if machine.gpu is None and work.dtype == "fp16":
            raise UserError(
                "--dtype fp16 without a GPU: DeepSpeed's CPU accelerator has no fp16; use --dtype bf16, or --engine "
                "tiered"
            )
        if self.tensor > 1:
            self._refuse_dividing(work)

    def _refuse_dividing(self, work: Workload) -> None:
        """UserError where the ranks, the model or the sums cannot be divided so."""
        wish = f"parallel.tensor={self.tensor}"
        if work.world % self.tensor:
            raise UserError(f"{wish} with {work.world} rank(s): a multiple of {self.tensor} is needed (--gpus)")
        if not any(weight.split for weight in work.shape.weights):
            raise UserError(
                f"{wish}: transformers has no rule for this architecture that divides each matrix of its blocks by "
                "rows or columns alone; use 1"
            )
        if reason := refusal(Mode(tensor=self.tensor), work.shape, rows=1, seq_len=work.seq_len):
            raise UserError(f"{wish}: {reason}")
        if self._sums_need_ram(work) and self.place.optimizer == "gpu":
            raise UserError(
                f"{wish} --optimizer gpu with sums in fp32 of several bf16 micro-batches: DeepSpeed takes another "
                "optimizer there, which was never tried; use --optimizer cpu, --accumulate 1, or "
                "optim.accumulate_dtype=model"
            )

    def _sums_need_ram(self, work: Workload) -> bool:
        """ZeRO-1 in bf16 with fp32 sums is another class in DeepSpeed, unless its state is in RAM."""
        return work.tensor > 1 and work.dtype == "bf16" and work.accumulate > 1 and work.sums == "fp32"

    def candidates(self, work: Workload, machine: MachineProfile) -> list[DeepSpeedCandidate]:
        """From the fastest to the roomiest."""
        found = self._placements(machine)
        if self.tensor > 1:
            found = [one for one in found if one.stage == 2] or [Placement("gpu", "cpu")]
        if self._sums_need_ram(work):
            found = [Placement("gpu", "cpu")]
        return [DeepSpeedCandidate(work, machine, placement, self) for placement in found]

    def _placements(self, machine: MachineProfile) -> list[Placement]:
        params, optimizer = self.place.params, self.place.optimizer
        if self.moments == "8bit":
            optimizer = "gpu"
        if params != "auto" and optimizer != "auto":
            return [Placement(params, optimizer)]
        found = [
            one
            for one in _PLACEMENTS
            if params in ("auto", one.params)
            and optimizer in ("auto", one.optimizer)
            and (self.place.nvme or "nvme" not in (one.params, one.optimizer))
            # Without a GPU "gpu" is host memory: an optimizer there would be DeepSpeed's slower path to the same place.
            and (machine.gpu is not None or one.optimizer != "gpu" or optimizer == "gpu")
        ]
        # A wish for one home that none of them has (weights off the GPU, optimizer on it): take it at its word.
        fallback = Placement("gpu" if params == "auto" else params, "cpu" if optimizer == "auto" else optimizer)
        return found or [fallback]


def stock_update_rate(work: Workload, machine: MachineProfile) -> float | None:
    """Parameters a second of DeepSpeedCPUAdam on a node; None where nothing was timed."""
    rate, stock = update_rate(work, machine), machine.rates.update.get("deepspeed")
    if rate is None:
        return None
    return stock.value if stock else rate * _SPEED


@dataclass(frozen=True)
class DeepSpeedCandidate:
    """One placement, with sizes worked out for it."""

    work: Workload
    machine: MachineProfile
    placement: Placement
    wish: DeepSpeed

    @cached_property
    def sizes(self) -> ZeroSizes:
        work = self.work
        return zero_sizes(work.shape, self.wish.section, self.placement, world=work.world, item_bytes=work.item_bytes)

    @property
    def title(self) -> str:
        if self.work.tensor > 1:
            return f"DeepSpeed's AutoTP over {self.work.tensor}, ZeRO-1"
        return f"DeepSpeed ZeRO-{self.placement.stage}"

    @property
    def homes(self) -> str:
        return self.machine.in_words(str(self.placement))

    @property
    def uses_drives(self) -> bool:
        return "nvme" in (self.placement.params, self.placement.optimizer)

    @property
    def cannot_save(self) -> str | None:
        if self.placement.optimizer == "nvme":
            return "stock DeepSpeed loses moments of an NVMe optimizer on resume, and cannot export its checkpoints"
        if self.wish.moments == "8bit":
            return "the 8-bit moments live in DeepSpeed's flat buffers, which cannot be saved by weight"
        if self.work.tensor > 1:
            return f"parallel.tensor={self.work.tensor} divides each weight's moments, which are not put together yet"
        return None

    @property
    def _drive(self) -> str | None:
        return self.machine.drives[0].directory if self.machine.drives else None

    def _of_node(self, count: int) -> int:
        """What is divided over all ranks, as far as it lies on one node."""
        return -(-count // self.work.nodes)

    @property
    def _mode(self) -> Mode:
        return Mode(data=self.work.data, tensor=self.work.tensor)

    @cached_property
    def _held(self) -> int:
        """Weights of a rank where none are divided but by tensor parallel."""
        return weights_held(self._mode, self.work.shape)

    @property
    def _held_trained(self) -> int:
        return -(-self._held * self.work.shape.trainable // self.work.shape.parameters)

    @property
    def _trained(self) -> int:
        """Whose state lies on one node."""
        if self.work.tensor > 1:
            return -(-self._held_trained * self.work.here // self.work.data)
        return self._of_node(self.work.shape.trainable)

    def _tier(self, home: str) -> str:
        return {"gpu": self.machine.device, "cpu": "ram", "nvme": self._drive or "nvme"}[home]

    # -- bytes --------------------------------------------------------------------------------------------------------

    def items(self) -> list[Item]:
        """What stock DeepSpeed holds at its peak."""
        work, device = self.work, self.machine.device
        process = (_PROCESS + cuda_process(device)) * work.here
        return [
            Item("ram", "process", process, "interpreter, torch and DeepSpeed, in each process"),
            *self._weights(),
            *self._gradients(),
            *self._state(),
            Item("ram", "seen beyond these", self._seen(), "measured (predictions.md); what it holds is not known"),
            *activation_items(self._dividing(work), device=device),
        ]

    def _dividing(self, work: Workload) -> Workload:
        """The work with what a rank holds of the activations."""
        on_gpu, on_cpu = work.shape.on_gpu, work.shape.on_cpu
        if work.tensor == 1 or on_gpu is None or on_cpu is None:
            return work
        on_gpu, on_cpu = divided(on_gpu, self._mode), divided(on_cpu, self._mode)
        return replace(work, shape=replace(work.shape, on_gpu=on_gpu, on_cpu=on_cpu))

    def _weights(self) -> list[Item]:
        shape, world, e = self.work.shape, self.work.here, self.work.item_bytes
        device, sizes = self.machine.device, self.sizes
        if self.placement.stage == 2:
            how = "whole on each rank" if self.work.tensor == 1 else f"{self._held:,} of them on each rank"
            whole = Item(device, "weights", e * self._held * world, f"{e} B a parameter, {how}")
            why = "ZeRO-2 copies them into one buffer at the start"
            return [whole, Item(device, "weights, flattened", e * self._held_trained * world, why)]
        home = self._tier(self.placement.params)
        live = min(shape.parameters, sizes.max_live + sizes.prefetch_bucket)
        why = "gathered at a time: max_live_parameters and a prefetch bucket"
        items = [
            Item(home, "weights", e * self._of_node(shape.parameters), f"{e} B a parameter, divided over the ranks"),
            Item(device, "weights in use", e * live * world, why),
        ]
        if self.placement.params == "nvme":
            buffers, why = e * sizes.weight_buffers * sizes.weight_buffer_elements, f"{sizes.weight_buffers} of the"
            items.append(Item("ram", "weight swap buffers", buffers * world, f"{why} largest weight"))
            items.append(Item("ram", "weight write buffer", e * sizes.largest_sub_group * world, "one sub-group"))
        return items

    def _gradients(self) -> list[Item]:
        e, device = self.work.item_bytes, self.machine.device
        buckets = 2 * e * self.sizes.reduce_bucket * self.work.here
        if self.work.tensor > 1:
            each = self.work.gradient_bytes * self._held_trained * self.work.here
            return [
                Item(device, "gradients", each, "whole on each rank"),
                Item(device, "gradient buckets", buckets, "2"),
            ]
        return [
            Item(device, "gradients", e * self._trained, f"{e} B a parameter before they are handed over"),
            Item(device, "gradient buckets", buckets, "2 reduce buckets"),
        ]

    def _state(self) -> list[Item]:
        trained, home, sizes = self._trained, self._tier(self.placement.optimizer), self.sizes
        items = [Item(home, "masters and moments", 12 * trained, "fp32 master, first and second moment")]
        if self.placement.optimizer != "nvme":
            return [*items, Item(home, "gradients, fp32", 4 * trained, "the update reads them in fp32")]
        buffers = 4 * sizes.optimizer_buffers * sizes.largest_sub_group * self.work.here
        why = f"{sizes.optimizer_buffers} of the largest sub-group"
        return [
            *items,
            Item(home, "gradients, fp32", 4 * trained, "DeepSpeed swaps them with the state"),
            Item("ram", "optimizer swap buffers", buffers, why),
        ]

    def _seen(self) -> int:
        """What the peak was above the items, for 124 and 354 M parameters with the CPU as the accelerator (0.19.8)."""
        trained = self._trained
        if self.placement.optimizer == "nvme":
            return int(11.5 * trained)
        return 3 * trained if self.placement.stage == 3 else 380_000_000

    # -- a step -------------------------------------------------------------------------------------------------------

    def traffic(self) -> list[Traffic]:
        """What a step moves: 16 bytes a parameter each way, since it swaps fp32 gradients with the state."""
        work, e, micro, drive = self.work, self.work.item_bytes, self.work.accumulate, self._drive
        trained, total = self._trained, self._of_node(work.shape.parameters)
        own_trained, own = -(-trained // work.here), -(-work.shape.parameters // work.world)
        micro_out = 1 if work.tensor > 1 else micro
        found = [
            Traffic("device", "backward", 0, e * own_trained * micro_out),
            Traffic("device", "update", e * own_trained, 0),
        ]
        if self.placement.optimizer == "nvme" and drive:
            found.append(Traffic(drive, "update", 16 * trained, 16 * trained))
        if self.placement.params != "gpu":
            found += [Traffic("device", phase, e * own * micro, 0) for phase in ("forward", "backward")]
        if self.placement.params == "nvme" and drive:
            found += [Traffic(drive, phase, e * total * micro, 0) for phase in ("forward", "backward")]
            found.append(Traffic(drive, "update", 0, e * total))
        return found

    def links(self) -> tuple[Traffic, ...]:
        if self.work.tensor > 1:
            return tuple(_as_traffic(self._flows, here=self.work.here))
        return zero_links(self.work, stage=self.placement.stage)

    @cached_property
    def _flows(self) -> list[Flow]:
        return list(flows(self._mode, self.work, held=self._held, trained=self._held_trained))

    def bounds(self) -> list[Bound]:
        """AdamW alone, on the CPU or on the device, and the collectives."""
        moved = self.links()
        if self.work.tensor > 1:  # the rest comes on top
            moved = tuple(_as_traffic([one for one in self._flows if one.hides != "nothing"], here=self.work.here))
        return [*self._update(), *zero_bounds(moved, self.machine)]

    def _update(self) -> list[Bound]:
        if self.machine.gpu is not None and self.placement.optimizer == "gpu":
            return [Bound("update", 0.0, "AdamW on the GPU", "adamw")]
        count, rate = self._trained, stock_update_rate(self.work, self.machine)
        seconds = None if rate is None else count / rate + UPDATE_START
        return [Bound("update", seconds, f"AdamW on {format_count(count)} parameters", "adamw")]

    def stretch(self) -> float:
        return drive_stretch(self.work.shape, self.wish.section, self.sizes)

    def on_top(self) -> Mapping[str, float]:
        if self.machine.gpu is None:
            return {"backward": _HOOKS * self.work.shape.trainable}
        waits = dict.fromkeys(PHASES, 0.0)
        for one in self._flows if self.work.tensor > 1 else ():
            if one.hides == "nothing":
                waits[one.phase] += link_seconds(one, self.machine, here=self.work.here) or 0.0
        return waits

    def settled(self, found: Forecast) -> tuple[ZeroSizes, Forecast]:
        return self.sizes, found

    def notes(self) -> list[str]:
        notes = [
            "what DeepSpeed copies beyond its buffers is from peaks seen on a CPU, not worked out (predictions.md)"
        ]
        if self.work.checkpoints == 0:
            notes.append(
                "no checkpoints (--save-every 0): a run that is killed starts again; weights are exported at the end"
            )
        if self.work.tensor > 1:
            notes.append(
                f"parallel.tensor={self.work.tensor}: {self.work.data} rank(s) have rows of their own; what AutoTP "
                "holds of activations is assumed, and nothing of it was measured"
            )
        return notes

    def tunable(self) -> list[tuple[str, ...]]:
        return [_TUNING, *(TUNING_OF_DRIVES if self.placement.optimizer == "nvme" else ())]


def _as_traffic(moved: Sequence[Flow], *, here: int) -> Iterator[Traffic]:
    """Bytes through each GPU, and through each node's network."""
    for one in moved:
        size, through = round(one.bytes), round(one.network(here))
        yield Traffic(GPUS, one.phase, size, size)
        if through:
            yield Traffic(NETWORK, one.phase, through, through)
