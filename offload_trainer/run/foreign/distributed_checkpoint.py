"""Read directories of torch.distributed.checkpoint (DCP), as training with FSDP2 saves them.

    .metadata       names, shapes, and the file, offset and length of each chunk of a tensor
    __N_M.distcp    chunks, each written by torch.save

Expected is what `get_state_dict` returns: weights `model.NAME`, state `optim.state.NAME.{step,exp_avg,exp_avg_sq}`,
and settings `optim.param_groups...`. The words `model` and `optim` are the caller's and may be others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from offload_trainer.errors import UserError
from offload_trainer.run.foreign.pickles import load_metadata, unpacked
from offload_trainer.run.foreign.state import AdamSettings, ForeignState, adam_settings
from offload_trainer.safe_files import open_given, shown

METADATA = ".metadata"
_MOMENT = re.compile(r"(?P<optimizer>.+?)\.state\.(?P<name>.+)\.exp_avg")
_SETTINGS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay")


@dataclass(frozen=True)
class _Chunk:
    """A part of a tensor, or a whole pickled object, in one file."""

    offsets: tuple[int, ...]
    path: Path
    start: int
    bytes: int


@dataclass(frozen=True)
class _Stored:
    """Tensors and objects by name, of one directory or two."""

    told: str  # name of the checkpoint in messages
    shapes: Mapping[str, tuple[int, ...]]  # shapes of the tensors
    chunks: Mapping[str, list[_Chunk]]

    def object(self, name: str) -> Any:
        """Return a tensor or an object."""
        if name in self.shapes:
            return self.tensor(name)
        return self._load(name, self.chunks[name][0])

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor. Raises UserError if its chunks do not fill it or overlap."""
        shape, whole, filled, boxes = self.shapes[name], None, 0, list[tuple[tuple[int, int], ...]]()
        for chunk in self.chunks[name]:
            part = self._load(name, chunk)
            if not shape:
                return part
            whole = torch.empty(shape, dtype=part.dtype) if whole is None else whole
            box = tuple((begin, begin + size) for begin, size in zip(chunk.offsets, part.shape, strict=True))
            if any(begin < 0 or end > size for (begin, end), size in zip(box, shape, strict=True)):
                ends = [end for _, end in box]
                raise UserError(f"{self.told}: a chunk of {name} ends at {ends}, and its shape is {shape}")
            whole[tuple(slice(*place) for place in box)] = part
            filled += part.numel()
            boxes.append(box)
        if whole is None or filled != whole.numel():
            raise UserError(f"{self.told}: the chunks of {name} have {filled} elements, and its shape is {shape}")
        if _overlap(boxes):
            raise UserError(f"{self.told}: chunks of {name} overlap")
        return whole

    def _load(self, name: str, chunk: _Chunk) -> Any:
        with open_given(chunk.path) as file:
            file.seek(chunk.start)
            data = file.read(chunk.bytes)
        if len(data) < chunk.bytes:
            raise UserError(f"{chunk.path} ends after {chunk.start + len(data)} bytes; {name} needs {chunk.bytes} more")
        return unpacked(data, told=f"{chunk.path}: {name}")


def _overlap(boxes: Sequence[tuple[tuple[int, int], ...]]) -> bool:
    """Return whether two of the boxes, each of pairs (begin, end) by dimension, have an element in common."""
    ordered = sorted(boxes)
    for number, one in enumerate(ordered, 1):
        for other in islice(ordered, number, None):
            if other[0][0] >= one[0][1]:
                break
            if all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(one, other, strict=True)):
                return True
    return False


