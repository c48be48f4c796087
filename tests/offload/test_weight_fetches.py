"""Tests of weights that several ranks fetch together, read from a drive once or copied from RAM by parts and gathered:
every rank (a thread here) gets the right bits, whatever it needs next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_sharded_gradients import Place, ThreadOfNode

from offload_trainer import ranks
from offload_trainer.errors import TrainerError
from offload_trainer.offloading.device import copy_alone
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.ranks.collective_fetch import PendingGather, SharedReads, Turn, Turns
from offload_trainer.offloading.ranks.node_comm import FetchMatching, Node
from offload_trainer.plan.tiered.layout import ALIGN
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import DriveFile, Future, Transfers, Workers

pytestmark = pytest.mark.usefixtures("loopback")
WORLD, MEET = 3, -1
SIZES = [ALIGN, 2 * ALIGN, 3 * ALIGN, 7 * ALIGN, 11 * ALIGN]  # fewer pieces than ranks, and numbers that do not divide
UNITS = [torch.randn(size, generator=torch.Generator().manual_seed(size)).bfloat16() for size in SIZES]

Fetch = Callable[[int, torch.Tensor], Future]
Made = tuple[SharedReads, Fetch]
BOTH = pytest.mark.parametrize("kind", ["reads", "gathers"])


class Counting(Transfers):
    """Transfers that count the elements read, and may fail."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.moved, self.fails = 0, fails

    def read(self, file: DriveFile, offset: int, buffer: torch.Tensor) -> Future:
        self.moved += buffer.numel()
        if self.fails:
            failed = Future()
            failed.finish_part(TrainerError("the drive is gone"))
            return failed
        return super().read(file, offset, buffer)


def reads(path: Path, node: Node, rounds: FetchMatching, barrier: Any, transfers: Any, stack: ExitStack) -> Made:
    """Return the shared reads of `UNITS` in a file, and a function that fetches one."""
    path.write_bytes(torch.cat(UNITS).view(torch.uint8).numpy().tobytes())
    file = DriveFile(path, 2 * sum(SIZES))
    stack.callback(file.close)
    words: dict[str, Any] = {"dtype": torch.bfloat16, "files": [file], "transfers": transfers, "pinned": False}
    store = UnitStore([2 * size for size in SIZES], [0] * len(SIZES), node=node, **words)
    made = SharedReads(store, node=node, rounds=rounds, barrier=barrier)
    return made, lambda unit, into: made.request(unit)(into)


def turns_of(shared: SharedReads | Turns) -> Turns:
    return shared.turns if isinstance(shared, SharedReads) else shared


def of_ranks(
    kind: str, folder: Path, programs: Sequence[Sequence[int]], *, fails: bool = False
) -> tuple[list[Any], list[int]]:
    """Run the ranks' programs. Return each rank's list of correct fetches, or its error, and the elements that each
    read or copied.
    """
    place = Place(WORLD, nodes=1)
    moved = [0] * WORLD

    def of_rank(rank: int) -> Any:
        node = ThreadOfNode(rank, place)
        meeting, reading, gathering = (place.group(name, rank) for name in ("rounds", "reads", "gathers"))

        def join(values: torch.Tensor, number: int) -> None:
            if fails and rank == 1:
                raise TrainerError("the link is gone")
            ranks.all_gather_parts(values, number, group=gathering)

        def copy(values: torch.Tensor, target: torch.Tensor) -> None:
            moved[rank] += values.numel()
            copy_alone(values, target)

        def gather(what: int, into: torch.Tensor) -> Future:
            wanted = PendingGather(gathers.announce(what), UNITS[what], node=node, join=join)
            fill = wanted.fill
            wanted.fill = lambda into, _: fill(into, copy)  # type: ignore[method-assign]
            return wanted(into)

        rounds = FetchMatching(meeting.all_gather_numbers)
        gathers, transfers = Turns(rounds, "gathers"), Counting(fails=fails and rank == 1)
        shared: SharedReads | Turns = gathers
        fetch: Fetch = gather
        with ExitStack() as stack:
            if kind == "reads":
                path, barrier = folder / f"{rank}", partial(reading.all_gather_numbers, 0)
                shared, fetch = reads(path, node, rounds, barrier, transfers, stack)
            try:
                found = []
                for what in programs[rank]:
                    if what == MEET:
                        rounds.barrier()
                        continue
                    into = host_buffer(2 * SIZES[what]).view(torch.bfloat16)
                    fetch(what, into).wait()
                    found.append(torch.equal(into, UNITS[what]))
                return found
            except Exception as error:
                place.leave(rank)
                return error
            finally:
                turns_of(shared).cancel()
                for one in {shared, gathers}:
                    one.close()
                rounds.close()
                transfers.close()
                moved[rank] += transfers.moved

    with ThreadPoolExecutor(WORLD) as threads:
        return list(threads.map(of_rank, range(WORLD))), moved


