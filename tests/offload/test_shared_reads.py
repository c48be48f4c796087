"""Tests of weights that several ranks (threads here) read from a drive: one read serves all ranks
that need them next.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gradients import model
from test_sharded_gradients import Place, ThreadOfNode
from thread_ranks import Threads

from offload_trainer.errors import TrainerError
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.ranks.collective_fetch import SharedReads
from offload_trainer.offloading.ranks.fetch_matching import FetchMatching
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import DriveFile, Future, ThreadedTransfers

WORLD, MEET = 3, -1


class Counting(ThreadedTransfers):
    """Transfers that count the bytes read, and may fail."""

    moved, fails = 0, False

    def read(self, file: DriveFile, offset: int, buffer: torch.Tensor) -> Future:
        self.moved += buffer.nbytes
        if self.fails:
            failed = Future()
            failed.finish_part(TrainerError("the drive is gone"))
            return failed
        return super().read(file, offset, buffer)


def of_ranks(path: Path, programs: Sequence[Sequence[int]], *, fails: bool = False) -> tuple[list[Any], int]:
    """Run the ranks' programs. Return each rank's list of correct fetches, or its error, and the bytes read."""
    units, between = model(tied=False), Threads(WORLD)
    place = Place(WORLD, nodes=1)
    place.barrier = between.barriers[1]
    sizes = [unit.elements for unit in units]
    values = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(3)).bfloat16()
    path.write_bytes(values.view(torch.uint8).numpy().tobytes())
    moved = [0] * WORLD

    def of_rank(rank: int) -> Any:
        node, file = ThreadOfNode(rank, place), DriveFile(path, values.nbytes)
        transfers = Counting(threads=1)
        transfers.fails = fails and rank == 1
        words: dict[str, Any] = {"dtype": torch.bfloat16, "files": [file], "transfers": transfers, "pinned": False}
        store = UnitStore([2 * size for size in sizes], [0] * len(units), node=node, **words)
        rounds = FetchMatching(lambda mine: between.exchange(rank, mine))
        reads = SharedReads(store, node=node, rounds=rounds, barrier=between.barrier)
        found = []
        try:
            for what in programs[rank]:
                if what == MEET:
                    rounds.barrier()
                    continue
                buffer = host_buffer(2 * sizes[what]).view(torch.bfloat16)
                reads.request(what)(buffer).wait()
                found.append(torch.equal(buffer, values.split(sizes)[what]))
            return found
        except Exception as error:
            between.abort()
            return error
        finally:
            reads.turns.cancel()
            reads.close()
            rounds.close()
            transfers.close()
            file.close()
            moved[rank] = transfers.moved

    with ThreadPoolExecutor(WORLD) as threads:
        return list(threads.map(of_rank, range(WORLD))), sum(moved)


def bytes_of(units: Sequence[int]) -> int:
    return sum(2 * model(tied=False)[unit].elements for unit in units)


def test_units_that_all_ranks_need_are_read_once(tmp_path: Path) -> None:
    program = [0, 1, 2, MEET, 3, 2, 1, 0, MEET, 0, 1]
    found, moved = of_ranks(tmp_path / "weights", [program] * WORLD)
    assert found == [[True] * 9] * WORLD
    assert moved == bytes_of([unit for unit in program if unit != MEET])


def test_ranks_that_need_different_units_do_not_deadlock(tmp_path: Path) -> None:
    """One rank reaches a barrier late, after fetches that the others do later; one skips a unit."""
    late = [3, 2, 1, MEET, 0, MEET, 0]
    others = [3, MEET, 2, 1, 0, MEET, 0]
    found, moved = of_ranks(tmp_path / "weights", [others, late, [3, MEET, 2, 0, MEET, 0]])
    assert found == [[True] * 5, [True] * 5, [True] * 4]
    assert bytes_of([3, 2, 1, 0, 0]) < moved <= WORLD * bytes_of([3, 2, 1, 0, 0])


def test_a_read_that_fails_ends_every_rank(tmp_path: Path) -> None:
    found, _ = of_ranks(tmp_path / "weights", [[0, 1, MEET, 2]] * WORLD, fails=True)
    assert isinstance(found[1], TrainerError)
    assert all(isinstance(error, Exception) for error in found)


def test_closing_does_not_wait_for_other_ranks(tmp_path: Path) -> None:
    """`cancel` ends a read that only one rank has requested."""
    ends, closed = threading.Event(), Future()

    def never(mine: int) -> list[int]:
        ends.wait(300)
        raise TrainerError("the others are gone")

    units, node, transfers = model(tied=False), Node(), ThreadedTransfers(threads=1)
    file = DriveFile(tmp_path / "weights", 2 * sum(unit.elements for unit in units))
    words: dict[str, Any] = {"dtype": torch.bfloat16, "files": [file], "transfers": transfers, "pinned": False}
    store, rounds = (
        UnitStore([2 * unit.elements for unit in units], [0] * len(units), node=node, **words),
        FetchMatching(never),
    )
    reads = SharedReads(store, node=node, rounds=rounds, barrier=lambda: None)
    filled = reads.request(0)(host_buffer(2 * units[0].elements).view(torch.bfloat16))
    reads.request(1)  # its buffer never comes, as after a failed update
    filled.then(closed.finish_part)
    assert not closed.done
    reads.turns.cancel()
    assert closed.done
    with pytest.raises(RuntimeError, match="closed before"):
        filled.wait()
    ends.set()
    reads.close()
    rounds.close()
    transfers.close()
    file.close()
