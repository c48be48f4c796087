"""Read a GGUF file back with the gguf package's reader and compare it with what should have been written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_trainer.errors import TrainerError

if TYPE_CHECKING:  # gguf is an extra, so functions import it when they need it
    import gguf
    import numpy as np

_NAMED = 10  # differences in a message


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
    told = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    wrong = [
        f"{key} is {str(told.get(key))[:60]}"
        for key in {**metadata, **told}
        if key not in told or key not in metadata or not _equal(told[key], metadata[key])
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


def _equal(told: Any, meant: Any) -> bool:
    """Compare two metadata values; floats are stored in 32 bits."""
    import numpy as np

    values = meant if isinstance(meant, list) else [meant]
    if any(isinstance(value, float) for value in values):
        return bool(np.array_equal(np.float32(told), np.float32(meant)))
    return bool(told == meant)
