"""The tiered engine's state by the weight's name: out to files while training goes on, and back from them.

    PageSnapshot ── page by page ──> master, exp_avg, exp_avg_sq (and scales), each written end to end
    files ── weight by weight ──> pages, and the 16-bit weights made from the masters

A page is a stretch of a unit, so walking pages in order walks each file in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from offload_trainer.engine.state import (
    EngineState,
    StateFile,
    fixed_file,
    read_engine_state,
    read_stored,
    read_tensors,
    write_engine_state,
    write_files,
)
from offload_trainer.plan.layout import BLOCK_8BIT, FIELDS, Place, Unit, aligned
from offload_trainer.tiers.moments import encode_8bit, zero_code
from offload_trainer.tiers.snapshot import PageSnapshot
from offload_trainer.tiers.store import PageStore, field_dtype
from offload_trainer.tiers.tensorfile import TensorEntry, TensorFileWriter
from offload_trainer.tiers.weights import Weights


class TieredState:
    """Masters and moments in `store`, 16-bit weights in `weights`, both laid out as `units`."""

    def __init__(self, units: Sequence[Unit], store: PageStore, weights: Weights) -> None:
        self.units, self.store, self.weights = units, store, weights
        self.places: dict[str, tuple[Unit, Place]] = {
            place.weight.name: (unit, place) for unit in units for place in unit.places
        }

    def names(self, *, trainable: bool) -> list[str]:
        """In the order of the pages."""
        return [name for name, (_, place) in self.places.items() if place.weight.trainable == trainable]

    def shapes(self, *, trainable: bool) -> dict[str, tuple[int, ...]]:
        return {name: self.places[name][1].weight.shape for name in self.names(trainable=trainable)}

    def entry(self, field: str, name: str) -> TensorEntry:
        """How one field of a weight is stored."""
        weight = self.places[name][1].weight
        per = FIELDS[self.store.states][field][1]
        shape = weight.shape if per == 1 else (-(-weight.numel // per),)
        return TensorEntry(name, field_dtype(field, states=self.store.states), shape)

    def master(self, name: str) -> torch.Tensor:
        """A copy of one master: fp32, whole."""
        unit, place = self.places[name]
        values = self.store.get("master", unit.index, place.start, place.weight.numel)
        return values.view(place.weight.shape)

    def fixed(self, name: str) -> torch.Tensor:
        """A copy of one weight that is not trained, in the run's dtype."""
        unit, place = self.places[name]
        return self.weights.get(unit.index, place.start, place.weight.numel).view(place.weight.shape)

    def fixed_files(self) -> list[StateFile]:
        shapes = {name: (shape, self.weights.dtype) for name, shape in self.shapes(trainable=False).items()}
        return fixed_file(shapes, self.fixed)

    def pieces(self, number: int) -> Iterator[tuple[str, slice]]:
        """The weights on a page, each with its stretch of the page's elements."""
        page = self.store.pages[number]
        for place in self.units[page.unit].places:
            first = max(place.start, page.start)
            last = min(place.start + place.weight.numel, page.start + page.elements)
            if place.weight.trainable and first < last:
                yield place.weight.name, slice(first - page.start, last - page.start)

    # -- back from files ----------------------------------------------------------------------------------------------

    def load(self, directory: Path) -> EngineState:
        """Set everything to what `directory` holds, whichever engine wrote it and however it stored moments."""
        state = read_engine_state(directory)
        shapes = self.shapes(trainable=True)
        for name, tensor in read_tensors(directory, "master", shapes=shapes):
            self._put("master", name, tensor)
            unit, place = self.places[name]
            self.weights.put(unit.index, place.start, tensor.reshape(-1))
        for field in list(FIELDS[self.store.states])[1:]:
            if state.states == self.store.states:
                stored = {name: self.entry(field, name).shape for name in shapes}
                for name, tensor in read_stored(directory, field, shapes=stored):
                    self._put(field, name, tensor)
            elif not field.endswith("_scales"):
                for name, tensor in read_tensors(directory, field, shapes=shapes):
                    self._put_converted(field, name, tensor)
        fixed = self.shapes(trainable=False)
        if fixed:
            for name, tensor in read_tensors(directory, "fixed", shapes=fixed):
                unit, place = self.places[name]
                self.weights.put(unit.index, place.start, tensor.reshape(-1))
        self.put_away()
        return state

    def _put(self, field: str, name: str, values: torch.Tensor) -> None:
        unit, place = self.places[name]
        flat, count = values.reshape(-1), place.weight.numel
        if flat.dtype is torch.uint8:
            # What follows the weight shares its last scale and must stay zero, which is not code 0.
            rest = aligned(count, BLOCK_8BIT) - count
            flat = torch.nn.functional.pad(flat, (0, rest), value=zero_code(signed=field == "exp_avg"))
            count += rest
        self.store.put(field, unit.index, place.start, count, flat)

    def _put_converted(self, kind: str, name: str, values: torch.Tensor) -> None:
        """A moment that was stored in another precision."""
        if self.store.states != "8bit":
            self._put(kind, name, values.to(field_dtype(kind, states=self.store.states)))
            return
        flat = values.reshape(-1)
        codes = torch.empty(flat.numel(), dtype=torch.uint8)
        scales = torch.empty(self.entry(f"{kind}_scales", name).shape)
        encode_8bit(flat, codes, scales, signed=kind == "exp_avg")
        self._put(kind, name, codes)
        self._put(f"{kind}_scales", name, scales)

    def put_away(self) -> None:
        """What was put has reached its home, and no memory is held for it."""
        self.store.put_away()
        self.weights.put_away()


@dataclass(frozen=True)
class TieredSnapshot:
    """The state of one moment. The engine's update waits for the pages that are not written yet, nothing else does."""

    held: TieredState
    state: EngineState
    pages: PageSnapshot
    behind: bool = True

    def write(self, directory: Path) -> dict[str, Any]:
        """One file a field, all of them end to end at once. TrainerError where the disk or a drive refuses."""
        names = self.held.names(trainable=True)
        writers = {
            field: TensorFileWriter(
                directory / f"{field}.safetensors", [self.held.entry(field, name) for name in names]
            )
            for field in FIELDS[self.held.store.states]
        }
        with ThreadPoolExecutor(len(writers)) as threads:
            for number, fields in self.pages.pages():
                list(threads.map(lambda field: self._append(writers[field], field, number, fields[field]), writers))  # noqa: B023 - waited for
        written = {f"{field}.safetensors": asdict(writer.close()) for field, writer in writers.items()}
        written |= write_files(directory, self.held.fixed_files(), writes=True)
        self.held.weights.put_away()
        write_engine_state(directory, self.state)
        return written

    def _append(self, writer: TensorFileWriter, field: str, number: int, values: torch.Tensor) -> None:
        per = FIELDS[self.held.store.states][field][1]
        for name, stretch in self.held.pieces(number):
            writer.append(name, values[stretch.start // per : -(-stretch.stop // per)])

    def close(self) -> None:
        self.pages.close()
