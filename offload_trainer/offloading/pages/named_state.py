"""Access the tiered engine's state by weight name, save it to files while training continues, and load it.

A page is a range of a unit, so writing pages in order writes each file in order. Each rank writes the pages that it
updates to the same files. Rank 0 writes the headers and everything that is not on pages.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from offload_trainer.common.errors import UserError
from offload_trainer.offloading.pages.store import PageSnapshot, PageStore
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.offloading.weights.placed import PlacedWeights
from offload_trainer.optim.moments import stored_field
from offload_trainer.optim.state_files import (
    EngineState,
    StoredKind,
    read_engine_state,
    read_tensors,
    refuse_to_save,
    write_engine_state,
    write_file,
)
from offload_trainer.plan.tiered.layout import Unit
from offload_trainer.plan.tiered.state_formats import KINDS, MOMENTS
from offload_trainer.ranks import ALONE, Group
from offload_trainer.storage.atomic_io import StoredFile
from offload_trainer.storage.tensorfile import DTYPES, Piece, PlacedWriter, TensorEntry, file_of


class TieredState:
    """The state by weight name: masters and moments in `store`, 16-bit weights in `weights`, both laid out by unit."""

    def __init__(
        self, units: Sequence[Unit], store: PageStore, weights: PlacedWeights, *, numbers: Sequence[int]
    ) -> None:
        """Index the weights of `units`; `numbers` are the pages that this rank updates, in order."""
        self.units, self.store, self.weights, self._numbers = units, store, weights, numbers
        self.places = {place.weight.name: (unit, place) for unit in units for place in unit.places}
        held = {name: place.weight for name, (_, place) in self.places.items()}
        self.trained = [name for name, weight in held.items() if weight.trainable]
        self.fixed = {name: weight.shape for name, weight in held.items() if not weight.trainable}

    def holds(self, field: str, name: str) -> bool:
        """Return whether a weight has a field: a rule on whole matrices has no second moment of them."""
        return self.store.format.fields[field].holds(self.places[name][1].weight)

    def entries(self, field: str) -> list[TensorEntry]:
        """Return the name, dtype and shape of one field of each trainable weight in its file."""
        kind = self.store.format.fields[field]
        weights = (self.places[name][1].weight for name in self.trained if self.holds(field, name))
        return [TensorEntry(weight.name, DTYPES[kind.dtype], kind.shape_of(weight)) for weight in weights]

    def weight(self, name: str) -> torch.Tensor:
        """Return a CPU copy of one weight in the run's dtype."""
        unit, place = self.places[name]
        return self.weights.get(unit.index, place.start, place.weight.numel).view(place.weight.shape)

    def pieces(self, number: int) -> Iterator[tuple[str, slice]]:
        """Yield the trainable weights on a page, each with its range of the page's elements."""
        page = self.store.pages[number]
        for place in self.units[page.unit].places:
            first = max(place.start, page.start)
            last = min(place.start + place.weight.numel, page.start + page.elements)
            if place.weight.trainable and first < last:
                yield place.weight.name, slice(first - page.start, last - page.start)

    def load(self, directory: Path, node: Node) -> EngineState:
        """Load a state of any engine and format. All ranks call it, and each reads its own pages."""
        node.on_first_rank(lambda: self._load_fixed(directory))
        self.weights.broadcast_all()  # the trained ones too, which the next lines replace
        state = node.on_each_rank(lambda: self._load_pages(directory))
        self.weights.broadcast()
        return state

    def _load_fixed(self, directory: Path) -> None:
        if self.fixed and self.trained:
            for name, tensor in read_tensors(directory, "fixed", shapes=self.fixed):
                unit, place = self.places[name]
                self.weights.put(unit.index, place.start, tensor.reshape(-1))

    def _load_pages(self, directory: Path) -> EngineState:
        ours = self.store.format
        state = read_engine_state(directory, rule=ours.rule)
        theirs, stored = state.format, dict[str, StoredKind]()
        with ExitStack() as stack:
            for kind in KINDS:
                shapes = {entry.name: entry.shape for entry in self.entries(kind)}
                stored[kind] = StoredKind(directory, kind, shapes=shapes, stack=stack)
            for kind, held in stored.items():
                if not held.dtypes <= {DTYPES[theirs.fields[kind].dtype]}:
                    told = state.masters if kind == "master" else state.states
                    raise UserError(f"{directory}: its {kind} is not in {told}, as its engine.json says")
            for number, fields in self.store.replaced(self._numbers):
                self._fill_page(number, fields, stored, converted=theirs.moments != ours.moments)
        self.store.flush()  # masters that were open before have the old values
        return state

    def _fill_page(
        self, number: int, fields: Mapping[str, torch.Tensor], stored: Mapping[str, StoredKind], *, converted: bool
    ) -> None:
        """Fill a zeroed page from the files, and round its 16-bit weights; `converted`: those of moments differ."""
        page, master = self.store.pages[number], fields["master"]
        for name, part in self.pieces(number):
            within = page.start + part.start - self.places[name][1].start
            master[part].copy_(stored["master"].in_fp32(name, within, part.stop - part.start))
            for moment in (moment for moment in MOMENTS if self.holds(moment, name)):
                here, source = stored_field(moment, fields, part), stored[moment]
                count = here.values.numel()
                if converted:
                    here.write(source.in_fp32(name, within, count))
                    continue
                values, scales = source.as_stored(name, within, count)
                here.values.copy_(values)
                if here.scales is not None and scales is not None:
                    here.scales.copy_(scales)
        self.weights.put(page.unit, page.start, master)

    def make_weights(self) -> None:
        """Round the 16-bit weights of this rank's pages from their current masters."""
        for number, fields in PageSnapshot(self.store, self._numbers).pages():
            page = self.store.pages[number]
            self.weights.put(page.unit, page.start, fields["master"])


