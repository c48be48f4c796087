"""Safetensors files written one tensor at a time, so that a file may be larger than memory.

The format is eight bytes of length, a JSON header with every tensor's dtype, shape and place, then the bytes
(https://huggingface.co/docs/safetensors). Sizes are known beforehand, so the header is written first. Any
safetensors library reads the result; `safetensors.safe_open` reads one tensor at a time.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from offload_trainer.errors import TrainerError

_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorEntry:
    """What a file will hold under one name."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WrittenFile:
    """A finished file: its size, and the CRC-32 of its bytes."""

    bytes: int
    crc32: int


class TensorFileWriter:
    """Write the tensors of `entries`, in that order, then `close` it. TrainerError where the disk refuses."""

    def __init__(self, path: Path, entries: list[TensorEntry], *, metadata: dict[str, str] | None = None) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        offset = 0
        for entry in entries:
            places = [offset, offset + entry.bytes]
            header[entry.name] = {
                "dtype": _DTYPES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": places,
            }
            offset = places[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data begins aligned
        self.path = path
        self._left = list(reversed(entries))
        self._crc = 0
        self._written = 0
        try:
            self._file = open(path, "wb")  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise TrainerError(f"{path}: cannot be written: {error.strerror}") from error
        self._put(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor: any device and layout; its dtype and shape must be the entry's."""
        entry = self._left.pop()
        assert entry == TensorEntry(name, tensor.dtype, tuple(tensor.shape)), f"{entry} expected, {name} given"
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        if flat.numel():
            self._put(flat.view(torch.uint8).numpy().data)

    def _put(self, data: bytes | memoryview) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise TrainerError(
                f"{self.path}: {error.strerror} after {self._written} bytes; free space on that disk and run again"
            ) from error
        self._written += len(data)
        self._crc = zlib.crc32(data, self._crc)

    def close(self) -> WrittenFile:
        """Finish: every entry must have been written. The bytes are on the disk when this returns."""
        assert not self._left, f"{len(self._left)} tensors were not written, {self._left[-1].name} first"
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise TrainerError(f"{self.path}: {error.strerror} after {self._written} bytes") from error
        return WrittenFile(self._written, self._crc)
