"""What lies in a run's files on drives, written beside them, so that masters can be read after the run has died.

    <lease>/store.json   where each weight's master is, in which file; the model's directory
    <lease>/progress     the update that the files are of, and whether one was under way

A killed process loses nothing that it has written to `progress`: the kernel has it. Pages in memory are gone with it.
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
from offload_trainer.offloading.store import offsets, size_of_home
from offload_trainer.optim.state_files import MomentsName, RuleName
from offload_trainer.plan.formats import StateFormat, state_format
from offload_trainer.plan.layout import ALIGN, ELSEWHERE, Page, Unit
from offload_trainer.readback import EXACT, Count, Flag, Line, Steps, file_bytes, open_file, parsed, read_back, shown
from offload_trainer.storage.durable import write_text
from offload_trainer.units import format_count

DESCRIPTION = "store.json"
_PROGRESS, _RECORD = "progress", 64  # name; bytes
_MASTER = 4  # bytes; masters are a page's first field
_FIX = "Export the run's newest checkpoint"

_PageElements = Annotated[Count, Field(gt=0, multiple_of=ALIGN)]
_Home = Annotated[int, Strict(), Field(ge=ELSEWHERE, lt=1000)]


class PageIndex:
    """Keeps the index of one run's page files in each of `drives`, its private directories."""

    def __init__(
        self, drives: Sequence[Path], *, units: Sequence[Unit], pages: Sequence[Page], format: StateFormat, model: Path
    ) -> None:
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
        }
        for drive in drives:
            write_text(drive / DESCRIPTION, json.dumps(description))
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._descriptors = [os.open(drive / _PROGRESS, flags, 0o666) for drive in drives]

    def note(self, step: int, *, updating: bool) -> None:
        """The files hold the state after `step` updates; with `updating`, parts of them that after the next."""
        record = json.dumps({"step": step, "updating": updating}).ljust(_RECORD).encode()
        for descriptor in self._descriptors:
            os.pwrite(descriptor, record, 0)

    def close(self) -> None:
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


@with_config(EXACT)
@dataclass(frozen=True)
class _Progress:
    step: Steps
    updating: Flag


def read_store(directory: Path) -> StoredMasters:
    """The masters in a private directory that a dead run left. UserError where they are not all in files."""
    told = read_back(directory / DESCRIPTION, _Told, fix=_FIX)
    progress = _read_progress(directory)
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
        places = _places(told, [Path(drive) / "state" for drive in told.drives])
    except (ValueError, OSError) as error:
        raise UserError(f"{directory}: {error}. {_FIX}") from error
    # After a power cut the record may be older than the pages, which pass the cache by.
    updating = progress.updating or told.boot != _boot()
    shapes = {weight.name: weight.shape for weight in told.weights}
    return StoredMasters(progress.step, updating, shapes, Path(told.model), places)


def _read_progress(directory: Path) -> _Progress:
    try:
        record = file_bytes(directory / _PROGRESS, most=_RECORD)
        if record:
            return parsed(record, _Progress)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"{directory / _PROGRESS} cannot be read: {error}. {_FIX}") from error
    raise UserError(f"{directory}: its run died before its first update; there is nothing in it to export")


def _refuse_outside(directory: Path, told: _Told) -> None:
    """ValueError where files or the model would be taken from a directory that is not this run's."""
    ours = file_bytes(directory / DESCRIPTION)
    for drive in map(Path, told.drives):
        account = drive / DESCRIPTION
        if not account.is_file() or account.stat().st_size != len(ours) or file_bytes(account) != ours:
            raise ValueError(f"{shown(str(drive))} is not one of its run's directories: it holds no such {DESCRIPTION}")
    if directory.resolve() not in [Path(drive).resolve() for drive in told.drives]:
        raise ValueError(f"{DESCRIPTION} is of the run in {shown(', '.join(told.drives))}")


def _places(told: _Told, files: Sequence[Path]) -> dict[str, list[_Stretch]]:
    """Where each weight's master lies. ValueError where pages do not hold all of it, or a file not all of a page."""
    homes = [page.home for page in told.pages]
    if max(homes, default=0) >= len(files):
        raise ValueError(f"{DESCRIPTION} has a page on drive {max(homes)} of {len(files)}")
    stored = state_format(told.rule, told.states)
    sizes = [stored.page_bytes(page.elements) for page in told.pages]
    for home, file in enumerate(files):
        need = size_of_home(sizes, homes, home)
        if need and (not file.is_file() or file.stat().st_size < need):
            raise ValueError(f"{shown(str(file))} is not there, or is shorter than its {need} bytes")
    of_unit: dict[int, list[tuple[_ToldPage, int]]] = {}
    for page, start in zip(told.pages, offsets(sizes, homes), strict=True):
        of_unit.setdefault(page.unit, []).append((page, start))
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
