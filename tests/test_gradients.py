"""Norms of gradients; tests/test_tiered.py has what becomes of the gradients themselves."""

from __future__ import annotations

import pytest
import torch

from offload_trainer.tiers.gradients import norm_of


def test_norms_of_large_gradients_are_right() -> None:
    """torch's own, of the whole tensor, is further off than this allows."""
    gradient = torch.randn(20_000_000, generator=torch.Generator().manual_seed(1)).bfloat16()
    for size in (len(gradient), 300_000, 100):
        assert float(norm_of(gradient[:size])) == pytest.approx(float(gradient[:size].double().norm()), rel=1e-5)
