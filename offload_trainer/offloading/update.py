"""The update: AdamW over all pages, drives reading ahead and writing behind while CPU and device compute.

    drive ──state, gradient──> slot ──kernel──> slot ──state, 16-bit weight──> drive        pages that move
                               memory ──kernel──> memory                                    pages that stay
                               device ──its kernel──> device                                pages that live there

Slots are host buffers, each with one page on its way in, ready, or on its way out. A slot whose bytes have left is
filled again at once, on the thread that saw them leave. The device is told its pages first and computes them beside
all else; the CPU takes what is ready, and pages in memory while nothing is. Clipping and loss scaling are one factor on
the gradient. No element depends on another, so the order does not change a bit.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload_trainer.offloading.device import Device
from offload_trainer.offloading.gradients import Gradients
from offload_trainer.offloading.snapshot import PageSnapshot
from offload_trainer.offloading.store import PageStore
from offload_trainer.offloading.weights import Weights
from offload_trainer.optim.moments import Noise
from offload_trainer.optim.protocol import Kernel, PageNoise, Stretch, within
from offload_trainer.plan.routes import Route, device_slot, host_slot
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import Future, done, together


@dataclass(frozen=True)
class _Path:
    """A page's route, and the memory of what the update finds at home; None for what comes through a host slot."""

    route: Route
    state: torch.Tensor | None  # uint8
    gradient: torch.Tensor | None
    out: torch.Tensor | None


@dataclass
class _Job:
    """A page in a slot."""

    path: _Path
    state: torch.Tensor  # uint8; each is empty where that does not pass through the slot
    gradient: torch.Tensor
    out: torch.Tensor
    loaded: list[Future]
    slot: int


@dataclass(frozen=True)
class _Step:
    """What one step's update is told."""

    stretches: Sequence[Sequence[Stretch]]  # of each unit
    scale: float
    noise: Noise | None
    after: Any  # the device's mark: all gradients are made


