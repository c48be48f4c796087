"""Write, read and validate the manifest of a run's page files, which says what a dead run's files contain.

Each private directory has a store.json with the layout, and the first one a record of the last step. Only a run whose
whole state is on drives, in two copies of each page, has a manifest (`run/resume.py`). Its files always contain one
whole step: pages are synced before the record that names them, and the record before the next update overwrites the old
copies.
"""

import json
import os
import secrets
import struct
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from offload_trainer.common.errors import UserError
from offload_trainer.common.safe_files import Count, Line, Steps, exact_record, file_bytes, parsed, quoted, read_back
from offload_trainer.offloading.pages.store import PageStore, PageTable
from offload_trainer.optim.state_files import EngineState, FormatName, RuleName
from offload_trainer.plan.tiered.layout import Page, Unit
from offload_trainer.plan.tiered.state_formats import StateFormat, state_format
from offload_trainer.plan.tiers import size_of_home
from offload_trainer.storage.atomic_io import sync_directory, write_text
from offload_trainer.storage.manifest import FORMAT
from offload_trainer.storage.tensorfile import write_all

DESCRIPTION, RECORD = "store.json", "record"
FIX = "Only a copy of that file can fix this"


@exact_record
class ManifestWeight:
    """A trainable weight: its unit, and its first element in the unit."""

    name: Line
    shape: tuple[Count, ...]
    unit: Count
    start: Count


@exact_record
class StoreManifest:
    """The content of store.json."""

    drives: list[str]
    states: FormatName
    pages: list[Page]
    weights: list[ManifestWeight]
    model: str
    rule: RuleName
    run: Line  # the run's id, which its record contains as well
    masters: FormatName
    file_format: Count  # `FORMAT` of checkpoints, since values are stored in the same way

    def __post_init__(self) -> None:
        state_format(self.rule, self.states, self.masters)  # raises ValueError for an unsupported combination

    @property
    def format(self) -> StateFormat:
        return state_format(self.rule, self.states, self.masters)

    @property
    def record(self) -> tuple[Path, int]:
        """Return the record's path and its maximum size in bytes."""
        pages = len(self.pages) * (1 + 8 * len(self.format.fields))
        names = sum(len(json.dumps(weight.name)) + 14 for weight in self.weights)
        return Path(*self.drives[:1]) / RECORD, 1024 + pages + names


def manifest_of(
    drives: Sequence[Path], units: Sequence[Unit], table: PageTable, *, model: Path, run: str
) -> StoreManifest:
    """Return the manifest of the files of `drives`: the pages in them, and the weights."""
    places = [(place.weight, unit.index, place.start) for unit in units for place in unit.places]
    return StoreManifest(
        run=run,
        drives=[str(drive.resolve()) for drive in drives],
        rule=table.format.rule.name,
        states=table.format.moments.name,
        masters=table.format.masters.name,
        pages=list(table.pages),
        weights=[ManifestWeight(weight.name, weight.shape, unit, start) for weight, unit, start in places],
        model=str(model.resolve()),
        file_format=FORMAT,
    )


@exact_record
class Newest:
    """The content of a record. The first one of a run, before any update, has no pages."""

    step: Steps
    newest: Annotated[str, Field(pattern="^[01]*$")]  # the valid copy of each page
    run: Line
    sums: Annotated[str, Field(pattern="^([0-9a-f]{8})*$")] = ""  # checksums by page and field
    engine: EngineState | None = None
    train: dict[Line, Count] | None = None  # position of the training loop

    @property
    def pages(self) -> tuple[list[int], bytes]:
        """Return the valid copy of each page and their checksums, as `PageCopies.record` does."""
        return [int(copy) for copy in self.newest], bytes.fromhex(self.sums)


class ManifestWriter:
    """The manifest of one run's page files, in each of the run's private directories `drives`."""

    def __init__(self, drives: Sequence[Path], units: Sequence[Unit], store: PageStore, *, model: Path) -> None:
        """Write store.json to each directory, and open the record. Files that were taken over keep their run's id."""
        self._store = store
        taken_over = (drives[0] / DESCRIPTION).exists()
        self._run = read_description(drives[0]).run if taken_over else secrets.token_hex(16)
        manifest = manifest_of(drives, units, store, model=model, run=self._run)
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
        """Note that the files contain the state after `step` updates, or with `updating` that an update is running."""
        if not updating:
            self._store.sync()
        with self._lock:
            self._step, self._under_way = step, updating
            if not updating and self._committed is not None:
                self._write(self._committed)

    def commit(self, step: int, content: Mapping[str, Any]) -> None:
        """Add content to the record after `step` updates, and write it now, or when the running update ends.

        The next update may begin only after this.
        """
        with self._lock:
            self._committed = content
            if not self._under_way:
                self._step = step
                self._write(content)

    def _write(self, committed: Mapping[str, Any]) -> None:
        self._committed = None
        newest, sums = self._store.copies.record()
        pages = {"newest": "".join(map(str, newest)), "sums": sums.hex()}
        content = {"step": self._step, "run": self._run} | pages | dict(committed)
        self._record.write(json.dumps(content).encode())

    def close(self) -> None:
        self._record.close()


