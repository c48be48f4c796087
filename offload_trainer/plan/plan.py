"""A plan: what will be where, how many bytes, how long a step takes, and why not otherwise."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from offload_trainer.config import TrainConfig
from offload_trainer.plan.memory import Item
from offload_trainer.plan.tiered import TierSizes
from offload_trainer.plan.time import PHASES, Forecast, tokens_that_hide_the_update
from offload_trainer.plan.traffic import Traffic
from offload_trainer.plan.zero import Placement, ZeroSizes
from offload_trainer.units import format_bytes, format_count, format_seconds


@dataclass(frozen=True)
class Plan:
    """What will be where. `tiers` maps "gpu", "ram" and each directory to needed and available bytes."""

    engine: str
    placement: Placement
    sizes: ZeroSizes | TierSizes | None
    checkpointing: bool
    seq_len: int
    micro_batch: int
    tokens_per_step: int
    world: int
    items: tuple[Item, ...]
    tiers: dict[str, dict[str, int]]
    traffic: tuple[Traffic, ...]
    forecast: Forecast
    rejected: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    @property
    def homes(self) -> str:
        """Where weights and optimizer state live, in words. Without a GPU the device is the CPU, its memory RAM."""
        words = self._homes()
        return words.replace(" gpu", " RAM") if self._without_gpu else words

    @property
    def _without_gpu(self) -> bool:
        return not any(self.tiers.get("gpu", {"need": 0, "have": 0}).values())

    def _homes(self) -> str:
        if not isinstance(self.sizes, TierSizes):
            return str(self.placement)
        on_gpu, in_ram = self.sizes.gpu_fraction, self.sizes.ram_fraction
        shown = self.sizes.gradients != "cpu" and on_gpu < 1
        gradients = f", gradients {self.sizes.gradients}" if shown else ""
        if self._without_gpu:
            on_gpu, in_ram = 0.0, on_gpu + in_ram  # the device's memory is RAM
        state = _divided({"gpu": on_gpu, "RAM": in_ram, "nvme": round(1 - on_gpu - in_ram, 9)})
        inputs = f", block inputs {self.sizes.activations}" if self.checkpointing and self.sizes.activations else ""
        return f"params {self.placement.params}, optimizer {state}{gradients}{inputs}"

    @property
    def uses_drives(self) -> bool:
        """Whether anything lives on a drive."""
        on_drive = "nvme" in (self.placement.params, self.placement.optimizer)
        if isinstance(self.sizes, TierSizes):
            inputs = self.checkpointing and self.sizes.activations == "nvme"
            weights, gradients = self.placement.params == "nvme", self.sizes.gradients == "nvme"
            stored = round(1 - self.sizes.gpu_fraction - self.sizes.ram_fraction, 9) > 0
            return weights or gradients or inputs or stored
        return on_drive

    @property
    def fits(self) -> bool:
        return not self.shortfalls()

    def shortfalls(self) -> list[str]:
        return _shortfalls(self.tiers)

    def to_json(self) -> dict[str, Any]:
        """The contract of `plan --json`, the reader's own. Seconds are null where the machine has not been timed."""
        return {
            "fits": self.fits,
            "chosen": {
                "engine": self.engine,
                "params": self.placement.params,
                "optimizer": self.placement.optimizer,
                "zero_stage": self.placement.stage if self.engine == "deepspeed" else None,
                "checkpointing": self.checkpointing,
                "seq_len": self.seq_len,
                "micro_batch": self.micro_batch,
                "tokens_per_step": self.tokens_per_step,
                "ranks": self.world,
                "sizes": asdict(self.sizes) if self.sizes else None,
            },
            "tiers": {tier: dict(room) for tier, room in self.tiers.items()},
            "items": [asdict(item) for item in self.items],
            "seconds": dict(self.forecast.seconds),
            "bounds": [asdict(bound) for bound in self.forecast.bounds],
            "traffic": [asdict(moved) for moved in self.traffic],
            "rejected": [{"placement": name, "reason": reason} for name, reason in self.rejected],
            "notes": list(self.notes),
        }

    def describe(self) -> str:
        """The plan as a person reads it."""
        engine = {
            "tiered": "tiered engine",
            "deepspeed": f"DeepSpeed ZeRO-{self.placement.stage}",
            "plain": "plain torch",
        }[self.engine]
        lines = [
            f"plan: {engine}; {self.homes}; {format_count(self.tokens_per_step)} tokens a step, {self.micro_batch} x "
            f"{self.seq_len} at a time; gradient checkpointing {'on' if self.checkpointing else 'off'}"
        ]
        for tier, room in self.tiers.items():
            if tier == "gpu" and self._without_gpu:
                continue
            verdict = "" if room["need"] <= room["have"] else "   DOES NOT FIT"
            lines.append(f"  {tier}: {format_bytes(room['need'])} of {format_bytes(room['have'])}{verdict}")
            for item in self.items:
                if item.tier == tier and item.bytes:
                    lines.append(f"    {item.name:<24}{format_bytes(item.bytes):>10}   {item.why}")
        lines += self._describe_seconds()
        lines += [f"  not {name}: {reason}" for name, reason in self.rejected]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _describe_seconds(self) -> list[str]:
        found = self.forecast
        step = found.step
        if step is None:
            untimed = dict.fromkeys(bound.what for bound in found.bounds if bound.seconds is None)
            return [
                f"  seconds a step: not known; `offload-train bench` with the same words times what never was here: "
                f"{'; '.join(untimed)}"
            ]
        lines = [f"  a step: about {format_seconds(step)}, {format_count(self.tokens_per_step / step)} tokens/s"]
        for phase in PHASES:
            lines.append(f"    {phase:<24}{format_seconds(found.seconds[phase] or 0.0):>10}   {found.limits(phase)}")
        hidden = tokens_that_hide_the_update(found, tokens=self.tokens_per_step)
        if hidden and hidden > self.tokens_per_step:
            lines.append(
                f"    the update is a tenth of a step from {format_count(hidden)} tokens a step on (--accumulate)"
            )
        return lines


def _divided(shares: dict[str, float]) -> str:
    """Shares that make 1, in words."""
    *parts, (last, _) = [(place, share) for place, share in shares.items() if share > 0]
    return ", ".join([*(f"{share:.1%} {place}" for place, share in parts), f"else {last}" if parts else last])


def _shortfalls(tiers: dict[str, dict[str, int]]) -> list[str]:
    return [
        f"{tier} needs {format_bytes(room['need'])} and has {format_bytes(room['have'])}"
        for tier, room in tiers.items()
        if room["need"] > room["have"]
    ]


def saves_state(config: TrainConfig, plan: Plan) -> str | None:
    """None if checkpoints can be made and resumed from exactly, else the reason why not."""
    if plan.engine != "deepspeed":
        return None
    if plan.placement.optimizer == "nvme":
        return "stock DeepSpeed loses moments of an NVMe optimizer on resume, and cannot export its checkpoints"
    if config.optim.states == "8bit":
        return "the 8-bit moments live in DeepSpeed's flat buffers, which cannot be saved by weight"
    return None
