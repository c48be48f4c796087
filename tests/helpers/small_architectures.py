"""Build small transformers models of many architectures, with random weights, for tests."""

import copy

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_COMMON = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_COMMON |= {"num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 64}
_COMMON |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 99, "n_positions": 64}
_OPT = _COMMON | {"num_key_value_heads": None, "ffn_dim": 48, "word_embed_proj_dim": 32}
_MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
_config = AutoConfig.for_model
ARCHITECTURES = {
    "gpt2": _config("gpt2", **_GPT2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    "llama, untied": _config("llama", **_COMMON, tie_word_embeddings=False),
    "qwen3, tied": _config("qwen3", **_COMMON, head_dim=8, tie_word_embeddings=True),
    "gemma2, soft-capped": _config("gemma2", **_COMMON, head_dim=8, final_logit_softcapping=3.0),
    "granite, scaled": _config("granite", **_COMMON, logits_scaling=8.0),
    "opt, whose head calls a part of the body": _config("opt", **_OPT, dropout=0.0),
    "falcon-h1, whose head reads a scale of the body": _config(
        "falcon_h1", **_COMMON, **_MAMBA, lm_head_multiplier=3.0
    ),
    "mixtral, experts": _config("mixtral", **_COMMON, num_local_experts=4),
    "qwen2moe, shared expert": _config("qwen2_moe", **_COMMON, **_EXPERTS),
}


def reference(config):
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation="eager")
