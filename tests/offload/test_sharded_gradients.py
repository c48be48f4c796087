"""Tests of ranks that threads simulate: their gradients add up to one rank's sums bit for bit, whichever rank had one
and in whatever order they arrived, and a unit is ready only after all of them have updated it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from test_gradients import model, names, places, sums

from offload_trainer.errors import TrainerError
from offload_trainer.offloading.device import CpuDevice
from offload_trainer.offloading.gradients.collector import Gradients
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.ranks.node_comm import Addressed, Node
from offload_trainer.offloading.ranks.sharded_gradients import ShardedGradients, ShardedNorms
from offload_trainer.offloading.update.progress import UpdateProgress
from offload_trainer.optim.kernel_api import TorchKernel
from offload_trainer.optim.norms import global_norm, norm_of
from offload_trainer.plan.parallel import comm_cost
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.plan.tiered.layout import RAM, Page, range_of_rank, units_of
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import DriveFile, Transfers

AnyGradients = Gradients | ShardedGradients
MICRO = 2  # micro-batches of each rank


class Place:
    """The memory and messages that simulated ranks in one process share."""

    def __init__(self, world: int, *, nodes: int) -> None:
        self.world, self.told, self.parts = world, [0] * world, dict[int, torch.Tensor]()
        # A barrier each for numbers, for tensors, for reads and for the node's own.
        self.barriers = [threading.Barrier(world, timeout=300) for _ in range(4)]
        each = world // nodes
        self.nodes = tuple(range(first, first + each) for first in range(0, world, each))
        self.made: dict[tuple[int, int], torch.Tensor] = {}
        self.sent: dict[tuple[int, int], Queue[torch.Tensor]] = {
            (source, to): Queue() for source in range(world) for to in range(world)
        }
        self.given: dict[int, torch.Tensor] = {}

    def exchange(self, rank: int, mine: int) -> list[int]:
        """Return every rank's number, in order of rank."""
        self.told[rank] = mine
        self.barriers[0].wait()
        told = list(self.told)
        self.barriers[0].wait()
        return told

    def join(self, values: torch.Tensor, rank: int) -> None:
        """All-gather in place: each rank contributes its equal part of `values`."""
        self.parts[rank] = values.chunk(self.world)[rank].clone()
        self.barriers[1].wait()
        values.copy_(torch.cat([self.parts[other] for other in range(self.world)]))
        self.barriers[1].wait()

    def abort(self) -> None:
        """Break all barriers, as a closed connection would."""
        for barrier in self.barriers:
            barrier.abort()


class ThreadOfNode(Node):
    """A Node for one of several simulated ranks in one process."""

    def __init__(self, rank: int, place: Place) -> None:
        super().__init__()
        self.rank, self.world, self.nodes = rank, place.world, place.nodes
        self.number = next(number for number, its in enumerate(place.nodes) if rank in its)
        self._place, self._asked = place, count()

    def memory(self, size: int, *, pinned: bool = False) -> torch.Tensor:
        number = next(self._asked)
        if self.is_first:
            self._place.made[self.number, number] = host_buffer(size)
        self.barrier()
        return self._place.made[self.number, number]

    def barrier(self) -> None:
        self._place.barriers[3].wait()

    def send_recv(self, out: Addressed, into: Addressed) -> Callable[[], None]:
        for to, values in out:
            self._place.sent[self.rank, to].put(values.clone())

        def wait() -> None:
            for source, values in into:
                values.copy_(self._place.sent[source, self.rank].get(timeout=300))

        return wait

    def all_reduce(self, values: torch.Tensor) -> None:
        self._place.given[self.rank] = values.clone()
        self.barrier()
        values.copy_(sum(self._place.given.values()))  # type: ignore[arg-type]
        self.barrier()


def hand_over(to: AnyGradients, *, seed: int, last: bool) -> None:
    """Add a backward's gradients in random order; a third are missing, of tied weights perhaps only one use's."""
    generator = torch.Generator().manual_seed(seed)
    uses = [place.weight for _, place in places(model(tied=True)) for _ in range(place.weight.uses)]
    for number in torch.randperm(len(uses), generator=generator).tolist():
        gradient = torch.randn(uses[number].shape, generator=generator).bfloat16()
        gradient[torch.rand(uses[number].shape, generator=generator) < 0.5] = -0.0  # adding 0.0 would change the sign
        if torch.rand(1, generator=generator) < 0.66:
            to.add(uses[number].name, gradient, last=last)
    to.end_of_backward(last=last)


def bits(gradients: AnyGradients) -> tuple[float, frozenset[str], dict[str, torch.Tensor]]:
    """Return the norm, the names of weights with a gradient, and their sums."""
    gradients.finish()
    found = {}
    for unit, place in places(model(tied=True)):
        if place.weight.name in gradients.arrived:
            held = gradients.store.get(unit.index, place.start, place.weight.numel)
            found[place.weight.name] = held.view(torch.int32)
    return global_norm(gradients.norms()), frozenset(gradients.arrived), found