@dataclass(frozen=True)
class TieredSnapshot:
    """A snapshot of the state, to be written to files once. Updates wait for the pages that are not written yet."""

    owner: TieredState
    state: EngineState
    pages: PageSnapshot
    concurrent: bool = True

    def write(self, directory: Path, group: Group = ALONE) -> dict[str, StoredFile]:
        """Write one file per field with all ranks of `group`; return the manifest's entries on rank 0, else {}.

        Raises TrainerError if the disk or a drive failed.
        """
        owner, written, headers = self.owner, dict[str, StoredFile](), dict[str, Piece]()
        entries = {field: owner.entries(field) for field in owner.store.format.fields}

        def begin() -> None:
            for field, its in entries.items():
                headers[field] = PlacedWriter.make(directory / f"{field}.safetensors", its)

        def end() -> None:
            if owner.trained and owner.fixed:  # without trainable weights the frozen ones need not be written
                fixed = [TensorEntry(name, owner.weights.dtype, shape) for name, shape in owner.fixed.items()]
                written.update(write_file(directory / "fixed.safetensors", fixed, owner.weight))
            write_engine_state(directory, self.state)

        group.first(begin)
        pieces = group.each(lambda: self._write_pages(directory, entries), dict[str, list[Piece]])
        group.first(end)  # the update waits for pages, so they go first
        if group.rank:
            return {}
        of = {field: [headers[field], *(piece for one in pieces for piece in one[field])] for field in entries}
        return {f"{field}.safetensors": file_of(its) for field, its in of.items()} | written

    def _write_pages(self, directory: Path, entries: Mapping[str, list[TensorEntry]]) -> dict[str, list[Piece]]:
        """Write this rank's pages at their offsets, to all files concurrently; return the written pieces by field."""
        writers = {field: PlacedWriter(directory / f"{field}.safetensors", its) for field, its in entries.items()}
        with ThreadPoolExecutor(len(writers)) as threads:
            for number, fields in self.pages.pages():
                list(threads.map(lambda field: self._put(writers[field], field, number, fields[field]), writers))  # noqa: B023 - waited for
        return {field: writer.close() for field, writer in writers.items()}

    def _put(self, writer: PlacedWriter, field: str, number: int, values: torch.Tensor) -> None:
        kind, page = self.owner.store.format.fields[field], self.owner.store.pages[number]
        for name, part in self.owner.pieces(number):
            if not self.owner.holds(field, name):
                continue
            stored = values[part.start // kind.per : kind.entries(part.stop)]
            refuse_to_save(name, stored, field=field)
            within = page.start + part.start - self.owner.places[name][1].start
            writer.put(name, within // kind.per, stored)

    def close(self) -> None:
        self.pages.close()
