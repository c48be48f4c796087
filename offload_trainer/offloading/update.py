"""The update: the rule over all pages, drives reading ahead and writing behind while CPU and device compute.

    drive ──state, gradient──> slot ──kernel──> slot ──state, 16-bit weight──> drive        pages that move (`moving`)
                               memory ──kernel──> memory                                    pages that stay
                               device ──its kernel──> device                                pages that live there

The device is told its pages first and computes them beside all else; the CPU takes what is ready, and pages in memory
while nothing is. Clipping and loss scaling are one factor on the gradient. No element depends on another, so the order
does not change a bit. `Renewal` is told of each page that is home. Pages on drives may be done before the step is
decided (`ahead`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from offload_trainer.offloading.ahead import Ahead
from offload_trainer.offloading.decision import Decision
from offload_trainer.offloading.device import Device
from offload_trainer.offloading.exchange import AnyGradients
from offload_trainer.offloading.moving import Arrived, MovingPages, Sent
from offload_trainer.offloading.renewal import Renewal
from offload_trainer.offloading.snapshot import PageSnapshot
from offload_trainer.offloading.store import PageStore
from offload_trainer.offloading.weights import Weights
from offload_trainer.optim.protocol import Kernel, PageNoise, Stretch, within
from offload_trainer.plan.routes import Route, device_slot
from offload_trainer.storage.transfer import Future, Workers, done, ending, together


@dataclass(frozen=True)
class _Path:
    """A page's route, and the memory of what the update finds at home; None for what comes through a host slot."""

    route: Route
    state: torch.Tensor | None  # uint8
    gradient: torch.Tensor | None
    out: torch.Tensor | None


@dataclass(frozen=True)
class _Step:
    """One step's update."""

    decision: Decision
    after: Any  # the device's mark: all gradients are made
    kept: Collection[int] = ()  # pages that were done before it was decided


