"""Write, read and validate the manifest of a run's page files, which says what a dead run's files contain.

    store.json   in each private directory: the page layout, the position of each weight's master, the model's directory
    record       in the first directory only: the step, the valid copy and checksums of each page, and the engine's and
                 the training loop's state at that step

Only a run whose whole state is on drives, in two copies of each page, has a manifest (`run/resume.py`). A killed
process loses no completed write, because the kernel still has it, so its files always contain one whole step. An update
writes the copies that are not valid, and then a record that names the new ones:

    pages written ── synced ───────────────────┐
    `commit` (step counts, training position) ─┴── record ── synced ── the next update may write

The same holds after a power cut: pages are durable before the record that names them, and the record is durable before
the old copies are overwritten. `read_store` reads the masters of a dead run.
"""

from __future__ import annotations

import json
import math
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from offload_trainer.errors import TrainerError, UserError
from offload_trainer.offloading.pages.store import DamagedPage, PageCopies, PageTable, copies_of_bits
from offload_trainer.optim.native_adam import zlib_sum
from offload_trainer.optim.state_files import EngineState, MomentsName, RuleName
from offload_trainer.plan.tiered.layout import Page, Unit
from offload_trainer.plan.tiered.state_formats import StateFormat, state_format
from offload_trainer.safe_files import Count, Line, Steps, exact_record, file_bytes, open_file, parsed, read_back, shown
from offload_trainer.storage.ab_record import Record, read_record, torn_slot
from offload_trainer.storage.atomic_io import sync_directory, write_text

DESCRIPTION, RECORD = "store.json", "record"
FIX = "Export the run's newest checkpoint"


# -- contents ----------------------------------------------------------------------------------------------------------


@exact_record
class ManifestWeight:
    """A trainable weight: its unit, and its first element in the unit."""

    name: Line
    shape: tuple[Count, ...]
    unit: Count
    start: Count

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@exact_record
class StoreManifest:
    """The content of store.json."""

    drives: list[str]
    states: MomentsName
    pages: list[Page]
    weights: list[ManifestWeight]
    model: str
    rule: RuleName
    run: Line  # the run's id, which its record contains as well

    def __post_init__(self) -> None:
        state_format(self.rule, self.states)  # raises ValueError for an unsupported combination

    @property
    def format(self) -> StateFormat:
        return state_format(self.rule, self.states)

    @property
    def table(self) -> PageTable:
        return PageTable(self.pages, self.format)

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
    run: str,
) -> StoreManifest:
    """Return the manifest of the files of `drives`: the pages in them, and the weights."""
    return StoreManifest(
        run=run,
        drives=[str(drive.resolve()) for drive in drives],
        rule=format.rule.name,
        states=format.moments.name,
        pages=list(pages),
        weights=[
            ManifestWeight(place.weight.name, place.weight.shape, unit.index, place.start)
            for unit in units
            for place in unit.places
        ],
        model=str(model.absolute()),
    )


@exact_record
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
        copies: PageCopies,
        sync: Callable[[], None],
    ) -> None:
        """Write store.json to each directory, and open the record.

        `copies` tracks the pages' copies; `sync` makes written pages durable. Files that were taken over from an
        earlier process keep that run's id.
        """
        self._copies, self._sync = copies, sync
        taken_over = (drives[0] / DESCRIPTION).exists()
        self._run = read_description(drives[0]).run if taken_over else secrets.token_hex(16)
        manifest = manifest_of(drives, units, pages, format=format, model=model, run=self._run)
        for drive in drives:
            write_text(drive / DESCRIPTION, json.dumps(asdict(manifest)))
        self._lock = threading.Lock()
        self._step, self._under_way = 0, False
        self._committed: Mapping[str, Any] | None = None  # content from `commit`, kept while the update is running
        for drive in drives:  # the directory entries must be durable, too
            sync_directory(drive.parent)
            sync_directory(drive.parent.parent)
        self._record = Record(drives[0] / RECORD, most=manifest.record[1])
        if self._record.is_new:  # once it is written, a missing record means damage
            self._record.write(json.dumps({"step": 0, "newest": "", "run": self._run}).encode())

    def note(self, step: int, *, updating: bool) -> None:
        """Note that the files contain the state after `step` updates, or with `updating` that an update is running.

        The update does not change the copies that the record names, so its beginning is not recorded.
        """
        if not updating:
            self._sync()
        with self._lock:
            self._step, self._under_way = step, updating
            if not updating and self._committed is not None:
                self._write(self._committed)

    def commit(self, step: int, content: Mapping[str, Any]) -> None:
        """Add content to the record of the state after `step` updates, and write the record.

        If the update is still running, the record is written when it ends. The next update may begin only after this.
        """
        with self._lock:
            self._committed = content
            if not self._under_way:
                self._step = step
                self._write(content)

    def _write(self, committed: Mapping[str, Any]) -> None:
        self._committed = None
        pages = {"newest": self._copies.newest_bits().hex(), "sums": self._copies.newest_sums().hex()}
        content = {"step": self._step, "run": self._run} | pages | dict(committed)
        self._record.write(json.dumps(content).encode())

    def close(self) -> None:
        self._record.close()


