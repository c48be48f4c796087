"""Tests of units that several ranks (threads here) update: a unit is ready only after all of them have updated it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from offload_trainer.errors import TrainerError
from offload_trainer.offloading.update.progress import UpdateProgress
from offload_trainer.plan.tiered.layout import Page
from offload_trainer.plan.tiers import RAM

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
