"""Weights out: a stream of (name, tensor) becomes one GGUF file, which llama.cpp and what is built on it read.

    config.json ─┐
    tokenizer   ─┼─ refused? ─ metadata, then every tensor's name, shape and type, then the tensors one after another
    shapes      ─┘

A GGUF file holds no code: llama.cpp computes what it knows by the architecture's name, and splits text by the
tokenizer's. What it would do differently from transformers is therefore refused before a byte is written.

Keys, names and layouts are facts of https://github.com/ggml-org/llama.cpp (convert_hf_to_gguf.py and conversion/;
src/llama-vocab.cpp for tokenizers), the file is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from offload_trainer.errors import TrainerError, UserError, reason
from offload_trainer.export.directory import EXPORT, check_destination
from offload_trainer.export.gguf_check import check_file
from offload_trainer.export.gguf_models import ARCHITECTURES, add_model, read_config
from offload_trainer.export.gguf_tensors import Tensor, encoded, largest, layout, limit, pieces, rotary_factors
from offload_trainer.export.gguf_tokenizer import Config, add_tokenizer
from offload_trainer.storage.durable import put_in_place
from offload_trainer.storage.removal import replacing
from offload_trainer.units import format_bytes

if TYPE_CHECKING:  # an extra, so it is imported where it is used
    import gguf
    import numpy as np

DTYPES = ("f32", "f16", "q8_0")
_SAMPLE = 32  # weights that a check compares


@dataclass(frozen=True)
class WrittenFile:
    """What a check compared, and what llama.cpp will do otherwise with text."""

    compared: int  # tensors
    notes: tuple[str, ...]


def write_gguf(
    weights: Iterable[tuple[str, torch.Tensor]],
    destination: Path,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    model: Path,
    dtype: str,
    read: Callable[[str], torch.Tensor] | None = None,
) -> WrittenFile:
    """Write `weights` (whole fp32 tensors on the CPU, tied ones once, in the order of `shapes`) as `dtype`.

    `dtype` is one of DTYPES; vectors, norms, learned positions and routers stay f32, and a matrix whose rows are no
    multiple of 32 is f16 in a q8_0 file. `model` holds config.json and the tokenizer. One tensor is in memory at a
    time. With `read`, which gives a weight once more, the file is read back before it has its name. Raises UserError
    for a destination that exists, too little space, a model or a tokenizer that llama.cpp would compute differently, or
    values too large for `dtype`; TrainerError where the disk refuses, or the file holds anything else.
    """
    assert destination.suffix == ".gguf", destination
    assert dtype in DTYPES, dtype
    if importlib.util.find_spec("gguf") is None:
        raise UserError("GGUF files need the gguf package: pip install 'offload-trainer[gguf]'")
    config = read_config(model)
    tensors = layout(shapes, config=config, dtype=dtype)
    total = sum(tensor.bytes for tensor in tensors)
    writer, notes = _described(tensors, config=config, model=model, name=destination.stem, dtype=dtype)
    check_destination(destination, total)
    written = 0
    try:
        with replacing(destination, what=EXPORT) as temporary:
            try:
                _write(writer, weights, temporary, shapes=shapes, tensors=tensors, config=config)
            finally:
                written = temporary.stat().st_size if temporary.exists() else 0
            compared = 0
            if read:
                told = {key: held.value for key, held in writer.kv_data[0].items()}
                places = {tensor.name: (tensor.shape, tensor.kind) for tensor in tensors}
                sample = _sampled(shapes, read, tensors=tensors, config=config)
                compared = check_file(temporary, metadata=told, tensors=places, sample=sample)
            put_in_place(temporary, destination)
    except OSError as error:
        raise TrainerError(
            f"{destination}: {reason(error, destination.parent)} after {format_bytes(written)} of "
            f"{format_bytes(total)}; free space on that disk and run again"
        ) from error
    return WrittenFile(compared, tuple(notes))


def _described(
    tensors: list[Tensor], *, config: Config, model: Path, name: str, dtype: str
) -> tuple[gguf.GGUFWriter, list[str]]:
    """A writer that knows all but the data, and what llama.cpp will do otherwise with text."""
    import gguf
    import numpy as np

    types = gguf.LlamaFileType
    writer = gguf.GGUFWriter(None, ARCHITECTURES[config["model_type"]].name)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_file_type({"f32": types.ALL_F32, "f16": types.MOSTLY_F16, "q8_0": types.MOSTLY_Q8_0}[dtype])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_model(writer, config)
    notes = add_tokenizer(writer, model, config=config)
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.bytes, raw_dtype=tensor.kind)
    return writer, notes


def _write(
    writer: gguf.GGUFWriter,
    weights: Iterable[tuple[str, torch.Tensor]],
    path: Path,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: list[Tensor],
    config: Config,
) -> None:
    stream, places = iter(weights), iter(tensors)
    overflowing: list[str] = []
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        factors = rotary_factors(config)
        if len(factors):
            writer.write_tensor_data(encoded(factors, next(places).kind))
        for expected in shapes:
            overflowing += _write_next(writer, stream, places, expected=expected, config=config)
        assert next(stream, None) is None, "more weights came than shapes"
    finally:
        with contextlib.suppress(OSError):  # the first failure is the one to tell of
            writer.close()
    if overflowing:
        raise UserError(
            f"{len(overflowing)} weights hold values beyond what the file's types can: {', '.join(overflowing)}; "
            "export f32"
        )
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _write_next(
    writer: gguf.GGUFWriter,
    stream: Iterator[tuple[str, torch.Tensor]],
    places: Iterator[Tensor],
    *,
    expected: str,
    config: Config,
) -> list[str]:
    """Write the stream's next weight; what in it overflows. A function, so that it is let go of before the next."""
    name, weight = next(stream)
    assert name == expected, f"{expected} was to come, not {name}"
    overflowing = []
    for _, piece in pieces(name, weight, config=config):
        place = next(places)
        assert tuple(piece.shape) == place.shape, f"{name}: {tuple(piece.shape)} for {place}"
        most = largest(piece)
        if not most < limit(place.kind):  # not a number, too
            overflowing.append(f"{name} (largest {most:.4g})")
        writer.write_tensor_data(encoded(piece, place.kind))
    return overflowing


def _sampled(
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], torch.Tensor],
    *,
    tensors: list[Tensor],
    config: Config,
) -> Iterator[tuple[str, np.ndarray]]:
    """Of the first weight, the last and others evenly between: (a tensor's name, what it is to hold)."""
    names, places = list(shapes), iter(tensors)
    if len(rotary_factors(config)):
        next(places)
    taken = {*names[:: max(1, len(names) // _SAMPLE)], names[-1]}
    for name in names:
        meant = pieces(name, torch.empty(shapes[name], device="meta"), config=config)
        here = [next(places) for _ in meant]
        if name in taken:
            for place, (_, piece) in zip(here, pieces(name, read(name), config=config), strict=True):
                yield place.name, encoded(piece, place.kind)
