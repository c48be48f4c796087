"""Replace a model's norms, rotary embeddings and gated MLPs by Liger-Kernel's Triton kernels (`model.kernels=liger`).

liger_kernel patches transformers' classes for the whole process and the modules of one model. Its fused loss stays
off, because the chunked loss (`model/loss.py`) needs the hidden states.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from offload_trainer.errors import UserError
from offload_trainer.packages import is_installed, lacks

_OWN_LOSS = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def refuse_without_liger(model_type: str) -> None:
    """Raise UserError if Liger-Kernel cannot run here, is not installed, or has no kernels for `model_type`."""
    if not torch.cuda.is_available():
        raise UserError(
            "model.kernels=liger: Triton kernels need a GPU, and there is none here: use model.kernels=torch"
        )
    if not is_installed("liger_kernel"):
        raise UserError(lacks("model.kernels=liger", "liger-kernel"))
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        known = ", ".join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))
        raise UserError(
            f"model.kernels=liger: the installed liger-kernel has no kernels for {model_type} (it has them for "
            f"{known}): use model.kernels=torch"
        )


def use_liger(model: PreTrainedModel) -> None:
    """Replace what Liger-Kernel has kernels for, except the loss."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, **_OWN_LOSS)
