"""Tests of weights in RAM that ranks copy by parts and all-gather: every rank gets the right bits, whatever it needs
next.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_bench import DROPOUT, model_directory
from forked_ranks import Case, run_ranks
from test_ranks import BEHIND
from test_sharded_gradients import Place, ThreadOfNode
from thread_ranks import Threads

import offload_trainer.plan.tiered.layout as layout
from offload_trainer.errors import TrainerError
from offload_trainer.offloading.device import copy_alone
from offload_trainer.offloading.ranks.collective_fetch import PendingGather, Turn, WeightAllGather
from offload_trainer.offloading.ranks.fetch_matching import FetchMatching
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.plan.tiered.layout import ALIGN
from offload_trainer.plan.tiered.weight_streaming import even_part
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import Workers

WORLD, MEET = 3, -1
SIZES = [ALIGN, 2 * ALIGN, 3 * ALIGN, 7 * ALIGN, 11 * ALIGN]  # fewer pieces than ranks, and numbers that do not divide


def of_ranks(programs: Sequence[Sequence[int]], *, fails: bool = False) -> tuple[list[Any], list[int]]:
    """Run the ranks' programs. Return each rank's list of correct fetches, or its error, and the elements that each
    copied.
    """
    between, place = Threads(WORLD), Place(WORLD, nodes=1)
    units = [torch.randn(size, generator=torch.Generator().manual_seed(size)).bfloat16() for size in SIZES]
    copied = [0] * WORLD

    def of_rank(rank: int) -> Any:
        def join(values: torch.Tensor, number: int) -> None:
            if fails and rank == 1:
                between.barriers[1].abort()  # a closed connection breaks the others' waits
                raise TrainerError("the link is gone")
            between.join(values, number)

        def copy(values: torch.Tensor, target: torch.Tensor) -> None:
            copied[rank] += values.numel()
            copy_alone(values, target)

        rounds = FetchMatching(lambda mine: between.exchange(rank, mine))
        gathers = WeightAllGather(ThreadOfNode(rank, place), rounds=rounds, join=join)
        try:
            found = []
            for what in programs[rank]:
                if what == MEET:
                    rounds.barrier()
                    continue
                into = host_buffer(2 * SIZES[what]).view(torch.bfloat16)
                wanted = gathers.request(what, units[what])
                fill = wanted.fill
                wanted.fill = lambda into, _, fill=fill: fill(into, copy)  # type: ignore[method-assign,misc]
                wanted(into).wait()
                found.append(torch.equal(into, units[what]))
            return found
        except Exception as error:
            return error
        finally:
            gathers.turns.cancel()
            gathers.close()
            rounds.close()

    with ThreadPoolExecutor(WORLD) as threads:
        return list(threads.map(of_rank, range(WORLD))), copied


def test_units_that_all_ranks_need_are_gathered() -> None:
    """Each rank copies its part and the remainder; each copies all of a unit that has fewer pieces than ranks."""
    found, copied = of_ranks([[0, 1, 2, MEET, 3, 4]] * WORLD)
    assert found == [[True] * 5] * WORLD
    assert copied == [(1 + 2 + 1 + (2 + 1) + (3 + 2)) * ALIGN] * WORLD


def test_ranks_that_need_different_units_do_not_deadlock() -> None:
    """One rank reaches a barrier late, after fetches that the others do later; one skips a unit."""
    late, others = [4, 3, 2, MEET, 4, MEET, 3], [4, MEET, 3, 2, 4, MEET, 3]
    found, copied = of_ranks([others, late, [4, MEET, 3, 4, MEET, 3]])
    assert found == [[True] * 5, [True] * 5, [True] * 4]
    assert sum(copied) > WORLD * (5 + 3 + 1 + 5 + 3) * ALIGN - ALIGN


def test_a_failed_link_ends_every_rank() -> None:
    found, _ = of_ranks([[2, MEET, 3]] * WORLD, fails=True)
    assert isinstance(found[1], TrainerError)
    assert all(isinstance(error, Exception) for error in found)


def test_closing_does_not_wait_for_other_ranks() -> None:
    ends = threading.Event()

    def never(mine: int) -> list[int]:
        ends.wait(300)
        raise TrainerError("the others are gone")

    node, rounds = Node(), FetchMatching(never)
    gathers = WeightAllGather(node, rounds=rounds, join=lambda values, number: None)
    filled = gathers.request(0, torch.zeros(ALIGN))(torch.zeros(ALIGN))
    never_given = gathers.request(1, torch.zeros(ALIGN))  # its destination never comes, as after a failed update
    assert not filled.done
    gathers.turns.cancel()
    with pytest.raises(RuntimeError, match="closed before"):
        filled.wait()
    with pytest.raises(RuntimeError, match="closed before"):
        never_given(torch.zeros(ALIGN)).wait()
    ends.set()
    gathers.close()
    rounds.close()


def test_parts_and_remainder_cover_a_unit() -> None:
    for elements in (0, *SIZES, 1000 * ALIGN):
        for ranks in (1, 2, 3, 8):
            part = even_part(elements, ranks=ranks)
            assert part % ALIGN == 0
            assert 0 <= elements - ranks * part < ranks * ALIGN


@pytest.mark.slow
def test_ranks_that_gather_have_the_bits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, norms, masters, moments and evaluation losses match one rank's. Layer drop makes ranks need different
    units.
    """
    monkeypatch.setattr(layout, "SMALL", 0)
    tied = model_directory(tmp_path / "tied", "gpt2", **DROPOUT)
    dropped = model_directory(tmp_path / "dropped", "opt")  # each rank drops different layers
    experts = model_directory(tmp_path / "experts", "mixtral")
    cases = [
        Case(str(model), ("--params", "cpu", "--dtype", dtype), "", steps=2, micro=6, evaluate=True)
        for model, dtype in ((tied, "bf16"), (dropped, "fp32"), (experts, "bf16"))
    ]

    def by(ranks: int) -> list[Case]:
        words = (
            "--accumulate",
            str(6 // ranks),
            *(("tiered.weight_transfer=all_gather", *BEHIND) if ranks > 1 else ()),
        )
        return [
            replace(case, words=(*case.words, *words), out=str(tmp_path / f"{ranks}-{number}"))
            for number, case in enumerate(cases)
        ]

    made = {ranks: by(ranks) for ranks in (1, 2, 3)}
    for ranks, of_ranks in made.items():
        run_ranks(of_ranks, count=ranks, folder=tmp_path / f"ranks-{ranks}")
    for ranks in (2, 3):
        for one, expected in zip(made[ranks], made[1], strict=True):
            assert one.left == expected.left, one


def test_a_gather_waits_for_its_buffer() -> None:
    """The destination may become known after the unit was requested, when the other ranks have already agreed."""
    joined: list[int] = []
    turn, thread = Turn(), Workers(1, "gathers")
    wanted = PendingGather(
        turn, torch.arange(2.0 * ALIGN), rank=1, ranks=2, join=lambda values, number: joined.append(number)
    )
    turn.decide(None, thread=thread)
    assert not joined
    into = torch.zeros(2 * ALIGN)
    wanted(into).wait()
    thread.close()
    assert joined == [1]
    assert torch.equal(into[ALIGN:], torch.arange(2.0 * ALIGN)[ALIGN:])
    assert not into[:ALIGN].any()
