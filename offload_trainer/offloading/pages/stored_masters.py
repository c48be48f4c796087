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
    ManifestWeight,
    files_of,
    read_description,
    read_newest,
    refuse_outside,
)
from offload_trainer.offloading.pages.store import DamagedPage, PageTable
from offload_trainer.optim.native_adam import zlib_sum
from offload_trainer.safe_files import open_file

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
