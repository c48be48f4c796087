"""Write weights as one GGUF file for llama.cpp: a stream of (name, tensor) becomes metadata and tensor data.

    config.json ─┐
    tokenizer   ─┼─ refused? ─ metadata, then every tensor's name, shape and type, then the tensors one after another
    shapes      ─┘

A GGUF file holds no code: llama.cpp computes by the architecture's name and splits text by the tokenizer's name. Models
that it would compute differently from transformers are refused before a byte is written.

Keys, names and layouts follow https://github.com/ggml-org/llama.cpp (convert_hf_to_gguf.py and conversion/;
src/llama-vocab.cpp for tokenizers); the file format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offload_trainer.errors import TrainerError, UserError, reason
from offload_trainer.export.directory import EXPORT, Written, check_destination
from offload_trainer.export.gguf_models import (
    ARCHITECTURES,
    Tensor,
    add_model,
    encoded,
    largest,
    layout,
    limit,
    pieces,
    read_config,
    rotary_factors,
)
from offload_trainer.export.gguf_tokenizer import Config, add_tokenizer
from offload_trainer.storage.atomic_io import put_in_place
from offload_trainer.storage.owned_dirs import replacing
from offload_trainer.units import format_bytes

if TYPE_CHECKING:  # gguf is an extra, so functions import it when they need it
    import gguf
    import numpy as np

DTYPES = ("f32", "f16", "q8_0")
_SAMPLE = 32  # number of weights that a check compares
_NAMED = 10  # differences in a message


def write_gguf(
    weights: Iterable[tuple[str, torch.Tensor]],
    destination: Path,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    model: Path,
    dtype: str,
    read: Callable[[str], torch.Tensor] | None = None,
) -> Written:
    """Write `weights` as a GGUF file, with one tensor in memory at a time.

    Args:
        weights: whole fp32 tensors on the CPU, tied ones once, in the order of `shapes`.
        destination: the file to create.
        shapes: shape of each weight.
        model: directory with config.json and the tokenizer.
        dtype: one of DTYPES. Vectors, norms, learned positions and routers stay f32. In a q8_0 file, matrices whose
            rows are not a multiple of 32 are f16.
        read: return a weight again. If given, the file is compared with the weights before it gets its name.

    Raises:
        UserError: the destination exists, space is short, llama.cpp would compute the model or tokenize differently, or
            values are too large for `dtype`.
        TrainerError: the disk fails, or the file differs from the weights.
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
                written_metadata = {key: held.value for key, held in writer.kv_data[0].items()}
                places = {tensor.name: (tensor.shape, tensor.kind) for tensor in tensors}
                sample = _sampled(shapes, read, tensors=tensors, config=config)
                compared = check_file(temporary, metadata=written_metadata, tensors=places, sample=sample)
            put_in_place(temporary, destination)
    except OSError as error:
        raise TrainerError(
            f"{destination}: {reason(error, destination.parent)} after {format_bytes(written)} of "
            f"{format_bytes(total)}; free space on that disk and run again"
        ) from error
    return Written(written, compared, tuple(notes))


def _described(
    tensors: list[Tensor], *, config: Config, model: Path, name: str, dtype: str
) -> tuple[gguf.GGUFWriter, list[str]]:
    """Return a writer with all metadata, and notes on how llama.cpp treats text differently."""
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
            name, weight = next(stream)
            assert name == expected, f"{expected} was to come, not {name}"
            for _, piece in pieces(name, weight, config=config):
                place = next(places)
                assert tuple(piece.shape) == place.shape, f"{name}: {tuple(piece.shape)} for {place}"
                most = largest(piece)
                if not most < limit(place.kind):  # also true for NaN
                    overflowing.append(f"{name} (largest {most:.4g})")
                writer.write_tensor_data(encoded(piece, place.kind))
            del weight, piece  # freed before the next one is read
        assert next(stream, None) is None, "more weights came than shapes"
    finally:
        with contextlib.suppress(OSError):  # report the first failure, not this one
            writer.close()
    if overflowing:
        raise UserError(
            f"{len(overflowing)} weights hold values beyond what the file's types can: {', '.join(overflowing)}; "
            "export f32"
        )
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sampled(
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], torch.Tensor],
    *,
    tensors: list[Tensor],
    config: Config,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (tensor name, expected contents) for the first weight, the last one, and some evenly spaced in between."""
    names, places = list(shapes), iter(tensors)
    if len(rotary_factors(config)):
        next(places)
    taken = {*names[:: max(1, len(names) // _SAMPLE)], names[-1]}
    for name in names:
        parts = pieces(name, torch.empty(shapes[name], device="meta"), config=config)
        here = [next(places) for _ in parts]
        if name in taken:
            for place, (_, piece) in zip(here, pieces(name, read(name), config=config), strict=True):
                yield place.name, encoded(piece, place.kind)


def check_file(
    path: Path,
    *,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[tuple[int, ...], gguf.GGMLQuantizationType]],
    sample: Iterable[tuple[str, np.ndarray]],
) -> int:
    """Compare the file's metadata, every tensor's shape and type, and the bytes of `sample`.

    Return the number of compared tensors of `sample`, which yields (name, expected bytes).

    Raises:
        TrainerError: something differs; the message names it.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, KeyError, IndexError) as error:
        raise TrainerError(f"what was exported cannot be read back: {error}") from error
    held = {tensor.name: tensor for tensor in reader.tensors}
    read_metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    wrong = [
        f"{key} is {str(read_metadata.get(key))[:60]}"
        for key in {**metadata, **read_metadata}
        if key not in read_metadata or key not in metadata or not _equal(read_metadata[key], metadata[key])
    ]
    for name in {**tensors, **held}:
        found = (tuple(map(int, reversed(held[name].shape))), held[name].tensor_type) if name in held else None
        if found != tensors.get(name):
            wrong.append(f"{name} is {found}, and should be {tensors.get(name)}")
    compared = 0
    for name, expected in sample if not wrong else ():
        compared += 1
        if held[name].data.tobytes() != expected.tobytes():
            wrong.append(f"{name} holds other values")
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise TrainerError(f"the file does not hold what was exported: {'; '.join(wrong[:_NAMED])}{more}")
    return compared


def _equal(found: Any, expected: Any) -> bool:
    """Compare two metadata values; floats are stored in 32 bits."""
    import numpy as np

    values = expected if isinstance(expected, list) else [expected]
    if any(isinstance(value, float) for value in values):
        return bool(np.array_equal(np.float32(found), np.float32(expected)))
    return bool(found == expected)
