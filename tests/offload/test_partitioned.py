"""Tests of checkpoint inputs that ranks keep in parts: the parts of all ranks make up the whole input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload_trainer.engine.tp_shards import PartitionedInputs, piece_of


@pytest.mark.parametrize("shape", [(2, 5, 7), (3, 4), (1, 1, 1), (2, 1)])
@pytest.mark.parametrize("away", [False, True])
def test_parts_are_joined_to_the_input(shape: tuple[int, ...], away: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks rebuild rows of any length, though 3 need not divide the number of elements."""
    given = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    ranks = [PartitionedInputs(place=place, count=3, group=None, to_host=away) for place in range(3)]
    kept = [rank.pack_input(given) for rank in ranks]

    def gather(into: torch.Tensor, own: torch.Tensor, *, group: Any) -> None:
        pieces = [piece_of(given, place, count=3) for place in range(3)]
        assert any(torch.equal(own, piece) for piece in pieces)
        torch.cat(pieces, out=into)

    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    for rank, part in zip(ranks, kept, strict=True):
        whole = rank.unpack(part)
        assert torch.equal(whole, given)
        assert not whole.requires_grad


def test_a_part_does_not_keep_the_whole_tensor() -> None:
    given = torch.arange(10.0)
    parts = [piece_of(given, place, count=4) for place in range(4)]
    assert [part.untyped_storage().nbytes() for part in parts] == [3 * 4] * 4
    assert torch.equal(torch.cat(parts)[:10], given)
    given.zero_()
    assert parts[1].tolist() == [3, 4, 5]


def test_other_tensors_are_not_divided() -> None:
    kept = PartitionedInputs(place=0, count=2, group=None)
    mask = torch.ones(3)
    assert torch.equal(kept.unpack(kept.pack_other(mask)), mask)
