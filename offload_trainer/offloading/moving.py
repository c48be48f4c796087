"""Pages on their way through the update: from their drive into host memory, and back once they are computed.

    drive, device ──state, gradient──> slot ──kernel──> slot ──state, 16-bit weight──> drive, device

Slots are host buffers, each with one page on its way in, ready, or on its way out. A slot whose bytes have left is
filled again at once, on the thread that saw them leave.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload_trainer.offloading.device import Device
from offload_trainer.offloading.exchange import AnyGradients
from offload_trainer.offloading.store import PageStore
from offload_trainer.offloading.weights import Weights
from offload_trainer.plan.routes import Route, host_slot
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import Future, together


@dataclass
class Arrived:
    """A page in a slot."""

    route: Route
    state: torch.Tensor  # uint8; each is empty where that does not pass through the slot
    gradient: torch.Tensor
    out: torch.Tensor
    loaded: list[Future]
    slot: int


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
        self._waiting: deque[Route] = deque()
        self._ready: queue.SimpleQueue[Arrived | BaseException] = queue.SimpleQueue()
        self._early: list[Arrived] | None = None  # pages read before their gradients were known
        self._after: Any = None  # the device's mark: the step's gradients are made
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._routes)

    def read_ahead(self) -> None:
        """Fill the slots with the first pages' state, while the gradients are still being computed."""
        if self._early is not None:
            return  # the last step was skipped: they are still there
        with self._lock:
            self._early = []
            self._waiting.extend(self._routes)
            free, self._free = self._free, []
        for slot in free:
            self._fill(slot)

    def forget_ahead(self) -> None:
        """Let go of what was read ahead: the state will be another."""
        with self._lock:
            early, self._early = self._early or [], None
            self._waiting.clear()
        for page in early:
            together(page.loaded).wait()
            self._free.append(page.slot)

    def begin(self, *, after: Any) -> None:
        """The gradients are known, once the device has passed `after`: all pages come now."""
        self.read_ahead()
        with self._lock:
            early, self._early = self._early or [], None
            self._after = after
        for page in early:
            self._complete(page)

    def next(self, *, wait: bool) -> Arrived | None:
        """A page that is in its slot; None if there is none now. Raises what went wrong on the way."""
        try:
            arrived = self._ready.get(block=wait)
        except queue.Empty:
            return None
        if isinstance(arrived, BaseException):
            raise arrived
        return arrived

    def send(self, page: Arrived, computed: Future, home: Callable[[BaseException | None], None]) -> None:
        """Start what has changed on its way, once it is computed. `home` is told, then the slot is filled again."""
        sent = Future()
        sent.then(home)
        sent.then(lambda error: self._refill(page.slot, error))
        computed.then(lambda error: self._leave(page, sent, error))

    # -- on any thread ------------------------------------------------------------------------------------------------

    def _fill(self, slot: int) -> None:
        """Start the next page on its way into a slot, or put the slot aside."""
        with self._lock:
            if not self._waiting:
                self._free.append(slot)
                return
            route = self._waiting.popleft()
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
        with self._lock:
            if self._early is not None:
                self._early.append(page)
                return
        self._complete(page)

    def _complete(self, page: Arrived) -> None:
        """Read the gradient as well, and where masters need it the old weight; report the page when all is there."""
        if "gradient" in page.route.through_host:
            where = page.route.page
            page.loaded.append(self._gradients.read(where.unit, where.start, page.gradient, after=self._after))
        if "weights" in page.route.through_host and self._store.format.remainders:
            where = page.route.page
            page.loaded.append(self._weights.read(where.unit, where.start, page.out, after=self._after))
        together(page.loaded).then(lambda error: self._ready.put(error or page))

    def _leave(self, page: Arrived, sent: Future, error: BaseException | None) -> None:
        """Runs on a transfer's thread where the device computed the page."""
        try:
            if error is not None:
                raise error
            leaving, route = [], page.route
            where, through = route.page, route.through_host
            if "state" in through:
                leaving.append(self._store.write(route.number, page.state))
            if "weights" in through:
                leaving.append(self._weights.commit(where.unit, where.start, page.out, after=self._after))
            together(leaving).then(sent.finish_part)
        except BaseException as caught:
            sent.finish_part(caught)

    def _refill(self, slot: int, error: BaseException | None) -> None:
        """Where a transfer's thread must not die of what goes wrong, since who asks for `next` would wait for ever."""
        try:
            if error is not None:
                raise error
            self._fill(slot)
        except BaseException as caught:
            self._ready.put(caught)
