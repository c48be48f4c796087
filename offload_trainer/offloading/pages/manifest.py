"""Define the index files that a run writes next to its page files, and read and validate them.

    store.json   in each private directory: the page layout, the position of each weight's master, the model's directory
    progress     with one copy of each page: the step of the files, and whether an update was running
    record       with two copies, in the first directory only: the step, the valid copy and checksums of each page,
                 and the engine's and the training loop's state at that step

`pages/index.py` writes these files during training.
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
    """Return the content of store.json: the pages in the files of `drives`, their copies, and the weights on them.

    `places` is the number of copies of each page. `run` is the run's id, which its record contains as well.
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
        "boot": boot() if places == 1 else "",  # two copies are consistent after a power cut, too
        "places": places,
    }


@with_config(EXACT)
@dataclass(frozen=True)
class ManifestWeight:
    """A trainable weight: its unit, and its first element in the unit."""

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
    """A page of optimizer state; see `plan.tiered.layout.Page`."""

    unit: Count
    start: Count
    elements: _PageElements
    home: _Home


@with_config(EXACT)
@dataclass(frozen=True)
class StoreManifest:
    """The content of store.json."""

    drives: list[str]
    states: MomentsName
    pages: list[ManifestPage]
    weights: list[ManifestWeight]
    fixed: list[Line]
    model: str
    boot: str
    rule: RuleName = "adamw"  # earlier versions had no other
    places: Annotated[int, Strict(), Field(ge=1, le=2)] = 1  # copies of each page on a drive
    run: Line = ""  # earlier versions had none

    @property
    def fields(self) -> dict[str, PageField]:
        """The fields of each page, in order."""
        return state_format(self.rule, self.states).fields


@with_config(EXACT)
@dataclass(frozen=True)
class Progress:
    """The content of the progress file."""

    step: Steps
    updating: Flag


@with_config(EXACT)
@dataclass(frozen=True)
class Newest:
    """The content of a record: the step of the files, the valid pages, and other state that a resumed run needs.

    The first record of a run, before any update, has no pages.
    """

    step: Steps
    newest: Annotated[str, Field(pattern="^([0-9a-f]{2})*$")]  # bit map, see `ShadowPages.bits`
    sums: Annotated[str, Field(pattern="^([0-9a-f]{8})*$")] = ""  # checksums by page and field; in early versions empty
    run: Line = ""
    engine: EngineState | None = None
    train: dict[Line, Count] | None = None  # position of the training loop

    def places(self, count: int) -> list[int]:
        """Return the valid copy of each of `count` pages; raise ValueError if the record has another number."""
        return places_of(bytes.fromhex(self.newest), count)


def most_of_record(pages: int, names: Sequence[str], *, fields: int) -> int:
    """Return the maximum size in bytes of a record for `pages` pages of `fields` fields and the weights `names`."""
    return 1024 + (2 * -(-pages // 8) + 8 * fields * pages) + sum(len(json.dumps(name)) + 14 for name in names)


def read_description(directory: Path, *, fix: str = FIX) -> StoreManifest:
    """Read store.json; raise UserError, with the advice `fix`, if it cannot be read."""
    return read_back(directory / DESCRIPTION, StoreManifest, fix=fix)


def read_progress(directory: Path) -> Progress:
    """Read the progress file of pages with one copy; raise UserError if it is damaged or there was no update yet."""
    try:
        record = file_bytes(directory / PROGRESS, most=OF_PROGRESS)
        if record:
            return parsed(record, Progress)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"{directory / PROGRESS} cannot be read: {error}. {FIX}") from error
    raise nothing_yet(directory)


def read_newest(told: StoreManifest, *, fix: str = FIX) -> Newest | None:
    """Read the record of pages with two copies; return None before the first update.

    Raises:
        UserError: the record is missing, damaged, or of another run or version.
    """
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
    """Return whether one of the record's two slots is damaged, so that the other may be of the previous step."""
    path, most = _record_of(told)
    return torn_slot(path, most=most)


def _record_of(told: StoreManifest) -> tuple[Path, int]:
    """Return the record's path and its maximum size in bytes."""
    directory = Path(told.drives[0]) if told.drives else Path()
    names = [weight.name for weight in told.weights]
    return directory / RECORD, most_of_record(len(told.pages), names, fields=len(told.fields))


def nothing_yet(directory: Path) -> UserError:
    """Return the error for a run that died before its first update."""
    return UserError(f"{directory}: its run died before its first update; there is nothing in it to export")


def refuse_outside(directory: Path, told: StoreManifest) -> None:
    """Raise ValueError unless every directory that store.json names contains the same store.json, and one is this."""
    ours = file_bytes(directory / DESCRIPTION)
    for drive in map(Path, told.drives):
        account = drive / DESCRIPTION
        if not account.is_file() or account.stat().st_size != len(ours) or file_bytes(account) != ours:
            raise ValueError(f"{shown(str(drive))} is not one of its run's directories: it holds no such {DESCRIPTION}")
    if directory.resolve() not in [Path(drive).resolve() for drive in told.drives]:
        raise ValueError(f"{directory / DESCRIPTION} is of the run in {shown(', '.join(told.drives))}")


def boot() -> str:
    """Return the kernel's id of the current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
