"""Measure one way to train and place a model: build it, time consecutive steps, and compare with the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpu_stages.stage import Failure, Stage, Worker, middle, outcome_of, spread

COLUMNS = {
    "case": "case",
    "homes": "where the plan puts it",
    "tokens": "tokens a step",
    "rate": "tokens/s",
    "mfu": "MFU",
    "step_spread": "step s (smallest-largest)",
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "planned_step": "planned step s",
    "gpu_planned": "GPU planned GB",
    "gpu_peak": "allocated GB",
    "gpu_reserved": "reserved GB",
    "retries": "allocation retries",
    "rss_planned": "host planned GB",
    "rss": "host peak GB",
    "read": "read GB a step",
    "written": "written GB a step",
    "skipped": "skipped",
    "build": "built in s",
}
MFU = (
    "MFU: operations of the shape's products, twice as many in the backward, what checkpointing recomputes not "
    "counted, over the step's seconds, as a share of what one product of two matrices reached here"
)
IN_A_ROW = "Steps are timed in a row, nothing stopped between them: work that one leaves to the next is in the next"
FILLED = "Weights are filled for benchmarks (scripts/gpu_stages/fill.py): no losses are meant"
WARM = 1  # untimed steps


@dataclass(frozen=True)
class Case:
    """One way to train: arguments of `offload-train`, and the foreign engine (peers.py), if any."""

    name: str
    words: Sequence[str]
    peer: str | None = None


def measure(
    stage: Stage, case: Case, *, steps: int, dtype: str, size: int, cap_bytes: int | None = None
) -> dict[str, Any] | None:
    """Measure a case and add its row to the record, whatever the outcome; return the row if steps were timed.

    `size`: rows of the square matrices whose product is timed.
    """
    row: dict[str, Any] = {"case": case.name, "words": " ".join(case.words)}
    try:
        with stage.process(case.name) if cap_bytes is None else stage.worker(case.name, cap_bytes=cap_bytes) as worker:
            product = worker.ask("product", dtype=dtype, size=size)["rate"]
            about = worker.build(case.words, fill=True, peer=case.peer)
            row |= _of_plan(about, ours=case.peer is None) | {"product": product, "kernel": about["kernel"]}
            row |= _of_steps(about, in_a_row(stage, worker, steps), product=product)
    except Failure as failure:
        stage.record.add(str(failure), **row)
        return None
    over = cap_bytes is not None and row["gpu_reserved"] > cap_bytes / 1e9
    stage.record.add("failed: more than the cap" if over else outcome_of(about), **row)
    return row


def in_a_row(stage: Stage, worker: Worker, steps: int) -> dict[str, Any]:
    """Take warm-up steps, then as many of `steps` as the remaining time allows, without a pause."""
    warm = worker.ask("steps", count=WARM)["steps"][-1]["step"]
    return worker.ask("steps", count=max(1, min(steps, int(stage.left() / (2 * warm)))))


def _of_plan(about: dict[str, Any], *, ours: bool) -> dict[str, Any]:
    plan, seconds = about["plan"], about["plan"]["seconds"]
    found = {"tokens": about["tokens_per_step"], "build": about["build_seconds"], "plan": plan}
    if not ours:
        return found
    return found | {
        "homes": homes(plan),
        "planned_step": None if None in seconds.values() else sum(seconds.values()),
        "gpu_planned": plan["tiers"].get("gpu", {"need": 0})["need"] / 1e9,
        "rss_planned": plan["tiers"]["ram"]["need"] / 1e9,
    }


def homes(plan: dict[str, Any]) -> str:
    """Describe the placement of weights and optimizer state in a plan's JSON."""
    chosen, sizes = plan["chosen"], plan["chosen"]["sizes"] or {}
    if chosen["engine"] != "tiered":
        return f"{chosen['engine']}, weights {chosen['params']}, state {chosen['optimizer']}"
    gpu, ram = sizes["gpu_fraction"], sizes["ram_fraction"]
    drive = max(0.0, 1 - gpu - ram)
    return f"weights {chosen['params']}; state {gpu:.1%} GPU, {ram:.1%} RAM, {drive:.1%} drive"


def _of_steps(about: dict[str, Any], found: dict[str, Any], *, product: float) -> dict[str, Any]:
    steps, seconds = found["steps"], middle(found["steps"], "step")
    return {
        **{key: middle(steps, key) for key in ("step", "forward", "backward", "update")},
        "step_spread": spread(steps, "step"),
        "rate": about["tokens_per_step"] / seconds,
        "mfu": about["flops_per_step"] / seconds / product,
        "gpu_peak": max(step["device_peak"] for step in steps) / 1e9,
        "gpu_reserved": found["reserved"] / 1e9,
        "gpu_in_use": found["in_use"] / 1e9,
        "retries": steps[-1]["retries"],
        "rss": max(step["peak_rss"] for step in steps) / 1e9,
        "read": middle(steps, "read_bytes") / 1e9,
        "written": middle(steps, "written_bytes") / 1e9,
        "skipped": f"{sum(step['skipped'] for step in steps)} of {len(steps)}",
        "loss": steps[-1]["loss"],
        "steps": steps,
    }
