"""Weights out: a stream of (name, tensor) becomes a directory that transformers, vLLM and llama.cpp read.

One tensor is in memory at a time. The directory is written under a temporary name and renamed when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from offload_trainer.checkpoint import find_checkpoint, read_manifest
from offload_trainer.errors import UserError
from offload_trainer.tiers.durable import sync_directory, write_text
from offload_trainer.tiers.tensorfile import TensorEntry, TensorFileWriter
from offload_trainer.units import format_bytes

SHARD_BYTES = 5_000_000_000
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def export_run(source: Path, destination: Path, *, dtype: str) -> Path:
    """Export a run directory's newest checkpoint, or a checkpoint, to `destination`; returns the checkpoint.

    Raises UserError if there is no checkpoint, it is damaged, `destination` holds something, or a value overflows.
    """
    checkpoint = find_checkpoint(source)
    read_manifest(checkpoint)
    model = checkpoint.parent.parent / "model"
    if not (model / "config.json").exists():
        raise UserError(f"{checkpoint}: its run directory has no model/config.json, so the shape is not known")
    shapes: dict[str, tuple[int, ...]] = {}
    for kind in _weight_files(checkpoint):
        with safe_open(kind, framework="pt", device="cpu") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    write_model(_stored(checkpoint), destination, shapes=shapes, model=model, dtype=dtype)
    return checkpoint


def _weight_files(checkpoint: Path) -> list[Path]:
    return [path for name in ("master", "fixed") if (path := checkpoint / f"{name}.safetensors").exists()]


def _stored(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in _weight_files(checkpoint):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)


def write_model(
    weights: Iterable[tuple[str, torch.Tensor]],
    destination: Path,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    model: Path,
    dtype: str,
    shard_bytes: int = SHARD_BYTES,
    replace: bool = False,
    writes: bool = True,
) -> None:
    """Write `weights` (whole tensors; the names of `shapes`, in any order, tied ones once) in `dtype`.

    `model` holds config.json, the tokenizer and what else goes along. With `writes` False the stream is only
    drained, for ranks that take part in producing it. Raises UserError for a destination that is not empty (unless
    `replace`), too little space, or values that do not fit fp16, naming each weight and its largest value.
    """
    if not writes:
        for _ in weights:
            pass
        return
    target = DTYPES[dtype]
    entries = {name: TensorEntry(name, target, shape) for name, shape in shapes.items()}
    total = sum(entry.bytes for entry in entries.values())
    _check_destination(destination, total, replace=replace)
    temporary = destination.with_name(f".{destination.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(model, temporary)
    _set_dtype(temporary / "config.json", target)
    try:
        _write_shards(weights, temporary, entries=entries, target=target, shard_bytes=shard_bytes, total=total)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if destination.exists():
        shutil.rmtree(destination)
    os.rename(temporary, destination)
    sync_directory(destination.parent)


def _check_destination(destination: Path, total: int, *, replace: bool) -> None:
    if destination.exists() and not replace and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"{destination}: already holds something; name a new directory")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{destination}: cannot be made: {error.strerror}") from error
    free = shutil.disk_usage(destination.parent).free
    if free < total:
        raise UserError(f"{destination}: the export takes {format_bytes(total)} and {format_bytes(free)} are free")


def _set_dtype(path: Path, dtype: torch.dtype) -> None:
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n")


def _write_shards(
    weights: Iterable[tuple[str, torch.Tensor]],
    directory: Path,
    *,
    entries: dict[str, TensorEntry],
    target: torch.dtype,
    shard_bytes: int,
    total: int,
) -> None:
    stream = iter(weights)
    order = _shards(list(entries.values()), shard_bytes)
    held: dict[str, torch.Tensor] = {}  # tensors that came before their turn; empty where the stream keeps the order
    overflowing: list[str] = []
    places: dict[str, str] = {}
    for number, shard in enumerate(order, 1):
        name = "model.safetensors" if len(order) == 1 else f"model-{number:05d}-of-{len(order):05d}.safetensors"
        writer = TensorFileWriter(directory / name, shard)
        for entry in shard:
            while entry.name not in held:
                given, tensor = next(stream)
                held[given] = tensor
            tensor = held.pop(entry.name)
            cast = tensor.to(target)
            if target is torch.float16 and not torch.isfinite(cast).all():
                overflowing.append(f"{entry.name} (largest {tensor.abs().max().item():.4g})")
            writer.write(entry.name, cast)
            places[entry.name] = name
        writer.close()
    if overflowing:
        raise UserError(
            f"{len(overflowing)} weights hold values beyond fp16's 65504: {', '.join(overflowing[:10])}; "
            "export with --dtype bf16"
        )
    if len(order) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_text(directory / "model.safetensors.index.json", json.dumps(index, indent=1))


def _shards(entries: list[TensorEntry], limit: int) -> list[list[TensorEntry]]:
    shards: list[list[TensorEntry]] = [[]]
    held = 0
    for entry in entries:
        if shards[-1] and held + entry.bytes > limit:
            shards.append([])
            held = 0
        shards[-1].append(entry)
        held += entry.bytes
    return shards
