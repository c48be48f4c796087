"""Store optimizer state by page, and weights or gradient sums by unit, in RAM, on the device or in files on drives.

    PageStore    pages of masters and moments     RAM: `in_memory(page)`    drive or device: `read`, `write` a buffer
                 on a drive in one or two copies (`page_copies.py`): `read` returns the copy that the last `flip` chose,
                 and compares its checksums
    ShadowPages  the old bytes of some pages in RAM while a step that may yet be undone updates these pages in place
    PageSnapshot the pages as they are now, read while training continues
    UnitStore    one flat tensor for each unit    RAM: `host(unit)`         drive: `read`, `write` a range

Training transfers whole aligned ranges. Initialisation, saving and loading access single weights at any offset (`get`,
`put`), those of pages through a write-back cache of fields.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from offload_trainer.errors import TrainerError
from offload_trainer.offloading.device import Device
from offload_trainer.offloading.pages.page_copies import DamagedPage, PageCopies, PageTable
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.plan.tiered.layout import ALIGN, aligned
from offload_trainer.plan.tiered.spec import SAVE_BUFFERS
from offload_trainer.plan.tiers import DEVICE, ELSEWHERE, offsets, on_drive
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.tensorfile import DTYPES
from offload_trainer.storage.transfer import DriveFile, Future, Transfers, done, followed

# Fields of pages that are kept open: a block's weights are on a few pages, and callers access them in another order.
_FIELDS_OPEN = 6


class PageStore:
    """The optimizer state of a node.

    A page is the concatenation of its fields: masters, moments, and scales of 8-bit moments.
    """

    def __init__(
        self,
        table: PageTable,
        *,
        files: Sequence[DriveFile],
        transfers: Transfers,
        device: Device,
        node: Node,
        copies: PageCopies,
    ) -> None:
        """Allocate memory for the pages in RAM and on the device. All ranks of a node call it.

        Pages in RAM and in `files` exist once per node; the caller decides which rank updates which page. Pages of
        other nodes (home ELSEWHERE) take no memory. `copies` tracks these pages' copies on drives; with two copies each
        file is twice as large.
        """
        self._table, self.pages, self.format, self.copies = table, table.pages, table.format, copies
        self.fields = table.fields
        self._files, self._transfers, self._device = files, transfers, device
        self._memory = node.memory_of(table.sizes, table.homes)
        self._on_device = device.buffer(table.home_bytes(DEVICE), torch.uint8)
        if self._on_device.numel():
            device.reached().wait()  # other streams may write there only after it has been set to zero
        # Fields of pages on drives that `get` and `put` have opened, by page, copy and name, and those changed.
        self._open: dict[tuple[int, int, str], torch.Tensor] = {}
        self._changed: set[tuple[int, int, str]] = set()

    def bytes_of(self, number: int) -> int:
        return self._table.sizes[number]

    def in_memory(self, number: int) -> torch.Tensor | None:
        """Return the bytes of a page in RAM (uint8), or None for another tier."""
        memory = self._memory.get(self.pages[number].home)
        return None if memory is None else memory[self._table.offset(number) :][: self.bytes_of(number)]

    def on_device(self, number: int) -> torch.Tensor | None:
        """Return the bytes of a page on the device (uint8), or None. They are updated on the side stream."""
        if self.pages[number].home != DEVICE:
            return None
        return self._on_device[self._table.offset(number) :][: self.bytes_of(number)]

    def buffers(self, count: int) -> list[torch.Tensor]:
        """Return at most `count` host buffers (uint8), each large enough for any page on the device or on drives."""
        copied = any(page.home == DEVICE for page in self.pages)
        sizes = zip(self._table.sizes, self._table.homes, strict=True)
        staged = [size for size, home in sizes if on_drive(home) or home == DEVICE]
        pinned = self._device.is_cuda and copied
        return [host_buffer(max(staged), pinned=pinned) for _ in range(min(count, len(staged)))]

    def read(self, number: int, buffer: torch.Tensor, *, copy: int | None = None) -> Future:
        """Fill `buffer` (uint8, the page's size) from the page's drive or from the device.

        From a drive this reads the valid copy, or `copy` if given. From the device it reads the content after the
        work queued so far on the side stream. The future raises DamagedPage if the page differs from what was written.
        """
        resident = self.on_device(number)
        if resident is not None:
            return self._copy(resident, buffer)
        copy = self.copies.valid(number) if copy is None else copy
        read = self._transfers.read(*self._where(number, copy), buffer)
        return followed(read, partial(self._compare, number, copy, None, buffer))

    def write(self, number: int, buffer: torch.Tensor) -> Future:
        """Write the page's new bytes. With two copies on a drive the valid copy stays until `flip`."""
        resident = self.on_device(number)
        if resident is not None:
            return self._copy(buffer, resident)
        copy = self.copies.free(number)
        self.copies.written(number)
        write = self._transfers.write(*self._where(number, copy), buffer)
        return followed(write, partial(self.copies.keep_sums, number, copy, None, buffer))

    def _compare(self, number: int, copy: int, field: str | None, data: torch.Tensor) -> None:
        """Raise DamagedPage if the checksums of `data` differ from those of what was written."""
        wrong = self.copies.differing(number, copy, field, data)
        if wrong is not None:
            (file, offset), size = self._where(number, copy), self.bytes_of(number)
            raise DamagedPage(
                f"{file.path}: page {number}, {size} bytes at {offset}, is damaged, or of another step or run: its "
                f"{wrong} does not have the CRC-32 that it was written with; dmesg may say more of the drive"
            )

    def flip(self) -> None:
        """Make the copies that this rank has written since the last call the valid ones, after all writes ended."""
        self.copies.flip()

    def sync(self) -> None:
        """Flush all files to stable storage, so that completed writes survive a power cut."""
        for file in self._files:
            file.sync()

    def _where(self, number: int, copy: int, field: str = "master") -> tuple[DriveFile, int]:
        return self._files[self.pages[number].home], self._table.offset(number, copy=copy, field=field)

    def _copy(self, values: torch.Tensor, into: torch.Tensor) -> Future:
        """Copy to or from the device on the side stream, in order with the updates there."""
        with self._device.side_stream(after=None):
            into.copy_(values, non_blocking=True)
            return self._device.reached()

    def replaced(self, numbers: Sequence[int]) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yield the number and the fields of each of these pages, set to zero, for the caller to fill.

        The caller fills a page before it asks for the next one. At the end all pages are written and valid.
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
            data = buffer[: self.bytes_of(number)].zero_()
            yield number, self.fields(number, data)
            leaving.append((buffer, done() if self.pages[number].home == ELSEWHERE else self.write(number, data)))
        for _, future in leaving:
            future.wait()
        self.flip()

    # -- single weights -----------------------------------------------------------------------------------------------

    def get(self, field: str, unit: int, start: int, count: int) -> torch.Tensor:
        """Return a copy of one field for `count` elements of a unit from element `start` on, in its stored dtype.

        Elements on another node's pages are uninitialised. `start` must be a multiple of 256, because each scale of
        8-bit moments covers 256 elements and each weight starts with a new scale.
        """
        kind = self.format.fields[field]
        out = torch.empty(kind.entries(count), dtype=DTYPES[kind.dtype])
        for number, held, given in self._table.touched(field, unit, start, count):
            out[given].copy_(self._field(field, number, modify=False)[held])
        return out

    def put(self, field: str, unit: int, start: int, count: int, values: torch.Tensor) -> None:
        """Set one field for those of `count` elements of a unit from `start` on that this node stores.

        `values` has the shape and dtype that `get` returns. Call `flush` afterwards.
        """
        for number, held, given in self._table.touched(field, unit, start, count):
            self._field(field, number, modify=True)[held].copy_(values[given])

    def flush(self) -> None:
        """Write everything that `put` has set to the drives, and release the memory."""
        for key in list(self._open):
            self._evict(key)

    def _evict(self, key: tuple[int, int, str]) -> None:
        data = self._open.pop(key)
        if key in self._changed:
            self._transfers.write(*self._where(*key), data).wait()
            self.copies.keep_sums(*key, data)
            self._changed.remove(key)

    def _field(self, field: str, number: int, *, modify: bool) -> torch.Tensor:
        """Return one field of a page: in RAM, on the device, or a copy of it that `flush` writes if it is to `modify`.

        The copy that was opened first is evicted first.
        """
        inside = self.in_memory(number)
        if inside is None:
            inside = self.on_device(number)
        if inside is not None:
            return self.fields(number, inside)[field]
        page, kind, key = self.pages[number], self.format.fields[field], (number, self.copies.newest(number), field)
        if key not in self._open:
            while len(self._open) >= _FIELDS_OPEN:
                self._evict(next(iter(self._open)))
            data = host_buffer(kind.padded(page))
            self._transfers.read(*self._where(*key), data).wait()
            self._compare(*key, data)
            self._open[key] = data
        if modify:
            self._changed.add(key)
        return self._open[key][: kind.bytes(page)].view(DTYPES[kind.dtype])


class ShadowPages:
    """Memory for the old bytes of some pages in RAM, so that their update can be undone.

    Pages are updated in place, so their addresses and views stay valid. A page on a drive needs no such memory: its
    second copy is on the drive.
    """

    def __init__(self, store: PageStore, numbers: Sequence[int]) -> None:
        """Allocate memory for the old bytes of the pages `numbers`, which are in RAM."""
        self._store = store
        sizes = [store.bytes_of(number) for number in numbers]
        self._bytes = dict(zip(numbers, host_buffer(sum(sizes)).split(sizes), strict=True))

    def __contains__(self, number: object) -> bool:
        return number in self._bytes

    @property
    def nbytes(self) -> int:
        return sum(memory.numel() for memory in self._bytes.values())

    def keep(self, number: int) -> None:
        """Copy the page's bytes; call it before an update that may have to be undone."""
        self._bytes[number].copy_(self._page(number))

    def restore(self, number: int) -> torch.Tensor:
        """Copy the bytes back that `keep` has copied, and return the page (uint8)."""
        return self._page(number).copy_(self._bytes[number])

    def _page(self, number: int) -> torch.Tensor:
        page = self._store.in_memory(number)
        assert page is not None
        return page


class UnitStore:
    """A flat tensor for each unit, in RAM or in a file on a drive (home 0, 1, ...)."""

    def __init__(
        self,
        sizes: Sequence[int],
        homes: Sequence[int],
        *,
        dtype: torch.dtype,
        files: Sequence[DriveFile],
        transfers: Transfers,
        pinned: bool,
        node: Node,
    ) -> None:
        """Allocate RAM for units of `sizes` bytes. RAM and `files` exist once per node, and all its ranks call it."""
        self.homes = tuple(homes)
        self.dtype = dtype
        self.elements = tuple(size // dtype.itemsize for size in sizes)
        self._files, self._transfers = files, transfers
        self._offsets = offsets(sizes, homes)
        self._memory = node.memory_of(sizes, homes, pinned=pinned)

    def host(self, unit: int) -> torch.Tensor | None:
        """Return the unit's elements if they are in RAM, else None."""
        memory = self._memory.get(self.homes[unit])
        if memory is None:
            return None
        first = self._offsets[unit] // self.dtype.itemsize
        return memory.view(self.dtype)[first : first + self.elements[unit]]

    def read(self, unit: int, start: int, buffer: torch.Tensor) -> Future:
        """Fill `buffer` (the store's dtype) from the drive; `start` and the size are aligned."""
        return self._transfers.read(*self._place(unit, start), buffer)

    def write(self, unit: int, start: int, buffer: torch.Tensor) -> Future:
        """Write `buffer` to the drive from element `start` on; `start` and the size are aligned."""
        return self._transfers.write(*self._place(unit, start), buffer)

    def _place(self, unit: int, start: int) -> tuple[DriveFile, int]:
        return self._files[self.homes[unit]], self._offsets[unit] + start * self.dtype.itemsize

    def get(self, unit: int, start: int, count: int) -> torch.Tensor:
        """Return a copy of `count` elements from `start` on.

        From a file this reads only the aligned range around them, because writes to other parts may be in flight.
        """
        inside = self.host(unit)
        return inside[start : start + count].clone() if inside is not None else self._around(unit, start, count)[1]

    def put(self, unit: int, start: int, values: torch.Tensor) -> None:
        """Set elements from `start` on to `values` (1-D, any dtype); in a file only the aligned range around them."""
        inside = self.host(unit)
        if inside is not None:
            inside[start : start + values.numel()].copy_(values)
            return
        buffer, held = self._around(unit, start, values.numel())
        held.copy_(values)
        self.write(unit, start // ALIGN * ALIGN, buffer).wait()

    def _around(self, unit: int, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the aligned range around `count` elements from `start` on; return it, and the elements in it."""
        first = start // ALIGN * ALIGN
        buffer = host_buffer((aligned(start + count) - first) * self.dtype.itemsize).view(self.dtype)
        self.read(unit, first, buffer).wait()
        return buffer, buffer[start - first :][:count]


class PageSnapshot:
    """A consistent snapshot of the pages `numbers` of `store`, read page by page while training continues.

        reader   page 0, 1, 2, ... in order; pages on drives and on the device are prefetched
        update   waits before it overwrites a page that has not been read yet (`wait_for`)

    Only the update changes pages. So the forward, the backward, and updates of pages that have been read continue.
    Pages with two copies on their drive do not block the next update either, because it writes the other copy.
    """

    def __init__(self, store: PageStore, numbers: Sequence[int]) -> None:
        self._store, self._numbers = store, numbers
        self._copies = {number: store.copies.valid(number) for number in numbers}
        self._read = 0  # pages before this number have been read and may change
        self._closed = False
        self._changed = threading.Condition()

    def wait_for(self, number: int) -> None:
        """Wait until page `number` may change."""
        if self._store.copies.free(number) != self._copies[number]:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._read > number)

    def pages(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yield each page's number and fields, which are views that the next page reuses.

        Raises:
            TrainerError: the snapshot was closed.
        """
        pending = deque(number for number in self._numbers if self._store.in_memory(number) is None)
        free = self._store.buffers(SAVE_BUFFERS)
        arriving: deque[tuple[torch.Tensor, Future]] = deque()
        for number in self._numbers:
            while free and pending:
                following, buffer = pending.popleft(), free.pop()
                data = buffer[: self._store.bytes_of(following)]
                future = self._store.read(following, data, copy=self._copies[following])
                arriving.append((buffer, future))
            if self._closed:
                raise TrainerError("the state was let go of before it was written")
            inside = self._store.in_memory(number)
            if inside is not None:
                yield number, self._store.fields(number, inside)
                self._may_change(number)
            else:
                buffer, future = arriving.popleft()
                future.wait()
                fields = self._store.fields(number, buffer)
                self._may_change(number)  # the caller reads the copy in the buffer
                yield number, fields
                free.append(buffer)

    def _may_change(self, number: int) -> None:
        with self._changed:
            self._read = number + 1
            self._changed.notify_all()

    def close(self) -> None:
        """Release the snapshot, so that no update waits for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
