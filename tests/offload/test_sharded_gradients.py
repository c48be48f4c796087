"""Tests of gradients of several ranks: they add up to one rank's sums bit for bit, whichever rank had one and in
whatever order they arrived, and a unit is ready only after all of them have updated it.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_bench import digest
from forked_ranks import in_ranks
from test_gradients import places, sums

from offload_trainer.errors import TrainerError
from offload_trainer.offloading import allocation
from offload_trainer.offloading.device import CpuDevice
from offload_trainer.offloading.gradients.collector import Gradients, StagedSums
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.offloading.ranks.sharded_gradients import ShardedGradients
from offload_trainer.offloading.update.progress import UpdateProgress
from offload_trainer.optim.kernel_api import TorchKernel
from offload_trainer.optim.norms import norm_of
from offload_trainer.plan import communication
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.plan.tiered.layout import RAM, Page, range_of_rank, units_of
from offload_trainer.storage.transfer import DriveFile, Future, Transfers, done

MICRO, STEPS = 2, 3  # micro-batches of each rank in a step
SHAPES = {  # pieces of norms are inside one rank's elements, or span two or all; some ranks have no elements of a unit
    **{"wte": (50, 100), "h.0.w": (60, 100), "h.0.none": (9000,), "h.0.b": (60,)},
    **{"h.1.large": (50_000,), "h.1.small": (300,), "h.1.last": (70, 301), "head.tiny": (7,)},
}
WEIGHTS = [
    Weight(name, shape, unit=name.rpartition(".")[0] or name, block=name[0:2] == "h.", uses=1 + (name == "wte"))
    for name, shape in SHAPES.items()
]
MODEL = units_of(ModelShape(tuple(WEIGHTS), layers=2, hidden=100, vocabulary=50, context=16))
NAMES = [weight.name for weight in WEIGHTS]


class OfGpu(CpuDevice):
    """A device whose norms are those of a GPU."""

    place = torch.device("cuda")


# Elements of a norm's piece, where the sums are, and the device: each pair of them occurs.
CASES = [
    (piece, home, device)
    for number, piece in enumerate((1024, 5000, 16384, 65536, 1 << 17))
    for home, device in zip((RAM, 0), (CpuDevice, OfGpu) if number % 2 else (OfGpu, CpuDevice), strict=True)
]
Sums = dict[str, torch.Tensor]


def measure_in(piece: int, replace: Callable[..., None] = setattr) -> None:
    replace(communication, "_PIECE", piece)
    replace(communication, "_CHUNK", 1 << piece.bit_length() - 1)


def hand_over(to: Gradients | ShardedGradients, *, seed: int, last: bool) -> None:
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


def steps(
    gradients: Gradients | ShardedGradients, numbers: range, *, barrier: Callable[[], None]
) -> list[tuple[dict[str, float], Sums]]:
    """Add up the gradients of the micro-batches with these numbers; return each step's norms and sums."""
    found = []
    for step in range(STEPS):
        for number in numbers:
            hand_over(gradients, seed=100 * step + number, last=number == numbers[-1])
        gradients.finish()
        whole = {
            place.weight.name: gradients.store.get(unit.index, place.start, place.weight.numel)
            for unit, place in places(MODEL)
            if place.weight.name in gradients.arrived
        }
        found.append(({name: float(norm) for name, norm in gradients.norms().items()}, whole))
        barrier()  # a real update ends with a barrier, too
        gradients.clear()
    return found


def of_range(whole: Sums, rank: int, world: int) -> dict[str, str]:
    """Return digests of a rank's part of the sums."""
    found = {}
    for unit, place in places(MODEL):
        first, end = range_of_rank(unit, rank, ranks=world)
        own = slice(max(0, first - place.start), max(0, end - place.start))
        if place.weight.name in whole:
            found[place.weight.name] = digest([whole[place.weight.name][own]])
    return found