@BOTH
def test_units_that_all_ranks_need_are_fetched_once(kind: str, tmp_path: Path) -> None:
    """Each is read once by all ranks, or each rank copies its part and the remainder, all of a small unit."""
    found, moved = of_ranks(kind, tmp_path, [[0, 1, 2, MEET, 3, 4]] * WORLD)
    assert found == [[True] * 5] * WORLD
    if kind == "reads":
        assert sum(moved) == sum(SIZES)
    else:
        assert moved == [(1 + 2 + 1 + (2 + 1) + (3 + 2)) * ALIGN] * WORLD


@BOTH
def test_ranks_that_need_different_units_do_not_deadlock(kind: str, tmp_path: Path) -> None:
    """One rank reaches a barrier late, after fetches that the others do later; one skips a unit."""
    late, others = [4, 3, 2, MEET, 4, MEET, 3], [4, MEET, 3, 2, 4, MEET, 3]
    found, moved = of_ranks(kind, tmp_path, [others, late, [4, MEET, 3, 4, MEET, 3]])
    assert found == [[True] * 5, [True] * 5, [True] * 4]
    once = sum(SIZES[unit] for unit in others if unit != MEET)
    assert once < sum(moved) <= WORLD * once


@BOTH
def test_a_failure_ends_every_rank(kind: str, tmp_path: Path) -> None:
    found, _ = of_ranks(kind, tmp_path, [[2, MEET, 3]] * WORLD, fails=True)
    assert isinstance(found[1], TrainerError)
    assert all(isinstance(error, Exception) for error in found)


@BOTH
def test_closing_does_not_wait_for_other_ranks(kind: str, tmp_path: Path) -> None:
    """`cancel` ends a fetch that only one rank has requested, and one whose destination never comes."""
    ends = threading.Event()

    def never(mine: int) -> list[int]:
        ends.wait(300)
        raise TrainerError("the others are gone")

    node, rounds, transfers = Node(), FetchMatching(never), Transfers()
    with ExitStack() as stack:
        shared: SharedReads | Turns = Turns(rounds, "gathers")
        if kind == "reads":
            shared, _ = reads(tmp_path / "weights", node, rounds, lambda: None, transfers, stack)
        asked = [
            shared.request(unit)
            if isinstance(shared, SharedReads)
            else PendingGather(shared.announce(unit), UNITS[unit], node=node, join=lambda values, number: None)
            for unit in (0, 1)
        ]
        buffers = [host_buffer(2 * SIZES[unit]).view(torch.bfloat16) for unit in (0, 1)]
        filled = asked[0](buffers[0])
        assert not filled.done
        turns_of(shared).cancel()
        assert filled.done
        for future in (filled, asked[1](buffers[1])):
            with pytest.raises(RuntimeError, match="closed before"):
                future.wait()
        ends.set()
        shared.close()
        rounds.close()
        transfers.close()


def test_a_gather_waits_for_its_buffer() -> None:
    """The destination may become known after the unit was requested, when the other ranks have already agreed."""
    joined: list[int] = []
    turn, thread = Turn(), Workers(1, "gathers")
    node: Any = SimpleNamespace(rank=1, local_ranks=range(2))
    wanted = PendingGather(
        turn, torch.arange(2.0 * ALIGN), node=node, join=lambda values, number: joined.append(number)
    )
    turn.decide(None, thread=thread)
    assert not joined
    into = torch.zeros(2 * ALIGN)
    wanted(into).wait()
    thread.close()
    assert joined == [1]
    assert torch.equal(into[ALIGN:], torch.arange(2.0 * ALIGN)[ALIGN:])
    assert not into[:ALIGN].any()
