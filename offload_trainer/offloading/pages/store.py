"""Store optimizer state by page, and weights or gradient sums by unit, in RAM, on the device or in files on drives.

    PageTable    where pages and their fields are
    PageCopies   the valid and the newest copy of each page on a drive, and their checksums
    PageStore    pages of masters and moments     RAM: `in_memory(page)`    drive or device: `read`, `write` a buffer
                 on a drive: `read` returns the copy that the last `flip` chose, and compares its checksums
    ShadowPages  the old bytes of some pages in RAM while a step that may yet be undone updates these pages in place
    PageSnapshot the pages as they are now, read while training continues
    UnitStore    one flat tensor for each unit    RAM: `host(unit)`         drive: `read`, `write` a range

Training transfers whole aligned ranges. Initialisation, saving and loading access single weights at any offset (`get`,
`put`), those of pages through a write-back cache of fields.

With two copies of each page on a drive no update overwrites the last valid state:

    write      goes to the copy that is not valid            `newest` points to it; `valid` stays the copy to read
    flip       makes all written copies the valid ones       the old copies become free
    forget     discards all written copies (rollback)        `newest` points to the valid copies again

Pages in RAM and on the device have one copy, which is updated in place. So have pages on drives if `count` is 1.

Each field of each copy on a drive has a checksum (CRC-32). It is computed from the buffer after the page has been
written, and computed again and compared before a page that was read is used. With two copies the record of a step
stores the checksums too (`pages/manifest.py`), so that a later process can detect a page that is damaged or belongs to
another step or run.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property, partial

import torch

from offload_trainer.errors import TrainerError
from offload_trainer.offloading.device import Device
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.optim.kernel_api import Sum
from offload_trainer.plan.tiered.layout import ALIGN, Page, aligned
from offload_trainer.plan.tiered.spec import SAVE_BUFFERS
from offload_trainer.plan.tiered.state_formats import StateFormat
from offload_trainer.plan.tiers import DEVICE, ELSEWHERE, offsets, on_drive, size_of_home
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.tensorfile import DTYPES
from offload_trainer.storage.transfer import DriveFile, Future, Transfers, done, followed

_SUM_BYTES = 4


class DamagedPage(TrainerError):
    """Raised when a page that was read from a drive differs from what was written there."""


class PageTable:
    """Where the pages of a node and their fields are. A page's fields follow each other, masters first."""

    def __init__(self, pages: Sequence[Page], format: StateFormat) -> None:
        self.pages, self.format = tuple(pages), format
        self.homes = [page.home for page in pages]
        self.sizes = [format.page_bytes(page) for page in pages]
        self._offsets = offsets(self.sizes, self.homes)
        self._bytes = {home: size_of_home(self.sizes, self.homes, home) for home in set(self.homes)}

    def home_bytes(self, home: int) -> int:
        """Return the bytes of one copy of all pages of a tier."""
        return self._bytes.get(home, 0)

    def offset(self, number: int, *, copy: int = 0, field: str = "master") -> int:
        """Return the first byte of one field of a page in its tier. Of a drive's pages, copies 1 follow copies 0."""
        page, start = self.pages[number], self._offsets[number] + copy * self._bytes[self.homes[number]]
        for name, kind in self.format.fields.items():
            if name == field:
                break
            start += kind.padded(page)
        return start

    def fields(self, number: int, data: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of the page's fields in `data`, the page's bytes, or in each row of `data`, for equal pages."""
        page, found, start = self.pages[number], {}, 0
        for name, field in self.format.fields.items():
            found[name] = data[..., start : start + field.bytes(page)].view(DTYPES[field.dtype])
            start += field.padded(page)
        return found

    def touched(self, field: str, unit: int, start: int, count: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield each page with some of these elements of a unit, as (number, range of the page's field, of the values).

        Pages of other nodes are left out.
        """
        per = self.format.fields[field].per
        for number in self._of_unit.get(unit, ()):
            page = self.pages[number]
            first, last = max(start, page.start), min(start + count, page.start + page.elements)
            if first < last and page.home != ELSEWHERE:
                held = slice((first - page.start) // per, -(-(last - page.start) // per))
                yield number, held, slice((first - start) // per, -(-(last - start) // per))

    @cached_property
    def _of_unit(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for number, page in enumerate(self.pages):
            found.setdefault(page.unit, []).append(number)
        return found


class PageCopies:
    """The valid and the newest copy of each page of a node, and the checksums of all copies.

    Each rank writes and flips its own pages. All ranks of the node see `newest` and the checksums, which start as 0,
    the checksum of zeros, because new files contain zeros.
    """

    def __init__(self, table: PageTable, *, count: int, node: Node, compute: Sum) -> None:
        """Set up `count` copies (1 or 2) of each page on a drive. All ranks call it with the same arguments.

        `compute` returns a buffer's CRC-32.
        """
        self.count, self._compute, pages, fields = count, compute, table.pages, table.format.fields
        self._two = [count == 2 and on_drive(page.home) for page in pages]
        self._valid = bytearray(len(pages))
        self._newest = node.memory(len(pages) if count == 2 else 0)
        self._written: set[int] = set()
        self._fields = list(fields)
        self._sizes = [[field.padded(page) for field in fields.values()] for page in pages]
        memory = node.memory(_SUM_BYTES * count * len(self._fields) * len(pages))
        self._sums = memory.numpy().data.cast("I")

    def valid(self, number: int) -> int:
        """Return the valid copy of the page, as of the last flip: 0 or 1."""
        return self._valid[number]

    def newest(self, number: int) -> int:
        """Return the copy that any rank wrote last; its content is complete once that write has completed."""
        return int(self._newest[number]) if self._two[number] else 0

    def free(self, number: int) -> int:
        """Return the copy that the next write goes to."""
        return 1 - self._valid[number] if self._two[number] else 0

    def written(self, number: int) -> None:
        """Record a write of the page to its free copy. Any thread may call it."""
        if self._two[number]:
            self._newest[number] = self.free(number)
            self._written.add(number)

    def flip(self) -> None:
        """Make all copies that this rank has written the valid ones; call it after their writes have completed."""
        for number in self._written:
            self._valid[number] = self.free(number)
        self._written.clear()

    def forget(self) -> None:
        """Discard all written copies. Call it after their writes have completed, or they could overwrite later ones."""
        for number in self._written:
            self._newest[number] = self._valid[number]
        self._written.clear()

    # -- checksums ----------------------------------------------------------------------------------------------------

    def keep_sums(self, number: int, copy: int, field: str | None, data: torch.Tensor) -> None:
        """Store the checksums of one copy of a page. `data` (uint8) is `field`, or with None the whole page."""
        for _, at, computed in self._computed(number, copy, field, data):
            self._sums[at] = computed

    def differing(self, number: int, copy: int, field: str | None, data: torch.Tensor) -> str | None:
        """Return the first field of `data` whose checksum differs, or None. `data`: see `keep_sums`."""
        for name, at, computed in self._computed(number, copy, field, data):
            if computed != self._sums[at]:
                return name
        return None

    def _computed(
        self, number: int, copy: int, field: str | None, data: torch.Tensor
    ) -> Iterator[tuple[str, int, int]]:
        """Yield each field's name, the index of its checksum, and the checksum of its bytes in `data`."""
        first, start = self._first_sum(number, copy), 0
        for index, (name, size) in enumerate(zip(self._fields, self._sizes[number], strict=True)):
            if field in (None, name):
                yield name, first + index, self._compute(data[start:][:size])
                start += size
        assert start == data.numel(), "all bytes of the page, or of its field"

    def _first_sum(self, number: int, copy: int) -> int:
        return (number * self.count + copy) * len(self._fields)

    # -- for the record of a step -------------------------------------------------------------------------------------

    def newest_bits(self) -> bytes:
        """Return the newest copy of each page as a bit map, the first page in the lowest bit of the first byte."""
        bits = bytearray(-(-len(self._two) // 8))
        for number in range(len(self._two)):
            bits[number // 8] |= self.newest(number) << number % 8
        return bytes(bits)

    def newest_sums(self) -> bytes:
        """Return the checksums of each page's newest copy, page by page, 4 bytes for each field."""
        count = len(self._fields)
        firsts = [self._first_sum(number, self.newest(number)) for number in range(len(self._two))]
        return b"".join(self._sums[first : first + count].tobytes() for first in firsts)

    def begin(self, newest: Sequence[int], sums: bytes) -> None:
        """Take over an earlier process's files: the valid copy of each page, and `sums` as from `newest_sums`."""
        given, count = memoryview(sums).cast("I"), len(self._fields)
        for number, copy in enumerate(newest):
            if self._two[number]:
                self._valid[number] = self._newest[number] = copy
            first = self._first_sum(number, copy)
            self._sums[first : first + count] = given[number * count : (number + 1) * count]


def copies_of_bits(bits: bytes, count: int) -> list[int]:
    """Decode `PageCopies.newest_bits` for `count` pages; raise ValueError if it has another length."""
    if len(bits) != -(-count // 8):
        raise ValueError(f"it has {len(bits)} bytes of places for {count} pages")
    return [bits[number // 8] >> number % 8 & 1 for number in range(count)]


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
