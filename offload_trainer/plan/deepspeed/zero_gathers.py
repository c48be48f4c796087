"""What stock ZeRO-3 gathers in a micro-batch: its own walk over the modules, step by step. Pure arithmetic.

DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py (`fetch_sub_module`, `__params_to_release`), once it
has recorded the order of modules, which takes a step: a module's weights are gathered where they are not there, then
those of the next ones, as far as a prefetch bucket and `max_live_parameters` go; behind a module its weights are let
go, but for those that are used again within `max_reuse_distance` elements, or that prefetching went past. So the last
blocks of a forward are still there for their backward. Small weights stay, and are gathered once after each update
(`_post_step` in stage3.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload_trainer.plan.deepspeed.zero_buffers import ZeroSizes
from offload_trainer.plan.shape import ModelShape, Weight


@dataclass(frozen=True)
class ZeroGathers:
    """Elements: of each micro-batch in forward and backward, and of the step behind its update."""

    forward: int
    backward: int
    update: int


def gathers(shape: ModelShape, sizes: ZeroSizes, *, checkpointing: bool) -> ZeroGathers:
    """Of all ranks together; a ring brings each of them its part."""
    forward = list(_modules(shape.weights))
    found = {True: 0, False: 0}
    walk = _Walk([*forward, *_backward(forward, checkpointing=checkpointing)], sizes)
    for step in range(len(walk.modules)):
        found[step < len(forward)] += walk.fetch(step)
        walk.release(step)
    once = sum(weight.numel for weight in shape.weights if weight.numel <= sizes.persistent)
    return ZeroGathers(found[True], found[False], once)


def _modules(weights: Sequence[Weight]) -> Iterator[list[Weight]]:
    """The weights of each module, in the order of the forward; a tied head comes last."""
    owned: dict[str, list[Weight]] = {}
    for weight in weights:
        owned.setdefault(weight.name.rpartition(".")[0], []).append(weight)
    yield from owned.values()
    tied = [weight for weight in weights if weight.uses > 1]
    if tied:
        yield tied


def _backward(forward: list[list[Weight]], *, checkpointing: bool) -> Iterator[list[Weight]]:
    """The other way round; where blocks are checkpointed each is computed again before."""
    blocks: dict[str, list[list[Weight]]] = {}
    for place, module in enumerate(forward):
        blocks.setdefault(module[0].unit if module[0].block else f" {place}", []).append(module)
    for block in reversed(blocks.values()):
        if checkpointing and block[0][0].block:
            yield from block
        yield from reversed(block)


class _Walk:
    """Which weights are there, by name, as a micro-batch goes through `modules`."""

    def __init__(self, modules: list[list[Weight]], sizes: ZeroSizes) -> None:
        self.modules = modules
        self._sizes = sizes
        self._there = {weight.name for module in modules for weight in module if weight.numel <= sizes.persistent}
        self._persistent = frozenset(self._there)
        self._ahead = deque((weight, step) for step, module in enumerate(modules) for weight in module)
        self._passed = dict[str, int]()  # the last step for which a weight was taken from those ahead
        self._live = 0

    def fetch(self, step: int) -> int:
        """Elements gathered at this step, ahead of later ones too."""
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
        """Behind a module."""
        going = {
            weight.name: weight.numel
            for weight in self.modules[step]
            if weight.name not in self._persistent and self._passed[weight.name] <= step + 1
        }
        seen = 0
        for later in self.modules[step + 1 :]:
            if not going or seen >= self._sizes.max_live:  # which is max_reuse_distance too (engine/ds_config.py)
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
