"""Cross-entropy of 16-bit logits that computes in fp32 on a few rows at a time, with the bits of torch's.

torch needs three more tensors of the logits' size in fp32: a copy, their log-softmax and its gradient. Here each exists
for one of several pieces of the rows, and the backward computes the log-softmax again: 1,024 rows of 50,257 logits in
32 pieces took 0.15 s instead of 0.35 s on two cores. The number of pieces (`loss_pieces`) does not depend on that of
the rows, so that memory traces of all lengths (`model/activations.py`) have the same operations.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from offload_trainer.plan.shape import LOSS_PIECES

IGNORED = -100  # torch's and transformers' label for targets that do not count


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, pieces: int) -> torch.Tensor:
        ctx.pieces = pieces
        ctx.save_for_backward(logits, targets)
        columns = targets.clamp(min=0)[:, None]  # ignored targets get any column
        parts = zip(logits.chunk(pieces), columns.chunk(pieces), strict=True)
        chosen = torch.cat([_log_softmax(rows).gather(1, column) for rows, column in parts])
        # torch's own sum over the rows, with its order of additions
        return functional.nll_loss(chosen, targets.clamp(max=0), ignore_index=IGNORED, reduction="sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, targets = ctx.saved_tensors
        of_logits = torch.empty_like(logits)
        columns = targets.clamp(min=0)[:, None]
        of_chosen = torch.where(targets != IGNORED, -gradient, 0.0)[:, None]
        parts = (tensor.chunk(ctx.pieces) for tensor in (of_logits, logits, columns, of_chosen))
        for into, rows, column, of_row in zip(*parts, strict=True):
            into.copy_(_gradient(rows, column, of_row))
            if logits.is_meta:  # a trace of memory: the other pieces need what the first one did
                break
        return of_logits, None, None


def _log_softmax(rows: torch.Tensor) -> torch.Tensor:
    return functional.log_softmax(rows.float(), dim=1)


def _gradient(rows: torch.Tensor, column: torch.Tensor, of_row: torch.Tensor) -> torch.Tensor:
    computed = _log_softmax(rows)
    of_computed = torch.zeros_like(computed).scatter_(1, column, of_row)
    return torch.ops.aten._log_softmax_backward_data(of_computed, computed, 1, torch.float32)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, *, pieces: int = LOSS_PIECES) -> torch.Tensor:
    """Return the summed cross-entropy as an fp32 scalar.

    `logits` are [tokens, vocabulary] in fp16, bf16 or fp32, and `targets` int64 [tokens], -100 where none counts. It
    equals ``functional.cross_entropy(logits.float(), targets, reduction="sum")``, and so do its gradients; on a CPU
    all bits are equal. One of `pieces` pieces of the tokens at a time is in fp32.
    """
    return _SummedCrossEntropy.apply(logits, targets, pieces)
