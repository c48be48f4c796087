"""What a run says of its page files, written beside them, and how that is read back.

<lease>/store.json   where each weight's master is, in which file; the model's directory
<lease>/progress     the update that the files are of, and whether one was under way
<lease>/record       instead of it where pages have two places: the update, which place of each page is of it, the
                     page's checksums, and what else the run was then; in the first of the directories
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, Strict, with_config

from offload_trainer.errors import UserError
from offload_trainer.offloading.pages.shadow_pages import places_of
from offload_trainer.optim.state_files import EngineState, MomentsName, RuleName
from offload_trainer.plan.tiered.layout import ALIGN, ELSEWHERE, Page, Unit
from offload_trainer.plan.tiered.state_formats import Field as PageField
from offload_trainer.plan.tiered.state_formats import StateFormat, state_format
from offload_trainer.safe_files import EXACT, Count, Flag, Line, Steps, file_bytes, parsed, read_back, shown
from offload_trainer.storage.ab_record import read_record, torn_slot

DESCRIPTION, PROGRESS, RECORD = "store.json", "progress", "record"
OF_PROGRESS = 64  # bytes
FIX = "Export the run's newest checkpoint"

_PageElements = Annotated[Count, Field(gt=0, multiple_of=ALIGN)]
_Home = Annotated[int, Strict(), Field(ge=ELSEWHERE, lt=1000)]


def description(
    drives: Sequence[Path],
    units: Sequence[Unit],
    pages: Sequence[Page],
    *,
    format: StateFormat,
    model: Path,
    places: int,
    run: str,
) -> dict[str, Any]:
    """Return what store.json holds: the pages in files of these directories, `places` of each, and what is on them.

    `run` identifies the run whose files they are; its record has it, too.
    """
    return {
        "run": run,
        "drives": [str(drive.resolve()) for drive in drives],
        "rule": format.rule.name,
        "states": format.moments.name,
        "pages": [asdict(page) for page in pages],
        "weights": [
            {"name": place.weight.name, "shape": list(place.weight.shape), "unit": unit.index, "start": place.start}
            for unit in units
            for place in unit.places
            if place.weight.trainable
        ],
        "fixed": [place.weight.name for unit in units for place in unit.places if not place.weight.trainable],
        "model": str(model.absolute()),
        "boot": boot() if places == 1 else "",  # two places hold one step whatever has ended the run
        "places": places,
    }


@with_config(EXACT)
@dataclass(frozen=True)
class ManifestWeight:
    name: Line
    shape: tuple[Count, ...]
    unit: Count
    start: Count

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@with_config(EXACT)
@dataclass(frozen=True)
class ManifestPage:
    unit: Count
    start: Count
    elements: _PageElements
    home: _Home


@with_config(EXACT)
@dataclass(frozen=True)
class StoreManifest:
    """What a store.json says."""

    drives: list[str]
    states: MomentsName
    pages: list[ManifestPage]
    weights: list[ManifestWeight]
    fixed: list[Line]
    model: str
    boot: str
    rule: RuleName = "adamw"  # earlier versions had no other
    places: Annotated[int, Strict(), Field(ge=1, le=2)] = 1  # of each page on a drive
    run: Line = ""  # earlier versions had none

    @property
    def fields(self) -> dict[str, PageField]:
        """The fields of each page, in order."""
        return state_format(self.rule, self.states).fields


@with_config(EXACT)
@dataclass(frozen=True)
class Progress:
    step: Steps
    updating: Flag


@with_config(EXACT)
@dataclass(frozen=True)
class Newest:
    """What a record says: the update that the files are of, and with it, where the run goes on from them, the rest.

    The first record of a run, before any update, has no pages.
    """

    step: Steps
    newest: Annotated[str, Field(pattern="^([0-9a-f]{2})*$")]  # eight places to a byte
    sums: Annotated[str, Field(pattern="^([0-9a-f]{8})*$")] = ""  # of each page's fields; earlier versions had none
    run: Line = ""
    engine: EngineState | None = None
    train: dict[Line, Count] | None = None  # where the loop stood

    def places(self, count: int) -> list[int]:
        """Of each of `count` pages. ValueError where it is of another number."""
        return places_of(bytes.fromhex(self.newest), count)


def most_of_record(pages: int, names: Sequence[str], *, fields: int) -> int:
    """Return the bytes that a record of so many pages, with so many fields, and of these weights takes at most."""
    return 1024 + (2 * -(-pages // 8) + 8 * fields * pages) + sum(len(json.dumps(name)) + 14 for name in names)


def read_description(directory: Path, *, fix: str = FIX) -> StoreManifest:
    """Return what a run says of its page files. UserError, with what to do, where it cannot be read."""
    return read_back(directory / DESCRIPTION, StoreManifest, fix=fix)


def read_progress(directory: Path) -> Progress:
    """Of pages with one place."""
    try:
        record = file_bytes(directory / PROGRESS, most=OF_PROGRESS)
        if record:
            return parsed(record, Progress)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"{directory / PROGRESS} cannot be read: {error}. {FIX}") from error
    raise nothing_yet(directory)


def read_newest(told: StoreManifest, *, fix: str = FIX) -> Newest | None:
    """Return the record of pages with two places, or None before the first update. UserError where it is damaged."""
    path, most = _record_of(told)
    if not told.run:
        raise UserError(f"{path} is of an earlier version, which kept no checksums of pages: use that version for it")
    try:
        found = parsed(read_record(path, most=most), Newest)
        if found.run != told.run:
            raise ValueError(f"it is of another run than the {DESCRIPTION} next to it")
        if not found.newest:
            return None
        found.places(len(told.pages))
        wanted = len(told.fields) * len(told.pages)
        if len(found.sums) != 8 * wanted:
            raise ValueError(f"it has {len(found.sums) // 8} checksums, and the pages have {wanted} fields")
        return found
    except FileNotFoundError as error:
        raise UserError(f"{path} cannot be read: it is not there. {fix}") from error
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}. {fix}") from error


def torn_record(told: StoreManifest) -> bool:
    """Return whether one of the record's two slots is damaged, so that the other one may be of the step before."""
    path, most = _record_of(told)
    return torn_slot(path, most=most)


def _record_of(told: StoreManifest) -> tuple[Path, int]:
    """Return the record's file and the most bytes that it holds."""
    directory = Path(told.drives[0]) if told.drives else Path()
    names = [weight.name for weight in told.weights]
    return directory / RECORD, most_of_record(len(told.pages), names, fields=len(told.fields))


def nothing_yet(directory: Path) -> UserError:
    return UserError(f"{directory}: its run died before its first update; there is nothing in it to export")


def refuse_outside(directory: Path, told: StoreManifest) -> None:
    """ValueError where files or the model would be taken from a directory that is not this run's."""
    ours = file_bytes(directory / DESCRIPTION)
    for drive in map(Path, told.drives):
        account = drive / DESCRIPTION
        if not account.is_file() or account.stat().st_size != len(ours) or file_bytes(account) != ours:
            raise ValueError(f"{shown(str(drive))} is not one of its run's directories: it holds no such {DESCRIPTION}")
    if directory.resolve() not in [Path(drive).resolve() for drive in told.drives]:
        raise ValueError(f"{directory / DESCRIPTION} is of the run in {shown(', '.join(told.drives))}")


def boot() -> str:
    """What tells this start of the system from every other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
