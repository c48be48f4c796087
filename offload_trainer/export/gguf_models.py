"""The models that llama.cpp computes as transformers does: their names, metadata and tensors in a GGUF file.

Names and fixed values follow https://github.com/ggml-org/llama.cpp (convert_hf_to_gguf.py and conversion/).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from offload_trainer.errors import UserError
from offload_trainer.export.gguf_tokenizer import ELSEWHERE, Config
from offload_trainer.model.checkpoint_mapping import read_model_config

if TYPE_CHECKING:  # gguf is an extra, so functions import it when they need it
    import gguf
    import numpy as np


@dataclass(frozen=True)
class Architecture:
    """llama.cpp's name for a transformers model, and the configuration values that its code assumes."""

    model_class: str
    name: str
    given: Mapping[str, tuple[object, ...]] = field(default_factory=dict)


_GATED: dict[str, tuple[object, ...]] = {"hidden_act": ("silu",)}
_EXPERTS_IN_EVERY_BLOCK: dict[str, tuple[object, ...]] = {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}
ARCHITECTURES = {
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "add_cross_attention": (False,),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
    ),
    "llama": Architecture("LlamaForCausalLM", "llama", _GATED),
    "mistral": Architecture("MistralForCausalLM", "llama", _GATED),
    "mixtral": Architecture("MixtralForCausalLM", "llama", _GATED),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _GATED),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", _GATED | {"attention_bias": (False,)}),
    "qwen2_moe": Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2moe",
        _GATED | _EXPERTS_IN_EVERY_BLOCK | {"qkv_bias": (True,), "norm_topk_prob": (False,)},
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3moe",
        _GATED | _EXPERTS_IN_EVERY_BLOCK | {"attention_bias": (False,), "norm_topk_prob": (True,)},
    ),
}
_ROPE_KEYS = {
    "default": {"rope_theta"},
    "llama3": {
        *("rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    },
}


def read_config(model: Path) -> Config:
    """Read a config.json with all of transformers' defaults filled in.

    Raises:
        UserError: llama.cpp would compute a different model.
    """
    config: Config = read_model_config(model)
    classes = config.get("architectures") or []
    known = ARCHITECTURES.get(config.get("model_type", ""))
    if known is None or any(name != known.model_class for name in classes):
        supported = ", ".join(architecture.model_class for architecture in ARCHITECTURES.values())
        raise UserError(
            f"{', '.join(classes) or config.get('model_type')} cannot be written as GGUF here, "
            f"only {supported}; {ELSEWHERE}"
        )
    problems = [
        f"{key} is {config.get(key)!r}, there it is {' or '.join(map(repr, values))}"
        for key, values in known.given.items()
        if config.get(key) not in values
    ] + _attention_problems(config, known)
    if problems:
        raise UserError(f"llama.cpp computes {known.name} differently from this model: {'; '.join(problems)}")
    return config


def _attention_problems(config: Config, architecture: Architecture) -> list[str]:
    if architecture.name == "gpt2":
        return []
    problems = []
    window, context = config.get("sliding_window"), config["max_position_embeddings"]
    if (window and window < context) or set(config.get("layer_types") or ()) - {"full_attention"}:
        problems.append(f"sliding_window is {window} and the context {context}, there all layers see the whole context")
    rope = {key: value for key, value in (config.get("rope_parameters") or {}).items() if value is not None}
    kind = rope.pop("rope_type", "default")
    known = _ROPE_KEYS.get(kind, set())
    if not known or rope.keys() != known or (kind == "llama3" and architecture.name != "llama"):
        problems.append(
            f"rope_parameters are {config.get('rope_parameters')}, there only 'default' or Llama's 'llama3'"
        )
    return problems


def add_model(writer: gguf.GGUFWriter, config: Config) -> None:
    """Add the model's sizes and constants to the metadata."""
    if config["model_type"] == "gpt2":
        writer.add_block_count(config["n_layer"])
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_feed_forward_length(config["n_inner"] or 4 * config["n_embd"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(_key_value_heads(config))
    writer.add_key_length(_head_size(config))
    writer.add_value_length(_head_size(config))
    writer.add_rope_dimension_count(_head_size(config))
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    experts = config.get("num_local_experts") or config.get("num_experts")
    if not experts:
        return
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _key_value_heads(config: Config) -> int:
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def _head_size(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


# -- tensors ----------------------------------------------------------------------------------------------------------


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
        # llama.cpp's llama rotates adjacent rows together, so each head's rows are permuted from halves to pairs.
        heads = config["num_attention_heads"] if module.endswith(".q_proj") else _key_value_heads(config)
        return [(name, tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2))]
    if name.endswith(".experts.gate_up_proj"):  # (expert, gate's rows then up's, hidden)
        gate, up = tensor.chunk(2, dim=1)
        return [(f"{module}.gate_proj.weight", gate), (f"{module}.up_proj.weight", up)]
    if name.endswith(".experts.down_proj"):
        return [(f"{name}.weight", tensor)]
    if module.endswith(".shared_expert_gate"):
        return [(name, tensor.squeeze(0))]  # one output, so a vector
    return [(name, tensor)]


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
    size = _head_size(config)
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
