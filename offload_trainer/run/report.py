"""Report of a run: report.html with planned and measured figures, and plans of other settings; calibrate later plans.

The other plans have one change each, and their figures are those that `offload-train plan` prints with these flags on
this machine. The ratios of measured to predicted seconds are stored in the rate cache, from which later plans on this
machine read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from offload_trainer.errors import TrainerError, UserError
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import resolve_and_plan
from offload_trainer.plan.step_time import steady_ratios
from offload_trainer.plan.tiered.spec import TierSizes
from offload_trainer.run.build import Setup
from offload_trainer.run.planning import Planned
from offload_trainer.settings import with_words
from offload_trainer.storage.atomic_io import bytes_below
from offload_trainer.telemetry.metrics import StepRecord, median_phases, read_evaluations, read_metrics, steady
from offload_trainer.telemetry.report import predicted_row, report_page
from offload_trainer.trainer import Job
from offload_trainer.units import format_bytes, format_count, format_seconds

_FASTER = 1.02  # least speed-up in tokens/s worth a row
_SMALLER = 0.05  # least saving worth a row, as a share of a tier's bytes
_MOST = 10  # rows of other plans
_MOST_ROWS = 800  # steps of which a page is made
_TELLING = 3  # least number of steps after the warm-up steps for usable timings


def report(setup: Setup, job: Job) -> None:
    """Write the last report.html of this process, and keep the timing ratios. Does nothing if no step was finished.

    Does nothing on ranks without telemetry.
    """
    if not job.telemetry or not job.telemetry.report:
        return
    rows = read_metrics(setup.output / "metrics.jsonl", most=_MOST_ROWS)
    if rows:
        job.telemetry.report.end()
        _keep_ratios(setup, rows)


def run_page(setup: Setup, left: float | None, failed: bool, *, swaps: list[Path]) -> str:
    """Return the page of a run, read from its directory.

    It takes 0.1 s on one core, also after 100,000 steps, since it is made of about 800 of them. `left`: the seconds to
    the end of the run; None: it has ended. The page of a run that has ended without having `failed` has other plans.
    """
    done = left is None and not failed
    rows = read_metrics(setup.output / "metrics.jsonl", most=_MOST_ROWS)
    return report_page(
        title=f"{setup.config.model.name}: {setup.plan.homes}",
        rows=rows,
        evaluations=read_evaluations(setup.output / "evaluations.jsonl"),
        progress=(setup.config.train.steps, left),
        predicted=_predicted(setup, rows, swaps=swaps),
        changes=other_plans(setup.planned) if done else (),
        notes=setup.plan.notes if done else (),
    )


def _predicted(setup: Setup, rows: Sequence[StepRecord], *, swaps: list[Path]) -> list[tuple[str, ...]]:
    """Return rows of predicted and measured numbers: bytes of each tier and of a step's traffic, seconds by phase."""
    if not rows:
        return []
    plan, output, counted = setup.plan, setup.output, steady(rows)
    measured: dict[str, int | None] = {"gpu": max(row.device_peak_bytes for row in rows)}
    measured["ram"] = max(row.host_rss_bytes for row in rows) if plan.world == 1 else None
    for drive, swap in zip(setup.drives, swaps, strict=False):
        measured[str(drive.resolve())] = bytes_below(swap)
    saved = sum(bytes_below(output / left) for left in ("checkpoints", "export"))
    measured[str(output.expanduser().absolute())] = saved
    table = []
    for tier in dict.fromkeys([*plan.tiers, *measured]):
        room = plan.tiers.get(tier, {})
        table += predicted_row(tier, room.get("need"), measured.get(tier), format_bytes, room.get("have"))
    on_drives = [moved for moved in plan.traffic if moved.place != "device"]
    for way, key in (("read", "nvme_read_bytes"), ("written", "nvme_written_bytes")):
        moved = [getattr(row, key) for row in counted]
        need = plan.nodes * sum(getattr(part, way) for part in on_drives)
        table += predicted_row(f"{way} on drives, a step", need, None if None in moved else median(moved), format_bytes)
    forecast, taken = plan.forecast.in_line, median_phases(rows)
    for phase in dict.fromkeys([*forecast, *taken]):
        table += predicted_row(phase, forecast.get(phase), taken.get(phase), format_seconds)
    known = [seconds for seconds in forecast.values() if seconds is not None]
    if taken.keys() == forecast.keys() and len(known) == len(forecast):  # otherwise the ratio would mislead
        table += predicted_row("all phases, added", sum(known), sum(taken.values()), format_seconds)
    return table


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


