"""The models that llama.cpp computes as transformers does, with llama.cpp's names and required metadata.

Names and fixed values follow https://github.com/ggml-org/llama.cpp (convert_hf_to_gguf.py and conversion/).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from offload_trainer.errors import UserError
from offload_trainer.export.gguf_tokenizer import ELSEWHERE, Config
from offload_trainer.model.checkpoint_mapping import read_model_config

if TYPE_CHECKING:  # gguf is an extra, so functions import it when they need it
    import gguf


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
    problems = _given_problems(config, known) + _attention_problems(config, known)
    if problems:
        raise UserError(f"llama.cpp computes {known.name} differently from this model: {'; '.join(problems)}")
    return config


def _given_problems(config: Config, architecture: Architecture) -> list[str]:
    return [
        f"{key} is {config.get(key)!r}, there it is {' or '.join(map(repr, values))}"
        for key, values in architecture.given.items()
        if config.get(key) not in values
    ]


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
        _add_gpt2(writer, config)
    else:
        _add_llama_like(writer, config)
        _add_experts(writer, config)


def _add_gpt2(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(config["n_inner"] or 4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _add_llama_like(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(key_value_heads(config))
    writer.add_key_length(head_size(config))
    writer.add_value_length(head_size(config))
    writer.add_rope_dimension_count(head_size(config))
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_experts(writer: gguf.GGUFWriter, config: Config) -> None:
    experts = config.get("num_local_experts") or config.get("num_experts")
    if not experts:
        return
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def key_value_heads(config: Config) -> int:
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def head_size(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
