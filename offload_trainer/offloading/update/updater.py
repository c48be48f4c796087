"""Update all pages of optimizer state: drives prefetch and write back while the CPU and the device compute.

The device's pages are queued first and computed concurrently. The CPU updates pages as they arrive from drives in the
slots of a `PagePipeline`, and pages in RAM while none has arrived; the order does not change a bit. Some pages may be
updated during the backward, before the step's parameters are known (`SpeculativeStep`, docs/design_update.md).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from offload_trainer.common.errors import TrainerError
from offload_trainer.offloading.allocation import EngineParts, Stores
from offload_trainer.offloading.device import Device, cores_beside, limit_cores
from offload_trainer.offloading.pages.store import PageSnapshot
from offload_trainer.optim.cuda_adam import CudaKernel
from offload_trainer.optim.kernel_api import Kernel, PageUpdate, ParamRange, clip_ranges
from offload_trainer.optim.moments import Noise
from offload_trainer.optim.muon import MatrixKernel
from offload_trainer.optim.native_kernel import NativeKernel
from offload_trainer.optim.rules import Hyper
from offload_trainer.plan.tiered.layout import Page, Unit
from offload_trainer.plan.tiered.spec import Part, Route, route_of, slot_bytes
from offload_trainer.plan.tiers import on_drive
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import Future, Workers, done, followed, together


@dataclass(frozen=True)
class StepParams:
    """Everything that determines a page's new state besides the page itself and its gradient."""

    ranges: Sequence[Sequence[ParamRange]]  # the updated ranges of each unit
    scale: float  # factor on the gradients: clipping and the inverse of the loss scale
    noise_seed: int | None  # seed of stochastic rounding, if there is any

    def noise(self, unit: int) -> Noise | None:
        """Return the random bits of a unit's masters and moments."""
        # The largest step over all weights stands still while those with fewer are updated alone; bits would repeat.
        step = max((part.step for part in self.ranges[unit]), default=0)
        return None if self.noise_seed is None else Noise(self.noise_seed, step)


def ranges_of(unit: Unit, rules: Mapping[str, Hyper], steps: Mapping[str, int]) -> list[ParamRange]:
    """Return the unit's ranges that are updated (weights in `rules`), merged where hyperparameters and steps agree.

    `steps` includes this one. Ranges include the padding after a weight, except after matrices updated as a whole.
    """
    places = [place for place in unit.places if place.weight.trainable]
    ends = [place.start for place in places[1:]] + [unit.trained]
    found: list[ParamRange] = []
    for place, end in zip(places, ends, strict=False):
        name, start = place.weight.name, place.start
        if name not in rules:
            continue
        same = (rules[name], steps[name])
        if start < unit.matrices:
            end = start + place.weight.numel
        elif found and (found[-1].end, found[-1].hyper, found[-1].step) == (start, *same):
            start = found.pop().start
        found.append(ParamRange(start, end, *same))
    return found


class SpeculativeStep:
    """The speculative updates of one step."""

    def __init__(self, expected: StepParams) -> None:
        self.expected = expected
        self.written: dict[int, PendingWrite] = {}  # updated pages; those on drives are being written
        self.began: float | None = None  # time of the first page
        self.error: BaseException | None = None  # the error that ended speculation

    def kept(self, params: StepParams, pages: Sequence[Page]) -> set[int]:
        """Return the updated pages that are valid for the step's actual parameters."""
        if replace(self.expected, ranges=params.ranges) != params:
            return set()
        same = [expected == actual for expected, actual in zip(self.expected.ranges, params.ranges, strict=True)]
        return {number for number in self.written if same[pages[number].unit]}


