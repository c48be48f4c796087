"""Write, read and validate the manifest of a run's page files, which says what a dead run's files contain.

    store.json   in each private directory: the page layout, the position of each weight's master, the model's directory
    progress     with one copy of each page: the step of the files, and whether an update was running
    record       with two copies, in the first directory only: the step, the valid copy and checksums of each page,
                 and the engine's and the training loop's state at that step

A killed process loses no completed write, because the kernel still has it; pages in RAM are lost. With two copies of
each page the files always contain one whole step. An update writes the copies that are not valid, and then a record
that names the new ones:

    pages written ── synced ───────────────────┐
    `commit` (step counts, training position) ─┴── record ── synced ── the next update may write

The same holds after a power cut: pages are durable before the record that names them, and the record is durable before
the old copies are overwritten. `pages/stored_masters.py` reads the masters of a dead run.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, Strict, with_config

from offload_trainer.errors import UserError
from offload_trainer.offloading.pages.page_copies import PageCopies, copies_of_bits
from offload_trainer.optim.state_files import EngineState, MomentsName, RuleName
from offload_trainer.plan.tiered.layout import Page, Unit
from offload_trainer.plan.tiered.state_formats import StateFormat, state_format
from offload_trainer.plan.tiers import on_drive, size_of_home
from offload_trainer.safe_files import EXACT, Count, Flag, Line, Steps, file_bytes, parsed, read_back, shown
from offload_trainer.storage.ab_record import Record, read_record, torn_slot
from offload_trainer.storage.atomic_io import sync_directory, write_text

DESCRIPTION, PROGRESS, RECORD = "store.json", "progress", "record"
FIX = "Export the run's newest checkpoint"
_PROGRESS_BYTES = 64


# -- contents ----------------------------------------------------------------------------------------------------------


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
class StoreManifest:
    """The content of store.json."""

    drives: list[str]
    states: MomentsName
    pages: list[Page]
    weights: list[ManifestWeight]
    fixed: list[Line]
    model: str
    boot: str
    rule: RuleName
    places: Annotated[int, Strict(), Field(ge=1, le=2)]  # copies of each page on a drive
    run: Line  # the run's id, which its record contains as well

    @property
    def format(self) -> StateFormat:
        return state_format(self.rule, self.states)

    @property
    def page_bytes(self) -> list[int]:
        """Return the bytes of each page."""
        format = self.format
        return [format.page_bytes(page) for page in self.pages]

    @property
    def record(self) -> tuple[Path, int]:
        """Return the record's path and its maximum size in bytes."""
        pages, fields = len(self.pages), len(self.format.fields)
        names = sum(len(json.dumps(weight.name)) + 14 for weight in self.weights)
        directory = Path(self.drives[0]) if self.drives else Path()
        return directory / RECORD, 1024 + (2 * -(-pages // 8) + 8 * fields * pages) + names


def manifest_of(
    drives: Sequence[Path],
    units: Sequence[Unit],
    pages: Sequence[Page],
    *,
    format: StateFormat,
    model: Path,
    copies: int,
    run: str,
) -> StoreManifest:
    """Return the manifest of the files of `drives`: the pages in them, their number of copies, and the weights."""
    places = [(unit, place) for unit in units for place in unit.places]
    return StoreManifest(
        run=run,
        drives=[str(drive.resolve()) for drive in drives],
        rule=format.rule.name,
        states=format.moments.name,
        pages=list(pages),
        weights=[
            ManifestWeight(place.weight.name, place.weight.shape, unit.index, place.start)
            for unit, place in places
            if place.weight.trainable
        ],
        fixed=[place.weight.name for _, place in places if not place.weight.trainable],
        model=str(model.absolute()),
        boot=boot() if copies == 1 else "",  # two copies are consistent after a power cut, too
        places=copies,
    )


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
    newest: Annotated[str, Field(pattern="^([0-9a-f]{2})*$")]  # bit map, see `PageCopies.newest_bits`
    run: Line
    sums: Annotated[str, Field(pattern="^([0-9a-f]{8})*$")] = ""  # checksums by page and field
    engine: EngineState | None = None
    train: dict[Line, Count] | None = None  # position of the training loop

    def copies(self, count: int) -> list[int]:
        """Return the valid copy of each of `count` pages; raise ValueError if the record has another number."""
        return copies_of_bits(bytes.fromhex(self.newest), count)


# -- while a run lives -------------------------------------------------------------------------------------------------


class ManifestWriter:
    """The manifest of one run's page files, in each of the run's private directories `drives`."""

    def __init__(
        self,
        drives: Sequence[Path],
        units: Sequence[Unit],
        pages: Sequence[Page],
        *,
        format: StateFormat,
        model: Path,
        copies: PageCopies | None = None,
        sync: Callable[[], None] = lambda: None,
    ) -> None:
        """Write store.json to each directory, and open the record or the progress files.

        `copies` tracks the pages' copies; `sync` makes written pages durable. Files that were taken over from an
        earlier process keep that run's id.
        """
        self._copies = copies if copies is not None and copies.count > 1 and drives else None
        self._sync, self._lasting = sync, all(on_drive(page.home) for page in pages)
        self.commits = False  # an update is recorded only together with the content that `commit` adds
        self._record: Record | None = None
        self._descriptors: list[int] = []
        taken_over = bool(drives) and (drives[0] / DESCRIPTION).exists()
        self._run = read_description(drives[0]).run if taken_over else secrets.token_hex(16)
        count = 2 if self._copies else 1
        manifest = manifest_of(drives, units, pages, format=format, model=model, copies=count, run=self._run)
        for drive in drives:
            write_text(drive / DESCRIPTION, json.dumps(asdict(manifest)))
        self._lock = threading.Lock()
        self._step, self._under_way = 0, False
        self._committed: Mapping[str, Any] | None = None  # content from `commit`, kept while the update is running
        if self._copies is not None:
            for drive in drives:  # the directory entries must be durable, too
                sync_directory(drive.parent)
                sync_directory(drive.parent.parent)
            self._record = Record(drives[0] / RECORD, most=manifest.record[1])
            if self._record.is_new:  # once it is written, a missing record means damage
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
            note = json.dumps({"step": step, "updating": updating}).ljust(_PROGRESS_BYTES).encode()
            for descriptor in self._descriptors:
                os.pwrite(descriptor, note, 0)
            return
        if not updating and self._lasting:
            self._sync()
        with self._lock:
            self._step, self._under_way = step, updating
            if not updating and (self._committed is not None or not self.commits):
                self._write()

    def commit(self, step: int, content: Mapping[str, Any]) -> None:
        """Add content to the record of the state after `step` updates, and write the record.

        If the update is still running, the record is written when it ends. The next update may begin only after this.
        """
        with self._lock:
            self._committed = content
            if not self._under_way:
                self._step = step
                self._write()

    def _write(self) -> None:
        assert self._record is not None
        assert self._copies is not None
        committed, self._committed = self._committed or {}, None
        pages = {"newest": self._copies.newest_bits().hex(), "sums": self._copies.newest_sums().hex()}
        content = {"step": self._step, "run": self._run} | pages | dict(committed)
        self._record.write(json.dumps(content).encode(), lasting=self._lasting)

    def close(self) -> None:
        if self._record is not None:
            self._record.close()
        while self._descriptors:
            os.close(self._descriptors.pop())


# -- after it has died -------------------------------------------------------------------------------------------------


def read_description(directory: Path, *, fix: str = FIX) -> StoreManifest:
    """Read store.json; raise UserError, with the advice `fix`, if it cannot be read."""
    return read_back(directory / DESCRIPTION, StoreManifest, fix=fix)


def read_progress(directory: Path) -> Progress:
    """Read the progress file of pages with one copy; raise UserError if it is damaged or there was no update yet."""
    try:
        record = file_bytes(directory / PROGRESS, most=_PROGRESS_BYTES)
        if record:
            return parsed(record, Progress)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"{directory / PROGRESS} cannot be read: {error}. {FIX}") from error
    raise nothing_yet(directory)


def read_newest(manifest: StoreManifest, *, fix: str = FIX) -> Newest | None:
    """Read the record of pages with two copies; return None before the first update.

    Raises:
        UserError: the record is missing, damaged, or of another run.
    """
    path, most = manifest.record
    try:
        found = parsed(read_record(path, most=most), Newest)
        if found.run != manifest.run:
            raise ValueError(f"it is of another run than the {DESCRIPTION} next to it")
        if not found.newest:
            return None
        found.copies(len(manifest.pages))
        wanted = len(manifest.format.fields) * len(manifest.pages)
        if len(found.sums) != 8 * wanted:
            raise ValueError(f"it has {len(found.sums) // 8} checksums, and the pages have {wanted} fields")
        return found
    except FileNotFoundError as error:
        raise UserError(f"{path} cannot be read: it is not there. {fix}") from error
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}. {fix}") from error


