"""An engine's state on disk: masters and moments by the weight's name, whatever engine wrote them.

    DIR/master.safetensors  exp_avg.safetensors  exp_avg_sq.safetensors    fp32, every trainable weight, whole
        fixed.safetensors                                                   the weights that are not trained, if any
        engine.json                                                         optimizer steps, loss scale

Nothing in it depends on ranks, homes or flat buffers, so any engine and placement continues from any other's,
and export needs no engine at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from offload_trainer.errors import UserError
from offload_trainer.tiers.durable import write_text
from offload_trainer.tiers.tensorfile import TensorEntry, TensorFileWriter

KINDS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class EngineState:
    """What an engine knows beside its tensors."""

    optimizer_steps: int  # steps that changed the weights; Adam's bias correction counts these
    loss_scale: float = 1.0
    good_steps: int = 0  # since the loss scale last changed


def write_state(
    directory: Path,
    state: EngineState,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str, str], torch.Tensor],
    fixed: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    read_fixed: Callable[[str], torch.Tensor],
    writes: bool,
) -> dict[str, Any]:
    """Write all files; returns {file name: {"bytes", "crc32"}} on the rank that `writes`.

    `read(name, kind)` and `read_fixed(name)` give whole tensors and may be collective: every rank calls them, in the
    same order. Raises TrainerError where the disk refuses.
    """
    files: dict[str, Any] = {}
    plans: list[tuple[str, list[TensorEntry], Callable[[str], torch.Tensor]]] = [
        (kind, [TensorEntry(name, torch.float32, shape) for name, shape in shapes.items()], _of(read, kind))
        for kind in KINDS
    ]
    if fixed:
        plans.append(("fixed", [TensorEntry(n, dtype, shape) for n, (shape, dtype) in fixed.items()], read_fixed))
    for kind, entries, get in plans:
        path = directory / f"{kind}.safetensors"
        writer = TensorFileWriter(path, entries) if writes else None
        for entry in entries:
            tensor = get(entry.name)
            if writer is not None:
                writer.write(entry.name, tensor)
        if writer is not None:
            files[path.name] = asdict(writer.close())
    if writes:
        write_text(directory / "engine.json", json.dumps(asdict(state), indent=1))
    return files


def _of(read: Callable[[str, str], torch.Tensor], kind: str) -> Callable[[str], torch.Tensor]:
    return lambda name: read(name, kind)


def read_engine_state(directory: Path) -> EngineState:
    return EngineState(**json.loads((directory / "engine.json").read_text()))


def read_tensors(
    directory: Path, kind: str, *, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of one kind, one at a time. UserError if names or shapes are not the model's."""
    path = directory / f"{kind}.safetensors"
    with safe_open(path, framework="pt", device="cpu") as file:
        held = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
        wrong = [name for name in {**held, **shapes} if held.get(name) != shapes.get(name)]
        if wrong:
            told = ", ".join(f"{n} (file {held.get(n)}, model {shapes.get(n)})" for n in sorted(wrong)[:5])
            raise UserError(f"{path}: {len(wrong)} weights do not fit this model: {told}")
        for name in shapes:
            yield name, file.get_tensor(name)
