"""Final report of a run: write report.html with planned and measured figures, and calibrate later plans.

The ratios of measured to predicted seconds are stored in the rate cache, from which later plans on this machine read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from offload_trainer.errors import TrainerError
from offload_trainer.plan.step_time import steady_ratios
from offload_trainer.run.advice import advice
from offload_trainer.run.build import Setup
from offload_trainer.storage.atomic_io import bytes_below
from offload_trainer.telemetry.metrics import StepRecord, median_phases, read_evaluations, read_metrics, steady
from offload_trainer.telemetry.report import write_report
from offload_trainer.units import format_bytes, format_count

_LOGS = 10**6  # bytes a step; a run that writes less writes logs only, no page files
_TELLING = 3  # least number of steps after the warm-up steps for usable timings


def report(setup: Setup, *, swaps: list[Path]) -> None:
    """Write report.html and keep the timing ratios. Does nothing if no step was finished."""
    plan, output = setup.planned.plan, setup.output
    rows = read_metrics(output / "metrics.jsonl")
    if not rows:
        return
    planned, measured = _bytes(setup, rows, swaps=swaps)
    seconds = median_phases(rows)
    write_report(
        output / "report.html",
        title=f"{setup.planned.config.model.name}: {plan.homes}",
        rows=rows,
        evaluations=read_evaluations(output / "evaluations.jsonl"),
        plan=planned,
        measured={"tiers": measured, "seconds": seconds},
        said=[*advice(setup.planned), *wear(rows), ("Notes", plan.notes)],
    )
    _keep_ratios(setup, steady(rows), seconds=seconds)


def wear(rows: Sequence[StepRecord]) -> list[tuple[str, list[str]]]:
    """Return report lines on the bytes written to drives, as a measure of SSD wear; empty if only logs were written."""
    written = [row.nvme_written_bytes or 0 for row in rows]
    each = median(written)
    if each < _LOGS:
        return []
    told = (
        f"{format_bytes(sum(written))} were written in these {len(rows)} steps, {format_bytes(each)} a step, by "
        "the kernel's counters. Each TB of a drive's rated endurance (TBW) lasts "
        f"{format_count(1e12 / each)} such steps"
    )
    return [("Wear of the drives", [told])]


def _bytes(
    setup: Setup, rows: Sequence[StepRecord], *, swaps: list[Path]
) -> tuple[dict[str, Any], dict[str, int | None]]:
    """Return the plan as JSON and the measured bytes of each tier; drive traffic per step is added as a tier."""
    plan, output = setup.planned.plan, setup.output
    measured: dict[str, int | None] = {}
    measured["ram"] = max(row.host_rss_bytes for row in rows) if plan.world == 1 else None
    measured["gpu"] = max(row.device_peak_bytes for row in rows)
    for drive, swap in zip(setup.planned.config.placement.nvme, swaps, strict=False):
        measured[str(Path(drive).expanduser().resolve())] = bytes_below(swap)
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


def _keep_ratios(setup: Setup, rows: Sequence[StepRecord], *, seconds: dict[str, float]) -> None:
    """Print measured / predicted seconds per phase and store the stable ratios for later plans.

    `rows`: the steps after the warm-up steps.
    """
    from offload_trainer.machine.rate_cache import keep_ratios

    plan, log = setup.planned.plan, setup.log
    off = {
        phase: seconds[phase] / known for phase, known in plan.forecast.in_line.items() if known and phase in seconds
    }
    if not off or len(rows) < _TELLING:
        return
    log.say("measured / predicted seconds: " + ", ".join(f"{phase} {ratio:.2f}" for phase, ratio in off.items()))
    try:
        taken = {phase: [row.phases.get(phase, 0.0) for row in rows] for phase in off}
        keep_ratios(setup.planned.machine, steady_ratios(plan.forecast, taken, engine=plan.engine, ranks=plan.world))
    except (OSError, TrainerError) as error:  # the run itself has succeeded
        log.say(f"note: these ratios could not be saved for later plans: {error}")
