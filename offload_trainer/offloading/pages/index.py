"""Keep an index of a run's page files on drives, and read master weights from these files after the run has died.

A killed process loses no completed write, because the kernel still has it; pages in RAM are lost. With two copies of
each page the files always contain one whole step. An update writes the copies that are not valid, and then a record
that names the new ones:

    pages written ── synced ───────────────────┐
    `commit` (step counts, training position) ─┴── record ── synced ── the next update may write

The same holds after a power cut: pages are durable before the record that names them, and the record is durable before
the old copies are overwritten. `pages/manifest.py` defines the index files.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from offload_trainer.errors import TrainerError, UserError
from offload_trainer.offloading.pages.checksums import DamagedPage, PageChecksums
from offload_trainer.offloading.pages.manifest import (
    DESCRIPTION,
    FIX,
    OF_PROGRESS,
    PROGRESS,
    RECORD,
    ManifestPage,
    StoreManifest,
    boot,
    description,
    most_of_record,
    nothing_yet,
    read_description,
    read_newest,
    read_progress,
    refuse_outside,
)
from offload_trainer.offloading.pages.store import offsets, size_of_home
from offload_trainer.optim.native_adam import zlib_sum
from offload_trainer.plan.tiered.layout import Page, Unit
from offload_trainer.plan.tiered.state_formats import StateFormat, state_format
from offload_trainer.safe_files import open_file, shown
from offload_trainer.storage.ab_record import Record
from offload_trainer.storage.atomic_io import sync_directory, write_text
from offload_trainer.units import format_count

_MASTER = 4  # bytes; masters are a page's first field


class PageIndex:
    """The index of one run's page files, in each of the run's private directories `drives`."""

    def __init__(
        self,
        drives: Sequence[Path],
        units: Sequence[Unit],
        pages: Sequence[Page],
        *,
        format: StateFormat,
        model: Path,
        sums: PageChecksums | None = None,
        sync: Callable[[], None] = lambda: None,
    ) -> None:
        """Write store.json to each directory, and open the record or the progress files.

        `sums` holds the pages' checksums and their number of copies; `sync` makes written pages durable. Files that
        were taken over from an earlier process keep that run's id.
        """
        self._sums = sums if sums is not None and sums.places.count > 1 and drives else None
        self._sync, self._lasting = sync, all(page.home >= 0 for page in pages)
        self.commits = False  # an update is recorded only together with the content that `commit` adds
        self._record: Record | None = None
        self._descriptors: list[int] = []
        self._run = _run_of(drives) or secrets.token_hex(16)
        places = 2 if self._sums else 1
        told = description(drives, units, pages, format=format, model=model, places=places, run=self._run)
        for drive in drives:
            write_text(drive / DESCRIPTION, json.dumps(told))
        self._lock = threading.Lock()
        self._step, self._under_way = 0, False
        self._told: Mapping[str, Any] | None = None  # content from `commit`, kept while the update is running
        if self._sums is not None:
            for drive in drives:  # the directory entries must be durable, too
                sync_directory(drive.parent)
                sync_directory(drive.parent.parent)
            names = [weight["name"] for weight in told["weights"]]
            most = most_of_record(len(pages), names, fields=len(format.fields))
            self._record = Record(drives[0] / RECORD, most=most)
            if self._record.is_new:  # from now on a file without a record is a damaged one
                first = {"step": 0, "newest": "", "run": self._run}
                self._record.write(json.dumps(first).encode(), lasting=True)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            self._descriptors = [os.open(drive / PROGRESS, flags, 0o666) for drive in drives]

    def note(self, step: int, *, updating: bool) -> None:
        """Record that the files contain the state after `step` updates.

        With `updating`, an update is running, and some pages may already have the next state. With two copies of each
        page that is not written to the record, because the update does not change the copies that the record names.
        """
        if self._record is None:
            note = json.dumps({"step": step, "updating": updating}).ljust(OF_PROGRESS).encode()
            for descriptor in self._descriptors:
                os.pwrite(descriptor, note, 0)
            return
        if not updating and self._lasting:
            self._sync()
        with self._lock:
            self._step, self._under_way = step, updating
            if not updating and (self._told is not None or not self.commits):
                self._write()

    def commit(self, step: int, told: Mapping[str, Any]) -> None:
        """Add content to the record of the state after `step` updates, and write the record.

        If the update is still running, the record is written when it ends. The next update may begin only after this.
        """
        with self._lock:
            self._told = told
            if not self._under_way:
                self._step = step
                self._write()

    def _write(self) -> None:
        assert self._record is not None
        assert self._sums is not None
        told, self._told = self._told or {}, None
        pages = {"newest": self._sums.places.bits().hex(), "sums": self._sums.of_newest().hex()}
        content = {"step": self._step, "run": self._run} | pages | dict(told)
        self._record.write(json.dumps(content).encode(), lasting=self._lasting)

    def close(self) -> None:
        if self._record is not None:
            self._record.close()
        while self._descriptors:
            os.close(self._descriptors.pop())


def _run_of(drives: Sequence[Path]) -> str:
    """Return the id of the run whose files are in these directories, or an empty string."""
    if not drives or not (drives[0] / DESCRIPTION).exists():
        return ""
    return read_description(drives[0]).run


@dataclass(frozen=True)
class _Summed:
    """The byte range of a page's masters, including padding, and their checksum."""

    offset: int
    bytes: int
    sum: int


