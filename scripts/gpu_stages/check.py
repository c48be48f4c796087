"""Check that the update kernels of this machine agree, and, with time left, what it is and would run.

A check that fails does not stop the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_stages.speed import homes, planned_seconds
from gpu_stages.stage import Failure, Stage

TITLE = "The driver, and the bits of the update kernels"
COLUMNS = {"check": "check", "found": "found"}
Check = Callable[[Stage], dict[str, Any]]


def kernels(stage: Stage) -> None:
    """Carry out the stage `kernels`."""
    _carry_out(stage, {"driver": driver, "kernels of the update": kernel_bits})


def machine(stage: Stage) -> None:
    """Carry out the stage `machine`."""
    checks: dict[str, Check] = {
        "bench": bench,
        "plan of 10B here": lambda stage: plan(stage, ["--nvme", str(stage.drive), "--dtype", "bf16"]),
        "plan of 10B for a V100": lambda stage: plan(stage, ["--machine", "v100-32gb", "--dtype", "fp16"]),
        "doctor": doctor,
    }
    _carry_out(stage, checks)


def _carry_out(stage: Stage, checks: Mapping[str, Check]) -> None:
    for name, check in checks.items():
        stage.add_row(lambda row, check=check: row.update(check(stage)), check=name)  # type: ignore[misc]


def driver(stage: Stage) -> dict[str, Any]:
    """Return what nvidia-smi prints; it is missing on machines with AMD cards."""
    fields = "name,driver_version,memory.total,clocks.max.sm,power.limit"
    try:
        done = stage.command(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"])
    except FileNotFoundError:
        return {"found": "no nvidia-smi"}
    return {"found": done.stdout or done.stderr}


def doctor(stage: Stage) -> dict[str, Any]:
    done = _ours(stage, ["doctor", "--json", "--nvme", str(stage.drive)])
    checks = _json(done)
    lacking = [f"{check['name']}: {check['found']}" for check in checks if check["state"] == "failure"]
    if lacking:
        raise Failure(f"failed: {'; '.join(lacking)}")
    warned = [check["name"] for check in checks if check["state"] == "warning"]
    return {"found": f"{len(checks)} looked at, warnings: {', '.join(warned) or 'none'}", "checks": checks}


def kernel_bits(stage: Stage) -> dict[str, Any]:
    """Report the CPU's update kernel, and whether the GPU's kernel compiles and gives the same bits."""
    found = _json(stage.command([sys.executable, str(Path(__file__).with_name("facts.py")), "kernels"]))
    if found["same"] is False:
        raise Failure(f"failed: {found['GPU']}")
    return {"found": f"{found['CPU']} {found['GPU']}", "kernels": found}


def bench(stage: Stage) -> dict[str, Any]:
    """Measure the machine's rates, and write bench.json next to the table, for `plan --machine FILE` elsewhere."""
    if stage.rehearsal:
        raise Failure("not run: it takes a minute")
    machine = _json(_ours(stage, ["bench", "--json", "--nvme", str(stage.drive)]))
    (stage.record.folder / "bench.json").write_text(json.dumps(machine, indent=1))
    rates = machine["rates"]
    told = [f"{dtype} {rate['value'] / 1e12:.4g} TFLOP/s" for dtype, rate in rates["matmul"].items()]
    told += [f"update by {name} {rate['value'] / 1e6:.0f} M/s" for name, rate in rates["update"].items()]
    for way in ("to_device", "from_device", "both_ways"):
        if rates[way]:
            told.append(f"{way.replace('_', ' ')} {rates[way]['value'] / 1e9:.3g} GB/s")
    return {"found": ", ".join(told), "machine": machine}


def plan(stage: Stage, words: Sequence[str]) -> dict[str, Any]:
    found = _json(_ours(stage, ["plan", "--json", "--model", "gpt2-10b", *words]), refused=2)
    seconds = planned_seconds(found)
    step = "not known" if seconds is None else f"{seconds:.1f} s"
    fits = "fits" if found["fits"] else "does not fit"
    return {"found": f"{fits}; {homes(found)}; a step {step}", "plan": found}


def _ours(stage: Stage, words: Sequence[str]) -> Any:
    return stage.command([sys.executable, "-m", "offload_trainer", *words])


def _json(done: Any, *, refused: int | None = None) -> Any:
    """Return a command's JSON output; accept the exit code `refused` as well as 0.

    Raises Failure with the last of its stderr where there is no output.
    """
    if done.returncode not in (0, refused) or not done.stdout.strip():
        last = " ".join(done.stderr.split())[-300:]
        if not done.stdout.strip():
            raise Failure(f"failed: exit {done.returncode}: {last}")
    return json.loads(done.stdout)
