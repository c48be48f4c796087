"""Replace torch's 16-bit matrix products on CPUs without hardware support by products in fp32.

Without AVX512-BF16 or AMX, torch multiplies bf16 matrices that are not transposed (as GPT-2's are) a hundred times
slower than fp32. Here they are computed in fp32 and rounded once, as hardware does; so is the backward of attention.
The last bits differ from torch's own slow products.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from offload_trainer.optim.cpu_units import has_native_16bit

_PIECE = 1 << 20  # elements that are copied to fp32 at a time

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_kept = threading.local()

_library: torch.library.Library | None = None


def use_fp32_products(dtype: torch.dtype) -> bool:
    """Multiply `dtype` matrices in fp32 from now on if the CPU has no units for them; return whether."""
    global _library
    if has_native_16bit(dtype):
        return False
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that a kernel is replaced, which is intended
            products: dict[str, Callable[..., Any]] = {"mm": partial(_addmm, None), "addmm": _addmm}
            products["bmm"] = lambda left, right: torch.bmm(left.float(), right.float()).to(left.dtype)
            products |= {f"{name}.out": function for name, function in products.items()}
            for name, function in {**products, _ATTENTION.__name__: _attention_backward}.items():
                _library.impl(name, _replacing(name, function), "CPU", with_keyset=True)
    return True


def _slow(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def _replacing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of an operator or its `out=` form: `function` for 16 bits, else torch's own kernel."""
    of_torch = torch.library.get_kernel(f"aten::{name}", "CPU")

    def replacement(keys: Any, *given: Any, out: torch.Tensor | None = None, **words: Any) -> Any:
        if not all(map(_slow, given[:3])):  # the factors; torch's own kernel refuses mixed dtypes
            return of_torch.call_boxed(keys, *given, **words | ({} if out is None else {"out": out}))
        found = function(*given, **words)
        return found if out is None else out.resize_(found.shape).copy_(found)

    return replacement


def _attention_backward(
    *given: Any, attn_mask: torch.Tensor | None = None, scale: float | None = None
) -> tuple[torch.Tensor, ...]:
    """Run torch's attention backward in fp32, and narrow the results."""
    widened = [one.float() if isinstance(one, torch.Tensor) else one for one in given]
    if attn_mask is not None and _slow(attn_mask):
        attn_mask = attn_mask.float()
    gradients = _ATTENTION(*widened, attn_mask=attn_mask, scale=scale)
    return tuple(gradient.to(given[0].dtype) for gradient in gradients)


def _addmm(
    added: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """Return alpha * left @ right + beta * added, with fp32 copies of one piece at a time along the longest dimension.

    A piece stays in the CPU's cache between copy and product, and the copies' memory is reused. Copying an embedding at
    once would take three times its memory, and fresh memory costs as much time as the product.
    """
    (rows, inner), columns = left.shape, right.shape[1]
    if right.shape[0] != inner:
        raise RuntimeError(f"matrices of shapes {tuple(left.shape)} and {tuple(right.shape)} cannot be multiplied")
    out = left.new_empty(rows, columns)
    added = added.expand(rows, columns) if added is not None and beta else None  # beta = 0 ignores NaN in `added`
    if inner >= max(rows, columns):
        total = _scratch("product", out.numel()).view(out.shape).zero_()
        if added is not None:
            total.copy_(added).mul_(beta)
        for part in _slices(inner, _PIECE // max(rows, columns, 1)):
            total.addmm_(_fp32("left", left[:, part]), _fp32("right", right[part]), alpha=alpha)
        return out.copy_(total)
    tall = rows >= columns
    whole = _fp32("right", right) if tall else _fp32("left", left)
    for part in _slices(max(rows, columns), _PIECE // max(inner, min(rows, columns), 1)):
        at = (part,) if tall else (slice(None), part)
        product = _scratch("product", out[at].numel()).view(out[at].shape)
        factors = (_fp32("left", left[part]), whole) if tall else (whole, _fp32("right", right[:, part]))
        if added is None:
            torch.mm(*factors, out=product)
            if alpha != 1:
                product.mul_(alpha)
        else:
            torch.addmm(added[at].float(), *factors, beta=beta, alpha=alpha, out=product)
        out[at] = product
    return out


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, start + max(1, step)) for start in range(0, length, max(1, step)))


def _fp32(use: str, matrix: torch.Tensor) -> torch.Tensor:
    """Return an fp32 copy in scratch memory, with the same dimension contiguous as in `matrix`."""
    if matrix.stride(0) < matrix.stride(1):
        return _fp32(use, matrix.t()).t()
    return _scratch(use, matrix.numel()).view(matrix.shape).copy_(matrix)


def _scratch(use: str, elements: int) -> torch.Tensor:
    """Return scratch memory of this thread, which is reused unless it is too large to keep."""
    if elements > _PIECE:
        return torch.empty(elements)
    kept: torch.Tensor | None = getattr(_kept, use, None)
    if kept is None or kept.numel() < elements:
        kept = torch.empty(elements)
        setattr(_kept, use, kept)
    return kept[:elements]
