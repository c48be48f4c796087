"""Tests that the loss on a few rows at a time is torch's, bit for bit, and holds no fp32 tensor of the logits' size."""

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from offload_trainer.optim.cross_entropy import cross_entropy
from offload_trainer.plan.shape import loss_pieces


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 31, 100])
@pytest.mark.parametrize("vocabulary", [2, 5003])
@pytest.mark.parametrize("pieces", [32, 2, 1])
def test_loss_and_gradient_have_torchs_bits(pieces: int, rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    """Whatever the number of pieces, which is another on a GPU."""
    torch.manual_seed(rows)
    logits = (3 * torch.randn(rows, vocabulary)).to(dtype)
    targets = torch.randint(0, vocabulary, (rows,))
    targets[1::7] = -100
    theirs, ours = (logits.clone().requires_grad_() for _ in range(2))

    expected = functional.cross_entropy(theirs.float(), targets, reduction="sum")
    loss = cross_entropy(ours, targets, pieces=pieces)
    (expected / 7).backward()
    (loss / 7).backward()

    assert loss.dtype is torch.float32
    assert torch.equal(loss, expected)
    assert ours.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


def test_without_a_target_that_counts_loss_and_gradient_are_zero() -> None:
    logits = torch.randn(5, 9, dtype=torch.bfloat16, requires_grad=True)
    loss = cross_entropy(logits, torch.full((5,), -100))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros(5, 9, dtype=torch.bfloat16))


class _Sizes(TorchDispatchMode):
    """Notes the bytes of fp32 tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.fp32: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's signature
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype is torch.float32:
            self.fp32.append(found.nbytes)
        return found


@pytest.mark.parametrize("pieces", [32, 4])
def test_fp32_tensors_have_the_rows_of_a_piece(pieces: int) -> None:
    logits = torch.randn(64, 1000).bfloat16().requires_grad_()
    with _Sizes() as sizes:
        cross_entropy(logits, torch.arange(64), pieces=pieces).backward()
    assert max(sizes.fp32) == 4 * 1000 * 64 // pieces


def test_a_gpu_has_few_pieces_of_bounded_size() -> None:
    found = {words: loss_pieces(words, chunk=1024, gpu=True) for words in (2, 32_000, 50_257, 128_256, 262_144)}
    assert list(found.values()) == [1, 2, 4, 8, 16]
    assert all(4 * words * 1024 / pieces <= 64 * 2**20 for words, pieces in found.items())
    assert loss_pieces(50_257, chunk=1024, gpu=False) == loss_pieces(50_257, chunk=10**6, gpu=True) == 32