class Updater:
    """Carries the update out over `store`, `gradients` and `weights`."""

    def __init__(
        self,
        store: PageStore,
        weights: Weights,
        gradients: Gradients,
        kernel: Kernel,
        *,
        device: Device,
        device_kernel: Kernel,
        routes: Sequence[Route],
        slots: int,
    ) -> None:
        """`device_kernel` is for the pages that live on `device`; `routes` are those of the store's pages."""
        self._store, self._weights, self._gradients = store, weights, gradients
        self._kernel, self._device, self._device_kernel = kernel, device, device_kernel
        paths = [self._resolved(route) for route in routes]
        self._moving = [path for path in paths if path.route.through_host]
        staying = [path for path in paths if not path.route.through_host]
        self._staying = [path for path in staying if not path.route.on_device]
        self._living = [path for path in staying if path.route.on_device]
        sizes = {"gradient": gradients.dtype.itemsize, "weight": weights.dtype.itemsize}
        parts = host_slot(routes, format=store.format, **sizes)
        self._slots = [
            host_buffer(parts.total, pinned=device.is_cuda).split([parts.state, parts.gradient, parts.weights])
            for _ in range(min(slots, len(self._moving)))
        ]
        inside = device_slot(routes, **sizes)
        self._device_gradient = device.buffer(inside.gradient // gradients.dtype.itemsize, gradients.dtype)
        self._device_out = device.buffer(inside.weights // weights.dtype.itemsize, weights.dtype)
        self._free = list(range(len(self._slots)))
        self._waiting: deque[_Path] = deque()
        self._ready: queue.SimpleQueue[_Job | BaseException] = queue.SimpleQueue()
        self._early: list[_Job] | None = None  # pages read before their gradients were known
        self._leaving: list[Future] = []
        self._lock = threading.Lock()
        self._snapshot: PageSnapshot | None = None

    def _resolved(self, route: Route) -> _Path:
        """Homes do not change, so where a page's parts are is asked once."""
        page, there, host = route.page, route.on_device, route.through_host
        state = self._store.on_device(route.number) if there else self._store.in_memory(route.number)
        sums_there = there and "gradient" not in route.through_device
        sums = self._gradients.on_device(page.unit) if sums_there else self._gradients.store.host(page.unit)
        weights_there = there and "weights" not in route.through_device
        weights = self._weights.resident(page.unit) if weights_there else self._weights.direct(page.unit)
        return _Path(
            route,
            state=None if "state" in host else state,
            gradient=None if "gradient" in host else _part(sums, route),
            out=None if "weights" in host else _part(weights, route),
        )

    def snapshot(self) -> PageSnapshot:
        """The state of now: from here on a page is changed only when its snapshot has been read, or is closed."""
        self._snapshot = PageSnapshot(self._store)
        return self._snapshot

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

    def forget_ahead(self) -> None:
        """Let go of what was read ahead: the state will be another."""
        with self._lock:
            early, self._early = self._early or [], None
            self._waiting.clear()
        for job in early:
            together(job.loaded).wait()
            self._free.append(job.slot)

    def _fill(self, slot: int) -> None:
        """Start the next page on its way into a slot, or put the slot aside. Runs on transfer threads too."""
        with self._lock:
            if not self._waiting:
                self._free.append(slot)
                return
            path = self._waiting.popleft()
        route = path.route
        state, gradient, out = self._slots[slot]
        count, through = route.page.elements, route.through_host
        job = _Job(
            path=path,
            state=state[: self._store.bytes_of(route.number) if "state" in through else 0],
            gradient=gradient.view(self._gradients.dtype)[: count if "gradient" in through else 0],
            out=out.view(self._weights.dtype)[: count if "weights" in through else 0],
            loaded=[],
            slot=slot,
        )
        if "state" in through:
            job.loaded.append(self._store.read(route.number, job.state))
        with self._lock:
            if self._early is not None:
                self._early.append(job)
                return
        self._complete(job)

    def _complete(self, job: _Job) -> None:
        """Read the gradient as well, and report the page when all of it is there."""
        route = job.path.route
        if "gradient" in route.through_host:
            page = route.page
            job.loaded.append(self._gradients.read(page.unit, page.start, job.gradient))
        together(job.loaded).then(lambda error: self._ready.put(error or job))

    def _send(self, job: _Job, computed: Future) -> None:
        """Start what has changed on its way home, once it is computed; then the slot is filled again."""
        home = Future()
        self._leaving.append(home)
        home.then(lambda error: self._refill(job.slot, error))
        computed.then(lambda error: self._leave(job, home, error))

    def _leave(self, job: _Job, home: Future, error: BaseException | None) -> None:
        """Runs on a transfer's thread where the device computed the page."""
        try:
            if error is not None:
                raise error
            leaving, route = [], job.path.route
            page, through = route.page, route.through_host
            if "state" in through:
                leaving.append(self._store.write(route.number, job.state))
            if "weights" in through:
                leaving.append(self._weights.commit(page.unit, page.start, job.out))
            together(leaving).then(home.finish_part)
        except BaseException as caught:
            home.finish_part(caught)

    def _refill(self, slot: int, error: BaseException | None) -> None:
        """Where a transfer's thread must not die of what goes wrong, since `update` would wait for ever."""
        try:
            if error is not None:
                raise error
            self._fill(slot)
        except BaseException as caught:
            self._ready.put(caught)

    # -- the step -----------------------------------------------------------------------------------------------------

    def update(self, stretches: Sequence[Sequence[Stretch]], *, scale: float, noise: Noise | None) -> None:
        """One step: `stretches` of each unit, gradients times `scale`. All of it is in its home when this returns.

        `noise` is for bf16 and 8-bit moments. Raises TrainerError where a drive fails; the state is then partly of the
        step before and partly of this one.
        """
        self.read_ahead()
        step = _Step(stretches, scale=scale, noise=noise, after=self._device.mark())
        with self._lock:
            early, self._early = self._early or [], None
        for job in early:
            self._complete(job)
        if self._living:
            with self._device.beside(after=step.after):
                for path in self._living:
                    self._compute_on_device(path, None, step)
                self._leaving.append(self._device.reached())
        staying, moving = deque(self._staying), len(self._moving)
        while staying or moving:
            try:
                arrived = self._ready.get(block=not staying)
            except queue.Empty:
                self._compute(staying.popleft(), None, step)
                continue
            if isinstance(arrived, BaseException):
                raise arrived
            job = arrived
            if job.path.route.on_device:
                with self._device.beside(after=step.after):
                    self._compute_on_device(job.path, job, step)
                    self._send(job, self._device.reached())
            else:
                self._compute(job.path, job, step)
                self._send(job, done())
            moving -= 1
        for future in self._leaving:
            future.wait()
        self._leaving.clear()

    def _compute(self, path: _Path, job: _Job | None, step: _Step) -> None:
        """The arithmetic of one page on the CPU, on whichever of its parts are in a slot and whichever are at home."""
        data, gradient, out = _memory(path, job)
        self._update(self._kernel, path.route, data, gradient, out, step, rest="weights" in path.route.through_host)

    def _compute_on_device(self, path: _Path, job: _Job | None, step: _Step) -> None:
        """The same on the device, told `beside`: what of the page lives elsewhere is copied there and back."""
        route, count = path.route, path.route.page.elements
        data, gradient, home = _memory(path, job)
        if "gradient" in route.through_device:
            gradient = self._device_gradient[:count].copy_(gradient, non_blocking=True)
        leaves = "weights" in route.through_device
        out = self._device_out[:count] if leaves else home
        self._update(self._device_kernel, route, data, gradient, out, step, rest=leaves)
        if leaves:
            home.copy_(out, non_blocking=True)

    def _update(
        self,
        kernel: Kernel,
        route: Route,
        data: torch.Tensor,
        gradient: torch.Tensor,
        out: torch.Tensor,
        step: _Step,
        *,
        rest: bool,
    ) -> None:
        """`kernel` on a page's state, where it is. `rest`: weights without a gradient go home with the others."""
        if self._snapshot is not None:
            self._snapshot.wait_for(route.number)
        page = route.page
        fields = self._store.fields(route.number, data)
        parts = within(step.stretches[page.unit], page.start, page.start + page.elements)
        if rest:
            _copy_rest(fields["master"], out, parts)
        kernel.update_page(
            fields,
            gradient,
            out,
            parts,
            format=self._store.format,
            scale=step.scale,
            noise=None if step.noise is None else PageNoise(step.noise, page.unit, page.start),
        )


def _memory(path: _Path, job: _Job | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A page's state, its gradient and where its new weights go: at home, or in the slot that it is in."""
    if job is None:
        assert path.state is not None
        assert path.gradient is not None
        assert path.out is not None
        return path.state, path.gradient, path.out
    return (
        job.state if path.state is None else path.state,
        job.gradient if path.gradient is None else path.gradient,
        job.out if path.out is None else path.out,
    )


def _part(whole: torch.Tensor | None, route: Route) -> torch.Tensor:
    """A page's stretch of its unit, which is where the route says."""
    assert whole is not None
    return whole[route.page.start :][: route.page.elements]


def _copy_rest(master: torch.Tensor, out: torch.Tensor, stretches: list[Stretch]) -> None:
    """Round the masters between the stretches."""
    ends = [0, *(part.end for part in stretches)]
    starts = [*(part.start for part in stretches), master.numel()]
    for end, start in zip(ends, starts, strict=True):
        if start > end:
            out[end:start].copy_(master[end:start], non_blocking=True)
