"""The update: AdamW over all pages, drives reading ahead and writing behind while the CPU computes.

    drive ──state, gradient──> slot ──kernel──> slot ──state, 16-bit weight──> drive        pages that move
                               memory ──kernel──> memory                                    pages that stay

Slots are host buffers, each with one page on its way in, ready, or on its way out. A slot whose bytes have left is
filled again at once, on the thread that saw them leave; the CPU takes what is ready, and pages in memory while nothing
is. Clipping and loss scaling are one factor on the gradient. No element depends on another, so the order does not
change a bit.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload_trainer.plan.layout import RAM
from offload_trainer.tiers.adam import Kernel, PageNoise, Stretch, within
from offload_trainer.tiers.gradients import Gradients
from offload_trainer.tiers.memory import host_buffer
from offload_trainer.tiers.moments import Noise
from offload_trainer.tiers.snapshot import PageSnapshot
from offload_trainer.tiers.store import PageStore
from offload_trainer.tiers.transfer import Ticket, together
from offload_trainer.tiers.weights import Weights


@dataclass
class _Job:
    """A page in a slot."""

    number: int
    state: torch.Tensor  # uint8; empty where the state lives in RAM
    gradient: torch.Tensor  # empty where it lives in RAM
    out: torch.Tensor  # empty where the weights can be written in place
    loaded: list[Ticket]
    slot: int


class Updater:
    """Carries the update out over `store`, `gradients` and `weights`."""

    def __init__(
        self, store: PageStore, weights: Weights, gradients: Gradients, kernel: Kernel, *, slots: int, pinned: bool
    ) -> None:
        self._store, self._weights, self._gradients, self._kernel = store, weights, gradients, kernel
        pages = store.pages
        self._staying = [number for number in range(len(pages)) if self._stays(number)]
        self._moving = [number for number in range(len(pages)) if not self._stays(number)]
        state = [store.bytes_of(n) for n in self._moving if store.in_memory(n) is None]
        collected = [pages[n].elements for n in self._moving if gradients.store.host(pages[n].unit) is None]
        rounded = [pages[n].elements for n in self._moving if weights.direct(pages[n].unit) is None]
        self._parts = (
            max(state, default=0),
            gradients.dtype.itemsize * max(collected, default=0),
            weights.dtype.itemsize * max(rounded, default=0),
        )
        self._slots = [
            host_buffer(sum(self._parts), pinned=pinned).split(self._parts)
            for _ in range(min(slots, len(self._moving)))
        ]
        self._free = list(range(len(self._slots)))
        self._waiting: deque[int] = deque()
        self._ready: queue.SimpleQueue[_Job | BaseException] = queue.SimpleQueue()
        self._early: list[_Job] | None = None  # pages read before their gradients were known
        self._leaving: list[Ticket] = []
        self._lock = threading.Lock()
        self._snapshot: PageSnapshot | None = None

    def snapshot(self) -> PageSnapshot:
        """The state of now: from here on a page is changed only when its snapshot has been read, or is closed."""
        self._snapshot = PageSnapshot(self._store)
        return self._snapshot

    def _stays(self, number: int) -> bool:
        """Whether a page and all that its update touches are in host memory."""
        unit = self._store.pages[number].unit
        return (
            self._store.in_memory(number) is not None
            and self._gradients.store.host(unit) is not None
            and self._weights.direct(unit) is not None
        )

    # -- pages that move ----------------------------------------------------------------------------------------------

    def read_ahead(self) -> None:
        """Fill the slots with the first pages' state, while the gradients are still being computed."""
        if self._early is not None:
            return  # the last step was skipped: they are still there
        with self._lock:
            self._early = []
            self._waiting.extend(self._moving)
            free, self._free = self._free, []
        for slot in free:
            self._fill(slot)

    def _fill(self, slot: int) -> None:
        """Start the next page on its way into a slot, or put the slot aside. Runs on transfer threads too."""
        with self._lock:
            if not self._waiting:
                self._free.append(slot)
                return
            number = self._waiting.popleft()
        page = self._store.pages[number]
        state, gradient, out = self._slots[slot]
        job = _Job(
            number=number,
            state=state[: self._store.bytes_of(number) if page.home != RAM else 0],
            gradient=gradient.view(self._gradients.dtype)[: page.elements],
            out=out.view(self._weights.dtype)[: page.elements],
            loaded=[],
            slot=slot,
        )
        if page.home != RAM:
            job.loaded.append(self._store.read(number, job.state))
        with self._lock:
            if self._early is not None:
                self._early.append(job)
                return
        self._complete(job)

    def _complete(self, job: _Job) -> None:
        """Read the gradient as well, and report the page when all of it is there."""
        page = self._store.pages[job.number]
        if self._gradients.store.host(page.unit) is None:
            job.loaded.append(self._gradients.read(page.unit, page.start, job.gradient))
        together(job.loaded).then(lambda error: self._ready.put(error or job))

    def _send(self, job: _Job) -> None:
        """Start what has changed on its way home; then the slot is filled again."""
        page = self._store.pages[job.number]
        leaving = [self._store.write(job.number, job.state)] if page.home != RAM else []
        if self._weights.direct(page.unit) is None:
            leaving.append(self._weights.commit(page.unit, page.start, job.out))
        ticket = together(leaving)
        self._leaving.append(ticket)
        ticket.then(lambda error: self._refill(job.slot, error))

    def _refill(self, slot: int, error: BaseException | None) -> None:
        """Where a transfer's thread must not die of what goes wrong, since `update` would wait for ever."""
        try:
            if error is not None:
                raise error
            self._fill(slot)
        except BaseException as caught:
            self._ready.put(caught)

    # -- the step -----------------------------------------------------------------------------------------------------

    def update(self, stretches: Sequence[Sequence[Stretch]], *, scale: float, lr: float, noise: Noise | None) -> None:
        """One step: `stretches` of each unit, gradients times `scale`. All of it is in its home when this returns.

        `noise` is for bf16 and 8-bit moments. Raises TrainerError where a drive fails; the state is then partly of the
        step before and partly of this one.
        """
        self.read_ahead()
        with self._lock:
            early, self._early = self._early or [], None
        for job in early:
            self._complete(job)
        staying, moving = deque(self._staying), len(self._moving)
        while staying or moving:
            try:
                arrived = self._ready.get(block=not staying)
            except queue.Empty:
                self._compute(staying.popleft(), None, stretches, scale=scale, lr=lr, noise=noise)
                continue
            if isinstance(arrived, BaseException):
                raise arrived
            job = arrived
            self._compute(job.number, job, stretches, scale=scale, lr=lr, noise=noise)
            self._send(job)
            moving -= 1
        for ticket in self._leaving:
            ticket.wait()
        self._leaving.clear()

    def _compute(
        self,
        number: int,
        job: _Job | None,
        stretches: Sequence[Sequence[Stretch]],
        *,
        scale: float,
        lr: float,
        noise: Noise | None,
    ) -> None:
        """The arithmetic of one page, on whichever of its parts are in a slot and whichever are at home."""
        if self._snapshot is not None:
            self._snapshot.wait_for(number)
        page = self._store.pages[number]
        stretch = slice(page.start, page.start + page.elements)
        inside = self._store.in_memory(number)
        data = inside if inside is not None else job.state if job else None
        gradient = self._gradients.store.host(page.unit)
        out = self._weights.direct(page.unit)
        assert data is not None
        assert job is not None or (gradient is not None and out is not None)
        fields = self._store.fields(number, data)
        new = out[stretch] if out is not None else job.out  # type: ignore[union-attr]
        parts = within(stretches[page.unit], page.start, page.start + page.elements)
        if out is None:  # weights without a gradient keep their value, and go home with the others
            _copy_rest(fields["master"], new, parts)
        grad = gradient[stretch] if gradient is not None else job.gradient  # type: ignore[union-attr]
        self._kernel.update_page(
            fields,
            grad,
            new,
            parts,
            states=self._store.states,
            scale=scale,
            lr=lr,
            noise=None if noise is None else PageNoise(noise, page.unit, page.start),
        )


def _copy_rest(master: torch.Tensor, out: torch.Tensor, stretches: list[Stretch]) -> None:
    """Round the masters between the stretches."""
    end = 0
    for part in [*stretches, Stretch(master.numel(), master.numel(), 0.0, 0)]:
        if part.start > end:
            out[end : part.start].copy_(master[end : part.start])
        end = part.end
