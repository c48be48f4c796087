"""Pages on their way through the update: from their drive into host memory, and back once they are computed.

    drive, device ──state, gradient──> slot ──kernel──> slot ──state, 16-bit weight──> drive, device

Slots are host buffers, each with one page on its way in, ready, or on its way out. A slot whose bytes have left is
filled again at once, on the thread that saw them leave. Pages come once all gradients are made, in the order of the
next forward; before that those on drives may be offered, unit by unit, as their gradients are (`offloading/ahead`), and
of these, too, what the next forward needs first comes first. Slots that would be empty hold the state of pages whose
gradients are still to come.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from offload_trainer.offloading.device import Device
from offload_trainer.offloading.exchange import AnyGradients
from offload_trainer.offloading.store import PageStore
from offload_trainer.offloading.weights import Weights
from offload_trainer.plan.routes import Route, host_slot
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import Future, done, together


@dataclass
class Arrived:
    """A page in a slot."""

    route: Route
    state: torch.Tensor  # uint8; each is empty where that does not pass through the slot
    gradient: torch.Tensor
    out: torch.Tensor
    loaded: list[Future]
    slot: int
    after: Any = None  # the device's mark: its gradients are made, and the old weights not needed any more


@dataclass(frozen=True)
class Sent:
    """A page that was computed, on its way home."""

    weights: Future  # the new ones are where the model finds them
    whole: Future  # and its state as well


class MovingPages:
    """The pages of `store` of which something passes through host memory, by their routes."""

    def __init__(
        self,
        store: PageStore,
        weights: Weights,
        gradients: AnyGradients,
        *,
        device: Device,
        routes: Sequence[Route],
        slots: int,
    ) -> None:
        """`routes`: of all pages that are updated; they come in this order."""
        self._store, self._weights, self._gradients = store, weights, gradients
        self._routes = [route for route in routes if route.through_host]
        sizes = {"gradient": gradients.dtype.itemsize, "weight": weights.dtype.itemsize}
        parts = host_slot(routes, format=store.format, **sizes)
        self._slots = [
            host_buffer(parts.total, pinned=device.is_cuda).split([parts.state, parts.gradient, parts.weights])
            for _ in range(min(slots, len(self._routes)))
        ]
        self._free = list(range(len(self._slots)))
        self._on_drives: dict[int, list[Route]] = {}  # of each unit
        for route in self._routes:
            if route.page.home >= 0:
                self._on_drives.setdefault(route.page.unit, []).append(route)
        self._waiting: deque[Route] = deque()  # their gradients are made
        self._expected: deque[Route] = deque()  # their gradients may come later
        self._early: list[Arrived] = []  # those of the latter that are in slots, or on their way there
        self._is_early = False  # whether gradients are still to come
        self._ready: queue.SimpleQueue[Arrived | BaseException | None] = queue.SimpleQueue()
        self._inside: set[int] = set()  # pages in slots that nobody has computed
        self._offered_to: object = None  # the step whose pages are offered before it is decided
        self._order: list[int] = []  # of its units, or the last such step's
        self._turns: dict[int, int] = {}  # of each unit, when it was offered to the step before
        self._overdue: list[Future] = []  # reads of pages whose unit was expected, and has not come
        self._made: dict[int, Any] = {}  # of each unit that was: the device's mark at which its gradients are made
        self._after: Any = None  # that of all the step's gradients
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._routes)

    def read_ahead(self) -> None:
        """Fill the slots with the first pages' state, while the gradients are still being computed."""
        if not self._is_early:  # or the last step was skipped, and they are still there
            self._read_early(self._routes)

    def _read_early(self, routes: Sequence[Route]) -> None:
        with self._lock:
            self._is_early, self._expected = True, deque(routes)
            free, self._free = self._free, []
        for slot in free:
            self._fill(slot)

    def forget_ahead(self) -> None:
        """Let go of what was read ahead: the state will be another."""
        with self._lock:
            early, self._early = self._early, []
            self._is_early = False
            self._expected.clear()
            self._waiting.clear()
            overdue, self._overdue = self._overdue, []
        together(overdue).wait()
        for page in early:
            together(page.loaded).wait()
            self._let_go(page)

    def begin(self, *, after: Any, but: Container[int] = ()) -> None:
        """The gradients are known, once the device has passed `after`: all pages come now, `but` these."""
        with self._lock:
            self._after, self._offered_to, self._is_early = after, None, False
            self._made.clear()
            self._expected.clear()
            early, self._early = self._early, []
            left = (one for one in self._routes if one.number not in self._inside and one.number not in but)
            self._waiting = deque(left)
            free, self._free = self._free, []
        for page in early:
            self._complete(page)
        for slot in free:
            self._fill(slot)

    def next(self, *, wait: bool) -> Arrived | None:
        """A page that is in its slot; None if there is none now, or at an `interrupt`. Raises what went wrong."""
        try:
            arrived = self._ready.get(block=wait)
        except queue.Empty:
            return None
        if isinstance(arrived, BaseException):
            raise arrived
        return arrived

    def send(self, page: Arrived, computed: Future) -> Sent:
        """Start what has changed on its way, once it is computed; when all has left the slot is filled again."""
        with self._lock:
            self._inside.discard(page.route.number)
        sent = Sent(Future(), Future())
        sent.whole.then(lambda error: self._refill(page.slot, error))
        computed.then(lambda error: self._leave(page, sent, error))
        return sent

    # -- before the step is decided -----------------------------------------------------------------------------------

    def expect(self, step: object) -> None:
        """From now on pages may be offered to this step, and their state is read in the order of the last one's offers.
        `interrupt`, then `begin` or `withdraw`, ends that.
        """
        self.forget_ahead()
        with self._lock:
            self._offered_to = step
            order, self._order = self._order, []
            self._turns = {unit: turn for turn, unit in enumerate(order)}
        self._read_early([route for unit in order for route in self._on_drives.get(unit, ())])

    def offer(self, step: object, unit: int, made: Any, error: BaseException | None) -> None:
        """A unit's gradients are at home, once the device has passed `made`: its pages on drives come now."""
        if error is not None:
            self._ready.put(error)
            return
        with self._lock:
            if step is not self._offered_to:
                return  # it is decided, and all pages come
            self._made[unit] = made
            self._order.append(unit)
            early = [page for page in self._early if page.route.page.unit == unit]
            self._early = [page for page in self._early if page.route.page.unit != unit]
            new = [route for route in self._on_drives.get(unit, ()) if route.number not in self._inside]
            self._waiting = deque(sorted([*self._waiting, *new], key=lambda route: route.number))
            overdue = self._not_come(self._turns.get(unit, -1))
            free, self._free = self._free, []
        for page in early:
            self._complete(page)
        for slot in free:
            self._fill(slot)
        for page, read in overdue:
            read.then(partial(self._refill, page.slot))

    def _not_come(self, turn: int) -> list[tuple[Arrived, Future]]:
        """Early pages that no gradients came for by that turn, and their reads: others have their slots, if need be.

        All early pages where they have all slots: units may come out of turn, and nothing else would empty one.
        """
        late = {unit for unit, its in self._turns.items() if its <= turn}
        self._expected = deque(route for route in self._expected if route.page.unit not in late)
        if self._free or not self._waiting:
            return []
        if len(self._early) == len(self._slots):
            late |= {page.route.page.unit for page in self._early}
        overdue = [(page, together(page.loaded)) for page in self._early if page.route.page.unit in late]
        self._early = [page for page in self._early if page.route.page.unit not in late]
        self._inside.difference_update(page.route.number for page, _ in overdue)
        self._overdue += [read for _, read in overdue]
        return overdue

    def interrupt(self) -> None:
        """Whoever waits for the next page gets None, after those that are there."""
        self._ready.put(None)

    def withdraw(self) -> None:
        """What was offered never was, and is in no slot when this returns. Raises what went wrong on the way."""
        with self._lock:
            self._offered_to = None
            self._made.clear()
        self.forget_ahead()
        while self._inside:
            page = self.next(wait=True)
            assert page is not None
            self._let_go(page)

    def read_back(self, numbers: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Each of these pages on drives as it holds, one after the other, while nothing else is in the slots."""
        for number in numbers:
            data = self._slots[0][0][: self._store.bytes_of(number)]
            self._store.read(number, data).wait()
            yield number, data

    def _let_go(self, page: Arrived) -> None:
        with self._lock:
            self._inside.discard(page.route.number)
            self._free.append(page.slot)

    # -- on any thread ------------------------------------------------------------------------------------------------

    def _fill(self, slot: int) -> None:
        """Start the next page on its way into a slot, or put the slot aside."""
        with self._lock:
            early = not self._waiting
            coming = self._expected if early else self._waiting
            if not coming:
                self._free.append(slot)
                return
            page = self._begun(coming.popleft(), slot)
            if early:
                self._early.append(page)
                return
        self._complete(page)

    def _begun(self, route: Route, slot: int) -> Arrived:
        """A page whose state is on its way into a slot."""
        self._inside.add(route.number)
        state, gradient, out = self._slots[slot]
        count, through = route.page.elements, route.through_host
        page = Arrived(
            route=route,
            state=state[: self._store.bytes_of(route.number) if "state" in through else 0],
            gradient=gradient.view(self._gradients.dtype)[: count if "gradient" in through else 0],
            out=out.view(self._weights.dtype)[: count if "weights" in through else 0],
            loaded=[],
            slot=slot,
        )
        if "state" in through:
            page.loaded.append(self._store.read(route.number, page.state))
        return page

    def _complete(self, page: Arrived) -> None:
        """Read the gradient as well, and where masters need it the old weight; report the page when all is there."""
        page.after = self._made.get(page.route.page.unit, self._after)
        if "gradient" in page.route.through_host:
            where = page.route.page
            page.loaded.append(self._gradients.read(where.unit, where.start, page.gradient, after=page.after))
        if "weights" in page.route.through_host and self._store.format.remainders:
            where = page.route.page
            page.loaded.append(self._weights.read(where.unit, where.start, page.out, after=page.after))
        together(page.loaded).then(lambda error: self._ready.put(error or page))

    def _leave(self, page: Arrived, sent: Sent, error: BaseException | None) -> None:
        """Runs on a transfer's thread where the device computed the page."""
        route = page.route
        where, through = route.page, route.through_host
        weights = state = done()
        try:
            if error is not None:
                raise error
            if "weights" in through:
                weights = self._weights.commit(where.unit, where.start, page.out, after=page.after)
            if "state" in through:
                state = self._store.write(route.number, page.state)
        except BaseException as caught:
            sent.weights.finish_part(caught)
            sent.whole.finish_part(caught)
            return
        weights.then(sent.weights.finish_part)
        together([weights, state]).then(sent.whole.finish_part)

    def _refill(self, slot: int, error: BaseException | None) -> None:
        """Where a transfer's thread must not die of what goes wrong, since who asks for `next` would wait for ever."""
        try:
            if error is not None:
                raise error
            self._fill(slot)
        except BaseException as caught:
            self._ready.put(caught)
