"""Tests of weights that several ranks fetch together: every rank gets the right bits, whatever it needs next."""

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_ranks import count_calls, counts, in_ranks, start_ranks

from offload_trainer import ranks
from offload_trainer.errors import TrainerError
from offload_trainer.offloading import device
from offload_trainer.offloading.device import QueuedFill
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.ranks.collective_fetch import Turns, WeightFetches
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.plan.tiered.layout import ALIGN, RAM
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import DriveFile, Future, Transfers

WORLD, MEET = 3, -1
SIZES = [ALIGN, 2 * ALIGN, 3 * ALIGN, 7 * ALIGN, 11 * ALIGN]  # fewer pieces than ranks, and numbers that do not divide
UNITS = [torch.randn(size, generator=torch.Generator().manual_seed(size)).bfloat16() for size in SIZES]
KINDS = {"reads": 0, "gathers": RAM}  # and where the weights are
BOTH = pytest.mark.parametrize("kind", KINDS)


def store_of(kind: str, path: Path, *, node: Node) -> UnitStore:
    """Return the units in the file `path`, or in memory."""
    path.write_bytes(torch.cat(UNITS).view(torch.uint8).numpy().tobytes())
    files, homes = [DriveFile(path, 2 * sum(SIZES))], [KINDS[kind]] * len(SIZES)
    sizes, transfers = [2 * size for size in SIZES], Transfers()
    store = UnitStore(sizes, homes, dtype=torch.bfloat16, files=files, transfers=transfers, pinned=False, node=node)
    for unit, values in enumerate(UNITS if kind == "gathers" else ()):
        store.put(unit, 0, values)
    return store


def fetch(kind: str, folder: Path, programs: Sequence[Sequence[int]], fails: bool = False) -> tuple[list[bool], int]:
    """Fetch the units of this rank's program; return which were right, and the elements that it read or copied."""
    node = Node(together=True, by_parts=kind == "gathers")
    if fails and node.rank == 1:
        break_transfers()
    count_calls(Transfers, "read", lambda _, file, offset, buffer: {"reads": buffer.numel()})
    count_calls(device, "copy_alone", lambda values, into: {"gathers": values.numel()})
    fetches = WeightFetches(store_of(kind, folder / f"{node.rank}", node=node), node=node, gpus=False)
    ranks.wait_for_all()  # all have filled the memory
    counts.clear()
    try:
        found = []
        for what in programs[node.rank]:
            if what == MEET:
                node.barrier()
                continue
            into = host_buffer(2 * SIZES[what]).view(torch.bfloat16)
            source = fetches.source(what)
            assert not isinstance(source, torch.Tensor)
            source(into).wait()
            found.append(torch.equal(into, UNITS[what]))
        ranks.wait_for_all()
        return found, counts[kind]
    finally:
        fetches.close()


def break_transfers() -> None:
    def read(*_: Any) -> Future:
        future = Future()
        future.finish_part(TrainerError("the drive is gone"))
        return future

    def gather(*_: Any, **__: Any) -> None:
        raise TrainerError("the link is gone")

    Transfers.read, ranks.all_gather_parts = read, gather  # type: ignore[method-assign]


@BOTH
def test_units_that_all_ranks_need_are_fetched_once(kind: str, tmp_path: Path) -> None:
    """Each is read once by all ranks, or each rank copies its part and the remainder, all of a small unit."""
    programs = [[0, 1, 2, MEET, 3, 4]] * WORLD
    found, moved = zip(*in_ranks(fetch, kind, tmp_path, programs, count=WORLD, folder=tmp_path), strict=True)
    assert [*found] == [[True] * 5] * WORLD
    if kind == "reads":
        assert sum(moved) == sum(SIZES)
    else:
        assert [*moved] == [(1 + 2 + 1 + (2 + 1) + (3 + 2)) * ALIGN] * WORLD


@BOTH
def test_ranks_that_need_different_units_do_not_deadlock(kind: str, tmp_path: Path) -> None:
    """One rank reaches a barrier late, after fetches that the others do later; one skips a unit."""
    late, others = [4, 3, 2, MEET, 4, MEET, 3], [4, MEET, 3, 2, 4, MEET, 3]
    programs = [others, late, [4, MEET, 3, 4, MEET, 3]]
    found, moved = zip(*in_ranks(fetch, kind, tmp_path, programs, count=WORLD, folder=tmp_path), strict=True)
    assert [*found] == [[True] * 5, [True] * 5, [True] * 4]
    once = sum(SIZES[unit] for unit in others if unit != MEET)
    assert once < sum(moved) <= WORLD * once


@BOTH
def test_a_failure_ends_every_rank(kind: str, tmp_path: Path) -> None:
    forks = start_ranks(fetch, kind, tmp_path, [[2, MEET, 3]] * WORLD, True, count=WORLD, folder=tmp_path)
    assert [fork.wait(300) for fork in forks] == [1] * WORLD
    told = [(tmp_path / f"told-{rank}").read_text() for rank in range(WORLD)]
    assert "TrainerError: the drive is gone" in told[1] or "TrainerError: the link is gone" in told[1], told
    assert all("another rank has ended" in told[rank] for rank in (0, 2)), told


@BOTH
def test_closing_does_not_wait_for_other_ranks(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cancel` ends a fetch that only one rank has requested, and one whose destination never comes."""
    ends = threading.Event()

    def never(mine: int) -> list[int]:
        ends.wait(300)
        raise TrainerError("the others are gone")

    node: Any = Node()
    monkeypatch.setattr(ranks, "group_of", lambda *_, **__: object())  # nobody gets as far as using it
    store = store_of(kind, tmp_path / "weights", node=node)
    node.world, node.by_parts, node.exchange = 2, kind == "gathers", lambda: never
    fetches = WeightFetches(store, node=node, gpus=False)
    asked: list[Any] = [fetches.source(unit) for unit in (0, 1)]
    buffers = [host_buffer(2 * SIZES[unit]).view(torch.bfloat16) for unit in (0, 1)]
    filled = asked[0](buffers[0])
    assert not filled.done
    fetches.cancel()
    assert filled.done
    for future in (filled, asked[1](buffers[1])):
        with pytest.raises(RuntimeError, match="closed before"):
            future.wait()
    ends.set()
    fetches.close()


def test_a_gather_waits_for_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The destination may become known after the unit was requested, when the other ranks have already agreed."""
    joined: list[int] = []
    monkeypatch.setattr(ranks, "all_gather_parts", lambda values, number, group: joined.append(number))
    turns, second = Turns(lambda mine: [mine, mine]), SimpleNamespace(_here=2, _number=1, _between=None)
    turn, unit = turns.announce(0), torch.arange(2.0 * ALIGN)
    wanted = QueuedFill(turn.run, partial(WeightFetches._gather, second, turn, unit))  # type: ignore[arg-type]
    turns.barrier()
    assert turn.together
    assert not joined
    into = torch.zeros(2 * ALIGN)
    wanted(into).wait()
    turns.close()
    assert joined == [1]
    assert torch.equal(into[ALIGN:], unit[ALIGN:])
    assert not into[:ALIGN].any()
