"""Fast 16-bit matrix products on CPUs that have no units for them.

Without AVX512-BF16 or AMX torch multiplies bf16 matrices that are not transposed at about 1 GFLOP/s on two cores,
a hundred times slower than fp32 (docs/log.md has the table); Conv1D, GPT-2's linear layer, is made of those.
Here such a product is taken in fp32 and rounded once at the end, which is what the units would do too: exact
products, fp32 sums, one rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

_PIECE = 1 << 22  # elements that are copied to fp32 at a time

_library: torch.library.Library | None = None


def has_native_16bit(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies `dtype` matrices in hardware."""
    if dtype is torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if dtype is torch.float16:
        return torch.cpu._is_amx_fp16_supported()
    return True


def use_fp32_products(dtype: torch.dtype) -> bool:
    """From now on, and for the whole process, multiply `dtype` matrices on the CPU in fp32 if that is faster.

    Returns whether it changed anything now or before.
    """
    global _library
    if has_native_16bit(dtype):
        return False
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced is the point
            for name, function in (("mm", _mm), ("bmm", _bmm), ("addmm", _addmm)):
                _library.impl(name, function, "CPU")
    return True


def _slow(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


# What is not 16 bit goes on to the operator's other form (`out=`), which is still torch's own.


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if _slow(left):
        return _in_pieces(left, right, torch.mm)
    return torch.mm(left, right, out=left.new_empty(left.shape[0], right.shape[1]))


def _in_pieces(
    left: torch.Tensor, right: torch.Tensor, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`product` of fp32 copies, rounded, along the longer side of the result a piece at a time.

    The copies of an embedding would take three times its own memory.
    """
    rows, columns = left.shape[0], right.shape[1]
    if max(left.numel(), right.numel(), rows * columns) <= _PIECE:
        return product(left.float(), right.float()).to(left.dtype)
    inner = left.shape[1]
    out = left.new_empty(rows, columns)
    if rows >= columns:
        whole, step = right.float(), max(1, _PIECE // max(inner, columns))
        for start in range(0, rows, step):
            out[start : start + step] = product(left[start : start + step].float(), whole)
    else:
        whole, step = left.float(), max(1, _PIECE // max(inner, rows))
        for start in range(0, columns, step):
            out[:, start : start + step] = product(whole, right[:, start : start + step].float())
    return out


def _bmm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if _slow(left):
        return torch.bmm(left.float(), right.float()).to(left.dtype)
    return torch.bmm(left, right, out=left.new_empty(left.shape[0], left.shape[1], right.shape[2]))


def _addmm(
    added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    if _slow(left):
        return torch.addmm(added.float(), left.float(), right.float(), beta=beta, alpha=alpha).to(left.dtype)
    out = left.new_empty(left.shape[0], right.shape[1])
    return torch.addmm(added, left, right, beta=beta, alpha=alpha, out=out)
