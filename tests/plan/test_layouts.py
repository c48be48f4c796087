"""Tests of layouts that candidates of a plan share: each is computed once, and equals what a candidate would compute
alone.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from sample_plans import SHAPES, timed, wish

from offload_trainer.plan.planner import resolve_and_plan
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.plan.tiered import spec
from offload_trainer.plan.tiered.layout import (
    ALIGN,
    ELSEWHERE,
    Page,
    Unit,
    homes_of,
    on_node,
    pages_of,
    range_of_rank,
    units_of,
)
from offload_trainer.plan.tiered.spec import route_of, routes_of
from offload_trainer.plan.tiered.weight_streaming import fetches
from offload_trainer.plan.tiers import DEVICE, RAM


def uneven() -> ModelShape:
    """Return a model with sizes that do not divide, and blocks of which one has a frozen weight."""
    weights = [Weight("wte", (3001, 300), unit="wte", uses=2)]
    for layer in range(4):
        unit = f"h.{layer}"
        weights += [
            Weight(f"{unit}.ln", (300,), unit=unit, block=True),
            Weight(f"{unit}.q", (300, 301), unit=unit, block=True, trainable=layer != 2),
            Weight(f"{unit}.f", (1201, 300), unit=unit, block=True),
        ]
    return ModelShape(tuple(weights), layers=4, hidden=300, vocabulary=3001, context=64)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(("ram", "speeds"), [(1.0, []), (0.4, [2.0, 1.0]), (0.0, [1.0])])
@pytest.mark.parametrize("ahead", [False, True])
def test_each_rank_divides_its_ranges_as_if_it_were_alone(
    ranks: int, ram: float, speeds: list[float], ahead: bool
) -> None:
    units = units_of(uneven())
    how = {"page": 9 * ALIGN, "shares": [(RAM, ram)], "speeds": speeds, "ahead": ahead}
    found: list[Page] = []
    for rank in range(ranks):
        stretches = [range_of_rank(unit, rank, ranks=ranks) for unit in units]
        alone = [replace(unit, trained=end - first) for unit, (first, end) in zip(units, stretches, strict=True)]
        found += [replace(page, start=page.start + stretches[page.unit][0]) for page in pages_of(alone, **how)]
    assert pages_of(units, ranks=ranks, **how) == tuple(sorted(found, key=lambda page: (page.unit, page.start)))


@pytest.mark.parametrize("ranks", [1, 4])
def test_pages_of_a_kind_are_all_pages(ranks: int) -> None:
    """Groups count all pages by rank, placements and size, and each page has the route of the first in its group."""
    units = units_of(uneven())
    shares = {"shares": [(DEVICE, 0.0 if ranks > 1 else 0.2), (RAM, 0.4)], "speeds": [2.0, 1.0]}
    pages = pages_of(units, page=9 * ALIGN, ranks=ranks, **shares)
    homes = homes_of(units, pages, params="nvme", gradients="nvme", speeds=[2.0, 1.0], ranks=ranks)
    homes = on_node(homes, range(max(1, ranks // 2)))
    owners = homes.owners or (0,) * len(homes.pages)
    kinds = [
        (rank, homes.weights[page.unit], homes.gradients[page.unit], page.home, page.elements)
        for page, rank in zip(homes.pages, owners, strict=True)
    ]
    alike = {(one.rank, one.weights, one.gradients, one.page.home, one.page.elements): one for one in homes.page_groups}
    assert {kind: one.count for kind, one in alike.items()} == Counter(kinds)
    assert len(homes.page_groups) < len(homes.pages)
    assert [one.number for one in homes.page_groups] == sorted(one.number for one in homes.page_groups)
    assert any(one.page.home == ELSEWHERE for one in homes.page_groups) == (ranks > 1)
    ways = {number: route_of(number, page, homes, is_gpu=True) for number, page in enumerate(homes.pages)}
    for route in routes_of(homes, is_gpu=True):
        first = alike[kinds[route.number]]
        assert homes.pages[first.number] == first.page
        theirs = ways[first.number]
        assert (theirs.through_host, theirs.through_device) == (route.through_host, route.through_device)


def test_a_plan_divides_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """All candidates, update schedules and micro-batches share the layouts."""
    divided: list[str] = []
    laid_out: list[ModelShape] = []

    def divide(units: object, **how: object) -> tuple[Page, ...]:
        divided.append(str(how))
        return pages_of(units, **how)  # type: ignore[arg-type]

    def lay_out(shape: ModelShape, **how: bool) -> object:
        laid_out.append(shape)
        return units_of(shape, **how)

    monkeypatch.setattr(spec, "pages_of", divide)
    monkeypatch.setattr(spec, "units_of", lay_out)
    spec._layouts.cache_clear()
    config = wish("--ram-fraction", "0.5", "--micro-batch", "2", "--seq-len", "1024")
    _, plan = resolve_and_plan(config, SHAPES["gpt2-medium"], timed())
    assert plan.fits
    assert plan.rejected
    assert len(plan.ways) == 3
    assert len(laid_out) == 1
    assert len(divided) == len(set(divided)) > 1


def test_a_repeated_order_is_simulated_until_it_repeats(seed: int) -> None:
    """The fetches equal those of the written-out repetition, for random units, orders and buffers."""
    draw = random.Random(seed)
    for _ in range(300):
        count = draw.randint(1, 8)
        units = [
            Unit(index, str(index), block, (), trained=0, elements=ALIGN * (3 if block else draw.randint(1, 4)))
            for index, block in enumerate(draw.choices((True, False), k=count))
        ]
        order = draw.choices(range(count), k=draw.randint(1, 14))
        away, times, blocks = draw.sample(units, draw.randint(0, count)), draw.randint(1, 9), draw.randint(1, 4)
        assert fetches(away, order, blocks=blocks, times=times) == fetches(away, order * times, blocks=blocks)