def torn_record(manifest: StoreManifest) -> bool:
    """Return whether one of the record's two slots is damaged, so that the other may be of the previous step."""
    path, most = manifest.record
    return torn_slot(path, most=most)


def nothing_yet(directory: Path) -> UserError:
    """Return the error for a run that died before its first update."""
    return UserError(f"{directory}: its run died before its first update; there is nothing in it to export")


def refuse_outside(directory: Path, manifest: StoreManifest) -> None:
    """Raise ValueError unless every directory that store.json names contains the same store.json, and one is this."""
    ours = file_bytes(directory / DESCRIPTION)
    for drive in map(Path, manifest.drives):
        path = drive / DESCRIPTION
        if not path.is_file() or path.stat().st_size != len(ours) or file_bytes(path) != ours:
            raise ValueError(f"{shown(str(drive))} is not one of its run's directories: it holds no such {DESCRIPTION}")
    if directory.resolve() not in [Path(drive).resolve() for drive in manifest.drives]:
        raise ValueError(f"{directory / DESCRIPTION} is of the run in {shown(', '.join(manifest.drives))}")


def files_of(manifest: StoreManifest) -> list[Path]:
    """Return the page file on each drive; raise ValueError if one is missing or too short for its pages."""
    files = [Path(drive) / "state" for drive in manifest.drives]
    sizes, homes = manifest.page_bytes, [page.home for page in manifest.pages]
    if max(homes, default=0) >= len(files):
        raise ValueError(f"{DESCRIPTION} has a page on drive {max(homes)} of {len(files)}")
    for home, file in enumerate(files):
        need = manifest.places * size_of_home(sizes, homes, home)
        if need and (not file.is_file() or file.stat().st_size < need):
            raise ValueError(f"{shown(str(file))} is not there, or is shorter than its {need} bytes")
    return files


def boot() -> str:
    """Return the kernel's id of the current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