def add_up(folder: Path) -> list[list[tuple[dict[str, float], dict[str, str]]]]:
    """As a rank, return the norms and the digests of its sums for each step of each case."""
    node, transfers, found = Node(together=True), Transfers(), []
    sizes = [4 * unit.trained for unit in MODEL]
    for piece, home, device in CASES:
        measure_in(piece)
        files, homes = [DriveFile(folder / f"sums-{node.number}", sum(sizes))], [home] * len(MODEL)
        store = UnitStore(sizes, homes, dtype=torch.float32, files=files, transfers=transfers, pinned=False, node=node)
        gradients = ShardedGradients(
            [MODEL[::-1]],
            StagedSums(MODEL, store, node=node),
            given=torch.bfloat16,
            device=device(),
            order=NAMES,
            node=node,
            kernel=TorchKernel(),
        )
        done = steps(gradients, range(node.rank, MICRO * node.world, node.world), barrier=node.barrier)
        found.append([(norms, of_range(whole, node.rank, node.world)) for norms, whole in done])
        files[0].close()
    return found


@pytest.mark.parametrize(("world", "nodes"), [(2, 1), (3, 1), (2, 2), (4, 2), (5, 5)])
def test_sums_and_norms_are_those_of_one_rank(
    world: int, nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are in RAM or on a node's drive. Norms are a CPU's or a GPU's, in pieces that span ranks and nodes."""
    of_ranks = in_ranks(add_up, tmp_path, count=world, nodes=nodes, folder=tmp_path)
    for (piece, _, device), *found in zip(CASES, *of_ranks, strict=True):
        measure_in(piece, monkeypatch.setattr)
        with sums(MODEL, RAM, device=device(), order=NAMES) as alone:
            expected = steps(alone, range(MICRO * world), barrier=lambda: None)
        for (norms, whole), *of_step in zip(expected, *found, strict=True):
            assert of_step == [(norms, of_range(whole, rank, world)) for rank in range(world)]
            assert norms.keys() == whole.keys() < set(NAMES)
            alone = {name: float(norm_of(values, ordered=device is OfGpu)) for name, values in whole.items()}
            assert norms == alone


PAGES = [  # pages of each rank
    [Page(0, 0, 8, RAM), Page(0, 8, 8, RAM), Page(2, 0, 8, RAM)],
    [Page(0, 16, 8, RAM), Page(1, 0, 8, RAM)],
]


def test_a_unit_is_ready_once_all_ranks_have_updated_it() -> None:
    """In the next step an error of one rank is raised there by every wait."""
    barrier = threading.Barrier(2, timeout=300)
    ranks = [UpdateProgress(pages, units=range(3), agree=lambda unit: barrier.wait()) for pages in PAGES]
    first, second = ranks

    def begin() -> None:
        for one in ranks:
            one.begin()

    def write(one: UpdateProgress, unit: int, *, pages: int = 1, state: Future | None = None) -> None:
        one.when_written(unit, weights=done(), whole=state or done(), pages=pages)

    def ready() -> list[list[bool]]:
        return [[one.is_ready(unit) for unit in range(3)] for one in ranks]

    begin()
    state = Future()  # is still being written
    write(first, 0, pages=2)
    write(first, 2, state=state)
    assert ready() == [[False] * 3] * 2
    write(second, 0)
    for one in ranks:
        one.wait(0)  # The first rank has no pages of unit 1, but must wait for it too.
    assert not first.is_ready(1)
    assert not first.is_ready(2)
    write(second, 1)
    for one in ranks:
        one.wait(1)
    assert not first.is_ready(2)
    state.finish_part()
    for one in ranks:
        one.wait_for_weights()
    assert ready() == [[True] * 3] * 2
    begin()
    failed = Future()
    failed.finish_part(TrainerError("the drive is gone"))
    write(first, 2, state=failed)
    for unit in range(3):
        with pytest.raises(TrainerError, match="the drive is gone"):
            first.wait(unit)
    barrier.abort()
    for one in ranks:
        one.close()


def test_ranks_agree_on_a_unit_before_its_weights_are_sent() -> None:
    seen: list[Any] = []
    ways = {"side_connections": lambda: None, "exchange": lambda: seen.append}
    node = SimpleNamespace(world=2, rank=0, nodes=[range(2)], **ways)
    homes = SimpleNamespace(pages=[Page(0, 0, 8, RAM)], of_rank=lambda *_: True)
    parts: Any = SimpleNamespace(homes=homes, node=node, device=CpuDevice(), units=[None])
    weights: Any = SimpleNamespace(broadcast_unit=lambda *_, **__: seen.append("weights"))
    progress = allocation._update_progress(parts, weights)
    progress.begin()
    progress.when_written(0, weights=done(), whole=done())
    progress.wait(0)
    progress.close()
    assert seen == [0, "weights"]
