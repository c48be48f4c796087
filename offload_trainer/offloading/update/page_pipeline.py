"""Stage pages of optimizer state for the update: read them from their drive into host buffers, and write them back.

A slot is a host buffer for the parts of one page that are not in RAM. When a write completes, its thread starts the
next read into the slot. Pages arrive after all gradients are complete, in the order of the next forward; some may be
offered before that, unit by unit. Otherwise idle slots prefetch the state of pages whose gradients are not complete.
"""

import threading
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from offload_trainer.offloading.allocation import Stores
from offload_trainer.offloading.device import Device
from offload_trainer.plan.tiered.spec import Route, slot_bytes
from offload_trainer.plan.tiers import on_drive
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import Future, done, followed, together


@dataclass
class PageMemory:
    """A page's route and the memory of its parts. Until a slot stages them, parts that are not in place are empty."""

    route: Route
    state: torch.Tensor  # uint8
    gradient: torch.Tensor
    out: torch.Tensor  # the new weights
    fields: Mapping[str, torch.Tensor] | None = None  # those of `state` if it is in place, since views take time
    shadow: torch.Tensor | None = None  # uint8 memory that receives the old state
    pages: int = 1  # if there are more, they are equal and follow each other, and `state` has a row for each
    slot: int = -1  # the slot that stages it, if any
    loaded: Future = field(default_factory=done)  # the slot has its state
    after: Any = None  # event on the device: its gradients are complete, and its old weights are no longer used


@dataclass(frozen=True)
class PendingWrite:
    """An updated page that is being written back."""

    weights: Future  # the new weights are written
    whole: Future  # the new weights and the state are written