def read_description(directory: Path) -> StoreManifest:
    """Read store.json; raise UserError if it cannot be read, or another version of this program has written it."""
    if (written := read_back(directory / DESCRIPTION, dict[str, Any], fix=FIX).get("file_format")) != FORMAT:
        raise UserError(f"{directory / DESCRIPTION}: written in format {written}, and this version reads {FORMAT}")
    return read_back(directory / DESCRIPTION, StoreManifest, fix=FIX)


def read_newest(manifest: StoreManifest) -> Newest | None:
    """Return the record, None before the first update. Raises UserError if it is missing, damaged or of another run."""
    path, most = manifest.record
    try:
        found = parsed(read_record(path, most=most), Newest)
        if found.run != manifest.run:
            raise ValueError(f"it is of another run than the {DESCRIPTION} next to it")
        if not found.newest:
            return None
        pages, fields = len(manifest.pages), len(manifest.format.fields)
        if (len(found.newest), len(found.sums)) != (pages, 8 * fields * pages):
            raise ValueError(
                f"it has {len(found.newest)} places and {len(found.sums) // 8} checksums for {pages} pages of {fields} "
                "fields"
            )
        return found
    except (FileNotFoundError, ValueError) as error:
        why = "it is not there" if isinstance(error, FileNotFoundError) else error
        raise UserError(f"{path} cannot be read: {why}. {FIX}") from error


def refuse_outside(directory: Path, manifest: StoreManifest) -> None:
    """Raise ValueError unless every directory that store.json names contains the same store.json, and one is this."""
    ours = file_bytes(directory / DESCRIPTION)
    for drive in map(Path, manifest.drives):
        path = drive / DESCRIPTION
        if not path.is_file() or path.stat().st_size != len(ours) or file_bytes(path) != ours:
            raise ValueError(
                f"{quoted(str(drive))} is not one of its run's directories: it holds no such {DESCRIPTION}"
            )
    if directory.resolve() not in [Path(drive).resolve() for drive in manifest.drives]:
        raise ValueError(f"{directory / DESCRIPTION} is of the run in {quoted(', '.join(manifest.drives))}")


def files_of(manifest: StoreManifest) -> list[Path]:
    """Return the page file on each drive; raise ValueError if one is missing or too short for its pages."""
    files = [Path(drive) / "state" for drive in manifest.drives]
    table = PageTable(manifest.pages, manifest.format)
    if outside := [home for home in table.homes if not 0 <= home < len(files)]:
        raise ValueError(f"{DESCRIPTION} has a page on drive {outside[0]} of {len(files)}")
    for home, file in enumerate(files):
        need = 2 * size_of_home(table.sizes, table.homes, home)
        if need and (not file.is_file() or file.stat().st_size < need):
            raise ValueError(f"{quoted(str(file))} is not there, or is shorter than its {need} bytes")
    return files


_HEAD = struct.Struct("<QQI")  # record number, content size in bytes, CRC-32 of number, size and content
_BLOCK = 4096


class Record:
    """A writer of records of at most `most` bytes to the file at `path`, in two slots in turn.

    A slot that a kill or a power cut has torn fails its CRC-32, and the other one has the previous record. The file's
    blocks are allocated when it is created, so writing a slot changes nothing else on the disk.
    """

    def __init__(self, path: Path, *, most: int) -> None:
        """Open or create the file. Raises OSError, and ValueError if an existing file has another size."""
        self._slot = _slot(most)
        found = _records(path, self._slot) if path.exists() else []
        self._number = max(found)[0] if found else 0
        self.is_new = not found
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        if self.is_new:
            os.posix_fallocate(self._descriptor, 0, 2 * self._slot)
            os.fsync(self._descriptor)
            sync_directory(path.parent)

    def write(self, content: bytes) -> None:
        """Replace the record. After a kill or a power cut, readers find this record or the previous one."""
        number = self._number + 1
        head = struct.pack("<QQ", number, len(content))
        data = head + struct.pack("<I", zlib.crc32(head + content)) + content
        assert len(data) <= self._slot, f"{len(content)} bytes in a slot of {self._slot}"
        write_all(self._descriptor, memoryview(data), number % 2 * self._slot)
        os.fdatasync(self._descriptor)
        self._number = number

    def close(self) -> None:
        os.close(self._descriptor)


def read_record(path: Path, *, most: int) -> bytes:
    """Return the newest valid record. Raises ValueError if neither slot is valid, and FileNotFoundError."""
    if not (found := _records(path, _slot(most))):
        raise ValueError("neither of its two slots is whole")
    return max(found)[1]


def _slot(most: int) -> int:
    """Return the size of a slot in bytes: whole blocks, so that writing one slot never touches a block of the other."""
    return -(-(_HEAD.size + most) // _BLOCK) * _BLOCK


def _records(path: Path, slot: int) -> list[tuple[int, bytes]]:
    """Return the number and the content of each valid record in the file. Raises as `read_record` and `Record` do."""
    data = file_bytes(path, most=2 * slot)
    if len(data) not in (0, 2 * slot):
        raise ValueError(f"it has {len(data)} bytes, and two slots have {2 * slot}")
    found = []
    for start in range(0, len(data), slot):
        number, size, crc = _HEAD.unpack_from(data, start)
        content = data[start + _HEAD.size :][:size]
        fits = size <= slot - _HEAD.size and number and number % 2 * slot == start
        if fits and zlib.crc32(data[start:][:16] + content) == crc:
            found.append((number, content))
    return found
