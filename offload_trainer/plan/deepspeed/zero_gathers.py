"""Simulate how stock ZeRO-3 gathers and releases weights in a micro-batch, to count gathered elements. Pure arithmetic.

This follows DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py (`fetch_sub_module`,
`__params_to_release`), after its first step has recorded the order of modules. Before a module runs, its missing
weights are gathered. Then those of the next modules are, up to a prefetch bucket and `max_live_parameters`. After it
ran, its weights are released, except those that are used again within `max_reuse_distance` elements, or that the
prefetcher has already passed for a later use. So the last blocks of a forward are still gathered for their backward.
Small weights stay gathered, and are gathered once after each update (`_post_step` in stage3.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload_trainer.plan.deepspeed.zero_buffers import ZeroSizes
from offload_trainer.plan.shape import ModelShape, Weight


@dataclass(frozen=True)
class ZeroGathers:
    """Gathered elements: in forward and backward of each micro-batch, and once per step after the update."""

    forward: int
    backward: int
    update: int


def gathers(shape: ModelShape, sizes: ZeroSizes, *, checkpointing: bool) -> ZeroGathers:
    """Return the elements gathered by all ranks together; in a ring each rank receives all but its own shard."""
    forward = list(_modules(shape.weights))
    found = {True: 0, False: 0}
    walk = _Walk([*forward, *_backward(forward, checkpointing=checkpointing)], sizes)
    for step in range(len(walk.modules)):
        found[step < len(forward)] += walk.fetch(step)
        walk.release(step)
    once = sum(weight.numel for weight in shape.weights if weight.numel <= sizes.persistent)
    return ZeroGathers(found[True], found[False], once)


def _modules(weights: Sequence[Weight]) -> Iterator[list[Weight]]:
    """Yield the weights of each module in the order of the forward; a tied head comes last."""
    owned: dict[str, list[Weight]] = {}
    for weight in weights:
        owned.setdefault(weight.name.rpartition(".")[0], []).append(weight)
    yield from owned.values()
    tied = [weight for weight in weights if weight.uses > 1]
    if tied:
        yield tied


def _backward(forward: list[list[Weight]], *, checkpointing: bool) -> Iterator[list[Weight]]:
    """Yield the modules in the order of the backward; a checkpointed block's forward is repeated before it."""
    blocks: dict[str, list[list[Weight]]] = {}
    for place, module in enumerate(forward):
        blocks.setdefault(module[0].unit if module[0].block else f" {place}", []).append(module)
    for block in reversed(blocks.values()):
        if checkpointing and block[0][0].block:
            yield from block
        yield from reversed(block)


class _Walk:
    """The set of gathered weights, by name, while a micro-batch runs through `modules`."""

    def __init__(self, modules: list[list[Weight]], sizes: ZeroSizes) -> None:
        self.modules = modules
        self._sizes = sizes
        self._there = {weight.name for module in modules for weight in module if weight.numel <= sizes.persistent}
        self._persistent = frozenset(self._there)
        self._ahead = deque((weight, step) for step, module in enumerate(modules) for weight in module)
        self._passed = dict[str, int]()  # the last step for which the prefetcher has taken each weight
        self._live = 0

    def fetch(self, step: int) -> int:
        """Gather the weights of this step and prefetch those of later ones; return the number of elements."""
        module = self.modules[step]
        size = self._gather([weight for weight in module if weight.name not in self._there])
        wanted = {weight.name for weight in module if self._passed.get(weight.name, -1) < step}
        while wanted and self._ahead:
            wanted.discard(self._next().name)
        room = min(self._sizes.max_live - self._live, self._sizes.prefetch_bucket)
        coming: dict[str, Weight] = {}
        while self._ahead and sum(weight.numel for weight in coming.values()) < room:
            weight = self._next()
            if weight.name not in self._there:
                coming[weight.name] = weight
        return size + self._gather(list(coming.values()))

    def release(self, step: int) -> None:
        """Release the weights of this step's module that are not needed again soon."""
        going = {
            weight.name: weight.numel
            for weight in self.modules[step]
            if weight.name not in self._persistent and self._passed[weight.name] <= step + 1
        }
        seen = 0
        for later in self.modules[step + 1 :]:
            if not going or seen >= self._sizes.max_live:  # engine/ds_config.py sets max_reuse_distance to the same
                break
            for weight in later:
                going.pop(weight.name, None)
                seen += weight.numel
        self._there -= set(going)
        self._live -= sum(going.values())

    def _gather(self, weights: list[Weight]) -> int:
        size = sum(weight.numel for weight in weights)
        self._there |= {weight.name for weight in weights}
        self._live += size
        return size

    def _next(self) -> Weight:
        weight, step = self._ahead.popleft()
        self._passed[weight.name] = max(step, self._passed.get(weight.name, -1))
        return weight
