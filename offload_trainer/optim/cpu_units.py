"""Detect the CPU's units for 16-bit matrix products. Without them torch's products of 16-bit matrices are slow."""

import torch


def has_native_16bit(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies `dtype` matrices in hardware."""
    if dtype is torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if dtype is torch.float16:
        return torch.cpu._is_amx_fp16_supported()
    return True
