"""Rates that were timed here before, kept by what they depend on: processor, GPU, and each disk with its limits.

One JSON file in the cache directory; a machine that changed finds nothing and is timed anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from offload_trainer.machine.profile import DriveFacts, MachineProfile, drive_rates, rates_from_json
from offload_trainer.places import cache_directory

_KEEP = 5  # runs whose ratios of measured to predicted seconds count


def cache_file() -> Path:
    return cache_directory() / "machine.json"


def fingerprint(machine: MachineProfile) -> str:
    """What the rates of computing and copying depend on."""
    facts = (machine.cpu, machine.cores, machine.gpu, os.environ.get("OMP_NUM_THREADS"))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _drive_key(drive: DriveFacts) -> str:
    return f"{drive.disk or drive.device} {drive.filesystem} {drive.throttle}".strip()


def _read() -> dict[str, Any]:
    try:
        stored = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _write(stored: dict[str, Any]) -> None:
    path = cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(stored, indent=1), encoding="utf-8")
    temporary.replace(path)


def with_cached_rates(machine: MachineProfile) -> MachineProfile:
    """The machine with what is known of its speed; as it was where nothing is."""
    stored = _read()
    here = stored.get("machines", {}).get(fingerprint(machine), {})
    corrections = {key: median(ratios) for key, ratios in here.get("ratios", {}).items() if ratios}
    rates = rates_from_json(here.get("rates", {}) | {"corrections": corrections})
    drives = []
    for drive in machine.drives:
        known = stored.get("drives", {}).get(_drive_key(drive))
        drives.append(replace(drive, rates=drive_rates(known) if known else None))
    return replace(machine, rates=rates, drives=tuple(drives))


def keep_rates(machine: MachineProfile) -> None:
    """Store what was timed. Ratios of earlier runs do not hold for new rates and are dropped."""
    stored = _read()
    values = asdict(machine.rates)
    values.pop("corrections")
    stored.setdefault("machines", {})[fingerprint(machine)] = {"rates": values, "ratios": {}}
    for drive in machine.drives:
        if drive.rates is not None:
            stored.setdefault("drives", {})[_drive_key(drive)] = asdict(drive.rates)
    _write(stored)


def keep_ratios(machine: MachineProfile, ratios: dict[str, float]) -> None:
    """Store measured / predicted seconds of a run, by "engine.phase", for the next plan on this machine."""
    stored = _read()
    here = stored.get("machines", {}).get(fingerprint(machine))
    if here is None:
        return
    kept = here.setdefault("ratios", {})
    for key, ratio in ratios.items():
        # Relative to what this run was corrected by already.
        kept[key] = [*kept.get(key, []), ratio * machine.rates.corrections.get(key, 1.0)][-_KEEP:]
    _write(stored)
