"""Divide blocks into submodules that are fetched separately (`tiered.fetch_granularity=module`). Pure arithmetic.

    model.layers.0   ──> model.layers.0.self_attn, .mlp.gate_proj, .mlp.up_proj, .mlp.down_proj   one after the other
                     ──> the remainder of model.layers.0: norms, routers, vectors                 stays on the device

A part is a submodule with everything inside it. The largest module that cannot be divided further sets the maximum size
of a part. `shape.apart` names the modules that may be divided; `model/probes/submodules.py` finds them with a trial.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.plan.tiered.layout import SMALL, Unit
from offload_trainer.plan.workload import Workload
from offload_trainer.units import format_count

_WORTH = 0.9  # divide only if the largest part has at most this share of the largest block
_LITTLE = 16  # a module that is smaller than the largest part by this factor stays on the device


@dataclass
class _Module:
    """A block, or a module inside one, with its weights."""

    name: str
    own: list[Weight] = field(default_factory=list)
    inside: dict[str, _Module] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        return sum(weight.numel for weight in self.weights())

    def weights(self) -> Iterator[Weight]:
        yield from self.own
        for module in self.inside.values():
            yield from module.weights()


def divided(shape: ModelShape) -> ModelShape:
    """Return the shape with blocks divided into the smallest possible parts, or unchanged if that gains too little.

    Modules that run on pieces of a row (`shape.tiles`) are not divided, because each piece would fetch all parts again.
    """
    blocks, apart = _blocks(shape.weights), set(shape.apart) - set(shape.tiles)
    least = [part for block in blocks for part in _parts(block, apart, most=0)]
    most = max((part.elements for part in least), default=0)
    if most > _WORTH * max((block.elements for block in blocks), default=0):
        return shape
    part_of: dict[str, str] = {}
    for block in blocks:
        parts = _parts(block, apart, most=most)
        if parts == [block]:
            continue
        part_of |= {weight.name: block.name for weight in block.weights()}
        for part in _moved(parts, most=most):
            part_of |= {weight.name: part.name for weight in part.weights()}
    weights = tuple(replace(weight, part=part_of.get(weight.name, "")) for weight in shape.weights)
    return replace(shape, weights=weights)


def undivided(shape: ModelShape) -> ModelShape:
    """Return the shape with every block as a single part."""
    weights = tuple(replace(weight, part="") for weight in shape.weights)
    return replace(shape, weights=weights, apart=(), needs=())


def is_divided(shape: ModelShape) -> bool:
    """Return whether any block is divided."""
    return any(weight.part for weight in shape.weights)


def module_fetch_mistake(work: Workload, fetch: str) -> list[str]:
    """Return the mistake of `tiered.fetch_granularity=module` if no block can be divided, else an empty list."""
    if fetch != "module" or is_divided(work.shape):
        return []
    return [
        "tiered.fetch_granularity=module: a trial with a tiny model of this architecture found no block whose modules "
        "need their weights one after the other and are much smaller than the block; leave it out"
    ]


def module_fetch_note(units: Sequence[Unit]) -> list[str]:
    """Return the plan's note about divided blocks, if there are any."""
    parts = [unit for unit in units if unit.is_part]
    if not parts:
        return []
    blocks: dict[str, int] = {}
    for unit in units:
        blocks[unit.within] = blocks.get(unit.within, 0) + unit.elements
    largest = max(parts, key=lambda unit: unit.elements)
    return [
        f"tiered.fetch_granularity=module: weights of blocks are fetched in parts; the largest, {largest.name}, has "
        f"{format_count(largest.elements)} of its block's {format_count(blocks[largest.within])} parameters"
    ]


def _blocks(weights: Sequence[Weight]) -> list[_Module]:
    blocks: dict[str, _Module] = {}
    for weight in weights:
        if not weight.block:
            continue
        module = blocks.setdefault(weight.unit, _Module(weight.unit))
        owner = weight.name.rpartition(".")[0]
        for name in owner.removeprefix(weight.unit).split(".")[1:]:
            module = module.inside.setdefault(name, _Module(f"{module.name}.{name}"))
        module.own.append(weight)
    return list(blocks.values())


def _parts(module: _Module, apart: set[str], *, most: int) -> list[_Module]:
    """Divide `module` into parts of at most `most` elements, except for modules that cannot be divided."""
    own = sum(weight.numel for weight in module.own)
    if module.elements <= most or module.name not in apart or own > SMALL:
        return [module]
    return [part for inner in module.inside.values() for part in _parts(inner, apart, most=most)]


def _moved(parts: Sequence[_Module], *, most: int) -> list[_Module]:
    """Return the parts that are fetched. The smallest ones stay on the device as long as their total is small too."""
    ordered = sorted(parts, key=lambda part: part.elements)
    staying, held = 0, 0
    for part in ordered:
        held += part.elements
        if part.elements > most // _LITTLE or held > SMALL:
            break
        staying += 1
    return ordered[staying:]
