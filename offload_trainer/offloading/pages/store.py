"""Store optimizer state by page, and weights or gradient sums by unit, in RAM, on the device or in files on drives.

Training transfers whole aligned ranges; `get` and `put` access single weights. With two copies of each page on a drive
no update overwrites the last valid state. Each field of each copy on a drive has a CRC-32, which is compared before a
page that was read is used.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from offload_trainer.common.errors import TrainerError
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.optim.kernel_api import Sum
from offload_trainer.plan.tiered.layout import ALIGN, Page, aligned
from offload_trainer.plan.tiered.spec import SAVE_BUFFERS
from offload_trainer.plan.tiered.state_formats import StateFormat
from offload_trainer.plan.tiers import DEVICE, ELSEWHERE, RAM, offsets, on_drive, size_of_home
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.tensorfile import DTYPES
from offload_trainer.storage.transfer import DriveFile, Future, Transfers, done, followed

if TYPE_CHECKING:
    from offload_trainer.offloading.allocation import EngineParts

_MASTERS_OPEN = 6  # pages whose masters `get` and `put` keep open: a block's weights are on a few, in another order


class DamagedPage(TrainerError):
    """Raised when a page that was read from a drive differs from what was written there."""


class PageTable:
    """The places of a node's pages and of their fields. A page's fields follow each other, masters first."""

    def __init__(self, pages: Sequence[Page], format: StateFormat) -> None:
        self.pages, self.format = tuple(pages), format
        self.homes = [page.home for page in pages]
        self.sizes = [format.page_bytes(page) for page in pages]
        self._offsets = offsets(self.sizes, self.homes)
        self._bytes = {home: size_of_home(self.sizes, self.homes, home) for home in set(self.homes)}
        self._of_unit: dict[int, list[int]] = {}
        for number, page in enumerate(self.pages):
            self._of_unit.setdefault(page.unit, []).append(number)

    def offset(self, number: int, *, copy: int = 0) -> int:
        """Return the first byte of a page, which is one of its masters, in its tier; copies 1 follow copies 0."""
        return self._offsets[number] + copy * self._bytes[self.homes[number]]

    def fields(self, number: int, data: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of the page's fields in `data`, the page's bytes, or in each row of `data`, for equal pages."""
        page, found, start = self.pages[number], {}, 0
        for name, field in self.format.fields.items():
            found[name] = data[..., start : start + field.bytes(page)].view(DTYPES[field.dtype])
            start += field.padded(page)
        return found

    def touched(self, unit: int, start: int, count: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield (page, range of its elements, range of these) for the node's pages with some of these elements."""
        for number in self._of_unit.get(unit, ()):
            page = self.pages[number]
            first, last = max(start, page.start), min(start + count, page.start + page.elements)
            if first < last and page.home != ELSEWHERE:
                yield number, slice(first - page.start, last - page.start), slice(first - start, last - start)


class PageCopies:
    """The valid and the newest copy of each page of a node, and the checksums of all copies, 0 for a new file's zeros.

    Each rank writes and flips its own pages. Checksums are of `data` (uint8): a page, or its masters.
    """

    def __init__(self, table: PageTable, *, count: int, node: Node, compute: Sum) -> None:
        """Set up `count` copies (1 or 2) of pages on drives; `compute` returns a buffer's CRC-32. All ranks call it."""
        self.count, self._compute, pages, fields = count, compute, table.pages, table.format.fields
        self._two = [count == 2 and on_drive(page.home) for page in pages]
        self.valid = bytearray(len(pages))  # the valid copy of each page, as of the last flip: 0 or 1
        self._newest = node.memory(len(pages)).numpy()
        self._written: set[int] = set()
        self._fields = list(fields)
        self._sizes = [[field.padded(page) for field in fields.values()] for page in pages]
        memory = node.memory(4 * len(pages) * count * len(fields)).numpy()
        self._sums = memory.view(np.uint32).reshape(len(pages), count, len(fields))

    def newest(self, number: int) -> int:
        """Return the copy that any rank wrote last; its content is complete once that write has completed."""
        return int(self._newest[number])

    def free(self, number: int) -> int:
        """Return the copy that the next write goes to."""
        return 1 - self.valid[number] if self._two[number] else 0

    def written(self, number: int) -> None:
        """Record a write of the page to its free copy. Any thread may call it."""
        if self._two[number]:
            self._newest[number] = self.free(number)
            self._written.add(number)

    def flip(self) -> None:
        """Make all copies that this rank has written the valid ones; call it after their writes have completed."""
        for number in self._written:
            self.valid[number] = self.free(number)
        self._written.clear()

    def forget(self) -> None:
        """Discard all written copies. Call it after their writes have completed, or they could overwrite later ones."""
        for number in self._written:
            self._newest[number] = self.valid[number]
        self._written.clear()

    def keep_sums(self, number: int, copy: int, data: torch.Tensor) -> None:
        """Store the checksums of one copy of a page."""
        computed = self._computed(number, data)
        self._sums[number, copy, : len(computed)] = computed

    def differing(self, number: int, copy: int, data: torch.Tensor) -> str | None:
        """Return the first field of `data` whose checksum differs, or None."""
        kept = self._sums[number, copy].tolist()
        both = zip(self._fields, kept, self._computed(number, data), strict=False)
        return next((name for name, before, now in both if before != now), None)

    def _computed(self, number: int, data: torch.Tensor) -> list[int]:
        sizes = self._sizes[number]
        return [self._compute(part) for part in data.split(sizes if data.numel() > sizes[0] else sizes[:1])]

    def record(self) -> tuple[list[int], bytes]:
        """Return each page's newest copy, and the checksums of these copies, page by page, 4 bytes for each field."""
        return self._newest.tolist(), self._sums[np.arange(len(self._newest)), self._newest].tobytes()

    def begin(self, newest: Sequence[int], sums: bytes) -> None:
        """Take over an earlier process's files: the valid copy of each page, and `sums` as from `record`."""
        self.valid[:] = bytes(newest)
        self._newest[:] = newest
        given = np.frombuffer(sums, np.uint32).reshape(len(newest), len(self._fields))
        self._sums[np.arange(len(newest)), self._newest] = given


class PageStore(PageTable):
    """The optimizer state of a node, by page."""

    def __init__(self, parts: EngineParts) -> None:
        """Allocate files with room for all copies, and memory, none for pages of other nodes (home ELSEWHERE).

        All ranks of a node call it, and share RAM and files.
        """
        super().__init__(parts.homes.pages, parts.format)
        node, device, count = parts.node, parts.device, parts.sizes.places
        self._files = parts.drives.files("state", [count * size for size in self.sizes], self.homes)
        self._transfers, self._device = parts.drives.transfers, device
        self.copies = PageCopies(self, count=count, node=node, compute=parts.kernels[0].checksum)
        self._memory = node.memory(size_of_home(self.sizes, self.homes, RAM))
        self._on_device = device.buffer(size_of_home(self.sizes, self.homes, DEVICE), torch.uint8)
        if self._on_device.numel():
            device.reached().wait()  # other streams may write there only after it has been set to zero
        # Masters of pages on drives that `get` and `put` have opened, by page and copy, and those changed.
        self._open: dict[tuple[int, int], torch.Tensor] = {}
        self._changed: set[tuple[int, int]] = set()

    def in_memory(self, number: int) -> torch.Tensor | None:
        """Return the bytes of a page in RAM (uint8), or None for another tier."""
        if self.pages[number].home != RAM:
            return None
        return self._memory[self.offset(number) :][: self.sizes[number]]

    def on_device(self, number: int) -> torch.Tensor | None:
        """Return the bytes of a page on the device (uint8), or None. They are updated on the side stream."""
        if self.pages[number].home != DEVICE:
            return None
        return self._on_device[self.offset(number) :][: self.sizes[number]]

    def buffers(self, count: int) -> list[torch.Tensor]:
        """Return at most `count` host buffers (uint8), each large enough for any page on the device or on drives."""
        sizes = zip(self.sizes, self.homes, strict=True)
        staged = [size for size, home in sizes if on_drive(home) or home == DEVICE]
        pinned = self._device.is_cuda and DEVICE in self.homes
        return [host_buffer(max(staged), pinned=pinned) for _ in range(min(count, len(staged)))]

    def read(self, number: int, buffer: torch.Tensor, *, copy: int | None = None) -> Future:
        """Fill `buffer` (uint8, the page's size) from the device, or with the valid or another `copy` from a drive.

        The future raises DamagedPage if a page from a drive differs from what was written.
        """
        if (resident := self.on_device(number)) is not None:
            return self._copy(resident, buffer)
        copy = self.copies.valid[number] if copy is None else copy
        read = self._transfers.read(*self._where(number, copy), buffer)
        return followed(read, partial(self._compare, number, copy, buffer))

    def write(self, number: int, buffer: torch.Tensor) -> Future:
        """Write the page's new bytes. With two copies on a drive the valid copy stays until `copies.flip`."""
        if (resident := self.on_device(number)) is not None:
            return self._copy(buffer, resident)
        copy = self.copies.free(number)
        self.copies.written(number)
        write = self._transfers.write(*self._where(number, copy), buffer)
        return followed(write, partial(self.copies.keep_sums, number, copy, buffer))

    def _compare(self, number: int, copy: int, data: torch.Tensor) -> None:
        """Raise DamagedPage if the checksums of a page, or of its masters, differ from those of what was written."""
        if (wrong := self.copies.differing(number, copy, data)) is not None:
            (file, offset), size = self._where(number, copy), self.sizes[number]
            raise DamagedPage(
                f"{file.path}: page {number}, {size} bytes at {offset}, is damaged, or of another step or run: its "
                f"{wrong} does not have the CRC-32 that it was written with; dmesg may say more of the drive"
            )

    def sync(self) -> None:
        """Flush all files to stable storage, so that completed writes survive a power cut."""
        for file in self._files:
            file.sync()

    def _where(self, number: int, copy: int) -> tuple[DriveFile, int]:
        return self._files[self.pages[number].home], self.offset(number, copy=copy)

    def _copy(self, values: torch.Tensor, into: torch.Tensor) -> Future:
        """Copy to or from the device on the side stream, in order with the updates there."""
        with self._device.side_stream(after=None):
            into.copy_(values, non_blocking=True)
            return self._device.reached()

    def replaced(self, numbers: Sequence[int]) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yield (page, its zeroed fields), to be filled before the next; at the end all are written and valid."""
        leaving = deque((buffer, done()) for buffer in self.buffers(2))
        for number in numbers:
            if (inside := self.in_memory(number)) is not None:
                yield number, self.fields(number, inside.zero_())
                continue
            buffer, written = leaving.popleft()
            written.wait()
            data = buffer[: self.sizes[number]].zero_()
            yield number, self.fields(number, data)
            leaving.append((buffer, self.write(number, data)))
        for _, written in leaving:
            written.wait()
        self.copies.flip()

    # -- masters of single weights ------------------------------------------------------------------------------------

    def get(self, unit: int, start: int, count: int) -> torch.Tensor:
        """Return a copy of a unit's masters (fp32) from `start` on; on other nodes' pages they are uninitialised."""
        out = torch.empty(count, dtype=torch.float32)
        for number, held, given in self.touched(unit, start, count):
            out[given].copy_(self._masters(number, modify=False)[held])
        return out

    def put(self, unit: int, start: int, values: torch.Tensor) -> None:
        """Set a unit's masters to `values` (fp32, 1-D) from `start` on, where this node has them; then `flush`."""
        for number, held, given in self.touched(unit, start, values.numel()):
            self._masters(number, modify=True)[held].copy_(values[given])

    def flush(self) -> None:
        """Write everything that `put` has set to the drives, and release the memory."""
        for key in list(self._open):
            self._evict(key)

    def _evict(self, key: tuple[int, int]) -> None:
        data = self._open.pop(key)
        if key in self._changed:
            self._transfers.write(*self._where(*key), data).wait()
            self.copies.keep_sums(*key, data)
            self._changed.remove(key)

    def _masters(self, number: int, *, modify: bool) -> torch.Tensor:
        """Return a page's masters: in memory, or a copy that `flush` writes if it is to `modify`."""
        if (inside := self.in_memory(number)) is None:
            inside = self.on_device(number)
        if inside is None:
            key = number, self.copies.newest(number)
            if key not in self._open:
                while len(self._open) >= _MASTERS_OPEN:
                    self._evict(next(iter(self._open)))
                data = host_buffer(self.format.fields["master"].padded(self.pages[number]))
                self._transfers.read(*self._where(*key), data).wait()
                self._compare(*key, data)
                self._open[key] = data
            if modify:
                self._changed.add(key)
            inside = self._open[key]
        return self.fields(number, inside)["master"]


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
        self.homes, self.dtype = tuple(homes), dtype
        self.elements = tuple(size // dtype.itemsize for size in sizes)
        self._files, self._transfers = files, transfers
        self._offsets = offsets(sizes, homes)
        self._memory = node.memory(size_of_home(sizes, homes, RAM), pinned=pinned).view(dtype)

    def host(self, unit: int) -> torch.Tensor | None:
        """Return the unit's elements if they are in RAM, else None."""
        if self.homes[unit] != RAM:
            return None
        return self._memory[self._offsets[unit] // self.dtype.itemsize :][: self.elements[unit]]

    def read(self, unit: int, start: int, buffer: torch.Tensor) -> Future:
        """Fill `buffer` (the store's dtype) from the drive; `start` and the size are aligned."""
        return self._transfers.read(*self._place(unit, start), buffer)

    def write(self, unit: int, start: int, buffer: torch.Tensor) -> Future:
        """Write `buffer` to the drive from element `start` on; `start` and the size are aligned."""
        return self._transfers.write(*self._place(unit, start), buffer)

    def _place(self, unit: int, start: int) -> tuple[DriveFile, int]:
        return self._files[self.homes[unit]], self._offsets[unit] + start * self.dtype.itemsize

    def get(self, unit: int, start: int, count: int) -> torch.Tensor:
        """Return a copy of `count` elements from `start` on; from a file only the aligned range around them is read."""
        inside = self.host(unit)
        return inside[start : start + count].clone() if inside is not None else self._around(unit, start, count)[1]

    def put(self, unit: int, start: int, values: torch.Tensor) -> None:
        """Set elements from `start` on to `values` (1-D, any dtype); in a file only the aligned range around them."""
        if (inside := self.host(unit)) is not None:
            inside[start : start + values.numel()].copy_(values)
            return
        whole = not (start % ALIGN or values.numel() % ALIGN)
        buffer, held = self._around(unit, start, values.numel(), read=not whole)
        held.copy_(values)
        self.write(unit, start // ALIGN * ALIGN, buffer).wait()

    def _around(self, unit: int, start: int, count: int, *, read: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for the aligned range around `count` elements from `start` on, and for the elements in it."""
        first = start // ALIGN * ALIGN
        buffer = host_buffer((aligned(start + count) - first) * self.dtype.itemsize).view(self.dtype)
        if read:
            self.read(unit, first, buffer).wait()
        return buffer, buffer[start - first :][:count]


class PageSnapshot:
    """A consistent snapshot of the pages `numbers` of `store`, read in order while training continues.

    An update waits before it overwrites a page that has not been read (`wait_for`), unless it writes another copy.
    """

    def __init__(self, store: PageStore, numbers: Sequence[int]) -> None:
        self._store, self._numbers = store, numbers
        self._copies = {number: store.copies.valid[number] for number in numbers}
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
        """Yield each page's number and fields, views that the next page reuses. Raises TrainerError once closed."""
        store = self._store
        pending = deque(number for number in self._numbers if store.in_memory(number) is None)
        free = store.buffers(SAVE_BUFFERS)
        arriving: deque[tuple[torch.Tensor, Future]] = deque()
        for number in self._numbers:
            while free and pending:
                following, buffer = pending.popleft(), free.pop()
                data = buffer[: store.sizes[following]]
                arriving.append((buffer, store.read(following, data, copy=self._copies[following])))
            if self._closed:
                raise TrainerError("the state was let go of before it was written")
            if (inside := store.in_memory(number)) is not None:
                yield number, store.fields(number, inside)
                self._may_change(number)
            else:
                buffer, future = arriving.popleft()
                future.wait()
                self._may_change(number)  # the caller reads the copy in the buffer
                yield number, store.fields(number, buffer)
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