@dataclass(frozen=True)
class _MasterRange:
    """A range of consecutive masters in a file."""

    file: Path
    offset: int
    elements: int
    page: _Summed | None = None  # all masters of the page, if their checksum is known


@dataclass(frozen=True)
class StoredMasters:
    """The master weights in the page files of a dead run."""

    step: int  # updates that all masters have
    updating: bool  # some masters may have one more
    shapes: dict[str, tuple[int, ...]]
    model: Path
    places: dict[str, list[_MasterRange]]
    _whole: set[tuple[Path, _Summed]] = field(default_factory=set)  # ranges whose checksum was verified

    def read(self, name: str) -> torch.Tensor:
        """Return one whole fp32 master.

        Raises:
            TrainerError: a file is too short or cannot be read, or a page does not have its checksum.
        """
        out = torch.empty(self.shapes[name])
        view, done = out.view(-1).view(torch.uint8).numpy().data, 0
        for stretch in self.places[name]:
            self._check(stretch)
            size = _MASTER * stretch.elements
            _fill(view[done : done + size], stretch.file, stretch.offset)
            done += size
        return out

    def _check(self, stretch: _MasterRange) -> None:
        """Raise DamagedPage if the checksum of the page's masters is known and differs."""
        if stretch.page is None or (stretch.file, stretch.page) in self._whole:
            return
        data = torch.empty(stretch.page.bytes, dtype=torch.uint8)
        _fill(data.numpy().data, stretch.file, stretch.page.offset)
        if zlib_sum(data) != stretch.page.sum:
            raise DamagedPage(
                f"{stretch.file}: {stretch.page.bytes} bytes of masters at {stretch.page.offset} are damaged or of "
                f"another step or run: they do not have the CRC-32 that they were written with. {FIX}"
            )
        self._whole.add((stretch.file, stretch.page))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole fp32 master), one at a time; see `read` for errors."""
        for name in self.shapes:
            yield name, self.read(name)


def _fill(view: memoryview, path: Path, offset: int) -> None:
    """Fill `view` from the file; raise TrainerError if it cannot be read or is too short."""
    try:
        with open(open_file(path), "rb") as file:
            file.seek(offset)
            got = file.readinto(view)
    except (OSError, ValueError) as error:
        raise TrainerError(f"{path}: {len(view)} bytes at {offset} cannot be read: {error}") from error
    if got != len(view):
        raise TrainerError(f"{path}: cut short: {got} of {len(view)} bytes at {offset}")


def read_store(directory: Path) -> StoredMasters:
    """Return the masters in a private directory that a dead run left.

    Raises:
        UserError: not all weights are in the files, or the index is missing or damaged.
    """
    told = read_description(directory)
    step, updating, newest, sums = _read_step(directory, told)
    lost = sum(page.elements for page in told.pages if page.home < 0)
    if lost or told.fixed:
        total = format_count(sum(page.elements for page in told.pages))
        what = f"{format_count(lost)} of {total} masters" if lost else f"{len(told.fixed)} fixed weights"
        raise UserError(
            f"{directory}: {what} were in memory and went with the run, or are on other nodes; export its newest "
            "checkpoint"
        )
    try:
        refuse_outside(directory, told)
        places = _places(told, newest=newest, sums=sums)
    except (ValueError, OSError) as error:
        raise UserError(f"{directory}: {error}. {FIX}") from error
    shapes = {weight.name: weight.shape for weight in told.weights}
    return StoredMasters(step, updating, shapes, Path(told.model), places)


def _read_step(directory: Path, told: StoreManifest) -> tuple[int, bool, list[int], Sequence[int]]:
    """Return the step of the files, whether an update was running, and, with two copies, valid copies and checksums."""
    if told.places > 1:
        newest = read_newest(told)
        if newest is None:
            raise nothing_yet(directory)
        return newest.step, False, newest.places(len(told.pages)), memoryview(bytes.fromhex(newest.sums)).cast("I")
    progress = read_progress(directory)
    # After a power cut the progress file may be older than the pages, because page writes bypass the page cache.
    return progress.step, progress.updating or told.boot != boot(), [], []


def files_of(told: StoreManifest) -> list[Path]:
    """Return the page file on each drive; raise ValueError if one is missing or too short for its pages."""
    files = [Path(drive) / "state" for drive in told.drives]
    sizes, homes = _sizes_and_homes(told)
    if max(homes, default=0) >= len(files):
        raise ValueError(f"{DESCRIPTION} has a page on drive {max(homes)} of {len(files)}")
    for home, file in enumerate(files):
        need = told.places * size_of_home(sizes, homes, home)
        if need and (not file.is_file() or file.stat().st_size < need):
            raise ValueError(f"{shown(str(file))} is not there, or is shorter than its {need} bytes")
    return files


def _sizes_and_homes(told: StoreManifest) -> tuple[list[int], list[int]]:
    stored = state_format(told.rule, told.states)
    return [stored.page_bytes(page.elements) for page in told.pages], [page.home for page in told.pages]


def _places(told: StoreManifest, *, newest: Sequence[int], sums: Sequence[int]) -> dict[str, list[_MasterRange]]:
    """Return the file ranges of each weight's master.

    `newest` and `sums` are the valid copy of each page and the checksums of its fields, if pages have two copies.
    Raises ValueError if the pages do not cover a weight or a file is too short.
    """
    files, (sizes, homes) = files_of(told), _sizes_and_homes(told)
    apart = [size_of_home(sizes, homes, home) for home in range(len(files))]
    of_unit: dict[int, list[tuple[ManifestPage, int, _Summed | None]]] = {}
    master = told.fields["master"]
    for number, (page, start) in enumerate(zip(told.pages, offsets(sizes, homes), strict=True)):
        second = apart[page.home] if newest and newest[number] else 0
        summed = (
            _Summed(start + second, master.padded(page.elements), sums[number * len(told.fields)]) if sums else None
        )
        of_unit.setdefault(page.unit, []).append((page, start + second, summed))
    places = {}
    for weight in told.weights:
        places[weight.name] = [
            _MasterRange(files[page.home], start + _MASTER * (first - page.start), last - first, summed)
            for page, start, summed in of_unit.get(weight.unit, ())
            if (first := max(weight.start, page.start))
            < (last := min(weight.start + weight.numel, page.start + page.elements))
        ]
        held = sum(stretch.elements for stretch in places[weight.name])
        if held != weight.numel:
            raise ValueError(f"{DESCRIPTION} has pages for {held} elements of {weight.name}, which has {weight.numel}")
    return places