@pytest.mark.parametrize("home", [RAM, 0])
@pytest.mark.parametrize(("world", "nodes", "piece"), [(2, 1, 1 << 17), (3, 1, 5000), (2, 2, 5000), (4, 2, 1 << 17)])
def test_sums_are_those_of_one_rank(
    world: int, nodes: int, piece: int, home: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in RAM and on a node's drive match one rank's; norm pieces of `piece` elements span several
    ranks and nodes.
    """
    monkeypatch.setattr(comm_cost, "_PIECE", piece)
    units, micro = model(tied=True), MICRO * world
    place = Place(world, nodes=nodes)

    def steps(gradients: AnyGradients, *, rank: int, world: int, barrier: Callable[[], None]) -> list[object]:
        found = []
        for step in range(3):
            for number in range(rank, micro, world):
                hand_over(gradients, seed=micro * step + number, last=number + world >= micro)
            found.append(bits(gradients))
            barrier()  # a real update ends with a barrier, too
            gradients.clear()
        return found

    def of_rank(rank: int) -> list[object]:
        node, transfers = ThreadOfNode(rank, place), Transfers()
        files = [DriveFile(tmp_path / f"sums-{node.number}", 4 * sum(unit.trained for unit in units))]
        sums = [4 * unit.trained for unit in units]
        made_of = {"dtype": torch.float32, "files": files, "transfers": transfers, "pinned": False, "node": node}
        store = UnitStore(sums, [home] * len(units), **made_of)  # type: ignore[arg-type]
        order = names(units)
        gradients = ShardedGradients(
            units, store, given=torch.bfloat16, device=CpuDevice(), order=order, node=node, kernel=TorchKernel()
        )
        try:
            return steps(gradients, rank=rank, world=world, barrier=node.barrier)
        except BaseException:
            place.abort()
            raise
        finally:
            transfers.close()
            files[0].close()

    with ThreadPoolExecutor(world) as threads:
        several = list(threads.map(of_rank, range(world)))
    with sums(units, -1, device=CpuDevice()) as alone:
        expected = steps(alone, rank=0, world=1, barrier=lambda: None)
    for rank, found in enumerate(several):
        for ours, right in zip(found, expected, strict=True):
            assert ours[:2] == right[:2]  # type: ignore[index]
            for unit, place in places(units):
                first, end = range_of_rank(unit, rank, ranks=world)
                own = slice(max(0, first - place.start), max(0, end - place.start))
                if (name := place.weight.name) in right[2]:  # type: ignore[index]
                    assert torch.equal(ours[2][name][own], right[2][name][own]), name  # type: ignore[index]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("width", [1024, 16384, 65536])
def test_norms_over_several_ranks(width: int, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm pieces are inside one rank's elements, or span two or all. One weight has no gradient; some ranks no
    elements.
    """
    world = 5
    monkeypatch.setattr(comm_cost, "_PIECE", width)
    monkeypatch.setattr(comm_cost, "_CHUNK", width)
    shapes = {"a.large": (50_000,), "a.none": (9000,), "a.small": (300,), "a.last": (70, 301), "b.tiny": (7,)}
    weights = [Weight(name, shape, unit=name[0]) for name, shape in shapes.items()]
    units = units_of(ModelShape(tuple(weights), layers=1, hidden=1, vocabulary=1, context=1))
    generator = torch.Generator().manual_seed(1)
    whole = {unit.index: torch.randn(unit.trained, generator=generator) for unit in units}
    arrived = shapes.keys() - {"a.none"}
    placed = places(units)
    place = Place(world, nodes=world)

    def of_rank(rank: int) -> list[dict[str, torch.Tensor]]:
        ours = ShardedNorms(
            placed, ThreadOfNode(rank, place), dtype=torch.float32, ordered=ordered, kernel=TorchKernel()
        )
        found = []
        for _ in range(2):
            for unit in units:
                first, end = range_of_rank(unit, rank, ranks=world)
                sums = torch.full((unit.trained,), float("nan"))  # elements of other ranks
                sums[first:end] = whole[unit.index][first:end]
                ours.take(unit.index, sums, arrived, staged=True)
                sums.fill_(float("nan"))
            found.append(ours.of(arrived))
            ours.clear()
        return found

    with ThreadPoolExecutor(world) as threads:
        found = [told for several in threads.map(of_rank, range(world)) for told in several]
    for told in found:
        assert told.keys() == arrived
        for unit, place_ in placed:
            if (name := place_.weight.name) in arrived:
                values = whole[unit.index][place_.start :][: place_.weight.numel]
                assert torch.equal(told[name], norm_of(values, ordered=ordered)), name


UNITS = [0, 1, 2]
PAGES = [  # pages of each rank
    [Page(0, 0, 8, RAM), Page(0, 8, 8, RAM), Page(2, 0, 8, RAM)],
    [Page(0, 16, 8, RAM), Page(1, 0, 8, RAM)],
]


@pytest.fixture
def ranks() -> Any:
    barrier = threading.Barrier(2, timeout=300)
    made = [UpdateProgress(pages, units=UNITS, agree=lambda unit: barrier.wait()) for pages in PAGES]
    for one in made:
        one.begin()
    yield made
    barrier.abort()
    for one in made:
        one.close()


def home(ranks: list[UpdateProgress]) -> list[list[bool]]:
    return [[one.is_ready(unit) for unit in UNITS] for one in ranks]


def test_a_unit_is_ready_once_all_ranks_have_updated_it(ranks: list[UpdateProgress]) -> None:
    first, second = ranks
    first.completion_callback(0, pages=2)(None)
    first.completion_callback(2)(None)
    assert home(ranks) == [[False] * 3] * 2
    second.completion_callback(0)(None)
    for one in ranks:
        one.wait(0)  # The first rank has no pages of unit 1, but must wait for it too.
    assert not first.is_ready(1)
    assert not first.is_ready(2)
    second.completion_callback(1)(None)
    for one in ranks:
        one.wait_for_pages()
    assert home(ranks) == [[True] * 3] * 2


def test_an_error_of_one_rank_is_raised_there(ranks: list[UpdateProgress]) -> None:
    first, _ = ranks
    first.completion_callback(2)(TrainerError("the drive is gone"))
    for unit in UNITS:
        with pytest.raises(TrainerError, match="the drive is gone"):
            first.wait(unit)
