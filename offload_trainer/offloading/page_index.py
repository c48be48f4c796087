"""What lies in a run's files on drives, written beside them, so that masters can be read after the run has died.

    <lease>/store.json   where each weight's master is, in which file; the model's directory
    <lease>/progress     the update that the files are of, and whether one was under way
    <lease>/record       instead of it where pages have two places: the update, and which place of each page is of it;
                         in the first of the directories

A killed process loses nothing that it has written there: the kernel has it. Pages in memory are gone with it. With two
places the files always hold one whole step: its pages are written beside those of the step before, then the record.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, Strict, with_config

from offload_trainer.errors import TrainerError, UserError
from offload_trainer.offloading.page_places import PagePlaces, places_of
from offload_trainer.offloading.store import offsets, size_of_home
from offload_trainer.optim.state_files import MomentsName, RuleName
from offload_trainer.plan.formats import StateFormat, state_format
from offload_trainer.plan.layout import ALIGN, ELSEWHERE, Page, Unit
from offload_trainer.readback import EXACT, Count, Flag, Line, Steps, file_bytes, open_file, parsed, read_back, shown
from offload_trainer.storage.durable import write_text
from offload_trainer.storage.record import Record, read_record
from offload_trainer.units import format_count

DESCRIPTION = "store.json"
_PROGRESS, _NOTE = "progress", 64  # name; bytes
_RECORD = "record"
_MASTER = 4  # bytes; masters are a page's first field
_FIX = "Export the run's newest checkpoint"

_PageElements = Annotated[Count, Field(gt=0, multiple_of=ALIGN)]
_Home = Annotated[int, Strict(), Field(ge=ELSEWHERE, lt=1000)]


class PageIndex:
    """Keeps the index of one run's page files in each of `drives`, its private directories."""

    def __init__(
        self,
        drives: Sequence[Path],
        units: Sequence[Unit],
        pages: Sequence[Page],
        *,
        format: StateFormat,
        model: Path,
        places: PagePlaces | None = None,
    ) -> None:
        """`places` of the pages on drives, where they have more than one."""
        self._places = places if places is not None and places.count > 1 else None
        description = {
            "drives": [str(drive.resolve()) for drive in drives],
            "rule": format.rule.name,
            "states": format.moments.name,
            "pages": [asdict(page) for page in pages],
            "weights": [
                {"name": place.weight.name, "shape": place.weight.shape, "unit": unit.index, "start": place.start}
                for unit in units
                for place in unit.places
                if place.weight.trainable
            ],
            "fixed": [place.weight.name for unit in units for place in unit.places if not place.weight.trainable],
            "model": str(model.absolute()),
            "boot": _boot(),
            "places": self._places.count if self._places else 1,
        }
        for drive in drives:
            write_text(drive / DESCRIPTION, json.dumps(description))
        self._record = Record(drives[0] / _RECORD, most=_most(len(pages))) if self._places and drives else None
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        beside = [] if self._places else drives
        self._descriptors = [os.open(drive / _PROGRESS, flags, 0o666) for drive in beside]

    def note(self, step: int, *, updating: bool) -> None:
        """The files hold the state after `step` updates; with `updating`, parts of them that after the next.

        Where pages have two places an update that is under way changes nothing that the record names.
        """
        if self._record is not None:
            assert self._places is not None
            if not updating:
                self._record.write(json.dumps({"step": step, "newest": self._places.bits().hex()}).encode())
            return
        note = json.dumps({"step": step, "updating": updating}).ljust(_NOTE).encode()
        for descriptor in self._descriptors:
            os.pwrite(descriptor, note, 0)

    def close(self) -> None:
        if self._record is not None:
            self._record.close()
        while self._descriptors:
            os.close(self._descriptors.pop())


@dataclass(frozen=True)
class _Stretch:
    """Consecutive masters in a file."""

    file: Path
    offset: int
    elements: int


@dataclass(frozen=True)
class StoredMasters:
    """The masters in a dead run's page files."""

    step: int  # updates that all of them have
    updating: bool  # whether some of them have one more
    shapes: dict[str, tuple[int, ...]]
    model: Path
    places: dict[str, list[_Stretch]]

    def read(self, name: str) -> torch.Tensor:
        """One of them, fp32, whole. TrainerError where a file is shorter than it should be."""
        out = torch.empty(self.shapes[name])
        view, done = out.view(-1).view(torch.uint8).numpy().data, 0
        for stretch in self.places[name]:
            size = _MASTER * stretch.elements
            try:
                with open(open_file(stretch.file), "rb") as file:
                    file.seek(stretch.offset)
                    got = file.readinto(view[done : done + size])
            except (OSError, ValueError) as error:
                raise TrainerError(
                    f"{stretch.file}: {size} bytes at {stretch.offset} cannot be read: {error}"
                ) from error
            if got != size:
                raise TrainerError(f"{stretch.file}: cut short: {got} of {size} bytes of {name} at {stretch.offset}")
            done += size
        return out

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.shapes:
            yield name, self.read(name)


@with_config(EXACT)
@dataclass(frozen=True)
class _ToldWeight:
    name: Line
    shape: tuple[Count, ...]
    unit: Count
    start: Count

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@with_config(EXACT)
@dataclass(frozen=True)
class _ToldPage:
    unit: Count
    start: Count
    elements: _PageElements
    home: _Home


