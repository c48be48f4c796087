"""Planning for the plain engine, which is torch alone with everything on one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offload_trainer.config import PlacementSection
from offload_trainer.plan.deepspeed.zero_buffers import Placement
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.memory.common import Item, activation_items, process_items
from offload_trainer.plan.time.step_time import UPDATE_START, Bound, Forecast, update_rate
from offload_trainer.plan.time.traffic import Traffic
from offload_trainer.plan.workload import Workload
from offload_trainer.units import format_count

# torch's optimizer, plus one more pass for norm, clipping and rounding, runs at this share of the kernel's rate.
_SPEED = 0.36


@dataclass(frozen=True)
class Plain:
    """The plain engine's settings, and the candidates that they allow."""

    place: PlacementSection

    name = "plain"

    def mistakes(self) -> list[str]:
        """Return the mistakes in the configuration, one sentence each."""
        mistakes = [
            f"{flag} {home} with --engine plain: plain torch keeps everything on one device"
            for flag, home in (("--params", self.place.params), ("--optimizer", self.place.optimizer))
            if home in ("cpu", "nvme")
        ]
        if self.place.gpus > 1:
            mistakes.append(f"--gpus {self.place.gpus} with --engine plain: plain torch trains on one device")
        return mistakes

    def packages(self) -> list[tuple[str, str]]:
        """Return (setting, package) for each package that the settings need and that is not always installed."""
        return []

    def refuse(self, work: Workload, machine: MachineProfile) -> None:
        """Accept every machine."""

    def candidates(self, work: Workload, machine: MachineProfile) -> list[PlainCandidate]:
        return [PlainCandidate(work, machine)]


@dataclass(frozen=True)
class PlainCandidate:
    """The only placement of the plain engine: everything on the device."""

    work: Workload
    machine: MachineProfile

    placement, sizes = Placement("gpu", "gpu"), None
    title, uses_drives, cannot_save = "plain torch", False, None

    @property
    def homes(self) -> str:
        return self.machine.in_words(str(self.placement))

    def items(self) -> list[Item]:
        shape, e, device = self.work.shape, self.work.item_bytes, self.machine.device
        return [
            *process_items(device),
            Item(device, "weights", e * shape.parameters, f"{e} B a parameter"),
            Item(device, "gradients", (e + 4) * shape.trainable, f"{e} B a parameter, plus 4 B for fp32 sums"),
            Item(device, "masters and moments", 12 * shape.trainable, "fp32 master, first and second moment"),
            *activation_items(self.work, device=device),
        ]

    def traffic(self) -> list[Traffic]:
        return []

    def links(self) -> list[Traffic]:
        return []

    def bounds(self) -> list[Bound]:
        if self.machine.gpu is not None:
            return [Bound("update", 0.0, "AdamW on the GPU", "adamw")]
        count, rate = self.work.shape.trainable, update_rate(self.work, self.machine)
        seconds = None if rate is None else count / (_SPEED * rate) + UPDATE_START
        return [Bound("update", seconds, f"AdamW on {format_count(count)} parameters", "adamw")]

    def stretch(self) -> float:
        return 1.0

    def on_top(self) -> Mapping[str, float]:
        return {}

    def settled(self, found: Forecast) -> tuple[None, Forecast]:
        return self.sizes, found

    def notes(self) -> list[str]:
        return []

    def tunable(self) -> list[tuple[str, ...]]:
        return []
