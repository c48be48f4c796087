"""Compute gradient norms, for clipping and logging, with the same bits wherever the gradients are placed.

    one gradient                    `norm_of`, on the device that computed it
    a sum over micro-batches        `norm_of` if a CPU trains; `ordered_norm` if a GPU trains, wherever the sum is

With a GPU a sum may be on the GPU, in host memory or on a drive, and torch's norm adds in a different order on each.
`ordered_norm` therefore consists of single additions in a fixed order. In host memory both are combined from the
partial results of `Pieces`, which optim/gradient_kernel.py computes as it adds gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload_trainer.optim.gradient_kernel import Pieces, TorchGradients, root_of_sum, sums_of_squares
from offload_trainer.plan.parallel.comm_cost import piece_width

_CHUNKS_ON_GPU = 8  # chunks that are squared at a time; 32 MiB


def clip_factor(norm: float, *, limit: float) -> float:
    """Return the factor that clips gradients of this norm to `limit`; 1 if `limit` is 0 (no clipping).

    The operations are those of torch.nn.utils.clip_grad_norm_, in fp32, for the same bits.
    """
    if not limit:
        return 1.0
    return float(torch.clamp(limit / (torch.tensor(norm, dtype=torch.float32) + 1e-6), max=1.0))


def global_norm(norms: Mapping[str, torch.Tensor]) -> float:
    """Return the norm of all gradients from each weight's, in the model's order; infinite or NaN if any element is."""
    return float(torch.linalg.vector_norm(torch.stack(list(norms.values())))) if norms else 0.0


def norm_of(flat: torch.Tensor) -> torch.Tensor:
    """Return the fp32 norm (0-dim) of one 1-D gradient, on its device.

    On the CPU it is computed in pieces. torch would make an fp32 copy of the whole gradient and sum it sequentially,
    with an error of 1 % at 9e7 elements.
    """
    if flat.device.type != "cpu":
        return torch.linalg.vector_norm(flat, dtype=torch.float32)
    pieces = Pieces.of(flat.numel(), ordered=False)
    return pieces.norm(TorchGradients().add(flat.contiguous(), None, pieces=pieces))


def ordered_norm(flat: torch.Tensor, *, chunks: int | None = None) -> torch.Tensor:
    """Return the fp32 norm (0-dim) of 1-D values, with the same bits on every device.

    The squares of each chunk of 2^20 elements are summed by halving: element i + half is added to element i, until one
    is left. The chunks' sums are added in the same way. Each step is one fp32 operation per element, rounded once,
    which every device computes identically, and padding with zeros changes nothing. `chunks` are processed at a time:
    by default one on the CPU, which fits its cache, and several on a GPU.
    """
    width = piece_width(flat.numel(), ordered=True)
    at_a_time = chunks or (1 if flat.device.type == "cpu" else _CHUNKS_ON_GPU)
    return root_of_sum(torch.cat([sums_of_squares(part, width) for part in flat.split(width * at_a_time)]))
