"""16-bit products on CPUs without units for them: fp32 products and one rounding, also for matrices taken in pieces."""

from __future__ import annotations

import pytest
import torch

from offload_trainer.engine import cpu_matmul


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(7, 5, 3), (3, 40, 501), (501, 40, 3), (64, 300, 64), (1, 1, 700)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_pieces_round_the_same_products(
    dtype: torch.dtype, rows: int, inner: int, columns: int, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_matmul, "_PIECE", 1000)
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(rows, inner, generator=generator).to(dtype)
    right = (
        torch.randn(columns, inner, generator=generator).to(dtype).t()
        if transposed
        else (torch.randn(inner, columns, generator=generator).to(dtype))
    )
    exact = left.double() @ right.double()
    given = cpu_matmul._mm(left, right)
    assert given.dtype is dtype
    torch.testing.assert_close(given.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
