"""A cache of measured rates, keyed by what they depend on: processor, GPU, threads, and each disk with its limits.

It is one JSON file in the cache directory. A machine that has changed, or whose rates an older version measured in
another way, has other keys and is timed again.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from offload_trainer.common.errors import UserError
from offload_trainer.common.safe_files import Count, Kind, as_kind, file_bytes, is_there, parsed, quoted
from offload_trainer.common.stdio import write_now
from offload_trainer.plan.machine import DriveFacts, DriveRates, Links, MachineProfile, Rates
from offload_trainer.storage.atomic_io import make_directories, write_text
from offload_trainer.storage.locks import exclusive_lock
from offload_trainer.storage.owned_dirs import MODE, cache_directory, open_owned, reason

_METHOD = 5  # raised when a computation or its timing changes, so that older rates are measured again
_DRIVE_METHOD = 3  # the same for drives


def cache_file() -> Path:
    return cache_directory() / "machine.json"


def rates_key(machine: MachineProfile, threads: int | None = None) -> str:
    """Return the cache key of compute and copy rates, with these or this process's threads of all ranks together."""
    # os.cpu_count: the machine's cores, since a rank may be restricted to some of them
    cpu = f"{machine.cpu}, {threads or threads_of_all_ranks(machine)} of {os.cpu_count()} cores"
    return f"rates {cpu}, {machine.gpu}, method {_METHOD}"


def threads_of_all_ranks(machine: MachineProfile) -> int:
    """Return OMP_NUM_THREADS, which every command sets, times the local ranks, or else the number of cores."""
    each = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(each) * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if each.isdecimal() else machine.cores


def _links_key(machine: MachineProfile) -> str:
    """Return the cache key of link rates, which do not depend on the threads of each rank."""
    return f"links {machine.cpu}, {machine.gpu}, method {_METHOD}"


def _drive_key(drive: DriveFacts) -> str:
    facts = ("drive", drive.disk or drive.device, drive.filesystem, drive.throttle, f"method {_DRIVE_METHOD}")
    return " ".join(str(fact) for fact in facts if fact)


def _read() -> dict[str, Any]:
    """Return the cached entries, or none without a file. Raises ValueError if it cannot be read.

    They are validated one by one, since other versions may have written some.
    """
    try:
        return parsed(file_bytes(cache_file(), opener=open_owned), dict[str, Any])
    except FileNotFoundError:
        return {}


@contextmanager
def _changed() -> Iterator[dict[str, Any]]:
    """Yield the cache's content to modify and write it back on exit, under a lock."""
    path = cache_file()
    make_directories(path.parent)
    # without locks another process's numbers may be lost; they are then measured again
    with exclusive_lock(path.with_name(f"{path.name}.lock"), say=write_now):
        try:
            stored = _read()
        except ValueError:
            stored = {}
        yield stored
        write_text(path, json.dumps(stored, indent=1), mode=MODE)


def refuse_unwritable() -> None:
    """Raise UserError if the cache cannot be written; called before minutes are spent on measuring."""
    path = cache_file()
    try:
        make_directories(path.parent)
        tempfile.TemporaryFile(dir=path.parent).close()
        if is_there(path):
            os.close(open_owned(path))
    except (ValueError, OSError) as error:
        refused = isinstance(error, ValueError)  # `open_owned` raised it
        why = f"{error}; move it away, or" if refused else f"rates cannot be saved there: {reason(error)};"
        raise UserError(f"{path}: {why} name another directory with OFFLOAD_TRAINER_CACHE") from error


def with_cached_rates(machine: MachineProfile) -> MachineProfile:
    """Return the machine with its cached rates, and with notes on entries that cannot be used."""
    notes, own, file = list[str](), rates_key(machine), cache_file()

    def known(key: str, kind: type[Kind]) -> Kind | None:
        try:
            return as_kind(stored[key], kind) if key in stored else None
        except ValueError as error:
            notes.append(f"{file}, {quoted(key)}: {error}; its speed is not known until it is timed again (bench)")
            return None

    try:
        stored = _read()
    except ValueError as error:
        notes.append(f"{file} cannot be read: {error}; no speed is known until it is timed again (bench)")
        stored = {}
    rates, threads = known(own, Rates) or Rates(), threads_of_all_ranks(machine)
    every = range(1, (os.cpu_count() or 1) + 1)
    counts = [str(count) for count in every if rates_key(machine, count) in stored]
    if counts and own not in stored:
        notes.append(
            f"this machine's speed was timed with {' and '.join(counts)} CPU threads, and is unknown with the "
            f"{threads} used now (OMP_NUM_THREADS, over all ranks): use as many, or time it with these, "
            f"`offload-train bench placement.threads={threads}`"
        )
    return replace(
        machine,
        rates=rates,
        drives=tuple(replace(drive, rates=known(_drive_key(drive), DriveRates)) for drive in machine.drives),
        links=known(_links_key(machine), Links) or machine.links,
        kept_free=known(f"kept free of {machine.gpu}", Count) or 0,
        notes=(*machine.notes, *dict.fromkeys(notes)),
    )


def keep_rates(machine: MachineProfile) -> None:
    """Store measured rates."""
    with _changed() as stored:
        stored[rates_key(machine)] = asdict(machine.rates)
        if machine.links != Links():
            stored[_links_key(machine)] = asdict(machine.links)
        for drive in machine.drives:
            if drive.rates is not None:
                stored[_drive_key(drive)] = asdict(drive.rates)


def keep_free(machine: MachineProfile, *, more: int) -> None:
    """Store that plans for this GPU leave `more` bytes of it free than so far, at most a quarter in all."""
    key = f"kept free of {machine.gpu}"
    with _changed() as stored:
        before = stored.get(key)
        stored[key] = min((before if type(before) is int else 0) + more, machine.gpu_bytes // 4)
