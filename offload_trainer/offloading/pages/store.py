"""Homes of what a run keeps: optimizer state by page, 16-bit weights and gradients by unit, in memory or in files.

    PageStore    pages of masters and moments     RAM: `in_memory(page)`    drive or device: `read`, `write` a buffer
                 on drives in one place or two (`page_places`): `read` gives what held at the last `flip`
                 on drives each has sums (`page_sums`), which are compared whenever it is read
    UnitStore    one flat tensor for each unit    RAM: `host(unit)`         drive: `read`, `write` a stretch

Training moves whole aligned stretches. Whoever builds, saves or loads reads and writes single weights at any place
(`get`, `put`), through a write-back cache that holds one stretch of one file at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from offload_trainer.offloading.device.base import Device
from offload_trainer.offloading.pages.checksums import DamagedPage, PageChecksums
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.plan.tiered.layout import ALIGN, DEVICE, ELSEWHERE, RAM, Page, aligned
from offload_trainer.plan.tiered.state_formats import StateFormat
from offload_trainer.storage.dtypes import DTYPES
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import DriveFile, Future, Transfers, done, followed


class WriteBackCache:
    """Stretches of files in memory, for reading and writing at any place in them."""

    def __init__(
        self,
        transfers: Transfers,
        *,
        places: int = 1,
        was_read: Callable[[DriveFile, int, torch.Tensor], None] = lambda *_: None,
        was_written: Callable[[DriveFile, int, torch.Tensor], None] = lambda *_: None,
    ) -> None:
        """At most `places` stretches are open at a time; the one opened longest ago is put away first.

        `was_read` and `was_written` are called with the file, the offset and the bytes after each transfer.
        """
        self._transfers, self._was_read, self._was_written = transfers, was_read, was_written
        self._places = places
        self._open: dict[tuple[DriveFile, int], torch.Tensor] = {}
        self._changed: set[tuple[DriveFile, int]] = set()

    def open(self, file: DriveFile, offset: int, size: int, *, modify: bool) -> torch.Tensor:
        """The `size` bytes at `offset` as uint8; what is written there under `modify` reaches the file later."""
        key = file, offset
        if key not in self._open:
            while len(self._open) >= self._places:
                self._put_away(next(iter(self._open)))
            buffer = host_buffer(size)
            self._transfers.read(file, offset, buffer).wait()
            self._was_read(file, offset, buffer)
            self._open[key] = buffer
        if modify:
            self._changed.add(key)
        return self._open[key]

    def flush(self) -> None:
        """Bring changes to the files and let go of the memory."""
        for key in list(self._open):
            self._put_away(key)

    def _put_away(self, key: tuple[DriveFile, int]) -> None:
        buffer = self._open.pop(key)
        if key in self._changed:
            self._transfers.write(*key, buffer).wait()
            self._was_written(*key, buffer)
            self._changed.remove(key)


# A block's weights lie on a few pages, and are given in another order than they lie in.
_PAGES_OPEN = 6


class PageStore:
    """The optimizer state. A page is its fields, one after the other: masters, moments, scales of 8-bit moments."""

    def __init__(
        self,
        pages: Sequence[Page],
        *,
        format: StateFormat,
        files: Sequence[DriveFile],
        transfers: Transfers,
        device: Device,
        node: Node,
        sums: PageChecksums,
    ) -> None:
        """Pages in RAM and in `files` are there once a node; which rank changes which of them is the caller's.

        Of those that another node has nothing is kept here. `sums`: of these pages, in one place or two on a drive,
        whose file is so many times as large.
        """
        self.pages = tuple(pages)
        self.format = format
        self._files, self._transfers, self._device = files, transfers, device
        self._sizes = [format.page_bytes(page.elements) for page in pages]
        homes = [page.home for page in pages]
        self._offsets = offsets(self._sizes, homes)
        self._apart = [size_of_home(self._sizes, homes, home) for home in range(len(files))]  # a page's two places
        self.sums, self.places = sums, sums.places
        self._memory = node.memory(size_of_home(self._sizes, homes, RAM))
        self._on_device = device.buffer(size_of_home(self._sizes, homes, DEVICE), torch.uint8)
        if self._on_device.numel():
            device.reached().wait()  # its memory is zero before anybody else writes there
        self._field_at: dict[tuple[DriveFile, int], tuple[int, int, str]] = {}  # page, place and field
        self._cache = WriteBackCache(
            transfers, places=_PAGES_OPEN, was_read=self._compare_field, was_written=self._keep_field
        )
        self._of_unit: dict[int, list[int]] = {}
        for number, page in enumerate(pages):
            self._of_unit.setdefault(page.unit, []).append(number)

    def bytes_of(self, number: int) -> int:
        return self._sizes[number]

    def in_memory(self, number: int) -> torch.Tensor | None:
        """The bytes of a page that lives in RAM."""
        if self.pages[number].home != RAM:
            return None
        return self._memory[self._offsets[number] :][: self._sizes[number]]

    def on_device(self, number: int) -> torch.Tensor | None:
        """The bytes of a page that lives on the device. They change `beside` what else the device computes."""
        if self.pages[number].home != DEVICE:
            return None
        return self._on_device[self._offsets[number] :][: self._sizes[number]]

    def buffers(self, count: int) -> list[torch.Tensor]:
        """At most `count` of them, each for any page that is not in RAM."""
        away = [size for size, page in zip(self._sizes, self.pages, strict=True) if page.home not in (RAM, ELSEWHERE)]
        copied = any(page.home == DEVICE for page in self.pages)
        pinned = self._device.is_cuda and copied
        return [host_buffer(max(away), pinned=pinned) for _ in range(min(count, len(away)))]

    def fields(self, number: int, data: torch.Tensor) -> dict[str, torch.Tensor]:
        """The page's fields within `data`, its bytes wherever they are."""
        elements = self.pages[number].elements
        found, start = {}, 0
        for name, field in self.format.fields.items():
            found[name] = data[start:][: field.bytes(elements)].view(DTYPES[field.dtype])
            start += field.padded(elements)
        return found

    def read(self, number: int, buffer: torch.Tensor, *, place: int | None = None) -> Future:
        """Fill `buffer` (uint8, the page's bytes) from the page's drive, or from the device as it is by then.

        From a drive as it was at the last `flip`, or from the `place` that held at another moment. DamagedPage, from
        the future, where the drive gives back something else than was written.
        """
        resident = self.on_device(number)
        if resident is not None:
            return self._copy(resident, buffer)
        place = self.places.holding(number) if place is None else place
        read = self._transfers.read(*self._where(number, place), buffer)
        return followed(read, partial(self._compare, number, place, buffer))

    def write(self, number: int, buffer: torch.Tensor) -> Future:
        """The page's new bytes: on a drive with two places beside the old ones, until `flip`."""
        resident = self.on_device(number)
        if resident is not None:
            return self._copy(buffer, resident)
        place = self.places.free(number)
        self.places.written(number)
        write = self._transfers.write(*self._where(number, place), buffer)
        return followed(write, partial(self.sums.keep, number, place, buffer))

    def _compare(self, number: int, place: int, data: torch.Tensor, field: str | None = None) -> None:
        """DamagedPage unless `data` is what was written."""
        wrong = self.sums.differing(number, place, data, field=field)
        if wrong is not None:
            (file, offset), size = self._where(number, place), self._sizes[number]
            raise DamagedPage(
                f"{file.path}: page {number}, {size} bytes at {offset}, is damaged, or of another step or run: its "
                f"{wrong} does not have the CRC-32 that it was written with; dmesg may say more of the drive"
            )

    def _compare_field(self, file: DriveFile, offset: int, data: torch.Tensor) -> None:
        number, place, field = self._field_at[file, offset]
        self._compare(number, place, data, field)

    def _keep_field(self, file: DriveFile, offset: int, data: torch.Tensor) -> None:
        number, place, field = self._field_at[file, offset]
        self.sums.keep(number, place, data, field=field)

    def flip(self) -> None:
        """What this rank has written since the last time, all of which has arrived, is what its pages hold."""
        self.places.flip()

    def forget_written(self) -> None:
        """Pages with two places are as at the last `flip`; what was written since has arrived."""
        self.places.forget()

    def sync(self) -> None:
        """What has arrived in files lasts when this returns, also without power."""
        for file in self._files:
            file.sync()

    def _where(self, number: int, place: int) -> tuple[DriveFile, int]:
        home = self.pages[number].home
        return self._files[home], self._offsets[number] + place * self._apart[home]

    def _copy(self, values: torch.Tensor, into: torch.Tensor) -> Future:
        """To the device or from it, in order with the updates there."""
        with self._device.beside(after=None):
            into.copy_(values, non_blocking=True)
            return self._device.reached()

    def replaced(self, numbers: Sequence[int]) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Of each of these pages the number and the fields, all zero, to be set before the next is asked for.

        All are home at the end, and hold.
        """
        free = self.buffers(2)
        leaving: deque[tuple[torch.Tensor, Future]] = deque()
        for number in numbers:
            inside = self.in_memory(number)
            if inside is not None:
                yield number, self.fields(number, inside.zero_())
                continue
            if not free:
                buffer, future = leaving.popleft()
                future.wait()
                free.append(buffer)
            buffer = free.pop()
            data = buffer[: self._sizes[number]].zero_()
            yield number, self.fields(number, data)
            leaving.append((buffer, done() if self.pages[number].home == ELSEWHERE else self.write(number, data)))
        for _, future in leaving:
            future.wait()
        self.flip()

    # -- single weights -----------------------------------------------------------------------------------------------

    def get(self, field: str, unit: int, start: int, count: int) -> torch.Tensor:
        """A copy of one field for `count` elements of a unit from `start` on, as it is stored; what is elsewhere is not
        set.

        A scale belongs to 256 elements, and a weight starts with a scale of its own: `start` is a multiple of 256.
        """
        kind = self.format.fields[field]
        out = torch.empty(kind.entries(count), dtype=DTYPES[kind.dtype])
        for held, given in self._touched(field, unit, start, count, modify=False):
            out[given].copy_(held)
        return out

    def put(self, field: str, unit: int, start: int, count: int, values: torch.Tensor) -> None:
        """Set one field for `count` elements of a unit from `start` on, as far as this node has them.

        `values` as `get` gives. Then `flush`.
        """
        for held, given in self._touched(field, unit, start, count, modify=True):
            held.copy_(values[given])

    def flush(self) -> None:
        """What `put` wrote has reached its home when this returns."""
        self._cache.flush()

    def _touched(
        self, field: str, unit: int, start: int, count: int, *, modify: bool
    ) -> Iterator[tuple[torch.Tensor, slice]]:
        """The stretches of these elements in their pages, each with its place among the values."""
        per = self.format.fields[field].per
        for number in self._of_unit.get(unit, ()):
            page = self.pages[number]
            first, last = max(start, page.start), min(start + count, page.start + page.elements)
            if first < last and page.home != ELSEWHERE:
                whole = self._field(field, number, modify=modify)
                held = whole[(first - page.start) // per : -(-(last - page.start) // per)]
                yield held, slice((first - start) // per, -(-(last - start) // per))

    def _field(self, field: str, number: int, *, modify: bool) -> torch.Tensor:
        """One field of a page, wherever it lives."""
        inside = self.in_memory(number)
        if inside is None:
            inside = self.on_device(number)
        if inside is not None:
            return self.fields(number, inside)[field]
        page, place = self.pages[number], self.places.newest(number)
        file, offset = self._where(number, place)
        for name, kind in self.format.fields.items():
            if name == field:
                break
            offset += kind.padded(page.elements)
        self._field_at[file, offset] = number, place, field
        data = self._cache.open(file, offset, kind.padded(page.elements), modify=modify)
        return data[: kind.bytes(page.elements)].view(DTYPES[kind.dtype])


class UnitStore:
    """A flat tensor for each unit, in memory (home RAM) or in a file (home 0, 1, ...)."""

    def __init__(
        self,
        elements: Sequence[int],
        homes: Sequence[int],
        *,
        dtype: torch.dtype,
        files: Sequence[DriveFile],
        transfers: Transfers,
        pinned: bool,
        node: Node,
    ) -> None:
        """What has its home in memory or in `files` is there once a node."""
        self.homes = tuple(homes)
        self.dtype = dtype
        self._elements = tuple(elements)
        self._files, self._transfers = files, transfers
        sizes = [count * dtype.itemsize for count in elements]
        self._offsets = offsets(sizes, homes)
        self._memory = node.memory(size_of_home(sizes, homes, RAM), pinned=pinned).view(dtype)
        self._cache = WriteBackCache(transfers)

    def host(self, unit: int) -> torch.Tensor | None:
        """The unit's elements where they live in memory."""
        if self.homes[unit] != RAM:
            return None
        first = self._offsets[unit] // self.dtype.itemsize
        return self._memory[first : first + self._elements[unit]]

    def read(self, unit: int, start: int, buffer: torch.Tensor) -> Future:
        """Fill `buffer` (this dtype) from element `start` on; aligned."""
        return self._transfers.read(*self._place(unit, start), buffer)

    def write(self, unit: int, start: int, buffer: torch.Tensor) -> Future:
        return self._transfers.write(*self._place(unit, start), buffer)

    def _place(self, unit: int, start: int) -> tuple[DriveFile, int]:
        return self._files[self.homes[unit]], self._offsets[unit] + start * self.dtype.itemsize

    def get(self, unit: int, start: int, count: int) -> torch.Tensor:
        """A copy of `count` elements from `start` on. Of a file nothing else is read, since it may be being written."""
        inside = self.host(unit)
        if inside is not None:
            return inside[start : start + count].clone()
        first = start // ALIGN * ALIGN
        buffer = host_buffer((aligned(start + count) - first) * self.dtype.itemsize).view(self.dtype)
        self.read(unit, first, buffer).wait()
        return buffer[start - first :][:count]

    def replace(self, unit: int, start: int, values: torch.Tensor) -> None:
        """Set elements from `start` on; of a file only the aligned stretch around them is read and written."""
        inside = self.host(unit)
        if inside is not None:
            inside[start : start + values.numel()].copy_(values)
            return
        first = start // ALIGN * ALIGN
        buffer = host_buffer((aligned(start + values.numel()) - first) * self.dtype.itemsize).view(self.dtype)
        self.read(unit, first, buffer).wait()
        buffer[start - first :][: values.numel()].copy_(values)
        self.write(unit, first, buffer).wait()

    def put(self, unit: int, start: int, values: torch.Tensor) -> None:
        """Set elements from `start` on; `values` 1-D of any dtype. Then `flush`."""
        self._whole(unit)[start : start + values.numel()].copy_(values)

    def flush(self) -> None:
        self._cache.flush()

    def _whole(self, unit: int) -> torch.Tensor:
        inside = self.host(unit)
        if inside is not None:
            return inside
        size = self._elements[unit] * self.dtype.itemsize
        return self._cache.open(*self._place(unit, 0), size, modify=True).view(self.dtype)


def offsets(sizes: Sequence[int], homes: Sequence[int]) -> list[int]:
    """Byte at which each of several things starts in its home."""
    ends = dict.fromkeys(homes, 0)
    starts = []
    for size, home in zip(sizes, homes, strict=True):
        starts.append(ends[home])
        ends[home] += size
    return starts


def size_of_home(sizes: Sequence[int], homes: Sequence[int], home: int) -> int:
    """Bytes of all that lives in one home."""
    return sum(size for size, its in zip(sizes, homes, strict=True) if its == home)
