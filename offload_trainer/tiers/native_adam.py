"""AdamW on host memory by adam.cpp, which is compiled on first use."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload_trainer.errors import TrainerError
from offload_trainer.plan.layout import BLOCK_8BIT
from offload_trainer.tiers.adam import Adam, PageNoise, Stretch
from offload_trainer.tiers.kernel_cache import built
from offload_trainer.tiers.moments import Bits, cells, dynamic_map, lower_table, nearest_table
from offload_trainer.tiers.torch_adam import update_widened

_SOURCE = Path(__file__).with_name("adam.cpp")
# Without errno and traps a square root or a choice between two values can be vectorised; neither changes a result.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_PIECE = 2**16  # adam.cpp's PIECE
_TYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}  # adam.cpp's Type


class NativeLibrary:
    """adam.cpp, built on first use and loaded; each call runs on torch's number of threads.

    TrainerError with the compiler's words where it cannot be built.
    """

    def __init__(self) -> None:
        path = built(_SOURCE, flags=_FLAGS)
        try:
            self._functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise TrainerError(
                f"{path}: cannot be loaded: {error}. Where the cache's filesystem is mounted noexec, name another "
                "directory with OFFLOAD_TRAINER_CACHE"
            ) from error
        self._pool = ThreadPoolExecutor(max_workers=os.cpu_count())

    def call(self, name: str, *arguments: torch.Tensor | ctypes.Structure | int | None, n: int) -> None:
        """Run function `name` over `n` elements; tensors are passed by address. ctypes lets go of the GIL meanwhile."""
        function = getattr(self._functions, name)
        begun = ctypes.c_int64(0)  # the threads claim pieces by counting it up
        passed = [*map(_passed, arguments), ctypes.c_int64(n), ctypes.byref(begun)]
        threads = min(torch.get_num_threads(), -(-n // _PIECE))
        others = [self._pool.submit(function, *passed) for _ in range(threads - 1)]
        function(*passed)
        for other in others:
            other.result()


class NativeKernel:
    """adam.cpp: gradient to 16-bit weight in one pass, 28 bytes of memory traffic an element. Bits as `TorchKernel`.

    TrainerError where it cannot be built.
    """

    name = "native"

    def __init__(self, adam: Adam) -> None:
        self.adam = adam
        self._library = NativeLibrary()

    def update_page(
        self,
        fields: Mapping[str, torch.Tensor],
        grad: torch.Tensor,
        out: torch.Tensor | None,
        parts: Sequence[Stretch],
        *,
        states: str,
        scale: float,
        lr: float,
        noise: PageNoise | None,
    ) -> None:
        update = partial(self._update, scale=scale, lr=lr)
        moments = NativeMoments(self._library)
        update_widened(update, moments, fields, grad, out, parts, states=states, noise=noise)

    def _update(
        self,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad: torch.Tensor,
        out: torch.Tensor | None,
        *,
        scale: float,
        lr: float,
        decay: float,
        step: int,
    ) -> None:
        out_type = 0 if out is None else _TYPES[out.dtype]
        constants = step_constants(self.adam, scale=scale, lr=lr, decay=decay, step=step)
        given = (master, exp_avg, exp_avg_sq, grad) + (() if out is None else (out,))
        assert all(tensor.is_contiguous() and tensor.numel() == master.numel() for tensor in given)
        assert all(tensor.dtype is torch.float32 for tensor in given[:3])
        self._library.call(
            "adam_update",
            constants,
            master,
            exp_avg,
            exp_avg_sq,
            grad,
            _TYPES[grad.dtype],
            out,
            out_type,
            n=master.numel(),
        )


class _Step(ctypes.Structure):
    """adam.cpp's Step."""

    _fields_ = (
        ("scale", ctypes.c_float),
        ("keep", ctypes.c_float),
        ("lerp", ctypes.c_float),
        ("from_gradient", ctypes.c_int32),
        ("beta2", ctypes.c_float),
        ("rest2", ctypes.c_float),
        ("root_correction", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("minus_step_size", ctypes.c_float),
    )


def step_constants(adam: Adam, *, scale: float, lr: float, decay: float, step: int) -> _Step:
    """torch's constants: computed in double, then rounded; ctypes rounds to nearest even."""
    beta1, beta2 = adam.betas
    rest1 = ctypes.c_float(1 - beta1).value
    from_gradient = abs(rest1) >= 0.5  # lerp starts from the end that is nearer
    return _Step(
        scale,
        1 - lr * decay,
        rest1 - 1 if from_gradient else rest1,
        from_gradient,
        beta2,
        1 - beta2,
        (1 - beta2**step) ** 0.5,
        adam.eps,
        -(lr / (1 - beta1**step)),
    )


def _passed(argument: torch.Tensor | ctypes.Structure | int | None) -> Any:
    """An argument as C wants it: an address, or a 32-bit number."""
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, ctypes.Structure):
        return ctypes.byref(argument)
    return ctypes.c_void_p(None) if argument is None else ctypes.c_int32(argument)


class NativeMoments:
    """The same, to the bit, by adam.cpp."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def encode_bf16(self, values: torch.Tensor, out: torch.Tensor, *, noise: Bits) -> None:
        assert values.numel() == out.numel()
        self._library.call("encode_bf16", values, noise, out, n=values.numel())

    def decode_bf16(self, values: torch.Tensor, out: torch.Tensor) -> None:
        assert values.numel() == out.numel()
        self._library.call("decode_bf16", values, out, n=out.numel())

    def encode_8bit(
        self,
        values: torch.Tensor,
        codes: torch.Tensor,
        absmax: torch.Tensor,
        *,
        signed: bool,
        noise: Bits | None = None,
    ) -> None:
        n = values.numel()
        assert n == codes.numel() <= absmax.numel() * BLOCK_8BIT
        if noise is None:
            self._library.call("encode_8bit", values, nearest_table(signed), codes, absmax, n=n)
        else:
            assert not signed
            self._library.call("encode_8bit_by_chance", values, lower_table(), cells(), noise, codes, absmax, n=n)

    def decode_8bit(self, codes: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor, *, signed: bool) -> None:
        assert out.numel() == codes.numel() <= absmax.numel() * BLOCK_8BIT
        self._library.call("decode_8bit", codes, absmax, dynamic_map(signed), out, n=out.numel())
