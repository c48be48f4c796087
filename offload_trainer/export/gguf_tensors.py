"""The mapping from a model's parameters to the tensors of a GGUF file: names, shapes, types, bytes and layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offload_trainer.export.gguf_models import ARCHITECTURES, head_size, key_value_heads
from offload_trainer.export.gguf_tokenizer import Config

if TYPE_CHECKING:  # gguf is an extra, so functions import it when they need it
    import gguf
    import numpy as np


@dataclass(frozen=True)
class Tensor:
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType

    @property
    def bytes(self) -> int:
        import gguf

        elements, size = gguf.GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // elements * size


def layout(shapes: Mapping[str, tuple[int, ...]], *, config: Config, dtype: str) -> list[Tensor]:
    """Return the file's tensors in the order of the weights, preceded by the model's rotary factors if it has any."""
    import gguf

    architecture = ARCHITECTURES[config["model_type"]]
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(number, config["n_layer" if architecture.name == "gpt2" else "num_hidden_layers"])
    factors = rotary_factors(config)
    tensors = [Tensor("rope_freqs.weight", (len(factors),), gguf.GGMLQuantizationType.F32)] if len(factors) else []
    for parameter, shape in shapes.items():
        for part, piece in pieces(parameter, torch.empty(shape, device="meta"), config=config):
            name = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert name is not None, f"{architecture.name} has no place for {part}"
            tensors.append(Tensor(name, tuple(piece.shape), _kind(name, piece.shape, dtype=dtype)))
    return tensors


def pieces(name: str, tensor: torch.Tensor, *, config: Config) -> list[tuple[str, torch.Tensor]]:
    """Return a parameter in llama.cpp's layout: transposed, with permuted rows, or split in two; views if possible."""
    module, _, last = name.rpartition(".")
    if config["model_type"] == "gpt2" and module.endswith((".c_attn", ".c_proj", ".c_fc")) and last == "weight":
        return [(name, tensor.T)]  # transformers' Conv1D stores (in, out)
    if ARCHITECTURES[config["model_type"]].name == "llama" and module.endswith((".q_proj", ".k_proj")):
        heads = config["num_attention_heads"] if module.endswith(".q_proj") else key_value_heads(config)
        return [(name, _interleaved(tensor, heads=heads))]
    if name.endswith(".experts.gate_up_proj"):  # (expert, gate's rows then up's, hidden)
        gate, up = tensor.chunk(2, dim=1)
        return [(f"{module}.gate_proj.weight", gate), (f"{module}.up_proj.weight", up)]
    if name.endswith(".experts.down_proj"):
        return [(f"{name}.weight", tensor)]
    if module.endswith(".shared_expert_gate"):
        return [(name, tensor.squeeze(0))]  # one output, so a vector
    return [(name, tensor)]


def _interleaved(tensor: torch.Tensor, *, heads: int) -> torch.Tensor:
    """Permute the rows of each head from halves to pairs, since llama.cpp's llama rotates adjacent rows together."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _kind(name: str, shape: torch.Size, *, dtype: str) -> gguf.GGMLQuantizationType:
    import gguf

    kinds = gguf.GGMLQuantizationType
    small = ("_norm.weight", "position_embd.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")
    if dtype == "f32" or len(shape) < 2 or name.endswith(small):
        return kinds.F32
    return kinds.Q8_0 if dtype == "q8_0" and shape[-1] % gguf.GGML_QUANT_SIZES[kinds.Q8_0][0] == 0 else kinds.F16


def rotary_factors(config: Config) -> torch.Tensor:
    """Return the divisors of the rotary frequencies, fp32 [head size / 2]; empty for unscaled frequencies.

    Llama 3 keeps wavelengths below `original / high_freq_factor`, divides the frequencies of those above
    `original / low_freq_factor` by `factor`, and interpolates between them (transformers' modeling_rope_utils.py,
    `_compute_llama3_parameters`).
    """
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return torch.empty(0)
    size = head_size(config)
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / (kept + (1 - kept) / rope["factor"])).float()


def largest(tensor: torch.Tensor) -> float:
    """Return the largest magnitude, or NaN if the tensor contains one."""
    low, high = tensor.aminmax()  # one pass without a copy
    return torch.maximum(-low, high).item()


def limit(kind: gguf.GGMLQuantizationType) -> float:
    """Return the magnitude from which on values of this type become infinite; infinity for f32.

    f16 rounds to infinity halfway between 65504 and 65536. The scale of a q8_0 block is an f16.
    """
    import gguf

    kinds = gguf.GGMLQuantizationType
    return {kinds.F32: math.inf, kinds.F16: 65520.0, kinds.Q8_0: 65520.0 * 127}[kind]


def encoded(tensor: torch.Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return the tensor as stored in the file: quantised blocks for Q8_0, else numbers."""
    import gguf
    import numpy as np

    if kind is gguf.GGMLQuantizationType.F16:
        return tensor.half().contiguous().numpy()
    with np.errstate(all="ignore"):  # the caller reports overflows by name
        return gguf.quants.quantize(tensor.contiguous().numpy(), kind)
