"""Tiny configurations of every causal language model in transformers, made by shrinking its defaults.

`offload_trainer.model.tiny_model` has the rules. This module has the exceptions, for classes whose shrunk
defaults give no valid model.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from offload_trainer.model.tiny_model import HEADS, HIDDEN, VOCABULARY, shrunk_keys

__all__ = ["VOCABULARY", "kinds", "tiny_config"]


def kinds() -> dict[str, type[PreTrainedConfig]]:
    """Return the architectures that `AutoModelForCausalLM` builds, by the name of their configuration."""
    return {kind.__name__.removesuffix("Config"): kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING}


def tiny_config(kind: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    """Return a `kind` with its defaults shrunk; `changes` override them."""
    return _shrunk(kind(**_NEEDED.get(kind.__name__, {})), changes)


def _shrunk(whole: PreTrainedConfig, changes: dict[str, Any]) -> PreTrainedConfig:
    made = {k: _shrunk(v, {}) if isinstance(v, PreTrainedConfig) else v for k, v in shrunk_keys(whole).items()}
    kind = type(whole)
    return kind(**made | _NEEDED.get(kind.__name__, {}) | _CHANGES.get(kind.__name__, {}) | changes)


_PLAIN = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_hidden_layers": 2}
_NEEDED: dict[str, dict[str, Any]] = {  # classes that cannot be built from defaults
    "Gemma4AssistantConfig": {"text_config": _PLAIN | {"num_kv_shared_layers": 2}},
}
_HYBRID = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HIDDEN // HEADS}
_ATTENTION = {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HIDDEN // HEADS}
_CHANGES: dict[str, dict[str, Any]] = {  # exceptions to the rules
    "BambaConfig": {"mamba_d_head": 2 * HIDDEN // HEADS},
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "Cosmos3EdgeTextConfig": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    },
    "DbrxAttentionConfig": {"rope_theta": 1e4, "clip_qkv": 8.0},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "Dots1Config": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Dots3NoteAudioConfig": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN},
    "Dots3NoteTextConfig": {
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 8,
        "swa_kv_lora_rank": 8,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "Dots3NoteVisionConfig": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
    "FlintConfig": {"mlp_only_layers": [0]},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0},
    "Glm5NextTextConfig": {"index_kpool": 2},  # index_topk has to be a multiple
    "GraniteMoeHybridConfig": {"mamba_d_head": 2 * HIDDEN // HEADS},
    "HunYuanDenseV1Config": {"head_dim": HIDDEN // HEADS},
    "HunYuanMoEV1Config": {"head_dim": HIDDEN // HEADS},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "LongcatFlashConfig": {"head_dim": HIDDEN // HEADS, "qk_head_dim": 2 * HIDDEN // HEADS},
    "Mamba2Config": {"head_dim": 2 * HIDDEN // HEADS},
    "MinistralConfig": {"head_dim": HIDDEN // HEADS},
    "NemotronConfig": {"num_key_value_heads": 2},
    "Qwen4ExpTextConfig": {"indexer_budget": 8, "indexer_compress_ratio": 2} | _INDEXER,
    "ReformerConfig": {"is_decoder": True, "hash_seed": 0, "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16]},
    "RwkvConfig": {"rescale_every": 1},
    "XmodConfig": {"default_language": "en_XX"},
    "xLSTMConfig": {"max_inference_chunksize": 16384},
    "ZambaConfig": {"num_hidden_layers": 4, "layers_block_type": _HYBRID} | _ATTENTION,
    "Zamba2Config": _ATTENTION | {"num_hidden_layers": 4, "mamba_headdim": 16, "layers_block_type": _HYBRID},
}
