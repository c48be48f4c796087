"""Initial weights for benchmarks, filled at memory speed: drawing 10e9 normal values on one thread takes minutes.

They are no real initialisation. Matrices repeat the same 2^24 + 43 normal values with the model's standard deviation,
and each starts at a different offset; norms are ones, biases zeros. Speed, bytes and finiteness match a freshly
initialised model's; losses do not.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch

_PATTERN = (1 << 24) + 43  # numbers; coprime to every width, so that no two rows of a matrix are equal


def filled_for_benchmarks(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, fp32 tensor on the CPU) in the model's order; the same shapes and seed give the same values.

    Matrices are views of one buffer, so that 8e9 parameters need the memory and the time of the largest.
    """
    assert source.random
    largest = max(weight.numel for weight in source.shape.weights if len(weight.shape) > 1)
    count = min(_PATTERN, largest | 1)
    deviation = float(getattr(source.config, "initializer_range", 0.02))
    pattern = torch.randn(count, generator=torch.Generator().manual_seed(source.seed)) * deviation
    repeated = pattern.repeat(largest // count + 2)
    for weight in source.shape.weights:
        if len(weight.shape) == 1:
            yield weight.name, torch.full(weight.shape, 0.0 if weight.name.endswith("bias") else 1.0)
        else:
            yield weight.name, repeated[zlib.crc32(weight.name.encode()) % count :][: weight.numel].view(weight.shape)