# -- other plans -------------------------------------------------------------------------------------------------------


def other_plans(planned: Planned) -> list[tuple[str, ...]]:
    """Return a table of the plans with one change each that would be faster, or would fit in less memory.

    Its rows are a head, this plan, and the others, the fastest first. Empty if there are none.
    """
    now, found = planned.plan, []
    for words, plan in _changed(planned):
        before, after = _speed(now), _speed(plan)
        faster = bool(before and after and after >= _FASTER * before)
        needs = [(plan.tiers[tier]["need"], now.tiers[tier]["need"]) for tier in ("gpu", "ram")]
        if faster or (plan.fits and any(need < (1 - _SMALLER) * needed for need, needed in needs)):
            found.append((words, plan))
    if not found:
        return []
    found.sort(key=lambda pair: -(_speed(pair[1]) or 0.0))
    head = ("settings", "a step", "tokens/s", "GPU", "RAM", "")
    return [head, _row("this plan", now), *(_row(words, plan) for words, plan in found[:_MOST])]


def _speed(plan: Plan) -> float | None:
    """Return the predicted tokens per second; None if the machine was not timed."""
    return plan.tokens_per_step / plan.forecast.step if plan.forecast.step else None


def _row(words: str, plan: Plan) -> tuple[str, ...]:
    step, speed = plan.forecast.step, _speed(plan)
    cells = (
        format_seconds(step) if step else "not timed: offload-train bench",
        format_count(speed) if speed else "-",
        *(format_bytes(plan.tiers[tier]["need"]) for tier in ("gpu", "ram")),
        "fits" if plan.fits else "does not fit: " + "; ".join(plan.shortfalls()),
    )
    return (words, *cells)


def _changed(planned: Planned) -> Iterator[tuple[str, Plan]]:
    """Yield (words, the plan with them) for each change; skip those that conflict with the configuration.

    The run's other choices stay, such as the number of blocks that it checkpoints.
    """
    now, shape = planned.plan, planned.source.shape
    for words in _changes(planned):
        with suppress(UserError):
            config = with_words(planned.config, words)
            yield words, resolve_and_plan(config, shape, planned.machine, world=now.world, nodes=now.nodes)[1]


def _changes(planned: Planned) -> Iterator[str]:
    """Yield the words of each change to try."""
    config, plan, sizes = planned.config, planned.plan, planned.plan.sizes
    rows, times = config.train.micro_batch_size, config.train.gradient_accumulation_steps
    yield f"--micro-batch {rows} --accumulate {4 * times}"
    if times % 2 == 0:
        yield f"--micro-batch {2 * rows} --accumulate {times // 2}"
    if rows % 2 == 0:
        yield f"--micro-batch {rows // 2} --accumulate {2 * times}"
    for other in ("off", "on"):
        if other != config.model.activation_checkpointing:
            yield f"model.activation_checkpointing={other}"
    if not isinstance(sizes, TierSizes):
        return
    for share in (0.0, 0.25, 0.5, 0.75, 1.0) if config.placement.nvme else ():
        if share != sizes.ram_fraction and share <= round(1 - sizes.gpu_fraction, 9):
            yield f"--ram-fraction {share:g}"
    for states in ("bf16", "8bit") if config.optim.moment_dtype == "fp32" else ():
        yield f"optim.moment_dtype={states}"
    for home in ("nvme",) if planned.machine.gpu is None else ("cpu", "nvme"):  # without a GPU, device memory is RAM
        if home != plan.placement.params and (home == "cpu" or config.placement.nvme):
            yield f"--params {home}"
