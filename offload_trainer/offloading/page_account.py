"""What a run says of its page files, written beside them, and how that is read back.

<lease>/store.json   where each weight's master is, in which file; the model's directory
<lease>/progress     the update that the files are of, and whether one was under way
<lease>/record       instead of it where pages have two places: the update, which place of each page is of it, and
                     what else the run was then; in the first of the directories
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
from offload_trainer.offloading.page_places import places_of
from offload_trainer.optim.state_files import EngineState, MomentsName, RuleName
from offload_trainer.plan.formats import StateFormat
from offload_trainer.plan.layout import ALIGN, ELSEWHERE, Page, Unit
from offload_trainer.readback import EXACT, Count, Flag, Line, Steps, file_bytes, parsed, read_back, shown
from offload_trainer.storage.record import read_record

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
) -> dict[str, Any]:
    """What store.json holds: the pages in files of these directories, `places` of each, and what is on them."""
    return {
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
class ToldWeight:
    name: Line
    shape: tuple[Count, ...]
    unit: Count
    start: Count

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@with_config(EXACT)
@dataclass(frozen=True)
class ToldPage:
    unit: Count
    start: Count
    elements: _PageElements
    home: _Home


@with_config(EXACT)
@dataclass(frozen=True)
class Told:
    """What a store.json says."""

    drives: list[str]
    states: MomentsName
    pages: list[ToldPage]
    weights: list[ToldWeight]
    fixed: list[Line]
    model: str
    boot: str
    rule: RuleName = "adamw"  # earlier versions had no other
    places: Annotated[int, Strict(), Field(ge=1, le=2)] = 1  # of each page on a drive


@with_config(EXACT)
@dataclass(frozen=True)
class Progress:
    step: Steps
    updating: Flag


@with_config(EXACT)
@dataclass(frozen=True)
class Newest:
    """What a record says: the update that the files are of, and with it, where the run goes on from them, the rest."""

    step: Steps
    newest: Annotated[str, Field(pattern="^([0-9a-f]{2})*$")]  # eight places to a byte
    engine: EngineState | None = None
    train: dict[Line, Count] | None = None  # where the loop stood

    def places(self, count: int) -> list[int]:
        """Of each of `count` pages. ValueError where it is of another number."""
        return places_of(bytes.fromhex(self.newest), count)


def most_of_record(pages: int, names: Sequence[str]) -> int:
    """Bytes that a record of so many pages and these weights takes, at most."""
    return 1024 + 2 * -(-pages // 8) + sum(len(json.dumps(name)) + 14 for name in names)


def read_description(directory: Path) -> Told:
    """UserError where it cannot be read."""
    return read_back(directory / DESCRIPTION, Told, fix=FIX)


def read_progress(directory: Path) -> Progress:
    """Of pages with one place."""
    try:
        record = file_bytes(directory / PROGRESS, most=OF_PROGRESS)
        if record:
            return parsed(record, Progress)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"{directory / PROGRESS} cannot be read: {error}. {FIX}") from error
    raise nothing_yet(directory)


def read_newest(told: Told) -> Newest | None:
    """Of pages with two places; None before the first update."""
    directory = Path(told.drives[0]) if told.drives else Path()
    most = most_of_record(len(told.pages), [weight.name for weight in told.weights])
    try:
        record = read_record(directory / RECORD, most=most)
        if record is None:
            return None
        found = parsed(record, Newest)
        found.places(len(told.pages))
        return found
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"{directory / RECORD} cannot be read: {error}. {FIX}") from error


def nothing_yet(directory: Path) -> UserError:
    return UserError(f"{directory}: its run died before its first update; there is nothing in it to export")


def refuse_outside(directory: Path, told: Told) -> None:
    """ValueError where files or the model would be taken from a directory that is not this run's."""
    ours = file_bytes(directory / DESCRIPTION)
    for drive in map(Path, told.drives):
        account = drive / DESCRIPTION
        if not account.is_file() or account.stat().st_size != len(ours) or file_bytes(account) != ours:
            raise ValueError(f"{shown(str(drive))} is not one of its run's directories: it holds no such {DESCRIPTION}")
    if directory.resolve() not in [Path(drive).resolve() for drive in told.drives]:
        raise ValueError(f"{DESCRIPTION} is of the run in {shown(', '.join(told.drives))}")


def boot() -> str:
    """What tells this start of the system from every other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