@dataclass
class PageMemory:
    """A page's route and the memory of its parts. Until a slot stages them, parts that are not in place are empty."""

    route: Route
    state: torch.Tensor  # uint8
    gradient: torch.Tensor
    out: torch.Tensor  # the new weights
    fields: Mapping[str, torch.Tensor] | None = None  # cached views of `state` if it is in place; making one takes time
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
    """The pages that the CPU updates, and those of the device that pass through host memory.

    A slot is a host buffer for the parts of one page that are not in RAM. When a write completes, its thread starts the
    next read into the slot. Pages arrive after all gradients are complete, in the order of the next forward; some may
    be offered before, unit by unit. Otherwise idle slots prefetch the state of pages whose gradients are not complete.
    """

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

    def prefetch(self, routes: Sequence[Route] | None = None) -> None:
        """Prefetch the state of these pages, or of all in their order, while gradients are still being computed."""
        if self._prefetching:  # after a skipped step the pages are still in the slots
            return
        with self._lock:
            self._prefetching, self._expected = True, deque(self._routes if routes is None else routes)
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
        self.prefetch([held[number] for number in order if number in held])

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
        for page in overdue:
            self._refill(page.slot, after=page.loaded)

    def _overdue_pages(self, offered: int) -> list[PageMemory]:
        """Return the prefetched pages that must give up their slots because others need them.

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
        self._overdue += [page.loaded for page in overdue]
        return overdue

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
        data = self._slots[0][0][: self._store.sizes[number]]
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
            self._in_slots.add(route.number)
            state, gradient, out = self._slots[slot]
            count, page = route.page.elements, replace(self._memory[route.number], slot=slot)
            if "gradient" in route.through_host:
                page.gradient = gradient.view(self._gradients.dtype)[:count]
            if "weights" in route.through_host:
                page.out = out.view(self._weights.dtype)[:count]
            if "state" in route.through_host:
                page.state = state[: self._store.sizes[route.number]]
                # Prefetched: what the last update has written, valid yet or not.
                copy = self._store.copies.newest(route.number) if early else None
                page.loaded = self._store.read(route.number, page.state, copy=copy)
            if early:
                self._prefetched.append(page)
                return
        self._complete(page)

    def _is_written(self, route: Route) -> bool:
        return route.number not in self._writing or self._writing[route.number].done

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


class Updater:
    """The optimizer update: it reads the state and the gradients, and writes the state and the weights."""

    def __init__(self, stores: Stores, parts: EngineParts) -> None:
        """Prepare the update of this rank's pages in `stores`, on a thread if it may overlap the next forward."""
        homes, sizes, device = parts.homes, parts.sizes, parts.device
        kernels: tuple[Kernel, Kernel] = parts.kernels
        store, weights, gradients = stores.state, stores.weights, stores.gradients
        self._store, self._weights, self._gradients = store, weights, gradients
        self._update_progress, self._device = stores.update_progress, device
        mine = ((n, page) for n, page in enumerate(homes.pages) if homes.cut.owners[n] == parts.node.rank)
        routes = [route_of(n, page, homes, is_gpu=device.is_cuda) for n, page in mine]  # ordered as in a forward
        if store.format.rule.matrices:
            gpu = device.torch_device if device.is_cuda else None
            threads = cores_beside(device) if sizes.overlap else torch.get_num_threads()
            made = {kernel: MatrixKernel(kernel, gpu=gpu, threads=threads) for kernel in kernels}  # one for a CPU
            kernels = made[kernels[0]], made[kernels[1]]
        self._kernel, self._device_kernel, self._copy = *kernels, parts.kernels[0].copy
        pages = [self._resolved(route) for route in routes]
        self.numbers = sorted(route.number for route in routes)  # the pages that this rank updates
        # Memory for the old bytes of some pages in RAM. Their update in place, after which addresses and views stay
        # valid, can be undone then.
        old = {number: store.sizes[number] for number in self.numbers if number in homes.shadows}
        self.shadows = dict(zip(old, host_buffer(sum(old.values())).split([*old.values()]), strict=True))
        self.pipeline = PagePipeline(stores, pages, device=device, slots=sizes.page_buffers, shadows=self.shadows)
        there = [page for page in pages if page.route.on_device and not page.route.through_host]
        self._device_pages = {
            unit: self._merged(list(its)) for unit, its in groupby(there, lambda page: page.route.page.unit)
        }
        gradient, weight = gradients.dtype.itemsize, weights.dtype.itemsize
        inside = slot_bytes(routes, on_device=True, format=store.format, gradient=gradient, weight=weight)
        self._device_gradient = device.buffer(inside["gradient"] // gradient, gradients.dtype)
        self._device_out = device.buffer(inside["weights"] // weight, weights.dtype)
        self._snapshot: PageSnapshot | None = None
        assert sizes.overlap or not sizes.ahead
        self._overlap_backward = sizes.ahead
        self._owners = {unit.index: owner for owner, stage in parts.stages for unit in stage}
        self._pending_writes: dict[int, PendingWrite] = {}  # pages of the current update that are being written back
        # The updates of the step that is announced; they begin only after the current update has ended.
        self.announced: SpeculativeStep | None = None
        self._failed: BaseException | None = None  # the error of the last update on the thread
        self._thread = Workers(1, "update") if sizes.overlap else None
        if self._thread is not None:
            limit_cores(self._thread, cores_beside(device))

    def _resolved(self, route: Route) -> PageMemory:
        """Look up the memory of a page's parts once, because tiers do not change."""
        page = route.page

        def part(whole: torch.Tensor | None, name: Part) -> torch.Tensor:
            if name in route.through_host:
                return torch.empty(0)
            assert whole is not None
            return whole if name == "state" else whole[page.start :][: page.elements]

        state = self._store.on_device(route.number) if route.on_device else self._store.in_memory(route.number)
        if (sums := self._gradients.on_device.get(page.unit)) is None:
            sums = self._gradients.store.host(page.unit)
        if (weights := self._weights.resident.get(page.unit)) is None:
            weights = self._weights.store.host(page.unit)
        fields = None if state is None else self._store.fields(route.number, state)
        return PageMemory(route, part(state, "state"), part(sums, "gradient"), part(weights, "weights"), fields)

    def _merged(self, pages: Sequence[PageMemory]) -> list[PageMemory]:
        """Merge the pages of a unit on the device that one launch of its kernel can update."""
        runs: list[list[PageMemory]] = []
        for page in pages:
            if runs and isinstance(self._device_kernel, CudaKernel) and _extends(runs[-1], page):
                runs[-1].append(page)  # other kernels take one page a call
            else:
                runs.append([page])
        return [self._whole(run) if len(run) > 1 else run[0] for run in runs]

    def _whole(self, run: Sequence[PageMemory]) -> PageMemory:
        """Return the memory of all pages of a run, numbered as the last, which a snapshot reads after the others."""
        page, state, count = run[0].route.page, run[0].state, len(run)
        route = replace(run[-1].route, page=replace(page, elements=count * page.elements))
        rows = state.as_strided((count, state.numel()), (state.numel(), 1))
        return replace(self._resolved(route), state=rows, fields=self._store.fields(route.number, rows), pages=count)

    def snapshot(self) -> PageSnapshot:
        """Return a snapshot of the current state. No page changes before the snapshot has read it or is closed."""
        self._snapshot = PageSnapshot(self._store, self.numbers)
        return self._snapshot

    def start(self, params: StepParams, *, at_end: Callable[[], None]) -> None:
        """Start one step's update, and call `at_end` after everything has been written back.

        `UpdateProgress.finish` waits for its end, and raises TrainerError each time if a drive failed.
        """
        after, speculative = self._device.mark(), self._end_speculation()
        self._update_progress.begin(since=speculative.began if speculative else None)
        if self._thread is None:
            self._run(params, after, at_end, None)
            self._update_progress.finish()
        else:
            self._thread.put(partial(self._run, params, after, at_end, speculative))

    @torch.no_grad()
    def _run(
        self, params: StepParams, after: Any, at_end: Callable[[], None], speculative: SpeculativeStep | None
    ) -> None:
        try:
            self._pending_writes = {}
            kept, undone = self._decided(speculative, params) if speculative else (set[int](), set[int]())
            self._update_all(params, after, kept, undone)
            if self._overlap_backward:
                self.pipeline.read_ahead(writing={n: sent.whole for n, sent in self._pending_writes.items()})
            together(self._update_progress.left()).wait()
            together([sent.whole for sent in self._pending_writes.values()]).wait()
            at_end()
        except BaseException as error:
            self._failed = error
            self._update_progress.end(error)
        else:
            self._update_progress.end(None)

    def _update_all(self, params: StepParams, after: Any, kept: Set[int], undone: Set[int]) -> None:
        """Update all pages but those in `kept`; restore those in `undone` first. Gradients are complete at `after`."""
        self.pipeline.begin(after=after, skip=kept)
        for unit, pages in self._device_pages.items():
            with self._device.side_stream(after=after):
                for memory in pages:
                    self._update_page(memory, params)
                there, count = self._device.reached(), sum(memory.pages for memory in pages)
                self._update_progress.when_written(unit, weights=there, whole=there, pages=count)
        for _ in range(len(self.pipeline) - len(kept)):
            page = self.pipeline.next()
            assert page is not None  # the interrupt of the speculative step has been received
            number, on_device = page.route.number, page.route.on_device
            if number in undone:
                self._copy(self.shadows[number], page.state)
            with self._device.side_stream(after=after) if on_device else nullcontext():
                self._update_page(page, params)
                computed = self._device.reached() if on_device else done()
                self._report_written(number, self.pipeline.write_back(page, computed))

    def _report_written(self, number: int, sent: PendingWrite) -> None:
        self._pending_writes[number] = sent
        self._update_progress.when_written(self._store.pages[number].unit, weights=sent.weights, whole=sent.whole)

    def close(self) -> None:
        """Wait for the current update, successful or not, and end the thread."""
        if self._thread is not None:
            with suppress(Exception):
                self._update_progress.finish()  # it would take the interrupt of an announced step for a page
            self._end_speculation()
            self._thread.close()
        with suppress(TrainerError):  # A read of state that nothing will use may fail.
            self.pipeline.drop_prefetched()

    # -- speculative updates, before the step's parameters are known ---------------------------------------------------

    def expect(self, params: StepParams) -> None:
        """Announce the expected parameters of the next step; `start` or `skip` must follow.

        Pages on drives and pages with shadow memory are updated as soon as its last backward completes their gradients.
        """
        assert self._thread is not None
        assert self.announced is None
        self.announced = SpeculativeStep(params)
        self._thread.put(partial(self._update_offered, self.announced))

    def begin_last_backward(self) -> None:
        """Take complete units of an announced step from its last backward on; for others prefetch the first pages."""
        if self.announced is not None:
            self._gradients.report_to(partial(self.pipeline.offer, self.announced), owners=self._owners)
        else:
            self._gradients.report_to(None, owners={})  # nothing would take the units, step after step
            self.pipeline.prefetch()

    def skip(self) -> bool:
        """Undo the speculative updates of a step that is skipped; return whether weights had been changed."""
        speculative = self._end_speculation()
        if speculative is not None and self._thread is not None:
            self._thread.submit(partial(self._undo, speculative)).wait()
        return speculative is not None

    def _end_speculation(self) -> SpeculativeStep | None:
        """Return the speculative updates of the current step, and stop accepting pages."""
        speculative, self.announced = self.announced, None
        if speculative is not None:
            self.pipeline.interrupt()
        return speculative

    @torch.no_grad()
    def _update_offered(self, speculative: SpeculativeStep) -> None:
        try:
            if self._failed is not None:  # its step may not be recorded, and the record's pages must stay
                raise self._failed
            self.pipeline.expect(speculative)
            while (page := self.pipeline.next()) is not None:
                speculative.began = speculative.began or time.perf_counter()
                number = page.route.number
                self._update_page(replace(page, shadow=self.shadows.get(number)), speculative.expected)
                speculative.written[number] = self.pipeline.write_back(page, done())
        except BaseException as error:
            speculative.error = error

    def _decided(self, speculative: SpeculativeStep, params: StepParams) -> tuple[set[int], set[int]]:
        """Return the pages that need no other update, and those to restore; wait until others can be updated again."""
        if speculative.error is not None:
            raise speculative.error
        kept = speculative.kept(params, self._store.pages)
        others = speculative.written.keys() - kept
        together([speculative.written[number].whole for number in others]).wait()
        for number in kept:
            self._report_written(number, speculative.written[number])
        return kept, {number for number in others if number in self.shadows}

    def _undo(self, speculative: SpeculativeStep) -> None:
        """Discard speculative pages, and restore their weights from the masters that are still valid."""
        if speculative.error is not None:
            raise speculative.error
        self.pipeline.withdraw()
        together([sent.whole for sent in speculative.written.values()]).wait()
        self._store.copies.forget()
        for number in sorted(speculative.written):
            page, state = self._store.pages[number], self._store.in_memory(number)
            data = self.pipeline.read_back(number) if state is None else state.copy_(self.shadows[number])
            self._weights.put(page.unit, page.start, self._store.fields(number, data)["master"])

    def _update_page(self, memory: PageMemory, params: StepParams) -> None:
        """Update a page; one on the device is queued, with copies of the parts that are not there."""
        route, gradient, out = memory.route, memory.gradient, memory.out
        page, number = route.page, route.number
        if "gradient" in route.through_device:
            gradient = self._device_gradient[: page.elements].copy_(gradient, non_blocking=True)
        if "weights" in route.through_device:
            out = self._device_out[: page.elements]
        if self._snapshot is not None:
            self._snapshot.wait_for(number)
        fields = memory.fields or self._store.fields(number, memory.state)
        parts = clip_ranges(params.ranges[page.unit], page.start, page.start + page.elements)
        if "weights" in route.through_host | route.through_device:  # also those that this step does not update
            ends = [0, *(part.end for part in parts)]
            starts = [*(part.start for part in parts), page.elements]
            for end, start in zip(ends, starts, strict=True):
                if start > end:
                    out[end:start].copy_(fields["master"][end:start], non_blocking=True)
        kernel = self._device_kernel if route.on_device else self._kernel
        shadow, updated = memory.shadow, sum(part.end - part.start for part in parts)
        if shadow is not None and not (isinstance(kernel, NativeKernel) and updated == page.elements):
            self._copy(memory.state, shadow)
            shadow = None
        given = (fields, gradient, out, parts, self._store.format, params.scale, params.noise(page.unit))
        kernel.update_page(PageUpdate(*given, page.unit, page.start, shadow))
        if "weights" in route.through_device:
            memory.out.copy_(out, non_blocking=True)


def _extends(run: Sequence[PageMemory], memory: PageMemory) -> bool:
    """Return whether `memory` is of the page after those of `run`, of equal size, and all are updated in place."""
    last, page = run[-1].route, memory.route.page
    return (
        memory.route.number == last.number + 1
        and page.start == last.page.start + last.page.elements
        and page.elements == last.page.elements
        and memory.state.data_ptr() == run[-1].state.data_ptr() + run[-1].state.numel()
        and not (last.through_device or memory.route.through_device)
        # The kernel's numbers of elements, and of words from page to page, have 32 bits.
        and max((len(run) + 1) * page.elements, memory.state.nbytes // 4) < 2**31
    )
