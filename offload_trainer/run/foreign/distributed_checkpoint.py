"""Read directories of torch.distributed.checkpoint (DCP), as training with FSDP2 saves them.

    .metadata       names, shapes, and the file, offset and length of each chunk of a tensor
    __N_M.distcp    chunks, each written by torch.save

Expected is what `get_state_dict` returns: weights `model.NAME`, state `optim.state.NAME.{step,exp_avg,exp_avg_sq}`,
and settings `optim.param_groups...`. The words `model` and `optim` are the caller's and may be others. Accelerate, and
so transformers' Trainer, writes model and optimizer into two such directories.

torch's own reader is not used. It unpickles `.metadata` and the settings and runs what code they name, opens any path
that `.metadata` names, and leaves elements unset that no chunk holds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload_trainer.errors import UserError
from offload_trainer.run.foreign.pickles import load_metadata, load_pickle
from offload_trainer.run.foreign.state import ForeignState, adam_settings, common_prefix
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
    shapes: dict[str, tuple[int, ...]]  # shapes of the tensors
    chunks: dict[str, list[_Chunk]]

    def object(self, name: str) -> Any:
        """Return a tensor or an object."""
        if name in self.shapes:
            return self.tensor(name)
        return self._load(name, self.chunks[name][0])

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor in fp32. Raises UserError if its chunks do not fill it."""
        shape = self.shapes[name]
        whole, filled = torch.empty(shape), torch.zeros(shape, dtype=torch.bool)
        for chunk in self.chunks.get(name, ()):
            part = self._load(name, chunk)
            try:
                box = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, part.shape, strict=True))
                whole[box] = part
                filled[box] = True
            except (AttributeError, RuntimeError, TypeError, ValueError) as error:
                raise UserError(f"{self.told}: a chunk of {name} at {chunk.offsets} does not fit {shape}") from error
        if not filled.all():
            raise UserError(f"{self.told}: the chunks of {name} hold {int(filled.sum())} of {filled.numel()} elements")
        return whole

    def _load(self, name: str, chunk: _Chunk) -> Any:
        with open_given(chunk.path) as file:
            file.seek(chunk.start)
            data = file.read(chunk.bytes)
        if len(data) < chunk.bytes:
            raise UserError(f"{chunk.path} ends after {chunk.start + len(data)} bytes; {name} needs {chunk.bytes} more")
        return load_pickle(data, told=f"{chunk.path}: {name}")


def read_distributed(source: Path, directories: Sequence[Path]) -> ForeignState:
    """Return the state in the DCP directories of the checkpoint `source`.

    Raises UserError if model or optimizer state is missing, or is another optimizer's.
    """
    told = f"{source} (torch.distributed.checkpoint)"
    stored = _Stored(told, {}, {})
    for directory in directories:
        _add(directory, stored)
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
    prefix = common_prefix(stored.shapes, list(found))
    if lost := [name for name in found if f"{prefix}{name}" not in stored.shapes]:
        raise UserError(f"{told}: holds moments of {len(lost)} weights, such as {lost[0]}, and not the weights")

    def read(name: str, kind: str) -> torch.Tensor:
        return stored.tensor(f"{prefix}{name}" if kind == "master" else f"{state}{name}.{kind}")

    def updates(name: str) -> int:
        return int(stored.object(f"{state}{name}.step"))

    rate, adam = adam_settings(_groups(stored, optimizers[0]), told=told)
    return ForeignState(
        told=told,
        step=max(map(updates, found)),
        shapes={key.removeprefix(prefix): shape for key, shape in stored.shapes.items() if key.startswith(prefix)},
        trained=set(found),
        updates=updates,
        read=read,
        rate=rate,
        adam=adam,
    )


def _add(directory: Path, stored: _Stored) -> None:
    """Add what the metadata of `directory` names. Raises UserError if it is damaged or names files outside."""
    path = directory / METADATA
    with open_given(path) as file:
        about = load_metadata(file, told=str(path))
    try:
        tensors = {name: its for name, its in about.state_dict_metadata.items() if hasattr(its, "size")}
        stored.shapes.update({name: tuple(tensor.size) for name, tensor in tensors.items()})
        for index, place in about.storage_data.items():
            if getattr(place, "transform_descriptors", None):
                raise UserError(f"{path}: its files are compressed, which is not read: save it without extensions")
            if Path(place.relative_path).name != place.relative_path:
                raise UserError(f"{path} names {shown(place.relative_path)}, which lies outside the directory")
            offsets = tuple(getattr(index, "offset", None) or ())
            chunk = _Chunk(offsets, directory / place.relative_path, place.offset, place.length)
            stored.chunks.setdefault(index.fqn, []).append(chunk)
    except (AttributeError, TypeError) as error:
        raise UserError(f"{path} is not of torch.distributed.checkpoint: {error}") from error


def _groups(stored: _Stored, optimizer: str) -> list[dict[str, Any]]:
    """Return the optimizer's groups with its settings, stored by the number of a group or by the name of a weight."""
    begin = f"{optimizer}.param_groups."
    groups: dict[str, dict[str, Any]] = {}
    for key in stored.chunks:
        group, _, word = key.removeprefix(begin).rpartition(".")
        if key.startswith(begin) and word in _SETTINGS:
            groups.setdefault(group, {"params": [group]})[word] = stored.object(key)
    return list(groups.values())