@with_config(EXACT)
@dataclass(frozen=True)
class _Told:
    """What a store.json says."""

    drives: list[str]
    states: MomentsName
    pages: list[_ToldPage]
    weights: list[_ToldWeight]
    fixed: list[Line]
    model: str
    boot: str
    rule: RuleName = "adamw"  # earlier versions had no other
    places: Annotated[int, Strict(), Field(ge=1, le=2)] = 1  # of each page on a drive


@with_config(EXACT)
@dataclass(frozen=True)
class _Progress:
    step: Steps
    updating: Flag


@with_config(EXACT)
@dataclass(frozen=True)
class _Newest:
    """What a record says."""

    step: Steps
    newest: Annotated[str, Field(pattern="^([0-9a-f]{2})*$")]


def _most(pages: int) -> int:
    """Bytes of a record of so many pages."""
    return 256 + 2 * -(-pages // 8)


def read_store(directory: Path) -> StoredMasters:
    """The masters in a private directory that a dead run left. UserError where they are not all in files."""
    told = read_back(directory / DESCRIPTION, _Told, fix=_FIX)
    progress, newest = _read_progress(directory) if told.places == 1 else _read_newest(told)
    lost = sum(page.elements for page in told.pages if page.home < 0)
    if lost or told.fixed:
        total = format_count(sum(page.elements for page in told.pages))
        what = f"{format_count(lost)} of {total} masters" if lost else f"{len(told.fixed)} fixed weights"
        raise UserError(
            f"{directory}: {what} were in memory and went with the run, or are on other nodes; export its newest "
            "checkpoint"
        )
    try:
        _refuse_outside(directory, told)
        places = _places(told, [Path(drive) / "state" for drive in told.drives], newest=newest)
    except (ValueError, OSError) as error:
        raise UserError(f"{directory}: {error}. {_FIX}") from error
    # After a power cut the record may be older than the pages, which pass the cache by.
    updating = progress.updating or told.boot != _boot()
    shapes = {weight.name: weight.shape for weight in told.weights}
    return StoredMasters(progress.step, updating, shapes, Path(told.model), places)


def _read_progress(directory: Path) -> tuple[_Progress, Sequence[int]]:
    """Of pages with one place, and that place."""
    try:
        record = file_bytes(directory / _PROGRESS, most=_NOTE)
        if record:
            return parsed(record, _Progress), ()
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"{directory / _PROGRESS} cannot be read: {error}. {_FIX}") from error
    raise _nothing_yet(directory)


def _read_newest(told: _Told) -> tuple[_Progress, Sequence[int]]:
    """Of pages with two places, and the place of each."""
    directory = Path(told.drives[0]) if told.drives else Path()
    try:
        record = read_record(directory / _RECORD, most=_most(len(told.pages)))
        if record is None:
            raise _nothing_yet(directory)
        found = parsed(record, _Newest)
        return _Progress(found.step, updating=False), places_of(bytes.fromhex(found.newest), len(told.pages))
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"{directory / _RECORD} cannot be read: {error}. {_FIX}") from error


def _nothing_yet(directory: Path) -> UserError:
    return UserError(f"{directory}: its run died before its first update; there is nothing in it to export")


def _refuse_outside(directory: Path, told: _Told) -> None:
    """ValueError where files or the model would be taken from a directory that is not this run's."""
    ours = file_bytes(directory / DESCRIPTION)
    for drive in map(Path, told.drives):
        account = drive / DESCRIPTION
        if not account.is_file() or account.stat().st_size != len(ours) or file_bytes(account) != ours:
            raise ValueError(f"{shown(str(drive))} is not one of its run's directories: it holds no such {DESCRIPTION}")
    if directory.resolve() not in [Path(drive).resolve() for drive in told.drives]:
        raise ValueError(f"{DESCRIPTION} is of the run in {shown(', '.join(told.drives))}")


def _places(told: _Told, files: Sequence[Path], *, newest: Sequence[int]) -> dict[str, list[_Stretch]]:
    """Where each weight's master lies. ValueError where pages do not hold all of it, or a file not all of a page.

    `newest`: the place of each page, where they have two.
    """
    homes = [page.home for page in told.pages]
    if max(homes, default=0) >= len(files):
        raise ValueError(f"{DESCRIPTION} has a page on drive {max(homes)} of {len(files)}")
    stored = state_format(told.rule, told.states)
    sizes = [stored.page_bytes(page.elements) for page in told.pages]
    apart = [size_of_home(sizes, homes, home) for home in range(len(files))]
    for need, file in zip((told.places * size for size in apart), files, strict=True):
        if need and (not file.is_file() or file.stat().st_size < need):
            raise ValueError(f"{shown(str(file))} is not there, or is shorter than its {need} bytes")
    of_unit: dict[int, list[tuple[_ToldPage, int]]] = {}
    for number, (page, start) in enumerate(zip(told.pages, offsets(sizes, homes), strict=True)):
        second = apart[page.home] if newest and newest[number] else 0
        of_unit.setdefault(page.unit, []).append((page, start + second))
    places = {}
    for weight in told.weights:
        places[weight.name] = [
            _Stretch(files[page.home], start + _MASTER * (first - page.start), last - first)
            for page, start in of_unit.get(weight.unit, ())
            if (first := max(weight.start, page.start))
            < (last := min(weight.start + weight.numel, page.start + page.elements))
        ]
        held = sum(stretch.elements for stretch in places[weight.name])
        if held != weight.numel:
            raise ValueError(f"{DESCRIPTION} has pages for {held} elements of {weight.name}, which has {weight.numel}")
    return places


def _boot() -> str:
    """What tells this start of the system from every other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
