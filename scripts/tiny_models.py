"""A tiny configuration of every causal language model that transformers has: its defaults, shrunk by rules.

Widths, heads and experts become small numbers, whatever their keys are called; of the layers one of each kind is left,
two at least. No dropout and no noise, so that whoever runs the model computes the same.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

VOCABULARY, POSITIONS, HIDDEN, HEADS = 211, 64, 32, 4

_LAYERS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|num_(de|en)coder_layers|(de|en)coder_layers|num_blocks)$"
)
# The first rule whose pattern is found in a key of this name says what its number becomes, where it is larger.
_RULES: tuple[tuple[str, int], ...] = (
    (r"token_id$|_index$|^seed$", 10**9),
    (r"vocab", VOCABULARY),
    (
        r"position_bias_max_distance|positions|position_embeddings$|context_length|n_ctx|max_seq_len|model_max_length",
        POSITIONS,
    ),
    (r"experts_per_tok|moe_(topk|k)$|topk_group|top_k_experts", 2),
    (r"zero_expert", 2),
    (r"n_group$|expert_group", 2),
    (r"experts?$", 8),
    (r"kv_heads|key_value_heads|query_groups|linear_num_key_heads", 2),
    (r"heads|n_head$|n_groups$|o_groups$", HEADS),
    (r"head_dim|d_head|dim_head|head_size|kv_channels|headdim|rotary_dim|v_head_dim", HIDDEN // HEADS),
    (r"hidden_size_per_layer_input|rank$|time_step_rank", 8),
    (r"^(intermediate_size|ffn|dff|dim_ff|.*intermediate|.*ffn|feed_forward|d_inner|expert_ffn)", 48),
    (r"hidden_size|d_model|n_embd|embed|emb_dim|dim_model|lru_width|mamba_d_ssm", HIDDEN),
    (r"d_state|state_size|chunk|block_size|window|extent|index_topk|local_attention$|index_block", 8),
    (r"buckets", 8),
)
_CHANCE = re.compile(r"drop|jitter|noise")
_PAIRS = (("num_attention_heads", "num_key_value_heads"), ("n_heads", "n_kv_heads"))  # the same where they are at first


def kinds() -> dict[str, type[PreTrainedConfig]]:
    """By the name of its configuration, every architecture that `AutoModelForCausalLM` builds."""
    return {kind.__name__.removesuffix("Config"): kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING}


def tiny_config(kind: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    """`kind` with its defaults shrunk; `changes` are the caller's, on top."""
    return _shrunk(kind, kind(**_NEEDED.get(kind.__name__, {})), changes)


def _shrunk(kind: type[PreTrainedConfig], whole: PreTrainedConfig, changes: dict[str, Any]) -> PreTrainedConfig:
    held = {key: value for key, value in vars(whole).items() if not key.startswith("_") and key not in _LEFT}
    made: dict[str, Any] = {}
    for key, value in held.items():
        if isinstance(value, PreTrainedConfig):
            made[key] = _shrunk(type(value), value, {})
        elif isinstance(value, float) and _CHANCE.search(key):
            made[key] = 0.0
        elif isinstance(value, int) and not isinstance(value, bool) and _number(key, value) != value:
            made[key] = _number(key, value)
    for heads, keys in _PAIRS:
        if keys in made and held[keys] == held.get(heads):
            made[keys] = made[heads]
    made |= _layers(held)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        if isinstance(held.get(token), int | list):
            made[token] = {"bos_token_id": 1, "pad_token_id": 0}.get(token, 2)
    given = _NEEDED.get(kind.__name__, {})
    return kind(**made | given | _CHANGES.get(kind.__name__, {}) | changes)


def _number(key: str, value: int) -> int:
    most = next((most for pattern, most in _RULES if re.search(pattern, key)), value)
    return min(value, most)


def _layers(held: dict[str, Any]) -> dict[str, Any]:
    """Keys with how many layers there are, and the lists with something for each, cut to one layer of each kind."""
    counts = {key: value for key, value in held.items() if isinstance(value, int) and _LAYERS.search(key)}
    if not counts:
        return {}
    count = max(counts.values())
    lists = {k: list(v) for k, v in held.items() if isinstance(v, list | tuple) and len(v) == count and count > 2}
    kinds = list(zip(*lists.values(), strict=True))
    chosen = sorted({kinds.index(one) for one in kinds})[:4]
    while len(chosen) < min(2, count):
        chosen.append(chosen[-1] if chosen else 0)
    made: dict[str, Any] = {key: min(value, len(chosen)) for key, value in counts.items()}
    return made | {key: [_item(key, values[place]) for place in chosen] for key, values in lists.items()}


def _item(key: str, value: Any) -> Any:
    return _number(key, value) if type(value) is int else value


_LEFT = {"transformers_version", "architectures", "id2label", "label2id", "model_type", "dtype"}
_PLAIN = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_hidden_layers": 2}
_NEEDED: dict[str, dict[str, Any]] = {  # without which there are no defaults
    "Gemma4AssistantConfig": {"text_config": _PLAIN | {"num_kv_shared_layers": 2}},
}
_HYBRID = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HIDDEN // HEADS}
_ATTENTION = {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HIDDEN // HEADS}
_CHANGES: dict[str, dict[str, Any]] = {  # what no rule finds
    "BambaConfig": {"mamba_d_head": 2 * HIDDEN // HEADS},
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
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
