"""What lies in a run's files on drives, written beside them, so that masters can be read after the run has died.

    <lease>/store.json   where each weight's master is, in which file; the model's directory
    <lease>/progress     the update that the files are of, and whether one was under way

A killed process loses nothing that it has written to `progress`: the kernel has it. Pages in RAM are gone with it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from offload_trainer.errors import TrainerError, UserError
from offload_trainer.plan.layout import RAM, Page, Unit, page_bytes
from offload_trainer.tiers.durable import write_text
from offload_trainer.tiers.store import offsets
from offload_trainer.units import format_count

DESCRIPTION = "store.json"
_PROGRESS, _RECORD = "progress", 64  # name; bytes
_MASTER = 4  # bytes; masters are a page's first field


class StoreAccount:
    """Keeps the account of one run's page files in each of `drives`, its private directories."""

    def __init__(
        self, drives: Sequence[Path], *, units: Sequence[Unit], pages: Sequence[Page], states: str, model: Path
    ) -> None:
        description = {
            "drives": [str(drive.resolve()) for drive in drives],
            "states": states,
            "pages": [asdict(page) for page in pages],
            "weights": [
                {"name": place.weight.name, "shape": place.weight.shape, "unit": unit.index, "start": place.start}
                for unit in units
                for place in unit.places
                if place.weight.trainable
            ],
            "fixed": [place.weight.name for unit in units for place in unit.places if not place.weight.trainable],
            "model": str(model.absolute()),
            "boot": _boot(),
        }
        for drive in drives:
            write_text(drive / DESCRIPTION, json.dumps(description))
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._descriptors = [os.open(drive / _PROGRESS, flags, 0o666) for drive in drives]

    def note(self, step: int, *, updating: bool) -> None:
        """The files hold the state after `step` updates; with `updating`, parts of them that after the next."""
        record = json.dumps({"step": step, "updating": updating}).ljust(_RECORD).encode()
        for descriptor in self._descriptors:
            os.pwrite(descriptor, record, 0)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


@dataclass(frozen=True)
class _Stretch:
    """Consecutive masters in a file."""

    file: Path
    offset: int
    elements: int


@dataclass(frozen=True)
class StoredMasters:
    """The masters in a dead run's page files."""

    step: int  # updates that all of them have
    updating: bool  # whether some of them have one more
    shapes: dict[str, tuple[int, ...]]
    model: Path
    places: dict[str, list[_Stretch]]

    def read(self, name: str) -> torch.Tensor:
        """One of them, fp32, whole. TrainerError where a file is shorter than it should be."""
        out = torch.empty(self.shapes[name])
        view, done = out.view(-1).view(torch.uint8).numpy().data, 0
        for stretch in self.places[name]:
            size = _MASTER * stretch.elements
            with open(stretch.file, "rb") as file:
                file.seek(stretch.offset)
                got = file.readinto(view[done : done + size])
            if got != size:
                raise TrainerError(f"{stretch.file}: cut short: {got} of {size} bytes of {name} at {stretch.offset}")
            done += size
        return out

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.shapes:
            yield name, self.read(name)


def read_store(directory: Path) -> StoredMasters:
    """The masters in a private directory that a dead run left. UserError where they are not all in files."""
    try:
        told: dict[str, Any] = json.loads((directory / DESCRIPTION).read_text())
        progress = json.loads((directory / _PROGRESS).read_bytes() or "null")
    except (OSError, ValueError) as error:
        raise UserError(f"{directory}: no account of page files that can be read: {error}") from error
    if progress is None:
        raise UserError(f"{directory}: its run died before its first update; there is nothing in it to export")
    pages = [Page(**page) for page in told["pages"]]
    lost = sum(page.elements for page in pages if page.home == RAM)
    if lost or told["fixed"]:
        total = format_count(sum(page.elements for page in pages))
        what = f"{format_count(lost)} of {total} masters" if lost else f"{len(told['fixed'])} fixed weights"
        raise UserError(f"{directory}: {what} were in memory and went with the run; export its newest checkpoint")
    shapes = {weight["name"]: tuple(weight["shape"]) for weight in told["weights"]}
    files = [Path(drive) / "state" for drive in told["drives"]]
    sizes = [page_bytes(page.elements, states=told["states"]) for page in pages]
    starts = offsets(sizes, [page.home for page in pages])
    places = {
        weight["name"]: [
            _Stretch(files[page.home], start + _MASTER * (first - page.start), last - first)
            for page, start in zip(pages, starts, strict=True)
            if page.unit == weight["unit"]
            and (first := max(weight["start"], page.start))
            < (last := min(weight["start"] + _numel(weight), page.start + page.elements))
        ]
        for weight in told["weights"]
    }
    # After a power cut the record may be older than the pages, which pass the cache by.
    updating = progress["updating"] or told["boot"] != _boot()
    return StoredMasters(progress["step"], updating, shapes, Path(told["model"]), places)


def _boot() -> str:
    """What tells this start of the system from every other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _numel(weight: dict[str, Any]) -> int:
    return torch.Size(weight["shape"]).numel()