@contextmanager
def opened_distributed(*directories: Path, told: str | None = None) -> Iterator[ForeignState]:
    """Open a DCP directory, or two: of the model and of its optimizer.

    `told` describes them in messages. Raises UserError if model or optimizer state is missing, or is another
    optimizer's.
    """
    told = told or f"{directories[0]} (torch.distributed.checkpoint)"
    parts = [_stored(directory) for directory in directories]
    shapes = {name: shape for part in parts for name, shape in part.shapes.items()}
    stored = _Stored(told, shapes, {name: chunks for part in parts for name, chunks in part.chunks.items()})
    found = {match["name"]: match["optimizer"] for key in stored.shapes if (match := _MOMENT.fullmatch(key))}
    if not found:
        names = ", ".join(map(shown, sorted(stored.chunks)[:5])) or "nothing"
        raise UserError(
            f"{told}: holds no moments of Adam, named such as optim.state.NAME.exp_avg; it holds {names}. Save it with "
            "get_state_dict of torch.distributed.checkpoint.state_dict, model and optimizer"
        )
    optimizers = sorted(set(found.values()))
    if len(optimizers) > 1:
        raise UserError(f"{told}: holds {len(optimizers)} optimizers, {', '.join(optimizers)}; a run has one")
    state = f"{optimizers[0]}.state."
    for name in found:
        if lacking := [key for key in ("exp_avg_sq", "step") if f"{state}{name}.{key}" not in stored.chunks]:
            raise UserError(f"{told}: its optimizer is not Adam: it has no {lacking[0]} for {name}")
    prefix = _prefix(stored.shapes, list(found), told=told)
    trained = {name: stored.shapes[f"{prefix}{name}"] for name in found}
    others = [key.removeprefix(prefix) for key in stored.shapes if key.startswith(prefix)]

    def read(name: str, kind: str) -> torch.Tensor:
        return stored.tensor(f"{prefix}{name}" if kind == "master" else f"{state}{name}.{kind}")

    def updates(name: str) -> int:
        return int(stored.object(f"{state}{name}.step"))

    yield ForeignState(
        told=told,
        step=max(map(updates, found)),
        trained=trained,
        fixed={name: stored.shapes[f"{prefix}{name}"] for name in others if name not in found},
        updates=updates,
        read=read,
        read_fixed=lambda name: stored.tensor(f"{prefix}{name}"),
        settings=_settings(stored, optimizers[0], told=told),
    )


def _stored(directory: Path) -> _Stored:
    """Read the metadata. Raises UserError if it is damaged or names files outside."""
    path = directory / METADATA
    with open_given(path) as file:
        about = load_metadata(file, told=str(path))
    try:
        shapes = {name: tuple(its.size) for name, its in about.state_dict_metadata.items() if hasattr(its, "size")}
        chunks: dict[str, list[_Chunk]] = {}
        for index, place in about.storage_data.items():
            if getattr(place, "transform_descriptors", None):
                raise UserError(f"{path}: its files are compressed, which is not read: save it without extensions")
            if Path(place.relative_path).name != place.relative_path:
                raise UserError(f"{path} names {shown(place.relative_path)}, which lies outside the directory")
            offsets = tuple(getattr(index, "offset", None) or ())
            chunk = _Chunk(offsets, directory / place.relative_path, place.offset, place.length)
            chunks.setdefault(index.fqn, []).append(chunk)
    except (AttributeError, TypeError) as error:
        raise UserError(f"{path} is not of torch.distributed.checkpoint: {error}") from error
    return _Stored(str(directory), shapes, chunks)


def _prefix(shapes: Mapping[str, Any], names: list[str], *, told: str) -> str:
    """Return what precedes a weight's name among the keys, such as "model."."""
    ends = [key for key in shapes if key == names[0] or key.endswith(f".{names[0]}")]
    found = [key.removesuffix(names[0]) for key in ends]
    fitting = [prefix for prefix in found if all(f"{prefix}{name}" in shapes for name in names)]
    if not fitting:
        raise UserError(f"{told}: holds moments of {len(names)} weights, such as {names[0]}, and not the weights")
    return min(fitting, key=len)


def _settings(stored: _Stored, optimizer: str, *, told: str) -> AdamSettings:
    """Return the optimizer's settings, stored by the number of a group or by the name of a weight."""
    begin = f"{optimizer}.param_groups."
    groups: dict[str, dict[str, Any]] = {}
    for key in stored.chunks:
        group, _, word = key.removeprefix(begin).rpartition(".")
        if key.startswith(begin) and word in _SETTINGS:
            groups.setdefault(group, {"params": [group]})[word] = stored.object(key)
    return adam_settings(list(groups.values()), told=told)
