"""Report of a run: report.html with planned and measured figures, at its end with advice; calibrate later plans.

The advice names settings that would make the run faster or smaller, found by replanning with one change each; its
figures are predictions, the same that `offload-train plan` prints with these flags on this machine. The ratios of
measured to predicted seconds are stored in the rate cache, from which later plans on this machine read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from offload_trainer.errors import TrainerError, UserError
from offload_trainer.plan.engines import combination_mistakes
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import resolve_and_plan
from offload_trainer.plan.step_time import steady_ratios, tokens_that_hide_the_update
from offload_trainer.plan.tiered.spec import TierSizes
from offload_trainer.run.build import Setup
from offload_trainer.run.planning import Planned
from offload_trainer.storage.atomic_io import bytes_below
from offload_trainer.telemetry.metrics import (
    EvalRecord,
    StepRecord,
    median_phases,
    read_evaluations,
    read_metrics,
    steady,
)
from offload_trainer.telemetry.report import report_page
from offload_trainer.trainer import Job
from offload_trainer.units import format_bytes, format_count, format_seconds

_FASTER = 1.02  # least speed-up in tokens/s worth a line
_SMALLER = 0.05  # least saving worth a line, as a share of a tier's bytes
_MOST = 4  # lines under each heading
FASTER, SMALLER = "Changes that would make a step faster, by the plan", "Changes that would save memory, by the plan"
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_LOGS = 10**6  # bytes a step; a run that writes less writes logs only, no page files
_TELLING = 3  # least number of steps after the warm-up steps for usable timings


def report(setup: Setup, job: Job) -> None:
    """Write the last report.html of this process, and keep the timing ratios. Does nothing if no step was finished.

    Does nothing on ranks without telemetry.
    """
    if not job.telemetry or not job.telemetry.report:
        return
    output = setup.output
    rows, evaluations = read_metrics(output / "metrics.jsonl"), read_evaluations(output / "evaluations.jsonl")
    if not rows:
        return

    def page() -> str:
        more = [*advice(setup.planned), *wear(rows), ("Notes", setup.plan.notes)]
        return run_page(setup, rows, evaluations, swaps=job.swaps, more=more)

    job.telemetry.report.write(page)
    _keep_ratios(setup, rows)


def run_page(
    setup: Setup,
    rows: Sequence[StepRecord],
    evaluations: Sequence[EvalRecord],
    left: float | None = None,
    *,
    swaps: list[Path],
    more: Sequence[tuple[str, Sequence[str]]] = (),
) -> str:
    """Return the page of a run. `left`: the seconds to its end while it goes on. `more`: headings with lines."""
    planned, measured = _bytes(setup, rows, swaps=swaps)
    return report_page(
        title=f"{setup.model.name}: {setup.plan.homes}",
        rows=rows,
        evaluations=evaluations,
        plan=planned,
        measured={"tiers": measured, "seconds": median_phases(rows)},
        advice=more,
        progress=(setup.train.steps, left),
    )


def wear(rows: Sequence[StepRecord]) -> list[tuple[str, list[str]]]:
    """Return report lines on the bytes written to drives, as a measure of SSD wear; empty if only logs were written."""
    written = [row.nvme_written_bytes or 0 for row in rows]
    each = median(written)
    if each < _LOGS:
        return []
    text = (
        f"{format_bytes(sum(written))} were written in these {len(rows)} steps, {format_bytes(each)} a step, by "
        "the kernel's counters. Each TB of a drive's rated endurance (TBW) lasts "
        f"{format_count(1e12 / each)} such steps"
    )
    return [("Wear of the drives", [text])]


def _bytes(
    setup: Setup, rows: Sequence[StepRecord], *, swaps: list[Path]
) -> tuple[dict[str, Any], dict[str, int | None]]:
    """Return the plan as JSON and the measured bytes of each tier; drive traffic per step is added as a tier."""
    plan, output = setup.plan, setup.output
    measured: dict[str, int | None] = {}
    measured["ram"] = max(row.host_rss_bytes for row in rows) if plan.world == 1 else None
    measured["gpu"] = max(row.device_peak_bytes for row in rows)
    for drive, swap in zip(setup.drives, swaps, strict=False):
        measured[str(drive.resolve())] = bytes_below(swap)
    measured[str(output.expanduser().absolute())] = sum(
        bytes_below(output / left) for left in ("checkpoints", "export")
    )
    planned = plan.to_json() | {"seconds": plan.forecast.in_line}
    on_drives = [moved for moved in plan.traffic if moved.place != "device"]
    for way, bytes_of in (("read", "nvme_read_bytes"), ("written", "nvme_written_bytes")):
        counted = [getattr(row, bytes_of) for row in steady(rows)]
        name = f"{way} on drives, a step"
        planned["tiers"][name] = {"need": plan.nodes * sum(getattr(moved, way) for moved in on_drives)}
        measured[name] = int(median(counted)) if None not in counted else None
    return planned, measured


def _keep_ratios(setup: Setup, rows: Sequence[StepRecord]) -> None:
    """Print measured / predicted seconds per phase and store the stable ratios for later plans."""
    from offload_trainer.machine.rate_cache import keep_ratios

    plan, log = setup.plan, setup.log
    seconds, rows = median_phases(rows), steady(rows)
    off = {
        phase: seconds[phase] / known for phase, known in plan.forecast.in_line.items() if known and phase in seconds
    }
    if not off or len(rows) < _TELLING:
        return
    log.say("measured / predicted seconds: " + ", ".join(f"{phase} {ratio:.2f}" for phase, ratio in off.items()))
    try:
        taken = {phase: [row.phases.get(phase, 0.0) for row in rows] for phase in off}
        keep_ratios(
            setup.planned.machine,
            steady_ratios(plan.forecast, taken, engine=setup.work.timed_as(plan.engine), ranks=plan.world),
        )
    except (OSError, TrainerError) as error:  # the run itself has succeeded
        log.say(f"note: these ratios could not be saved for later plans: {error}")


# -- advice ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Advice:
    """One change of the configuration, and the plan with it."""

    description: str  # what changes
    words: str  # flags and keys that make it
    plan: Plan

    @property
    def is_ram_share(self) -> bool:
        """True if the change is another share of the state in RAM."""
        return self.words.startswith("--ram-fraction")

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
    picked = _without_most_shares([one for _, one in faster])
    smaller = [one for one in found if one.plan.fits and one not in picked and one.saved(now)]
    smaller.sort(key=lambda one: -sum(one.saved(now).values()))
    of_shares = [one for one in smaller if one.is_ram_share][1:]  # show only the share that saves most
    smaller = [one for one in smaller if one not in of_shares]
    lines = [_faster(one, now) for one in picked[:_MOST]]
    if now.forecast.step is None:
        lines = ["unknown: time this machine first, with `offload-train bench` and the same arguments"]
    saves = []
    for one in smaller[:_MOST]:
        step, before = one.plan.forecast.step, now.forecast.step
        cost = f"; {_seconds(step)} a step instead of {_seconds(before)}" if step and before else ""
        saves.append(f"{one.description} ({one.words}): {_rooms(one, now)}{cost}")
    parts = [(FASTER, lines), (SMALLER, saves)]
    return [(heading, lines) for heading, lines in parts if lines]


def _without_most_shares(faster: list[Advice]) -> list[Advice]:
    """Select the changes to show: all that fit, but only the best RAM share.

    The smallest RAM share that does not fit is added if it is faster than the best that does.
    """
    shares = [one for one in faster if one.is_ram_share]
    fitting = [one for one in shares if one.plan.fits][:1]
    beyond = [one for one in shares if not one.plan.fits]
    beyond = [one for one in beyond if not fitting or (one.gain(fitting[0].plan) or 0) >= _FASTER][-1:]
    return [one for one in faster if one in (*fitting, *beyond) or (one not in shares and one.plan.fits)]


def _tried(planned: Planned) -> Iterator[Advice]:
    """Yield each possible change with its plan; skip changes that conflict with the configuration.

    The run's other choices stay, such as the number of blocks that it checkpoints.
    """
    now, shape, machine = planned.plan, planned.source.shape, planned.machine
    for description, words, (section, update) in _changes(planned):
        changed = getattr(planned.config, section).model_copy(update=update)
        config = planned.config.model_copy(update={section: changed})
        if combination_mistakes(config):
            continue
        try:
            _, plan = resolve_and_plan(config, shape, machine, world=now.world, nodes=now.nodes)
        except UserError:
            continue
        yield Advice(description, words, plan)


def _changes(planned: Planned) -> Iterator[tuple[str, str, tuple[str, dict[str, Any]]]]:
    """Yield (description, flags, (section, keys)) for each change to try."""
    config, plan, sizes = planned.config, planned.plan, planned.plan.sizes
    if isinstance(sizes, TierSizes) and config.placement.nvme:
        for share in _SHARES:
            if share != sizes.ram_fraction and share <= round(1 - sizes.gpu_fraction, 9):
                description = f"{share:.0%} of the optimizer state in RAM"
                yield description, f"--ram-fraction {share:g}", ("placement", {"ram_fraction": share})
    yield from _changes_of_rows(planned)
    for other, does in (("off", "stores all activations"), ("on", "recomputes activations")):
        if other != config.model.activation_checkpointing:
            description = f"gradient checkpointing {other}, which {does}"
            yield description, f"model.activation_checkpointing={other}", ("model", {"activation_checkpointing": other})
    if not isinstance(sizes, TierSizes):
        return
    for states in ("bf16", "8bit") if config.optim.moment_dtype == "fp32" else ():
        description = f"moments in {states}, which changes the results"
        yield description, f"optim.moment_dtype={states}", ("optim", {"moment_dtype": states})
    for home in ("nvme",) if planned.machine.gpu is None else ("cpu", "nvme"):  # without a GPU, device memory is RAM
        if home != plan.placement.params and (home == "cpu" or config.placement.nvme):
            yield f"weights on {home}", f"--params {home}", ("placement", {"params": home})


def _changes_of_rows(planned: Planned) -> Iterator[tuple[str, str, tuple[str, dict[str, Any]]]]:
    """Yield changes of the batch: four times the tokens per step, and other micro-batch sizes for the same tokens."""
    train, tokens = planned.config.train, 4 * planned.plan.tokens_per_step
    description, rows, times = (
        f"4 x the tokens a step, {format_count(tokens)}",
        train.micro_batch_size,
        train.gradient_accumulation_steps,
    )
    hidden = tokens_that_hide_the_update(planned.plan.forecast, tokens=planned.plan.tokens_per_step)
    if hidden and hidden > tokens:
        description += f" (from {format_count(hidden)} on, a step waits for the update at most 10% of its time)"
    ways = [(description, rows, 4 * times)]
    ways += [(f"micro-batches of {2 * rows} rows", 2 * rows, times // 2)] if times % 2 == 0 else []
    ways += [(f"micro-batches of {rows // 2} rows", rows // 2, 2 * times)] if rows % 2 == 0 else []
    for what, micro_batch, accumulate in ways:
        words = f"--micro-batch {micro_batch} --accumulate {accumulate}"
        yield what, words, ("train", {"micro_batch_size": micro_batch, "gradient_accumulation_steps": accumulate})


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
    return f"{one.description} ({one.words}): {gain}; {_rooms(one, now)}"


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
