"""In which order units need their weights: as a pass without memory has shown it, else as weights are registered.

    shown        `shape.order` (`model/needed.py`), where it is another one
    registered   modules before the blocks, blocks, modules behind them; those before them that are tied once more, as a
                 head. In a backward the same from behind, without those before the blocks: embeddings need no weights

Of a divided block its parts come as the trial with a tiny model has them (`shape.needs`). Pure arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from offload_trainer.plan.layout import Unit, units_of
from offload_trainer.plan.shape import ModelShape, Order


def with_order(shape: ModelShape, shown: Order) -> ModelShape:
    """The shape with that order, where its weights are not registered in it."""
    return replace(shape, order=None if shown == _registered(units_of(shape)) else shown)


def orders(units: Sequence[Unit], shape: ModelShape, *, again: bool) -> tuple[list[int], list[int]]:
    """Units as a forward and a backward pass need their weights. `again`: a backward computes each block again.

    Those too that are frozen with all before them: where blocks are checkpointed, transformers has the first one's
    input ask for a gradient (`activation_checkpointing_enable`).
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
    """Units as a backward makes their gradients: once whatever runs several times, but for a head's that is tied."""
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
    """Of each block, and of each module outside them, its units as a forward through it needs them."""
    found: dict[str, list[int]] = {}
    for unit in units:
        found.setdefault(unit.within or unit.name, []).append(unit.index)
    return found | _shown(units, shape, {each.block: each.forward for each in shape.needs})


def _shown(units: Sequence[Unit], shape: ModelShape, needs: dict[str, tuple[str, ...]]) -> dict[str, list[int]]:
    """What a trial has shown of blocks, of one call: a block that runs several times needs as much each time."""
    unit_of = {place.weight.name: unit.index for unit in units for place in unit.places}
    calls = Counter(_order(units, shape).forward)
    one = {block: names[: len(names) // max(1, calls[block])] for block, names in needs.items()}
    return {block: [unit_of[name] for name in names] for block, names in one.items()}
