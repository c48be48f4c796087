"""Build small transformers models of many architectures, with random weights, for tests."""

import copy

import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Qwen2MoeConfig,
    Qwen3Config,
)

_COMMON = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_COMMON |= {"num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 64}
_COMMON |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
ARCHITECTURES = {
    "gpt2": GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=99, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
    "llama, untied": LlamaConfig(**_COMMON, tie_word_embeddings=False),
    "qwen3, tied": Qwen3Config(**_COMMON, head_dim=8, tie_word_embeddings=True),
    "gemma2, soft-capped": Gemma2Config(**_COMMON, head_dim=8, final_logit_softcapping=3.0),
    "granite, scaled": GraniteConfig(**_COMMON, logits_scaling=8.0),
    "opt, whose head calls a part of the body": OPTConfig(
        **_COMMON | {"num_key_value_heads": None}, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0
    ),
    "falcon-h1, whose head reads a scale of the body": FalconH1Config(
        **_COMMON, lm_head_multiplier=3.0, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8
    ),
    "mixtral, experts": MixtralConfig(**_COMMON, num_local_experts=4),
    "qwen2moe, shared expert": Qwen2MoeConfig(
        **_COMMON, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
}


def reference(config):
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation="eager")