class PagePipeline:
    """The pages that the CPU updates, and those of the device that pass through host memory."""

    def __init__(
        self, stores: Stores, pages: Sequence[PageMemory], *, device: Device, slots: int, shadows: Container[int]
    ) -> None:
        """Allocate `slots` buffers for the staged ones of `pages`, which arrive in that order.

        Pages on drives, and the `shadows` in RAM, may be offered to a speculative step.
        """
        self._store, self._weights, self._gradients = stores.state, stores.weights, stores.gradients
        self._memory, routes = {page.route.number: page for page in pages}, [page.route for page in pages]
        self._routes = [route for route in routes if route.through_host]
        self._in_ram = [route for route in routes if not route.through_host and not route.on_device]
        sizes = {"gradient": self._gradients.dtype.itemsize, "weight": self._weights.dtype.itemsize}
        parts = slot_bytes(routes, on_device=False, format=self._store.format, **sizes)
        self._slots = [
            host_buffer(sum(parts.values()), pinned=device.is_cuda).split([*parts.values()])
            for _ in range(min(slots, len(self._routes)))
        ]
        self._free = list(range(len(self._slots)))
        self._offered: dict[int, list[Route]] = {}  # pages that are offered to a speculative step, by unit
        for route in (*self._routes, *self._in_ram):
            if on_drive(route.page.home) or route.number in shadows:
                self._offered.setdefault(route.page.unit, []).append(route)
        # Prefetched pages leave one slot to pages that have nothing to prefetch and are offered without their turn.
        self._one_stays_free = any(route.number in shadows for route in self._routes)
        self._waiting: deque[Route] = deque()  # pages with complete gradients, not in a slot yet
        self._expected: deque[Route] = deque()  # pages to prefetch, whose gradients are not complete
        self._prefetched: list[PageMemory] = []  # prefetched pages in slots
        self._prefetching = False  # gradients are not complete yet
        self._writing: Mapping[int, Future] = {}  # pages of the last update that may still be being written
        self._in_slots: set[int] = set()  # pages in slots that are not updated yet
        # What `next` returns: staged pages in the order of their arrival, errors, or None for an interrupt; and then
        # pages in RAM by number, the next one last.
        self._arrived: deque[PageMemory | BaseException | None] = deque()
        self._ready_in_ram: list[PageMemory] = []
        self._offered_to: object = None  # the speculative step that pages are offered to
        self._too_early: list[tuple[object, int, Any]] = []  # offers while the previous step is still being written
        self._order: list[int] = []  # order in which its units (or the previous step's) were offered
        self._turns: dict[int, int] = {}  # position of each unit in the previous step's offers
        self._overdue: list[Future] = []  # prefetches of units that were expected earlier and did not come
        self._gradients_ready: dict[int, Any] = {}  # event after which the gradients of an offered unit are complete
        self._after: Any = None  # event after which all of the step's gradients are complete
        self._lock = threading.Condition()  # notified when `next` may return

    def __len__(self) -> int:
        return len(self._routes) + len(self._in_ram)

    def prefetch(self) -> None:
        """Prefetch the first pages' state while gradients are still being computed."""
        if not self._prefetching:  # after a skipped step the pages are still in the slots
            self._prefetch(self._routes)

    def _prefetch(self, routes: Sequence[Route]) -> None:
        with self._lock:
            self._prefetching, self._expected = True, deque(routes)
            free, self._free = self._free, []
        self._proceed([], free)

    def drop_prefetched(self) -> None:
        """Discard prefetched pages, because their state will change."""
        with self._lock:
            early, self._prefetched = self._prefetched, []
            self._prefetching = False
            self._expected.clear()
            self._waiting.clear()
            overdue, self._overdue = self._overdue, []
        together(overdue).wait()
        for page in early:
            page.loaded.wait()
            self._free_slot(page)

    def begin(self, *, after: Any, skip: Container[int] = ()) -> None:
        """Stage all pages except `skip`; all gradients are complete after the event `after`."""
        with self._lock:
            self._after, self._offered_to, self._prefetching = after, None, False
            self._gradients_ready.clear()
            self._expected.clear()
            self._ready_in_ram.clear()
            self._put_in_ram(route for route in self._in_ram if route.number not in skip)
            early, self._prefetched = self._prefetched, []
            self._overdue = [read for read in self._overdue if not read.done]
            left = (one for one in self._routes if one.number not in self._in_slots and one.number not in skip)
            self._waiting = deque(left)
            free, self._free = self._free, []
        self._proceed(early, free)

    def _proceed(self, early: Sequence[PageMemory], free: Sequence[int]) -> None:
        for page in early:
            self._complete(page)
        for slot in free:
            self._fill(slot)

    def next(self) -> PageMemory | None:
        """Wait for the next page, a staged one first, and return it, or None at an `interrupt`; raise errors."""
        with self._lock:
            self._lock.wait_for(lambda: self._arrived or self._ready_in_ram)
            arrived = self._arrived.popleft() if self._arrived else self._ready_in_ram.pop()
        if isinstance(arrived, BaseException):
            raise arrived
        return arrived

    def write_back(self, page: PageMemory, computed: Future) -> PendingWrite:
        """Write an updated page back after `computed`, and then reuse its slot."""
        route, weights, state = page.route, computed, computed
        with self._lock:
            self._in_slots.discard(route.number)
        if "weights" in route.through_host:
            commit = partial(self._weights.commit, route.page.unit, route.page.start, page.out, after=page.after)
            weights = followed(computed, commit)
        if "state" in route.through_host:
            state = followed(computed, partial(self._store.write, route.number, page.state))
        whole = together([weights, state])
        if page.slot >= 0:
            self._refill(page.slot, after=whole)
        return PendingWrite(weights, whole)

    # -- speculative updates ------------------------------------------------------------------------------------------

    def expect(self, step: object) -> None:
        """Accept offers of pages for a speculative step, until `interrupt` and then `begin` or `withdraw`."""
        self.read_ahead()
        with self._lock:
            self._offered_to = step
            order, self._order = self._order, []
            self._turns = {unit: turn for turn, unit in enumerate(order)}
            before, self._too_early = self._too_early, []
        for its, unit, made in before:
            if its is step:
                self.offer(step, unit, made, None)

    def read_ahead(self, *, writing: Mapping[int, Future] | None = None) -> None:
        """Prefetch for a speculative step, if an earlier one has shown the order of its offers.

        Half of the slots are for the pages that the next forward needs first: their gradients come last, and reading
        their state only then would hold up that forward. A page in `writing` is read when its write has ended.
        """
        if self._prefetching or not self._order:
            return
        held = {route.number: route for route in self._routes if "state" in route.through_host}
        offered = [route.number for unit in self._order for route in self._offered.get(unit, ())]
        order = dict.fromkeys([*sorted(held)[: len(self._slots) // 2], *offered])
        self._writing = writing or {}
        self._prefetch([held[number] for number in order if number in held])

    def offer(self, step: object, unit: int, made: Any, error: BaseException | None) -> None:
        """Stage a unit's pages that may be offered; its gradients are complete after the event `made`."""
        if error is not None:
            self._put(error)
            return
        with self._lock:
            if step is not self._offered_to:  # `expect` stages these pages, or if the step is decided `begin` does
                self._too_early.append((step, unit, made))
                return
            self._gradients_ready[unit] = made
            self._order.append(unit)
            offered = self._offered.get(unit, ())
            # After a skipped step, slots may also hold pages in RAM without shadow memory: these wait for `begin`.
            numbers = {route.number for route in offered}
            early = [page for page in self._prefetched if page.route.number in numbers]
            self._prefetched = [page for page in self._prefetched if page.route.number not in numbers]
            self._put_in_ram(route for route in offered if not route.through_host)
            new = [route for route in offered if route.through_host and route.number not in self._in_slots]
            self._waiting = deque(sorted([*self._waiting, *new], key=lambda route: route.number))
            overdue = self._overdue_pages(unit)
            free, self._free = self._free, []
        self._proceed(early, free)
        for slot, read in overdue:
            self._refill(slot, after=read)

    def _overdue_pages(self, offered: int) -> list[tuple[int, Future]]:
        """Return the slots, with their reads, that prefetched pages must give up because others need them.

        These are pages whose unit came before the unit `offered` in the previous step and has not come now, or all if
        they fill all slots: units may come in another order, and nothing else would free a slot.
        """
        turn = self._turns.get(offered, -1)  # The first pages of the forward are expected without a turn.
        late = {offered, *(unit for unit, its in self._turns.items() if its <= turn)}
        self._expected = deque(route for route in self._expected if route.page.unit not in late)
        if self._free or not self._waiting:
            return []
        if len(self._prefetched) == len(self._slots):
            late |= {page.route.page.unit for page in self._prefetched}
        overdue = [page for page in self._prefetched if page.route.page.unit in late]
        self._prefetched = [page for page in self._prefetched if page.route.page.unit not in late]
        self._in_slots.difference_update(page.route.number for page in overdue)
        slots = [(page.slot, page.loaded) for page in overdue]
        self._overdue += [read for _, read in slots]
        return slots

    def interrupt(self) -> None:
        """Make `next` return None after the staged pages that have arrived, and before any page in RAM."""
        self._put(None)

    def withdraw(self) -> None:
        """Discard all offered pages, and wait until no slot holds one; raise transfer errors."""
        with self._lock:
            self._offered_to = None
            self._gradients_ready.clear()
            self._ready_in_ram.clear()
        self.drop_prefetched()
        while self._in_slots:
            page = self.next()
            assert page is not None
            self._free_slot(page)

    def read_back(self, number: int) -> torch.Tensor:
        """Return the valid state of a page on a drive until the next call; the slots must be empty."""
        data = self._slots[0][0][: self._store.bytes_of(number)]
        self._store.read(number, data).wait()
        return data

    def _free_slot(self, page: PageMemory) -> None:
        assert page.slot >= 0
        with self._lock:
            self._in_slots.discard(page.route.number)
            self._free.append(page.slot)

    # -- on any thread ------------------------------------------------------------------------------------------------

    def _put(self, arrived: PageMemory | BaseException | None) -> None:
        """Let `next` return a staged page, raise an error, or return None for an interrupt."""
        with self._lock:
            self._arrived.append(arrived)
            self._lock.notify()

    def _put_in_ram(self, routes: Iterable[Route]) -> None:
        """Let `next` return these pages, which are entirely in RAM. The caller holds the lock."""
        pages = [self._memory[route.number] for route in routes]
        self._ready_in_ram = sorted([*self._ready_in_ram, *pages], key=lambda page: page.route.number, reverse=True)
        self._lock.notify()

    def _fill(self, slot: int) -> None:
        """Start reading the next page into a slot, or mark the slot as free."""
        with self._lock:
            early = not self._waiting
            coming = self._expected if early else self._waiting
            route = next((route for route in coming if not early or self._is_written(route)), None)
            if route is None or (early and self._one_stays_free and not self._free):
                self._free.append(slot)
                return
            coming.remove(route)
            page = self._start_read(route, slot, newest=early)
            if early:
                self._prefetched.append(page)
                return
        self._complete(page)

    def _is_written(self, route: Route) -> bool:
        return route.number not in self._writing or self._writing[route.number].done

    def _start_read(self, route: Route, slot: int, *, newest: bool) -> PageMemory:
        """Start reading a page's state into a slot. `newest`: what the last update has written, valid yet or not."""
        self._in_slots.add(route.number)
        state, gradient, out = self._slots[slot]
        count, page = route.page.elements, replace(self._memory[route.number], slot=slot)
        if "gradient" in route.through_host:
            page.gradient = gradient.view(self._gradients.dtype)[:count]
        if "weights" in route.through_host:
            page.out = out.view(self._weights.dtype)[:count]
        if "state" in route.through_host:
            page.state = state[: self._store.bytes_of(route.number)]
            copy = self._store.copies.newest(route.number) if newest else None
            page.loaded = self._store.read(route.number, page.state, copy=copy)
        return page

    def _complete(self, page: PageMemory) -> None:
        """Read the gradient; report the page when everything has arrived."""
        where, arriving = page.route.page, [page.loaded]
        page.after = self._gradients_ready.get(where.unit, self._after)
        if "gradient" in page.route.through_host:
            arriving.append(self._gradients.read(where.unit, where.start, page.gradient, after=page.after))
        together(arriving).then(lambda error: self._put(error or page))

    def _refill(self, slot: int, *, after: Future) -> None:
        """Reuse a slot after a transfer. `next` reports errors, because they must not end the transfer's thread."""
        followed(after, partial(self._fill, slot)).then(lambda error: self._put(error) if error is not None else None)
