"""What a model is made of, counted: all that the plan needs to know of it. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Weight:
    """One parameter tensor, tied ones counted once."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    unit: str = ""  # name of the block that it is in, or of its own module
    block: bool = False  # whether that is one of the repeated blocks
    uses: int = 1  # modules that hold it: 2 for tied embeddings

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices and embeddings; biases and norms are vectors."""
        return len(self.shape) > 1


@dataclass(frozen=True)
class ModelShape:
    """Counts of a causal language model, its parameters in the model's own order."""

    weights: tuple[Weight, ...]
    layers: int
    hidden: int
    vocabulary: int
    context: int

    @property
    def parameters(self) -> int:
        return sum(weight.numel for weight in self.weights)

    @property
    def trainable(self) -> int:
        return sum(weight.numel for weight in self.weights if weight.trainable)

    @property
    def largest(self) -> int:
        return max(weight.numel for weight in self.weights)

    def flops_per_token(self, *, seq_len: int) -> int:
        """Floating-point operations of forward and backward for one token.

        6 a parameter, plus 12 x layers x hidden x seq_len for attention (Chowdhery et al. 2022, PaLM, appendix B);
        recomputation in checkpointing is not counted, as is the custom for model FLOPs utilisation.
        """
        return 6 * self.parameters + 12 * self.layers * self.hidden * seq_len
