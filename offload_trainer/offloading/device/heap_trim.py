"""Return freed activation memory from the CPU's heap to the system between blocks, when training on a CPU.

glibc up to 2.37 cuts each aligned allocation out of a larger one and does not reuse the holes. With allocations of up
to 10 MiB, a forward through 24 blocks of GPT-2 leaves 570 MB of holes, in addition to the largest tensors: the loss and
the embeddings' gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.utils.hooks import RemovableHandle

from offload_trainer.storage.host_memory import return_now

_EVERY = 8  # blocks between trims; a trim takes 10 ms, and a block of 1024 x 1024 elements leaves 20 MB


def trimmed(blocks: Sequence[tuple[nn.Module, nn.Parameter | None]]) -> list[RemovableHandle]:
    """Register hooks that trim the heap after every 8th block, in forward and backward; return them.

    Each block comes with the parameter whose gradient is its last, or None if the block is frozen.
    """
    hooks = []
    for number, (module, parameter) in enumerate(blocks):
        if (number + 1) % _EVERY == 0 or module is blocks[-1][0]:
            hooks.append(module.register_forward_hook(_after_forward))
        if number % _EVERY == 0 and parameter is not None:
            hooks.append(parameter.register_post_accumulate_grad_hook(_after_gradient))
    return hooks


def _after_forward(module: nn.Module, given: object, output: object) -> None:
    return_now()


def _after_gradient(parameter: nn.Parameter) -> None:
    return_now()
