"""Tests of ranks that threads simulate: their gradients add up to one rank's sums bit for bit, whichever rank had one
and in whatever order they arrived, and a unit is ready only after all of them have updated it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_gradients import places, sums

from offload_trainer.errors import TrainerError
from offload_trainer.offloading.device import CpuDevice
from offload_trainer.offloading.gradients.collector import Gradients
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.offloading.ranks.sharded_gradients import ShardedGradients
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


SHAPES = {  # pieces of norms are inside one rank's elements, or span two or all; some ranks have no elements of a unit
    **{"wte": (50, 100), "h.0.w": (60, 100), "h.0.none": (9000,), "h.0.b": (60,)},
    **{"h.1.large": (50_000,), "h.1.small": (300,), "h.1.last": (70, 301), "head.tiny": (7,)},
}
WEIGHTS = [
    Weight(name, shape, unit=name.rpartition(".")[0] or name, block=name[0:2] == "h.", uses=1 + (name == "wte"))
    for name, shape in SHAPES.items()
]
MODEL = units_of(ModelShape(tuple(WEIGHTS), layers=2, hidden=100, vocabulary=50, context=16))


class OfGpu(CpuDevice):
    """A device whose norms are those of a GPU."""

    place = torch.device("cuda")


def hand_over(to: AnyGradients, *, seed: int, last: bool) -> None:
    """Add a backward's gradients in random order; a third are missing, of tied weights perhaps only one use's.

    One weight never has a gradient.
    """
    generator = torch.Generator().manual_seed(seed)
    uses = [weight for weight in WEIGHTS for _ in range(weight.uses)]
    for number in torch.randperm(len(uses), generator=generator).tolist():
        gradient = torch.randn(uses[number].shape, generator=generator).bfloat16()
        gradient[torch.rand(uses[number].shape, generator=generator) < 0.5] = -0.0  # adding 0.0 would change the sign
        if torch.rand(1, generator=generator) < 0.66 and "none" not in uses[number].name:
            to.add(uses[number].name, gradient, last=last)
    to.end_of_backward(last=last)


@dataclass(frozen=True)
class Step:
    """What the gradients of a step are, by the weights that have one."""

    norms: dict[str, torch.Tensor]
    sums: dict[str, torch.Tensor]


def steps(gradients: AnyGradients, numbers: range, *, barrier: Callable[[], None]) -> list[Step]:
    """Add up three steps' gradients, of the micro-batches with these numbers."""
    found = []
    for step in range(3):
        for number in numbers:
            hand_over(gradients, seed=100 * step + number, last=number == numbers[-1])
        gradients.finish()
        get = gradients.store.get
        sums = {
            place.weight.name: get(unit.index, place.start, place.weight.numel)
            for unit, place in places(MODEL)
            if place.weight.name in gradients.arrived
        }
        found.append(Step(gradients.norms(), sums))
        barrier()  # a real update ends with a barrier, too
        gradients.clear()
    return found


@pytest.mark.parametrize("home", [RAM, 0])
@pytest.mark.parametrize(
    ("world", "nodes", "piece"),
    [(2, 1, 1 << 17), (3, 1, 5000), (2, 2, 5000), (4, 2, 1 << 17), (5, 5, 1024), (5, 5, 16384), (5, 5, 65536)],
)
def test_sums_and_norms_are_those_of_one_rank(
    world: int, nodes: int, piece: int, home: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are in RAM or on a node's drive. Norms are those of a CPU in pieces of `piece` elements, or of a GPU."""
    monkeypatch.setattr(comm_cost, "_PIECE", piece)
    monkeypatch.setattr(comm_cost, "_CHUNK", 1 << piece.bit_length() - 1)
    micro, names = MICRO * world, [weight.name for weight in WEIGHTS]

    def of_rank(rank: int, device: CpuDevice, place: Place) -> list[Step]:
        node, transfers = ThreadOfNode(rank, place), Transfers()
        files = [DriveFile(tmp_path / f"sums-{node.number}", 4 * sum(unit.trained for unit in MODEL))]
        sums, homes = [4 * unit.trained for unit in MODEL], [home] * len(MODEL)
        store = UnitStore(sums, homes, dtype=torch.float32, files=files, transfers=transfers, pinned=False, node=node)
        gradients = ShardedGradients(
            MODEL, store, given=torch.bfloat16, device=device, order=names, node=node, kernel=TorchGradients()
        )
        try:
            return steps(gradients, range(rank, micro, world), barrier=node.barrier)
        except BaseException:
            place.leave(rank)
            raise
        finally:
            transfers.close()
            files[0].close()

    for device, alone in ((CpuDevice(), norms.norm_of), (OfGpu(), norms.ordered_norm)):
        with sums(MODEL, RAM, device=device, order=names) as gradients:
            expected = steps(gradients, range(micro), barrier=lambda: None)
        with ThreadPoolExecutor(world) as threads:
            several = list(threads.map(partial(of_rank, device=device, place=Place(world, nodes=nodes)), range(world)))
        for right, *of_ranks in zip(expected, *several, strict=True):
            for unit, place in places(MODEL):
                name, start = place.weight.name, place.start
                assert all((name in ours.norms) == (name in right.norms) for ours in of_ranks), name
                for rank, ours in enumerate(of_ranks if name in right.norms else ()):
                    first, end = range_of_rank(unit, rank, ranks=world)
                    own = slice(max(0, first - start), max(0, end - start))
                    assert torch.equal(ours.sums[name][own].view(torch.int32), right.sums[name][own].view(torch.int32))
                    assert torch.equal(ours.norms[name], right.norms[name]), name
                    assert torch.equal(right.norms[name], alone(right.sums[name])), name
            assert {*SHAPES} - {"h.0.none"} >= right.norms.keys() == right.sums.keys()


PAGES = [  # pages of each rank
    [Page(0, 0, 8, RAM), Page(0, 8, 8, RAM), Page(2, 0, 8, RAM)],
    [Page(0, 16, 8, RAM), Page(1, 0, 8, RAM)],
]


@pytest.fixture
def ranks() -> Any:
    barrier = threading.Barrier(2, timeout=300)
    made = [UpdateProgress(pages, units=range(3), agree=lambda unit: barrier.wait()) for pages in PAGES]
    for one in made:
        one.begin()
    yield made
    barrier.abort()
    for one in made:
        one.close()


def home(ranks: list[UpdateProgress]) -> list[list[bool]]:
    return [[one.is_ready(unit) for unit in range(3)] for one in ranks]


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
    for unit in range(3):
        with pytest.raises(TrainerError, match="the drive is gone"):
            first.wait(unit)
