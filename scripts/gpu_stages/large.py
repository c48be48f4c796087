"""One large model, one way to place it: built, a few steps, its seconds and bytes beside the plan's."""

from __future__ import annotations

from typing import Any

from gpu_stages.stage import Failure, Stage, Worker, middle

COLUMNS = {
    "case": "case",
    "homes": "where the plan puts it",
    "tokens": "tokens a step",
    "rate": "tokens/s",
    "mfu": "MFU",
    "step": "step s",
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "planned_step": "planned step s",
    "gpu_planned": "GPU planned GB",
    "gpu_peak": "allocated GB",
    "gpu_reserved": "reserved GB",
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
WARM = 1  # steps that do not count


def measure(
    stage: Stage, case: str, words: list[str], *, steps: int, dtype: str, size: int, cap_bytes: int | None = None
) -> None:
    """A row of the record, whatever comes of it. `size`: of the square matrices whose product is timed."""
    row: dict[str, Any] = {"case": case, "words": " ".join(words)}
    try:
        with stage.worker(case, cap_bytes=cap_bytes) as worker:
            product = worker.ask("product", dtype=dtype, size=size)["rate"]
            about = worker.build(words, fill=True)
            row |= _of_plan(about) | {"product": product}
            worker.ask("steps", count=WARM)
            row |= _of_steps(about, _one_by_one(stage, worker, steps), product=product)
    except Failure as failure:
        stage.record.add(str(failure), **row)
        return
    over = cap_bytes is not None and row["gpu_reserved"] > cap_bytes / 1e9
    stage.record.add("failed: more than the cap" if over else "ok", **row)


def _one_by_one(stage: Stage, worker: Worker, steps: int) -> dict[str, Any]:
    """As many steps as there is time for, at least one."""
    found = worker.ask("steps", count=1)
    while len(found["steps"]) < steps and stage.left() > 2 * found["steps"][-1]["step"]:
        more = worker.ask("steps", count=1)
        found = more | {"steps": found["steps"] + more["steps"]}
    return found


def _of_plan(about: dict[str, Any]) -> dict[str, Any]:
    plan, seconds = about["plan"], about["plan"]["seconds"]
    return {
        "homes": homes(plan),
        "tokens": about["tokens_per_step"],
        "build": about["build_seconds"],
        "planned_step": None if None in seconds.values() else sum(seconds.values()),
        "gpu_planned": plan["tiers"].get("gpu", {"need": 0})["need"] / 1e9,
        "rss_planned": plan["tiers"]["ram"]["need"] / 1e9,
        "plan": plan,
    }


def homes(plan: dict[str, Any]) -> str:
    """Weights and shares of the state, from a plan's JSON."""
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
        "rate": about["tokens_per_step"] / seconds,
        "mfu": about["flops_per_step"] / seconds / product,
        "gpu_peak": max(step["device_peak"] for step in steps) / 1e9,
        "gpu_reserved": found["reserved"] / 1e9,
        "gpu_in_use": found["in_use"] / 1e9,
        "rss": max(step["peak_rss"] for step in steps) / 1e9,
        "read": middle(steps, "read_bytes") / 1e9,
        "written": middle(steps, "written_bytes") / 1e9,
        "skipped": f"{sum(step['skipped'] for step in steps)} of {len(steps)}",
        "loss": steps[-1]["loss"],
        "steps": steps,
    }
