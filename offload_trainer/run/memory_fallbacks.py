"""Settings that reduce device memory, tried in order when a configuration does not fit and leaves them at `auto`.

fewer weight buffers < MLPs on chunks of a row < weights fetched by the module, with fewer buffers, on chunks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from offload_trainer.config import TrainConfig
from offload_trainer.plan.engines import engine_of
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import any_placement_fits, with_fewer_buffers
from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.tiered.layout import is_divided, undivided
from offload_trainer.plan.tiered.spec import Layouts


def lacks_room(plan: Plan, machine: MachineProfile) -> bool:
    """Return True if the plan needs more memory on the computing device than there is, and fallbacks exist."""
    room = plan.tiers[machine.device]
    return plan.engine != "deepspeed" and room["need"] > room["have"]


class _Preset(NamedTuple):
    """Stand-in for a ModelSource whose shape is known without torch."""

    shape: ModelShape


class MemoryFallbacks:
    """Fallbacks for one model. Probes for chunked MLPs and per-module fetching run on first use and are cached."""

    def __init__(self, source: Callable[[], Any], *, preset: ModelShape | None = None) -> None:
        """Take `source`, which creates the ModelSource, and `preset`, its shape if that is known without torch."""
        self._make = source
        self._preset = preset and _Preset(preset)
        self._in_parts = dict[bool, Any]()  # key: with chunked MLPs

    @cached_property
    def source(self) -> Any:
        """The model with whole MLPs and weights fetched by the block."""
        return self._make()

    @cached_property
    def tiled(self) -> Any:
        """The model with the modules marked that can run on chunks of a row."""
        return _tiled(self.source)

    def as_wished(self, config: TrainConfig, *, pieces: bool = False) -> Any:
        """Return the model for a configuration's chunk and fetch settings; `pieces`: with chunked MLPs in any case."""
        pieces = pieces or isinstance(config.model.mlp_chunk, int)
        if self._preset and not pieces and config.tiered.fetch_granularity != "module":
            return self._preset
        whole = self.tiled if pieces else self.source
        if config.tiered.fetch_granularity != "module":
            return as_wished(whole, config)
        if pieces not in self._in_parts:
            self._in_parts[pieces] = as_wished(whole, config)
        return self._in_parts[pieces]

    def that_fit(
        self, config: TrainConfig, machine: MachineProfile, *, world: int, nodes: int, saves: bool = True
    ) -> Iterator[tuple[TrainConfig, Any]]:
        """Yield (configuration, model) that fit with some placement, largest device footprint first."""
        for wish, of in self._ways(config):
            layouts, fewer = Layouts(of.shape), with_fewer_buffers(wish)

            def fits(one: TrainConfig, layouts: Layouts = layouts) -> bool:
                return any_placement_fits(one, layouts, machine, world=world, nodes=nodes, saves=saves)

            if fits(fewer[-1]):
                yield next((one for one in fewer[:-1] if fits(one)), fewer[-1]), of

    def least(self, config: TrainConfig) -> tuple[TrainConfig, Any]:
        """Return the configuration with the smallest device footprint, with its model."""
        *_, (wish, of) = self._ways(config)
        return with_fewer_buffers(wish)[-1], of

    def _ways(self, config: TrainConfig) -> Iterator[tuple[TrainConfig, Any]]:
        """Yield (configuration, model), each with a smaller device footprint than the last, before buffers are cut."""
        tiered = config.tiered
        left_open = engine_of(config).name == "tiered" and tiered.fetch_granularity == "auto"
        for fetch in ("auto", "module") if left_open else (tiered.fetch_granularity,):
            for pieces in (False, True) if may_tile(config) else (False,):
                wish = config.model_copy(update={"tiered": tiered.model_copy(update={"fetch_granularity": fetch})})
                of = self.as_wished(wish, pieces=pieces)
                if (of.shape.tiles or not pieces) and (is_divided(of.shape) or fetch == tiered.fetch_granularity):
                    yield wish, of


def as_wished(source: Any, config: TrainConfig) -> Any:
    """Return the ModelSource with chunked MLPs and per-module fetching as the configuration requests them."""
    source = _tiled(source) if isinstance(config.model.mlp_chunk, int) else source
    if config.tiered.fetch_granularity == "module":
        return _divided(source)
    return replace(source, shape=undivided(source.shape)) if is_divided(source.shape) else source


def may_tile(config: TrainConfig) -> bool:
    """Return True if the plan may choose to run MLPs on chunks of a row."""
    return config.model.mlp_chunk == "auto" and engine_of(config).name != "deepspeed"


def _tiled(source: Any) -> Any:
    from offload_trainer.model.probes.positionwise import with_tiles

    return source if source.shape.tiles else with_tiles(source)


def _divided(source: Any) -> Any:
    from offload_trainer.model.probes.submodules import in_parts

    return source if is_divided(source.shape) else in_parts(source)