class Updater:
    """Carries the update out over `store`, `gradients` and `weights`."""

    def __init__(
        self,
        store: PageStore,
        weights: Weights,
        gradients: AnyGradients,
        renewal: Renewal,
        *,
        device: Device,
        kernels: tuple[Kernel, Kernel],
        routes: Sequence[Route],
        slots: int,
        behind: bool,
        ahead: bool = False,
    ) -> None:
        """`behind`: whether an update goes on after `start` has returned; `ahead`: whether one may begin before it.

        `kernels`: the CPU's, and the one for pages that live on `device`. `routes`: of the pages it updates, in the
        order in which a forward needs them.
        """
        self._store, self._weights, self._gradients, self._renewal = store, weights, gradients, renewal
        self._device, (self._kernel, self._device_kernel) = device, kernels
        self.moving = MovingPages(store, weights, gradients, device=device, routes=routes, slots=slots)
        self._paths = {route.number: self._resolved(route) for route in routes}
        self.numbers = sorted(self._paths)  # of the pages that it updates
        staying = [path for path in self._paths.values() if not path.route.through_host]
        self._staying = [path for path in staying if not path.route.on_device]
        living = [path for path in staying if path.route.on_device]
        self._living = {unit: list(paths) for unit, paths in groupby(living, lambda path: path.route.page.unit)}
        inside = device_slot(routes, gradient=gradients.dtype.itemsize, weight=weights.dtype.itemsize)
        self._device_gradient = device.buffer(inside.gradient // gradients.dtype.itemsize, gradients.dtype)
        self._device_out = device.buffer(inside.weights // weights.dtype.itemsize, weights.dtype)
        self._snapshot: PageSnapshot | None = None
        assert not ahead or (behind and not store.format.remainders)  # their old weights would be gone
        self._leaving: list[Sent] = []  # of the update under way
        self._coming: tuple[Ahead, Future] | None = None  # the next step, and that pages may be offered to it
        self._ahead: Ahead | None = None  # what is done of the step that is not decided
        self._thread = Workers(1, "update") if behind else None
        if self._thread is not None and not device.is_cuda:
            _take_one_core(self._thread)

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
        self._snapshot = PageSnapshot(self._store, self.numbers, weights=self._weights)
        return self._snapshot

    def start(
        self,
        decision: Decision,
        *,
        at_end: Callable[[], None],
    ) -> None:
        """One step; `renewal.finish` waits for the end of it.

        `at_end` is called once all is home. TrainerError, from whoever waits, where a drive fails; the state is then
        partly of the step before and partly of this one.
        """
        step, ahead = _Step(decision, after=self._device.mark()), self._taken()
        self._renewal.begin(since=ahead.began if ahead else None)
        if self._thread is None:
            self._carry_out(step, at_end, None)
            self._renewal.finish()
        else:
            self._thread.put(partial(self._carry_out, step, at_end, ahead))

    @torch.no_grad()
    def _carry_out(self, step: _Step, at_end: Callable[[], None], ahead: Ahead | None) -> None:
        try:
            self._leaving = []
            self._walk(step if ahead is None else replace(step, kept=self._keep(ahead, step)))
            self._renewal.wait_for_pages()
            together([sent.whole for sent in self._leaving]).wait()
            at_end()
        except BaseException as error:
            self._renewal.end(error)
        else:
            self._renewal.end(None)

    def _walk(self, step: _Step) -> None:
        """Tell the device its pages, and compute the others as they come."""
        self.moving.begin(after=step.after, but=step.kept)
        for unit, paths in self._living.items():
            with self._device.beside(after=step.after):
                for path in paths:
                    self._compute_on_device(path, None, step)
                self._device.reached().then(self._renewal.told_by(unit, pages=len(paths)))
        staying, left = deque(self._staying), len(self.moving) - len(step.kept)
        while staying or left:
            page = self.moving.next(wait=not staying)
            if page is None:
                path = staying.popleft()
                self._compute(path, None, step)
                self._renewal.told_by(path.route.page.unit)(None)
                continue
            left -= 1
            path = self._paths[page.route.number]
            if page.route.on_device:
                with self._device.beside(after=step.after):
                    self._compute_on_device(path, page, step)
                    self._goes_home(page.route, self.moving.send(page, self._device.reached()))
            else:
                self._compute(path, page, step)
                self._goes_home(page.route, self.moving.send(page, done()))

    def _goes_home(self, route: Route, sent: Sent) -> None:
        """A forward needs the weights, and the update's end all of it; so do other ranks before they see the unit."""
        self._leaving.append(sent)
        home = sent.whole if self._renewal.of_all_ranks else sent.weights
        home.then(self._renewal.told_by(route.page.unit))

    def close(self) -> None:
        """No update is under way when this returns, whatever became of it."""
        self._taken()
        if self._thread is not None:
            self._thread.close()

    # -- before the step is decided -----------------------------------------------------------------------------------

    def expect(self, decision: Decision) -> None:
        """The next step is taken to be this one: state that its backward needs first is read from now on, or once the
        update under way is over.
        """
        assert self._thread is not None
        ahead, told = Ahead(decision), Future()
        self._coming = ahead, told
        self._thread.put(ending(told, partial(self.moving.expect, ahead)))

    def begin_ahead(self) -> None:
        """A step's last backward begins: the first pages are read, or, where it is known what to expect of the step,
        pages on drives are updated as their gradients are complete. `start` or `skip` follows.
        """
        coming, self._coming = self._coming, None
        if coming is None:
            self.moving.read_ahead()
            return
        assert self._thread is not None
        self._ahead, told = coming
        told.wait()  # or it would hear of the first units too late
        self._gradients.watch(partial(self.moving.offer, self._ahead))
        self._thread.put(partial(self._go_ahead, self._ahead))

    def skip(self) -> bool:
        """There is no such step: all is as it was when this returns. Whether weights were other ones in between."""
        ahead = self._taken()
        if ahead is None or self._thread is None:
            return False
        undone = Future()
        self._thread.put(ending(undone, partial(self._undo, ahead)))
        undone.wait()
        return True

    def _taken(self) -> Ahead | None:
        """What was done before the step was decided, as it is now; no page is offered any more."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self.moving.interrupt()
        return ahead

    @torch.no_grad()
    def _go_ahead(self, ahead: Ahead) -> None:
        """On the thread, until it is interrupted."""
        step = _Step(ahead.expected, after=None)
        try:
            while (page := self.moving.next(wait=True)) is not None:
                ahead.began = ahead.began or time.perf_counter()
                self._compute(self._paths[page.route.number], page, step)
                ahead.written[page.route.number] = self.moving.send(page, done())
        except BaseException as error:
            ahead.error = error

    def _keep(self, ahead: Ahead, step: _Step) -> set[int]:
        """The pages that were done as the step is; the others are at rest when this returns, to be done again."""
        if ahead.error is not None:
            raise ahead.error
        kept = ahead.kept(step.decision, self._store.pages)
        together([sent.whole for number, sent in ahead.written.items() if number not in kept]).wait()
        for number in kept:
            self._goes_home(self._paths[number].route, ahead.written[number])
        return kept

    def _undo(self, ahead: Ahead) -> None:
        """The pages that hold are as they were; the weights follow from their masters."""
        if ahead.error is not None:
            raise ahead.error
        self.moving.withdraw()
        together([sent.whole for sent in ahead.written.values()]).wait()
        self._store.forget_written()
        for number, data in self.moving.read_back(sorted(ahead.written)):
            page = self._store.pages[number]
            self._weights.put_page(page.unit, page.start, self._store.fields(number, data)["master"])
        self._weights.put_away()

    # -- a page -------------------------------------------------------------------------------------------------------

    def _compute(self, path: _Path, arrived: Arrived | None, step: _Step) -> None:
        """The arithmetic of one page on the CPU, on whichever of its parts are in a slot and whichever are at home."""
        data, gradient, out = _memory(path, arrived)
        self._update(self._kernel, path.route, data, gradient, out, step, rest="weights" in path.route.through_host)

    def _compute_on_device(self, path: _Path, arrived: Arrived | None, step: _Step) -> None:
        """The same on the device, told `beside`: what of the page lives elsewhere is copied there and back."""
        route, count = path.route, path.route.page.elements
        data, gradient, home = _memory(path, arrived)
        if "gradient" in route.through_device:
            gradient = self._device_gradient[:count].copy_(gradient, non_blocking=True)
        leaves = "weights" in route.through_device
        out = self._device_out[:count] if leaves else home
        if leaves and self._store.format.remainders:
            out.copy_(home, non_blocking=True)
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
        decision = step.decision
        parts = within(decision.stretches[page.unit], page.start, page.start + page.elements)
        if rest and not self._store.format.remainders:  # beside those are all weights as they are
            _copy_rest(fields["master"], out, parts)
        kernel.update_page(
            fields,
            gradient,
            out,
            parts,
            format=self._store.format,
            scale=decision.scale,
            noise=None if decision.noise is None else PageNoise(decision.noise, page.unit, page.start),
        )


def _take_one_core(thread: Workers) -> None:
    """A thread that computes beside a model on the CPU computes alone; the others go on as they are."""
    threads, taken = torch.get_num_threads(), Future()

    def take() -> None:
        torch.get_num_threads()  # or torch would set the thread up, with the number for new ones, after this
        torch.set_num_threads(1)

    thread.put(ending(taken, take))
    taken.wait()
    torch.set_num_threads(threads)  # for new threads too


def _memory(path: _Path, arrived: Arrived | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A page's state, its gradient and where its new weights go: at home, or in the slot that it is in."""
    if arrived is None:
        assert path.state is not None
        assert path.gradient is not None
        assert path.out is not None
        return path.state, path.gradient, path.out
    return (
        arrived.state if path.state is None else path.state,
        arrived.gradient if path.gradient is None else path.gradient,
        arrived.out if path.out is None else path.out,
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
