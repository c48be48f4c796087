"""Advice in a run's report: settings that would make it faster or smaller, found by replanning with one change each.

    Planned ── configurations with one change each ── settle_and_plan ── Advice (faster | smaller, flags, figures)

All figures are predictions, the same that `offload-train plan` prints with these flags on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from offload_trainer.errors import UserError
from offload_trainer.plan.engines import combination_mistakes
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import resolve_and_plan
from offload_trainer.plan.step_time import tokens_that_hide_the_update
from offload_trainer.plan.tiered.spec import TierSizes
from offload_trainer.run.planning import Planned
from offload_trainer.units import format_bytes, format_count, format_seconds

_FASTER = 1.02  # least speed-up in tokens/s worth a line
_SMALLER = 0.05  # least saving worth a line, as a share of a tier's bytes
_MOST = 4  # lines under each heading
FASTER, SMALLER = "Changes that would make a step faster, by the plan", "Changes that would save memory, by the plan"
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)

Update = tuple[str, dict[str, Any]]  # a section, its keys and values


@dataclass(frozen=True)
class Advice:
    """One change of the configuration, and the plan with it."""

    told: str  # description of the change
    words: str  # flags and keys that make it
    plan: Plan

    def gain(self, now: Plan) -> float | None:
        """Return the speed-up in tokens/s over the plan `now`; None if either has no predicted time."""
        step, before = self.plan.forecast.step, now.forecast.step
        return self.plan.tokens_per_step / step / (now.tokens_per_step / before) if step and before else None

    def saved(self, now: Plan) -> dict[str, int]:
        """Return the bytes saved on GPU and in RAM, for tiers where the saving is more than 5 %."""
        fewer = {tier: now.tiers[tier]["need"] - self.plan.tiers[tier]["need"] for tier in ("gpu", "ram")}
        return {tier: less for tier, less in fewer.items() if less > _SMALLER * now.tiers[tier]["need"]}


def advice(planned: Planned) -> list[tuple[str, list[str]]]:
    """Return (heading, lines) for faster and for smaller settings; headings without lines are left out."""
    now = planned.plan
    found = list(_tried(planned))
    gains = [(one.gain(now), one) for one in found]
    faster = sorted((pair for pair in gains if pair[0] and pair[0] >= _FASTER), key=lambda pair: -(pair[0] or 0))
    picked = _nearest([one for _, one in faster])
    smaller = [one for one in found if one.plan.fits and one not in picked and one.saved(now)]
    smaller.sort(key=lambda one: -sum(one.saved(now).values()))
    of_shares = [one for one in smaller if _is_share(one)][1:]  # show only the share that saves most
    smaller = [one for one in smaller if one not in of_shares]
    lines = [_faster(one, now) for one in picked[:_MOST]]
    if now.forecast.step is None:
        lines = ["unknown: time this machine first, with `offload-train bench` and the same arguments"]
    parts = [(FASTER, lines), (SMALLER, [_smaller(one, now) for one in smaller[:_MOST]])]
    return [(heading, lines) for heading, lines in parts if lines]


def _nearest(faster: list[Advice]) -> list[Advice]:
    """Select the changes to show: all that fit, but only the best RAM share.

    The smallest RAM share that does not fit is added if it is faster than the best that does.
    """
    shares = [one for one in faster if _is_share(one)]
    fitting = [one for one in shares if one.plan.fits][:1]
    beyond = [one for one in shares if not one.plan.fits and (not fitting or _gains_more(one, fitting[0]))][-1:]
    return [one for one in faster if one in (*fitting, *beyond) or (one not in shares and one.plan.fits)]


def _is_share(one: Advice) -> bool:
    return one.words.startswith("--ram-fraction")


def _gains_more(one: Advice, other: Advice) -> bool:
    return (one.gain(other.plan) or 0) >= _FASTER


def _tried(planned: Planned) -> Iterator[Advice]:
    """Yield each possible change with its plan; skip changes that conflict with the configuration."""
    now, shape, machine = planned.plan, planned.source.shape, planned.machine
    for told, words, (section, update) in _changes(planned):
        changed = getattr(planned.config, section).model_copy(update=update)
        config = planned.config.model_copy(update={section: changed})
        if combination_mistakes(config):
            continue
        try:
            yield Advice(told, words, resolve_and_plan(config, shape, machine, world=now.world, nodes=now.nodes)[1])
        except UserError:
            continue


def _changes(planned: Planned) -> Iterator[tuple[str, str, Update]]:
    """Yield (description, flags, (section, keys)) for each change to try."""
    config, plan, sizes = planned.config, planned.plan, planned.plan.sizes
    if isinstance(sizes, TierSizes) and config.placement.nvme:
        for share in _SHARES:
            if share != sizes.ram_fraction and share <= round(1 - sizes.gpu_fraction, 9):
                told = f"{share:.0%} of the optimizer state in RAM"
                yield told, f"--ram-fraction {share:g}", ("placement", {"ram_fraction": share})
    yield from _changes_of_rows(planned)
    other, does = ("off", "stores all activations") if plan.checkpointing else ("on", "recomputes activations")
    told = f"gradient checkpointing {other}, which {does}"
    yield told, f"model.activation_checkpointing={other}", ("model", {"activation_checkpointing": other})
    if not isinstance(sizes, TierSizes):
        return
    for states in ("bf16", "8bit") if config.optim.moment_dtype == "fp32" else ():
        told = f"moments in {states}, which changes the results"
        yield told, f"optim.moment_dtype={states}", ("optim", {"moment_dtype": states})
    for home in ("nvme",) if planned.machine.gpu is None else ("cpu", "nvme"):  # without a GPU, device memory is RAM
        if home != plan.placement.params and (home == "cpu" or config.placement.nvme):
            yield f"weights on {home}", f"--params {home}", ("placement", {"params": home})


def _changes_of_rows(planned: Planned) -> Iterator[tuple[str, str, Update]]:
    """Yield changes of the batch: four times the tokens per step, and other micro-batch sizes for the same tokens."""
    train, tokens = planned.config.train, 4 * planned.plan.tokens_per_step
    told, rows, times = (
        f"4 x the tokens a step, {format_count(tokens)}",
        train.micro_batch_size,
        train.gradient_accumulation_steps,
    )
    hidden = tokens_that_hide_the_update(planned.plan.forecast, tokens=planned.plan.tokens_per_step)
    if hidden and hidden > tokens:
        told += f" (from {format_count(hidden)} on, a step waits for the update at most 10% of its time)"
    ways = [(told, rows, 4 * times)]
    ways += [(f"micro-batches of {2 * rows} rows", 2 * rows, times // 2)] if times % 2 == 0 else []
    ways += [(f"micro-batches of {rows // 2} rows", rows // 2, 2 * times)] if rows % 2 == 0 else []
    for what, micro_batch, accumulate in ways:
        words = f"--micro-batch {micro_batch} --accumulate {accumulate}"
        yield what, words, ("train", {"micro_batch_size": micro_batch, "gradient_accumulation_steps": accumulate})


# -- text ------------------------------------------------------------------------------------------------------------


def _faster(one: Advice, now: Plan) -> str:
    step, before = one.plan.forecast.step, now.forecast.step
    assert step is not None
    assert before is not None
    if one.plan.tokens_per_step == now.tokens_per_step:
        gain = f"{_seconds(step)} a step instead of {_seconds(before)}, {_seconds(before - step)} less"
    else:
        speeds = one.plan.tokens_per_step / step, now.tokens_per_step / before
        gain = f"{format_count(speeds[0])} tokens/s instead of {format_count(speeds[1])}"
        gain += f", since the update is {_update(one.plan):.0%} of such a step instead of {_update(now):.0%}"
    return f"{one.told} ({one.words}): {gain}; {_rooms(one, now)}"


def _smaller(one: Advice, now: Plan) -> str:
    step, before = one.plan.forecast.step, now.forecast.step
    cost = f"; {_seconds(step)} a step instead of {_seconds(before)}" if step and before else ""
    return f"{one.told} ({one.words}): {_rooms(one, now)}{cost}"


def _rooms(one: Advice, now: Plan) -> str:
    """Return the tiers whose size changes, and whether the plan fits."""
    changed = [
        f"{tier} {format_bytes(room['need'])} instead of {format_bytes(now.tiers[tier]['need'])}"
        for tier, room in one.plan.tiers.items()
        if abs(room["need"] - now.tiers[tier]["need"]) > _SMALLER * now.tiers[tier]["need"]
    ]
    fits = "it fits" if one.plan.fits else "it does not fit: " + "; ".join(one.plan.shortfalls())
    return "; ".join([*changed, fits])


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 60 else format_seconds(seconds)


def _update(plan: Plan) -> float:
    """Return the share of a step spent in the update, without its part that overlaps other phases."""
    update = plan.forecast.seconds["update"]
    return (update - plan.forecast.hidden) / plan.forecast.step if update and plan.forecast.step else 0.0
