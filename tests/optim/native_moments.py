"""The moment formats of native/formats.h, with the interface of moments.py."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch

from offload_trainer.optim.kernel_cache import built
from offload_trainer.optim.moments import Bits
from offload_trainer.optim.native_adam import tables
from offload_trainer.optim.prebuilt_kernels import FLAGS, SOURCE
from offload_trainer.optim.rules import TYPES


@cache
def functions() -> ctypes.CDLL:
    """Return native_moments.cpp, compiled next to the package's headers."""
    with tempfile.TemporaryDirectory() as folder:
        for path in (Path(__file__).with_suffix(".cpp"), *SOURCE.parent.glob("*.h")):
            shutil.copy(path, folder)
        return ctypes.CDLL(str(built(Path(folder) / "native_moments.cpp", flags=FLAGS)))


class NativeMoments:
    def __init__(self) -> None:
        self._functions = functions()

    def encode_bf16(self, values: torch.Tensor, out: torch.Tensor, *, noise: Bits) -> None:
        self._encode(values, out, None, noise)

    def decode_bf16(self, values: torch.Tensor, out: torch.Tensor) -> None:
        self._decode(values, None, out, signed=False)

    def encode_8bit(
        self,
        values: torch.Tensor,
        codes: torch.Tensor,
        absmax: torch.Tensor,
        *,
        signed: bool,
        noise: Bits | None = None,
    ) -> None:
        assert signed == (noise is None), "first moments to nearest, second ones stochastically"
        self._encode(values, codes, absmax, noise)

    def decode_8bit(self, codes: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor, *, signed: bool) -> None:
        self._decode(codes, absmax, out, signed=signed)

    def _encode(self, values: torch.Tensor, out: torch.Tensor, scales: torch.Tensor | None, noise: Bits | None) -> None:
        n, bits = ctypes.c_int64(values.numel()), noise and ctypes.byref(noise)
        table = ctypes.byref(tables()[0])
        self._functions.encode(TYPES[out.dtype], at(values), n, table, bits, at(out), at(scales))

    def _decode(self, stored: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor, *, signed: bool) -> None:
        n, table = ctypes.c_int64(out.numel()), ctypes.byref(tables()[0])
        self._functions.decode(TYPES[stored.dtype], at(stored), at(scales), n, table, int(signed), at(out))


def at(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
