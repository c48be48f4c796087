"""Tests of 16-bit matrix products on CPUs without 16-bit units: fp32 products are rounded once."""

from functools import partial

import pytest
import torch

from offload_trainer.engine import cpu_matmul
from offload_trainer.optim import cpu_units


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sizes", [(7, 5, 3), (3, 40, 501), (501, 40, 3), (64, 300, 64), (3, 2500, 4), (5, 0, 3), (0, 4, 3)]
)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("added", [None, "ignored", "row", "matrix"])
def test_pieces_round_the_same_products(
    dtype: torch.dtype, sizes: tuple[int, ...], transposed: bool, added: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, inner, columns = sizes
    monkeypatch.setattr(cpu_matmul, "_PIECE", 1000)
    generator = torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    left = some(rows, inner)
    right = some(columns, inner).t() if transposed else some(inner, columns)
    exact, more = left.double() @ right.double(), some(columns) if added == "row" else some(rows, columns)
    if added is None:
        given = cpu_matmul._addmm(None, left, right)
    elif added == "ignored":  # beta=0 ignores it
        given, exact = cpu_matmul._addmm(torch.full_like(more, torch.nan), left, right, beta=0, alpha=2), 2 * exact
    else:
        given = cpu_matmul._addmm(more, left, right, beta=0.5, alpha=2)
        exact = 2 * exact + 0.5 * more.double()
    assert given.dtype is dtype
    torch.testing.assert_close(given.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_backward(dtype: torch.dtype, masked: bool) -> None:
    """Gradients are as close to fp64 as one rounding allows, and fp32 still uses torch's own kernel."""
    cpu_matmul.use_fp32_products(torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(2, 3, 40, 16, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    mask = torch.randn(40, 40, generator=generator).to(dtype) if masked else None
    gradients = []
    for tensors in (given, exact):
        wide = mask.to(tensors[0].dtype) if mask is not None else None
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=wide, is_causal=not masked)
        gradients.append(torch.autograd.grad(out.square().sum(), tensors))
    for ours, wanted in zip(*gradients, strict=True):
        assert ours.dtype is dtype
        # The output, which the backward starts from, is rounded to `dtype` as well.
        tolerance = max(4 * torch.finfo(dtype).eps, 1e-5) * float(wanted.abs().max())
        torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_into_a_tensor_are_the_same(dtype: torch.dtype) -> None:
    """The result may have any strides; fp32 still uses torch's own kernel."""
    cpu_matmul.use_fp32_products(torch.bfloat16)
    if cpu_units.has_native_16bit(torch.bfloat16):
        pytest.skip("torch's own products are used on this CPU")
    generator = torch.Generator().manual_seed(1)
    left, right, more = (torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 40), (40, 6), (6,)))
    close = partial(torch.testing.assert_close, rtol=0, atol=0 if dtype is torch.bfloat16 else 1e-5)
    expected = {"mm": left @ right, "addmm": torch.addmm(more, left, right, beta=0.5, alpha=2)}
    for out in (torch.empty(5, 6, dtype=dtype), torch.empty(6, 5, dtype=dtype).t(), torch.empty(0, dtype=dtype)):
        close(torch.mm(left, right, out=out), expected["mm"])
        close(torch.addmm(more, left, right, beta=0.5, alpha=2, out=out), expected["addmm"])
    several = torch.empty(3, 5, 6, dtype=dtype)
    torch.bmm(left.expand(3, 5, 40), right.expand(3, 40, 6), out=several)
    close(several, expected["mm"].expand(3, 5, 6))
