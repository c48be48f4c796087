"""Determine the order in which a forward and a backward use the weights of the model's units.

    recorded     `shape.order`, recorded by a run on meta tensors (`model/meta/access_trace.py`), if it differs from
                 the registered order
    registered   modules before the blocks, blocks, modules after them, and tied embeddings again as the head. The
                 backward uses the reverse without the modules before the blocks, since embeddings need no weights

Inside a divided block the order comes from a trial with a tiny model (`shape.needs`). Pure arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from offload_trainer.plan.shape import ModelShape, Order
from offload_trainer.plan.tiered.layout import Unit, units_of


def with_order(shape: ModelShape, shown: Order) -> ModelShape:
    """Return the shape with the recorded order, or without one if the weights are registered in that order."""
    return replace(shape, order=None if shown == _registered(units_of(shape)) else shown)


def orders(units: Sequence[Unit], shape: ModelShape, *, again: bool) -> tuple[list[int], list[int]]:
    """Return unit indices in the order of use by a forward and by a backward.

    `again`: the backward recomputes each block. This includes frozen blocks with nothing trained before them, because
    transformers makes the first checkpointed block's input require a gradient (`activation_checkpointing_enable`).
    """
    order, forward = _order(units, shape), _inside(units, shape)
    backward = {name: inside[::-1] for name, inside in forward.items()}
    names = list(order.backward)
    if again:
        backward |= _shown(units, shape, {each.block: each.backward for each in shape.needs})
        blocks = {unit.within for unit in units if unit.within} - set(names)
        names += [name for name in order.forward[::-1] if name in blocks]
    return (
        [unit for name in order.forward for unit in forward[name]],
        [unit for name in names for unit in backward[name]],
    )


def as_gradients_come(units: Sequence[Unit], shape: ModelShape) -> list[int]:
    """Return unit indices in the order in which a backward completes their gradients.

    A unit that runs several times occurs once, except for a tied head, which occurs for each use.
    """
    names, inside = _order(units, shape).forward, _inside(units, shape)
    tied, first = set(_tied(units)), dict(zip(names[::-1], range(len(names) - 1, -1, -1), strict=True))
    once = [name for place, name in enumerate(names) if name in tied or place == first[name]]
    return [unit for name in once for unit in inside[name]][::-1]


def _order(units: Sequence[Unit], shape: ModelShape) -> Order:
    return shape.order or _registered(units)


def _registered(units: Sequence[Unit]) -> Order:
    first = next((place for place, unit in enumerate(units) if unit.within), len(units))
    before, tied = [unit.name for unit in units[:first]], _tied(units[:first])
    behind = list(dict.fromkeys(unit.within or unit.name for unit in units[first:]))
    return Order((*before, *behind, *tied), (*tied[::-1], *behind[::-1]))


def _tied(units: Sequence[Unit]) -> list[str]:
    return [unit.name for unit in units if not unit.within and any(place.weight.uses > 1 for place in unit.places)]


def _inside(units: Sequence[Unit], shape: ModelShape) -> dict[str, list[int]]:
    """Return the units of each block, and of each module outside the blocks, in the forward's order of use."""
    found: dict[str, list[int]] = {}
    for unit in units:
        found.setdefault(unit.within or unit.name, []).append(unit.index)
    return found | _shown(units, shape, {each.block: each.forward for each in shape.needs})


def _shown(units: Sequence[Unit], shape: ModelShape, needs: dict[str, tuple[str, ...]]) -> dict[str, list[int]]:
    """Return the recorded unit order of one call of each block. A block that runs several times repeats it."""
    unit_of = {place.weight.name: unit.index for unit in units for place in unit.places}
    calls = Counter(_order(units, shape).forward)
    one = {block: names[: len(names) // max(1, calls[block])] for block, names in needs.items()}
    return {block: [unit_of[name] for name in names] for block, names in one.items()}
