"""Torch dtypes by their names in configurations, plans and this package's files."""

import torch

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int16": torch.int16,
    "uint8": torch.uint8,
}
