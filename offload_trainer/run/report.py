"""Report of a run: report.html with planned and measured figures; calibrate later plans.

The ratios of measured to predicted seconds are stored in the rate cache, from which later plans on this machine read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from offload_trainer.errors import TrainerError
from offload_trainer.plan.step_time import steady_ratios
from offload_trainer.run.build import Setup
from offload_trainer.storage.atomic_io import bytes_below
from offload_trainer.telemetry.metrics import StepRecord, median_phases, read_evaluations, read_metrics, steady
from offload_trainer.telemetry.report import predicted_row, report_page
from offload_trainer.trainer import Job
from offload_trainer.units import format_bytes, format_seconds

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


def run_page(setup: Setup, left: float | None, *, swaps: list[Path]) -> str:
    """Return the page of a run, read from its directory.

    It takes 0.1 s on one core, also after 100,000 steps, since it is made of about 800 of them. `left`: the seconds to
    the end of the run; None: it has ended.
    """
    rows = read_metrics(setup.output / "metrics.jsonl", most=_MOST_ROWS)
    return report_page(
        title=f"{setup.config.model.name}: {setup.plan.homes}",
        rows=rows,
        evaluations=read_evaluations(setup.output / "evaluations.jsonl"),
        progress=(setup.config.train.steps, left),
        predicted=_predicted(setup, rows, swaps=swaps),
        notes=setup.plan.notes,
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
            steady_ratios(plan.forecast, taken, engine=plan.engine, ranks=plan.world),
        )
    except (OSError, TrainerError) as error:  # the run itself has succeeded
        log.say(f"note: these ratios could not be saved for later plans: {error}")
