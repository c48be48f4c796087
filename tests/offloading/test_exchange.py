"""Gradients of several ranks, which are threads here: one rank's sums, bit for bit, whoever had a gradient and when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
import torch
from test_gradients import model, names, places, sums

from offload_trainer.offloading.device import CpuDevice
from offload_trainer.offloading.exchange import AnyGradients, SharedGradients
from offload_trainer.offloading.node import Node
from offload_trainer.offloading.store import UnitStore
from offload_trainer.plan.layout import RAM
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import DriveFile, ThreadedTransfers

MICRO = 2  # micro-batches of each rank


class ThreadOfNode(Node):
    """One of several ranks in one process."""

    def __init__(self, rank: int, world: int, made: dict[int, torch.Tensor], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.world = rank, world
        self._made, self._barrier, self._asked = made, barrier, count()

    def memory(self, size: int, *, pinned: bool = False) -> torch.Tensor:
        number = next(self._asked)
        if self.rank == 0:
            self._made[number] = host_buffer(size)
        self.meet()
        return self._made[number]

    def meet(self) -> None:
        self._barrier.wait(200)


def hand_over(to: AnyGradients, *, seed: int, last: bool) -> None:
    """A backward in an order of its own: a third of the weights get nothing, a tied one perhaps from one use."""
    generator = torch.Generator().manual_seed(seed)
    uses = [place.weight for _, place in places(model(tied=True)) for _ in range(place.weight.uses)]
    for number in torch.randperm(len(uses), generator=generator).tolist():
        gradient = torch.randn(uses[number].shape, generator=generator).bfloat16()
        gradient[torch.rand(uses[number].shape, generator=generator) < 0.5] = -0.0  # which 0.0 would change
        if torch.rand(1, generator=generator) < 0.66:
            to.add(uses[number].name, gradient, last=last)
    to.end_of_backward(last=last)


def bits(gradients: AnyGradients) -> tuple[float, frozenset[str], dict[str, torch.Tensor]]:
    """The norm, who has a gradient, and their sums."""
    gradients.finish()
    found = {}
    for unit, place in places(model(tied=True)):
        if place.weight.name in gradients.arrived:
            held = gradients.store.get(unit.index, place.start, place.weight.numel)
            found[place.weight.name] = held.view(torch.int32)
    return gradients.norm(), gradients.arrived, found


@pytest.mark.parametrize("home", [RAM, 0])
@pytest.mark.parametrize("world", [2, 3])
def test_sums_are_those_of_one_rank(world: int, home: int, tmp_path: Path) -> None:
    """In RAM and on a drive, whose buffers all ranks use."""
    units, micro = model(tied=True), MICRO * world
    made: dict[int, torch.Tensor] = {}
    barrier = threading.Barrier(world)

    def steps(gradients: AnyGradients, *, rank: int, world: int, meet: Callable[[], None]) -> list[object]:
        found = []
        for step in range(3):
            for number in range(rank, micro, world):
                hand_over(gradients, seed=micro * step + number, last=number + world >= micro)
            found.append(bits(gradients))
            meet()  # as after an update
            gradients.clear()
        return found

    def of_rank(rank: int) -> list[object]:
        node, transfers = ThreadOfNode(rank, world, made, barrier), ThreadedTransfers(threads=1)
        files = [DriveFile(tmp_path / "sums", 4 * sum(unit.trained for unit in units))]
        trained = [unit.trained for unit in units]
        made_of = {"dtype": torch.float32, "files": files, "transfers": transfers, "pinned": False, "node": node}
        store = UnitStore(trained, [home] * len(units), **made_of)  # type: ignore[arg-type]
        order = names(units)
        gradients = SharedGradients(units, store, given=torch.bfloat16, device=CpuDevice(), order=order, node=node)
        try:
            return steps(gradients, rank=rank, world=world, meet=node.meet)
        except BaseException:
            barrier.abort()
            raise
        finally:
            transfers.close()
            files[0].close()

    with ThreadPoolExecutor(world) as threads:
        several = list(threads.map(of_rank, range(world)))
    with sums(units, -1, device=CpuDevice()) as alone:
        expected = steps(alone, rank=0, world=1, meet=lambda: None)
    for found in several:
        for ours, right in zip(found, expected, strict=True):
            assert ours[:2] == right[:2]  # type: ignore[index]
            for name, values in right[2].items():  # type: ignore[index]
                assert torch.equal(ours[2][name], values), name  # type: ignore[index]
