"""Rates that were timed here before, kept by what they depend on: processor, GPU, and each disk with its limits.

One JSON file in the cache directory; a machine that changed finds nothing and is timed anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import with_config

from offload_trainer.cache_dir import cache_directory
from offload_trainer.errors import UserError
from offload_trainer.plan.calibration import correction
from offload_trainer.plan.machine import DriveFacts, DriveRates, Links, MachineProfile, Rates, Ratio
from offload_trainer.safe_files import LENIENT, Kind, Line, as_kind, file_bytes, is_there, parsed, shown
from offload_trainer.stdio import write_now
from offload_trainer.storage.atomic_io import make_directories, write_text
from offload_trainer.storage.locks import NoLocks, turn
from offload_trainer.storage.owned_dirs import reason
from offload_trainer.storage.trusted_files import MODE, open_owned

_KEEP = 5  # runs whose ratios of measured to predicted seconds count


def cache_file() -> Path:
    return cache_directory() / "machine.json"


def fingerprint(machine: MachineProfile) -> str:
    """What the rates of computing and copying depend on: of the threads, on those of all ranks together."""
    return _key(machine, _threads(machine))


def _threads(machine: MachineProfile) -> int:
    """Of all ranks here: as many as OMP_NUM_THREADS says of each, which every command sets, or else all cores'."""
    each = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(each) * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if each.isdecimal() else machine.cores


def _key(machine: MachineProfile, threads: int) -> str:
    facts = (machine.cpu, os.cpu_count(), machine.gpu, str(threads))  # of the cores a rank may have some alone
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _links_key(machine: MachineProfile) -> str:
    """What ranks reach each other by does not depend on the threads of each."""
    return f"{machine.cpu}, {machine.gpu}"


def _drive_key(drive: DriveFacts) -> str:
    return f"{drive.disk or drive.device} {drive.filesystem} {drive.throttle}".strip()


@with_config(LENIENT)
@dataclass(frozen=True)
class _Kept:
    """The file. Entries are looked at one by one, since others may be of another version."""

    machines: dict[str, Any] = field(default_factory=dict)
    drives: dict[str, Any] = field(default_factory=dict)
    links: dict[str, Any] = field(default_factory=dict)


@with_config(LENIENT)
@dataclass(frozen=True)
class _OfMachine:
    rates: Rates
    ratios: dict[Line, list[Ratio]] = field(default_factory=dict)


def _read() -> _Kept:
    """What is kept, which may be nothing. ValueError where it cannot be read."""
    try:
        return parsed(file_bytes(cache_file(), opener=open_owned), _Kept)
    except FileNotFoundError:
        return _Kept()


@contextmanager
def _changed() -> Iterator[dict[str, Any]]:
    """What is kept, written again on the way out; a file that cannot be read is replaced. One process at a time."""
    path = cache_file()
    make_directories(path.parent)
    with ExitStack() as stack:
        try:
            stack.enter_context(turn(path.with_name(f"{path.name}.lock"), say=write_now))
        except NoLocks:
            pass  # another process's numbers may be lost, and are measured again
        try:
            stored = asdict(_read())
        except ValueError:
            stored = asdict(_Kept())
        yield stored
        write_text(path, json.dumps(stored, indent=1), mode=MODE)


def refuse_unwritable() -> None:
    """UserError where nothing can be kept: asked before minutes are spent on measuring."""
    path = cache_file()
    try:
        make_directories(path.parent)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if is_there(path):
            os.close(open_owned(path))
    except ValueError as error:
        raise UserError(
            f"{path}: {error}; move it away, or name another directory with OFFLOAD_TRAINER_CACHE"
        ) from error
    except OSError as error:
        raise UserError(
            f"{path}: rates cannot be saved there: {reason(error)}; name another directory with OFFLOAD_TRAINER_CACHE"
        ) from error


def with_cached_rates(machine: MachineProfile) -> MachineProfile:
    """The machine with what is known of its speed, and a note where what was kept cannot be read."""
    notes: list[str] = []

    def known(entries: dict[str, Any], key: str, kind: type[Kind]) -> Kind | None:
        try:
            return as_kind(entries[key], kind) if key in entries else None
        except ValueError as error:
            notes.append(
                f"{cache_file()}, {shown(key)}: {error}; its speed is not known until it is timed again (bench)"
            )
            return None

    try:
        stored = _read()
    except ValueError as error:
        notes.append(f"{cache_file()} cannot be read: {error}; no speed is known until it is timed again (bench)")
        stored = _Kept()
    here = known(stored.machines, fingerprint(machine), _OfMachine) or _OfMachine(Rates())
    notes += _timed_with_others(stored, machine)
    corrections = {key: correction(ratios) for key, ratios in here.ratios.items()}
    drives = [replace(drive, rates=known(stored.drives, _drive_key(drive), DriveRates)) for drive in machine.drives]
    rates = replace(here.rates, corrections=corrections)
    links = known(stored.links, _links_key(machine), Links) or machine.links
    return replace(
        machine, rates=rates, links=links, drives=tuple(drives), notes=(*machine.notes, *dict.fromkeys(notes))
    )


def _timed_with_others(stored: _Kept, machine: MachineProfile) -> list[str]:
    """A note, where rates were kept here for another number of threads alone."""
    threads = _threads(machine)
    if _key(machine, threads) in stored.machines:
        return []
    counts = [count for count in range(1, (os.cpu_count() or 1) + 1) if _key(machine, count) in stored.machines]
    if not counts:
        return []
    return [
        f"this machine's speed was timed with {' and '.join(map(str, counts))} CPU threads, and is unknown with the "
        f"{threads} used now (OMP_NUM_THREADS, over all ranks): use as many, or time it with these, "
        f"`offload-train bench placement.threads={threads}`"
    ]


def keep_rates(machine: MachineProfile) -> None:
    """Store what was timed. Ratios of earlier runs do not hold for new rates and are dropped."""
    values = asdict(machine.rates)
    values.pop("corrections")
    with _changed() as stored:
        stored["machines"][fingerprint(machine)] = {"rates": values, "ratios": {}}
        if machine.links != Links():
            stored["links"][_links_key(machine)] = asdict(machine.links)
        for drive in machine.drives:
            if drive.rates is not None:
                stored["drives"][_drive_key(drive)] = asdict(drive.rates)


def keep_ratios(machine: MachineProfile, ratios: dict[str, float]) -> None:
    """Store measured / predicted seconds of a run, by "engine.phase.bound", for the next plan on this machine."""
    if not cache_file().exists():
        return
    with _changed() as stored:
        try:
            kept = as_kind(stored["machines"].get(fingerprint(machine)), _OfMachine).ratios
        except ValueError:  # not timed
            return
        for key, ratio in ratios.items():
            # Relative to what this run was corrected by already.
            kept[key] = [*kept.get(key, []), ratio * machine.rates.corrections.get(key, 1.0)][-_KEEP:]
        stored["machines"][fingerprint(machine)]["ratios"] = kept
