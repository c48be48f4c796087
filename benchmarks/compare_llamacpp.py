"""Compare exported GGUF files in llama.cpp with transformers: log-probabilities of the next token.

    pip install xllamacpp
    python benchmarks/compare_llamacpp.py

Each architecture is tested with two layers of random weights, three file types and two prompts.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

import torch
import transformers as t
import xllamacpp

from offload_trainer.data.tokenizer import BUILTIN_TOKENIZER
from offload_trainer.export.gguf import DTYPES, write_gguf
from offload_trainer.storage.owned_dirs import scratch

VOCABULARY = 2050
# None of these models predicts the end of text after these prompts; llama.cpp would then return no probabilities.
PROMPTS = [
    [5, 300, 17, 1200, 44, 900, 3, 3, 2000, 8, 77, 123, 456, 789, 1011, 1213, 1415, 1617],
    [700, 1, 2, 3, 4, 5, 6, 7, 8],
]
_IDS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.3}
_GPT2 = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 256, **_IDS}
_COMMON = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, **_IDS,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "gpt2, tied": t.GPT2Config(**_GPT2, n_inner=96),
    "gpt2, untied": t.GPT2Config(**_GPT2, tie_word_embeddings=False),
    "llama, untied": t.LlamaConfig(**_COMMON),
    "llama, biases": t.LlamaConfig(**_COMMON, attention_bias=True, mlp_bias=True, head_dim=32),
    "llama 3's rope, tied": t.LlamaConfig(**_COMMON, tie_word_embeddings=True, rope_parameters=_LLAMA3),
    "mistral": t.MistralConfig(**_COMMON, sliding_window=None),
    "mixtral": t.MixtralConfig(**_COMMON, num_local_experts=4),
    "qwen2, tied": t.Qwen2Config(**_COMMON, tie_word_embeddings=True),
    "qwen3": t.Qwen3Config(**_COMMON, head_dim=32),
    "qwen2moe": t.Qwen2MoeConfig(**_COMMON, **_EXPERTS, shared_expert_intermediate_size=96),
    "qwen3moe": t.Qwen3MoeConfig(**_COMMON, **_EXPERTS, norm_topk_prob=True, head_dim=32),
}


def main() -> None:
    print(f"xllamacpp {xllamacpp.__version__}, transformers {t.__version__}, torch {torch.__version__}\n")
    print("| model | type | largest difference of log-probability | spread of them | same likeliest token |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    with scratch("llamacpp-") as folder:
        for name, config in MODELS.items():
            directory = folder / name.replace(" ", "-")
            model = save(config, directory)
            with torch.no_grad():
                right = [model(torch.tensor([ids])).logits[0, -1].log_softmax(-1) for ids in PROMPTS]
            for dtype in DTYPES:
                file = directory / f"{dtype}.gguf"
                weights = dict(model.named_parameters())
                shapes = {key: tuple(value.shape) for key, value in weights.items()}
                stream = ((key, value.detach()) for key, value in weights.items())
                write_gguf(stream, file, shapes=shapes, model=directory, dtype=dtype)
                theirs = list(map(log_probabilities(file), PROMPTS))
                apart = max((one - other).abs().max().item() for one, other in zip(theirs, right, strict=True))
                same = all(int(one.argmax()) == int(other.argmax()) for one, other in zip(theirs, right, strict=True))
                spread = torch.stack(right).std().item()
                print(f"| {name} | {dtype} | {apart:.2g} | {spread:.2g} | {'yes' if same else 'NO'} |", flush=True)
    sys.stdout.flush()
    os._exit(0)  # the servers' threads never end


def save(config: Any, directory: Path) -> Any:
    """Create a model with random weights, including norms and biases, and its export directory without weights."""
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    t.AutoTokenizer.from_pretrained(BUILTIN_TOKENIZER).save_pretrained(directory)
    return model


def log_probabilities(file: Path) -> Any:
    """Return a function from a prompt's ids to llama.cpp's log-probabilities of the next token, fp32 [vocabulary]."""
    wishes = xllamacpp.CommonParams()
    wishes.model.path = str(file)
    wishes.n_ctx, wishes.n_parallel, wishes.n_gpu_layers, wishes.cpuparams.n_threads = 256, 1, 0, 1
    wishes.warmup, wishes.verbosity, wishes.fit_params = False, -1, False
    wishes.cache_type_k = wishes.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    wishes.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(wishes)

    def ask(ids: list[int]) -> torch.Tensor:
        body = {"prompt": ids, "n_predict": 1, "n_probs": VOCABULARY, "temperature": 0, "cache_prompt": False}
        request = urllib.request.Request(
            f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            told = json.load(answer)["completion_probabilities"][0]["top_logprobs"]
        out = torch.full((VOCABULARY,), float("nan"))
        for one in told:
            out[one["id"]] = one["logprob"]
        assert not out.isnan().any(), f"{int(out.isnan().sum())} tokens have no probability"
        return out

    return ask


if __name__ == "__main__":
    main()
