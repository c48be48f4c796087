"""Read master weights from the page files of a run that has died; `pages/manifest.py` says what the files contain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from offload_trainer.errors import TrainerError, UserError
from offload_trainer.offloading.pages.manifest import (
    DESCRIPTION,
    FIX,
    StoreManifest,
    boot,
    files_of,
    nothing_yet,
    read_description,
    read_newest,
    read_progress,
    refuse_outside,
)
from offload_trainer.offloading.pages.page_copies import DamagedPage
from offload_trainer.optim.native_adam import zlib_sum
from offload_trainer.plan.tiered.layout import Page
from offload_trainer.plan.tiers import offsets, on_drive, size_of_home
from offload_trainer.safe_files import open_file
from offload_trainer.units import format_count

_MASTER = 4  # bytes; masters are a page's first field


@dataclass(frozen=True)
class _PageMasters:
    """All masters of a page: their byte range in the page's file, including padding, and their checksum if known."""

    file: Path
    offset: int
    bytes: int
    sum: int | None


@dataclass(frozen=True)
class _MasterRange:
    """A range of consecutive masters in a page's file."""

    page: _PageMasters
    offset: int
    elements: int


@dataclass(frozen=True)
class StoredMasters:
    """The master weights in the page files of a dead run."""

    step: int  # updates that all masters have
    updating: bool  # some masters may have one more
    shapes: dict[str, tuple[int, ...]]
    model: Path
    ranges: dict[str, list[_MasterRange]]
    _verified: set[_PageMasters] = field(default_factory=set)  # pages whose checksum was compared

    def read(self, name: str) -> torch.Tensor:
        """Return one whole fp32 master.

        Raises:
            TrainerError: a file is too short or cannot be read, or a page does not have its checksum.
        """
        out = torch.empty(self.shapes[name])
        view, done = out.view(-1).view(torch.uint8).numpy().data, 0
        for part in self.ranges[name]:
            self._verify(part.page)
            size = _MASTER * part.elements
            _fill(view[done : done + size], part.page.file, part.offset)
            done += size
        return out

    def _verify(self, page: _PageMasters) -> None:
        """Raise DamagedPage if the checksum of the page's masters is known and differs."""
        if page.sum is None or page in self._verified:
            return
        data = torch.empty(page.bytes, dtype=torch.uint8)
        _fill(data.numpy().data, page.file, page.offset)
        if zlib_sum(data) != page.sum:
            raise DamagedPage(
                f"{page.file}: {page.bytes} bytes of masters at {page.offset} are damaged or of another step or run: "
                f"they do not have the CRC-32 that they were written with. {FIX}"
            )
        self._verified.add(page)

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
        UserError: not all weights are in the files, or the manifest is missing or damaged.
    """
    manifest = read_description(directory)
    copies: Sequence[int] = ()
    sums: Sequence[int] = ()
    if manifest.places > 1:
        newest = read_newest(manifest)
        if newest is None:
            raise nothing_yet(directory)
        step, updating = newest.step, False
        copies, sums = newest.copies(len(manifest.pages)), memoryview(bytes.fromhex(newest.sums)).cast("I")
    else:
        progress = read_progress(directory)
        # After a power cut the progress file may be older than the pages, because their writes bypass the page cache.
        step, updating = progress.step, progress.updating or manifest.boot != boot()
    lost = sum(page.elements for page in manifest.pages if not on_drive(page.home))
    if lost or manifest.fixed:
        total = format_count(sum(page.elements for page in manifest.pages))
        what = f"{format_count(lost)} of {total} masters" if lost else f"{len(manifest.fixed)} fixed weights"
        raise UserError(
            f"{directory}: {what} were in memory and went with the run, or are on other nodes; export its newest "
            "checkpoint"
        )
    try:
        refuse_outside(directory, manifest)
        ranges = _master_ranges(manifest, copies=copies, sums=sums)
    except (ValueError, OSError) as error:
        raise UserError(f"{directory}: {error}. {FIX}") from error
    shapes = {weight.name: weight.shape for weight in manifest.weights}
    return StoredMasters(step, updating, shapes, Path(manifest.model), ranges)


def _master_ranges(
    manifest: StoreManifest, *, copies: Sequence[int], sums: Sequence[int]
) -> dict[str, list[_MasterRange]]:
    """Return the file ranges of each weight's master.

    `copies` and `sums` are the valid copy of each page and the checksums of its fields, if pages have two copies.
    Raises ValueError if the pages do not cover a weight or a file is too short.
    """
    files, sizes, homes = files_of(manifest), manifest.page_bytes, [page.home for page in manifest.pages]
    copy_bytes = [size_of_home(sizes, homes, home) for home in range(len(files))]
    fields = manifest.format.fields
    of_unit: dict[int, list[tuple[Page, _PageMasters]]] = {}
    for number, (page, offset) in enumerate(zip(manifest.pages, offsets(sizes, homes), strict=True)):
        if copies and copies[number]:
            offset += copy_bytes[page.home]
        size = fields["master"].padded(page)
        masters = _PageMasters(files[page.home], offset, size, sums[number * len(fields)] if sums else None)
        of_unit.setdefault(page.unit, []).append((page, masters))
    ranges = {}
    for weight in manifest.weights:
        ranges[weight.name] = [
            _MasterRange(masters, masters.offset + _MASTER * (first - page.start), last - first)
            for page, masters in of_unit.get(weight.unit, ())
            if (first := max(weight.start, page.start))
            < (last := min(weight.start + weight.numel, page.start + page.elements))
        ]
        held = sum(part.elements for part in ranges[weight.name])
        if held != weight.numel:
            raise ValueError(f"{DESCRIPTION} has pages for {held} elements of {weight.name}, which has {weight.numel}")
    return ranges
