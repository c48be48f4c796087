"""Tests of ranks that threads simulate: their gradients add up to one rank's sums bit for bit, whichever rank had one
and in whatever order they arrived, and a unit is ready only after all of them have updated it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_gradients import model, names, places, sums

from offload_trainer.errors import TrainerError
from offload_trainer.offloading.device import CpuDevice
from offload_trainer.offloading.gradients.collector import Gradients
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.offloading.ranks.sharded_gradients import ShardedGradients, ShardedNorms
from offload_trainer.offloading.update.progress import UpdateProgress
from offload_trainer.optim import gradient_kernel as norms
from offload_trainer.optim.gradient_kernel import TorchGradients
from offload_trainer.plan.parallel import comm_cost
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.plan.tiered.layout import RAM, Page, range_of_rank, units_of
from offload_trainer.ranks import Group, _connect
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import DriveFile, Transfers

pytestmark = pytest.mark.usefixtures("loopback")
AnyGradients = Gradients | ShardedGradients
MICRO = 2  # micro-batches of each rank


class Place:
    """What the simulated ranks of one process share: the memory of each node, and a store where they find each other.

    Their connections are those of real ranks.
    """

    def __init__(self, world: int, *, nodes: int) -> None:
        each = world // nodes
        self.world, self.nodes = world, tuple(range(first, first + each) for first in range(0, world, each))
        self.made: dict[tuple[int, int], torch.Tensor] = {}
        self._store, self._groups = dist.HashStore(), list[Group]()

    def group(self, name: str, rank: int) -> Group:
        """Connect the calling thread's rank to all others, whose threads call this at the same time."""
        group = _connect(name, range(self.world), patience=300, rank=rank, store=self._store)
        self._groups.append(group)
        return group

    def leave(self, rank: int) -> None:
        """Close all connections of a rank, so that no other waits for it."""
        for group in self._groups:
            if group.rank == rank:
                group.close()


class ThreadOfNode(Node):
    """A Node for one of several simulated ranks in one process."""

    def __init__(self, rank: int, place: Place) -> None:
        super().__init__()
        self.rank, self.world, self.nodes = rank, place.world, place.nodes
        self.number = next(number for number, its in enumerate(place.nodes) if rank in its)
        self._place, self._asked = place, count()
        self._meeting, self._point_to_point = place.group("meeting", rank), place.group("tensors", rank)

    def memory(self, size: int, *, pinned: bool = False) -> torch.Tensor:
        number = next(self._asked)
        if self.is_first:
            self._place.made[self.number, number] = host_buffer(size)
        self.barrier()
        return self._place.made[self.number, number]

    def barrier(self) -> None:
        self._meeting.all_gather_numbers(0)


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
    return norms.global_norm(gradients.norms()), frozenset(gradients.arrived), found


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
            units, store, given=torch.bfloat16, device=CpuDevice(), order=order, node=node, kernel=TorchGradients()
        )
        try:
            return steps(gradients, rank=rank, world=world, barrier=node.barrier)
        except BaseException:
            place.leave(rank)
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
            placed, ThreadOfNode(rank, place), dtype=torch.float32, ordered=ordered, kernel=TorchGradients()
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
    alone = norms.ordered_norm if ordered else norms.norm_of
    for told in found:
        assert told.keys() == arrived
        for unit, place_ in placed:
            if (name := place_.weight.name) in arrived:
                values = whole[unit.index][place_.start :][: place_.weight.numel]
                assert torch.equal(told[name], alone(values)), name


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
