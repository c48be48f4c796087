"""The result of planning: the chosen placement, its bytes per tier, the forecast of a step, and the rejected options.

`Plan` also renders itself as text (`describe`) and as the JSON of `plan --json` (`to_json`).
"""

from dataclasses import asdict, dataclass, field
from functools import partial
from shlex import quote
from textwrap import wrap
from typing import Any

from offload_trainer.common.errors import UserError
from offload_trainer.common.units import format_bytes, format_count, format_seconds, screen_columns
from offload_trainer.plan.deepspeed import ZeroSizes
from offload_trainer.plan.step_time import DEVICE_COPIES, PHASES, Forecast, Traffic, tokens_that_hide_the_update
from offload_trainer.plan.tiered.spec import TierSizes
from offload_trainer.plan.tiers import GPU_NAME, RAM_NAME, Item, Placement
from offload_trainer.plan.workload import Workload

_LINES, _REJECTED = 25, 2  # lines of the screen, and placements that it rejects by name


# Filesystems of which a plan uses several directories: of each of these, all of the run's directories there, and the
# free bytes.
Shared = dict[str, tuple[tuple[str, ...], int]]


@dataclass(frozen=True)
class Plan:
    """A placement with its memory use and forecast, in bytes per node unless stated otherwise."""

    engine: str
    title: str  # the engine's name for display
    placement: Placement
    sizes: ZeroSizes | TierSizes
    homes: str  # the placement of weights and optimizer state, in words
    uses_drives: bool
    cannot_save: str | None  # why this placement cannot save and resume exactly; None: it can
    work: Workload  # the step, with the numbers that the plan chose
    items: tuple[Item, ...]
    tiers: dict[str, dict[str, int]]  # bytes by the tier's name: {"need": ..., "have": ...}
    traffic: tuple[Traffic, ...]
    links: tuple[Traffic, ...]  # between ranks; for the network and the GPUs "read" means received
    forecast: Forecast
    rejected: tuple[tuple[str, str], ...]  # (placement, reason)
    notes: tuple[str, ...]
    faster: tuple[tuple[float, str], ...] = ()  # (seconds per step, setting) of settings that change results
    shared: Shared = field(default_factory=dict)
    too_large: str = ""  # a sentence about a unit of the model that exceeds the device's memory, or ""
    fits_with: tuple[str, ...] | None = None  # words of the command with which it would fit; None: not looked for

    @property
    def fits(self) -> bool:
        return not self.shortfalls()

    def shortfalls(self) -> list[str]:
        """Return one sentence for each tier that is too small; directories on the same filesystem share one."""
        sentences = dict[str, str]()
        for tier, room in self.tiers.items():
            if room["need"] > room["have"]:
                first, told = tier, f"{tier} needs {format_bytes(room['need'])} and has {format_bytes(room['have'])}"
                if tier in self.shared:
                    directories, free = self.shared[tier]
                    needs = [f"{format_bytes(self.tiers[each]['need'])} in {each}" for each in directories]
                    first = directories[0]
                    told = f"one filesystem has {format_bytes(free)} free for {' and '.join(needs)}"
                sentences[first] = told
        return list(sentences.values())

    def refuse(self, *, force: bool) -> None:
        """Raise UserError if the plan does not fit, unless `force`."""
        if not self.fits and not force:
            missing = [*self.shortfalls(), *([self.too_large] if self.too_large else [])]
            more = ""
            if self.fits_with:
                more = f". It fits with {', or '.join(f'`{words}`' for words in self.fits_with)} added to the command"
            elif self.fits_with is not None:
                more = (
                    ". Not even three of these together make it fit: fewer checkpoints, drives, 8-bit moments, fewer "
                    "or shorter rows. It takes a smaller model, or a larger machine"
                )
            raise UserError("this does not fit: " + "; ".join(missing) + f" (--force runs it anyway){more}")

    def to_json(self) -> dict[str, Any]:
        """Return the output of `plan --json`, a stable format. Seconds are null if a rate was not measured."""
        return {
            "fits": self.fits,
            "chosen": {
                "engine": self.engine,
                "homes": self.homes,
                "params": self.placement.params,
                "optimizer": self.placement.optimizer,
                "zero_stage": self.placement.stage if isinstance(self.sizes, ZeroSizes) else None,
                "checkpointing": self.work.checkpointed > 0,
                "checkpointed_blocks": self.work.checkpointed,
                "seq_len": self.work.seq_len,
                "micro_batch": self.work.micro_batch,
                "tokens_per_step": self.work.tokens,
                "ranks": self.work.world,
                "nodes": self.work.nodes,
                "sizes": asdict(self.sizes),
            },
            "tiers": {name: dict(room) for name, room in self.tiers.items()},
            "items": [asdict(item) for item in self.items],
            "seconds": dict(self.forecast.seconds),
            "hidden": self.forecast.hidden,
            "if_clipped": self.forecast.if_clipped,
            "bounds": [asdict(bound) for bound in self.forecast.bounds],
            "traffic": [asdict(moved) for moved in self.traffic],
            "links": [asdict(moved) for moved in self.links],
            "faster": [{"seconds": seconds, "words": words} for seconds, words in self.faster],
            "too_large": self.too_large or None,
            "rejected": [{"placement": name, "reason": reason} for name, reason in self.rejected],
            "notes": list(self.notes),
        }

    def describe(self, *, steps: int | None = None, full: bool = False) -> str:
        """Return the plan on one screen, or with `full` in lines of any number and length. `steps`: of the run."""
        work, layers, count = self.work, self.work.shape.layers, self.work.checkpointed
        some = "" if count == layers else f" of the first {count} of {layers} blocks"
        head = [
            f"plan: {format_count(work.shape.parameters)} parameters, {format_count(work.tokens)} tokens a step in "
            f"micro-batches of {work.micro_batch} x {work.seq_len}, {self.title}",
            f"  {self.homes}{f'; gradient checkpointing{some}' if count else ''}",
            *self._describe_tiers(full=full),
            *self._describe_seconds(steps),
        ]
        nearest = sorted(self.rejected, key=lambda one: not one[1].startswith("fits"))[:_REJECTED]
        rejected = [f"  rejected: {name}: {reason}" for name, reason in (self.rejected if full else nearest)]
        notes = [f"  note: {note}" for note in self.notes]
        if full:
            return "\n".join([*head, *rejected, *notes])
        fold = partial(
            wrap, width=screen_columns(), subsequent_indent="      ", break_on_hyphens=False, break_long_words=False
        )
        lines, last = [line for told in head for line in fold(told)], list[str]()
        for told, into in (*((note, last) for note in notes), *((one, lines) for one in rejected)):
            if len(lines) + len(last) + len(folded := fold(told)) < _LINES:  # rejections go first where room is short
                into += folded
        return "\n".join([*lines, *last, "  more: all items and rejections: `offload-train plan ... --explain`"])

    def _describe_tiers(self, *, full: bool) -> list[str]:
        tiers = [tier for tier, room in self.tiers.items() if tier != GPU_NAME or any(room.values())]
        if not full:  # tiers that do not fit come first
            tiers.sort(key=lambda tier: self.tiers[tier]["need"] <= self.tiers[tier]["have"])
        width, lines = max(map(len, tiers)), list[str]()
        for tier in tiers:
            room = self.tiers[tier]
            verdict = f"of {format_bytes(room['have'])}"
            if room["need"] > room["have"]:
                if tier in self.shared:
                    directories, free = self.shared[tier]
                    others = " and ".join(each for each in directories if each != tier)
                    verdict = f"of {format_bytes(free)} on the filesystem shared with {others}"
                verdict += "   DOES NOT FIT"
            elif not room["need"] and tier not in (GPU_NAME, RAM_NAME):
                verdict += ": not used by this plan"
            lines.append(f"  {tier:<{width}} {format_bytes(room['need']):>8} {verdict}")
            items = [item for item in self.items if item.tier == tier and item.bytes]
            if full:
                lines += [f"    {item.name:<26}{format_bytes(item.bytes):>10}   {item.why}" for item in items]
            elif items:
                largest = sorted(items, key=lambda item: -item.bytes)[:3]
                lines[-1] += f": {'; '.join(f'{item.name} {format_bytes(item.bytes)}' for item in largest)}"
        return [*lines, *([f"  {self.too_large}"] if self.too_large else [])]

    def _describe_seconds(self, steps: int | None) -> list[str]:
        """Return the lines about seconds; without a forecast, the missing rates and the command that measures them."""
        found, step, of_step = self.forecast, self.forecast.step, self.work.tokens
        if step is None:
            untimed = dict.fromkeys(bound.what for bound in found.bounds if bound.seconds is None)
            drives = dict.fromkeys(moved.place for moved in self.traffic if moved.place != DEVICE_COPIES)
            command = " ".join(["offload-train bench", *(f"--nvme {quote(drive)}" for drive in drives)])
            return [
                f"  seconds a step: unknown, this machine was not timed for: {'; '.join(untimed)}",
                f"    run `{command}` once to time it",
            ]
        total = f", {format_seconds(steps * step)} for {steps} steps" if steps else ""
        lines = [f"  a step takes {format_seconds(step)}, {format_count(of_step / step)} tokens/s{total}"]
        for phase in PHASES:
            seconds = format_seconds(found.seconds[phase] or 0.0)
            lines.append(f"    {phase:<10}{seconds:>9}   {found.slowest(phase).what}")
        if found.behind:
            hidden, whole = format_seconds(found.hidden), format_seconds(found.seconds["update"] or 0.0)
            where = "the backward and the next forward" if found.ahead else "the next forward"
            lines.append(f"    {hidden} of the {whole} update overlap with {where} (tiered.overlap)")
        if found.ahead:
            longer = format_seconds(found.if_clipped)
            lines.append(f"    if the gradient turns out to need clipping or the step is skipped: up to {longer} more")
        tokens = tokens_that_hide_the_update(found, tokens=of_step)
        if tokens > of_step:
            least = f"from {format_count(tokens)} tokens a step on (--accumulate)"
            lines.append(f"    {least}, a step waits for the update at most 10% of its time")
        told = " or ".join(f"{format_seconds(seconds)} a step with {words}" for seconds, words in self.faster)
        return [*lines, f"  faster, with other results: {told}"] if told else lines