# -- after it has died -------------------------------------------------------------------------------------------------


def read_description(directory: Path, *, fix: str = FIX) -> StoreManifest:
    """Read store.json; raise UserError, with the advice `fix`, if it cannot be read."""
    return read_back(directory / DESCRIPTION, StoreManifest, fix=fix)


def read_newest(manifest: StoreManifest, *, fix: str = FIX) -> Newest | None:
    """Read the record; return None before the first update.

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
    files, table = [Path(drive) / "state" for drive in manifest.drives], manifest.table
    if outside := [home for home in table.homes if not 0 <= home < len(files)]:
        raise ValueError(f"{DESCRIPTION} has a page on drive {outside[0]} of {len(files)}")
    for home, file in enumerate(files):
        need = 2 * table.home_bytes(home)
        if need and (not file.is_file() or file.stat().st_size < need):
            raise ValueError(f"{shown(str(file))} is not there, or is shorter than its {need} bytes")
    return files


# -- masters of a dead run ---------------------------------------------------------------------------------------------

_MASTER = 4  # bytes; masters are a page's first field


@dataclass(frozen=True)
class StoredMasters:
    """The master weights in the page files of a dead run."""

    step: int  # updates that the masters have
    model: Path
    files: Sequence[Path]  # by drive
    table: PageTable
    copies: Sequence[int]  # the valid copy of each page
    sums: Sequence[int]  # checksums by page and field
    places: dict[str, ManifestWeight]
    _verified: set[int] = field(default_factory=set)  # pages whose checksum was compared

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: weight.shape for name, weight in self.places.items()}

    def read(self, name: str) -> torch.Tensor:
        """Return one whole fp32 master.

        Raises:
            TrainerError: a file is too short or cannot be read, or a page does not have its checksum.
        """
        weight = self.places[name]
        out = torch.empty(weight.numel)
        for number, held, given in self.table.touched("master", weight.unit, weight.start, weight.numel):
            self._verify(number)
            self._fill(out[given], number, start=_MASTER * held.start)
        return out.view(weight.shape)

    def _verify(self, number: int) -> None:
        """Raise DamagedPage if the checksum of the page's masters differs."""
        if number in self._verified:
            return
        fields = self.table.format.fields
        data = torch.empty(fields["master"].padded(self.table.pages[number]), dtype=torch.uint8)
        file, offset = self._fill(data, number)
        if zlib_sum(data) != self.sums[number * len(fields)]:
            raise DamagedPage(
                f"{file}: {data.numel()} bytes of masters at {offset} are damaged or of another step or run: "
                f"they do not have the CRC-32 that they were written with. {FIX}"
            )
        self._verified.add(number)

    def _fill(self, data: torch.Tensor, number: int, *, start: int = 0) -> tuple[Path, int]:
        """Fill `data` from byte `start` of a page; return the file and the offset that it was read from.

        Raises TrainerError if the file cannot be read or is too short.
        """
        view, path = data.view(torch.uint8).numpy().data, self.files[self.table.homes[number]]
        offset = self.table.offset(number, copy=self.copies[number]) + start
        try:
            with open(open_file(path), "rb") as file:
                file.seek(offset)
                got = file.readinto(view)
        except (OSError, ValueError) as error:
            raise TrainerError(f"{path}: {len(view)} bytes at {offset} cannot be read: {error}") from error
        if got != len(view):
            raise TrainerError(f"{path}: cut short: {got} of {len(view)} bytes at {offset}")
        return path, offset

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole fp32 master), one at a time; see `read` for errors."""
        for name in self.places:
            yield name, self.read(name)


def read_store(directory: Path) -> StoredMasters:
    """Return the masters in a private directory that a dead run left.

    Raises:
        UserError: the run died before its first update, or the manifest is missing or damaged.
    """
    manifest = read_description(directory)
    newest = read_newest(manifest)
    if newest is None:
        raise UserError(f"{directory}: its run died before its first update; there is nothing in it to export")
    copies, sums = newest.copies(len(manifest.pages)), memoryview(bytes.fromhex(newest.sums)).cast("I")
    table = manifest.table
    try:
        refuse_outside(directory, manifest)
        files = files_of(manifest)
        for weight in manifest.weights:
            ranges = table.touched("master", weight.unit, weight.start, weight.numel)
            held = sum(given.stop - given.start for _, _, given in ranges)
            if held != weight.numel:
                raise ValueError(
                    f"{DESCRIPTION} has pages for {held} elements of {weight.name}, which has {weight.numel}"
                )
    except (ValueError, OSError) as error:
        raise UserError(f"{directory}: {error}. {FIX}") from error
    places = {weight.name: weight for weight in manifest.weights}
    return StoredMasters(newest.step, Path(manifest.model), files, table, copies, sums, places)
