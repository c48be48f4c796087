"""Write small models as transformers 4.57 and 5 save them, and print what they and llama.cpp compute from exports.

As a script: `write DIR` writes MODELS, `read DIR ...` and `llamacpp CASES` print JSON lists of what functions return.
"""

import json
import os
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaTokenizerFast, PreTrainedTokenizerFast

TEXT = "It was the best of times, it was the worst of times."
TEXTS = [TEXT, "  two\n\nlines 123 é", "</s>after <s> and <|end|>between<|end|> special tokens"]
CHAT = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Yes."}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
_SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "rope_theta": 300.0}
_SIZES |= {"pad_token_id": None, "tie_word_embeddings": False}
_GEMMA = {
    "head_dim": 16, "sliding_window": 8, "tie_word_embeddings": True, "query_pre_attn_scalar": 16,
    "initializer_range": 0.15,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def pieces() -> PreTrainedTokenizerFast:
    """Return a tokenizer of SentencePiece's kind: letters and bytes, no merges."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *sorted(set(TEXT) - {" "})]
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(ids, [], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def llama_pieces() -> PreTrainedTokenizerFast:
    """Return `pieces` as Llama's class, which transformers 5 rebuilds: it adds no space after special tokens."""
    if transformers.__version__ < "5":
        return LlamaTokenizerFast(tokenizer_object=pieces().backend_tokenizer, add_bos_token=True, legacy=False)
    return LlamaTokenizerFast(vocab=pieces().get_vocab(), merges=[])


def byte_letters() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with one merge and a further special token."""
    alphabet = ["<s>", "</s>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, [("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    special = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<|end|>"]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


# Model type, its configuration under the names of transformers 4, and its tokenizer
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], PreTrainedTokenizerFast]]] = {
    "llama": ("llama", {**_SIZES, "tie_word_embeddings": True}, llama_pieces),
    "llama3.1": ("llama", {**_SIZES, "rope_scaling": _LLAMA3}, byte_letters),
    "qwen3": ("qwen3", {**_SIZES, "head_dim": 16}, byte_letters),
    "mixtral": ("mixtral", {**_SIZES, "head_dim": 16, "num_local_experts": 4, "sliding_window": None}, pieces),
    # llama.cpp knows the base of Gemma's local layers, and that each sixth is global.
    "gemma3": ("gemma3_text", {**_SIZES, **_GEMMA, "num_hidden_layers": 6}, byte_letters),
    "gpt2": (
        "gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.15}, byte_letters
    ),
}  # fmt: skip


def write(directory: Path, name: str) -> None:
    """Write a model of MODELS with random weights and its tokenizer."""
    kind, words, made = MODELS[name]
    tokenizer = made()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    torch.manual_seed(3)
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **special, **words)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # llama.cpp reads gelu from a table in fp16, which is to be seen less than a wrong base
        for name, parameter in model.named_parameters():
            if name.endswith(("mlp.down_proj.weight", "mlp.c_proj.weight")):
                parameter.mul_(0.2)
            elif name.endswith("post_feedforward_layernorm.weight"):  # Gemma's, to which it adds 1
                parameter.sub_(0.8)
    model.save_pretrained(directory)


def read(directory: Path) -> dict[str, Any]:
    """Return the ids of TEXTS and of a chat, and the logits of TEXT, which is longer than a sliding window."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", attn_implementation="eager")
    dtype = str(model.dtype)
    model.float()  # the releases add a mixture's experts in other orders
    ids = tokenizer(TEXT)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    chat = tokenizer.apply_chat_template(CHAT, tokenize=False)
    return {
        "ids": [tokenizer(text)["input_ids"] for text in TEXTS],
        "chat": tokenizer(chat, add_special_tokens=False)["input_ids"],
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, sorted(tokenizer.all_special_ids)],
        "dtype": dtype,
        "logits": logits.tolist(),
    }


def log_probabilities(file: str, vocabulary: int, prompts: list[list[int]]) -> list[list[float]]:
    """Return llama.cpp's log-probabilities of the next token after each prompt, computed in fp32 if the file is."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = file
    settings.n_ctx, settings.n_parallel, settings.n_gpu_layers, settings.cpuparams.n_threads = 256, 1, 0, 1
    settings.warmup, settings.verbosity, settings.fit_params = False, -1, False
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(settings)
    # The answer has no probabilities if its token ends the text or is part of a character. The bias chooses the
    # token; the probabilities are those without the bias.
    bias = {"temperature": 0, "logit_bias": [[prompts[-1][-1], 1000]]}
    found = []
    for ids in prompts:
        body = {"prompt": ids, "n_predict": 1, "n_probs": vocabulary, "cache_prompt": False, **bias}
        request = urllib.request.Request(
            f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            told = json.load(answer)["completion_probabilities"][0]["top_logprobs"]
        by_id = {token["id"]: token["logprob"] for token in told}
        found.append([by_id[number] for number in range(vocabulary)])
    return found


if __name__ == "__main__":
    if sys.argv[1] == "write":
        for name in MODELS:
            write(Path(sys.argv[2]) / name, name)
    elif sys.argv[1] == "read":
        print(json.dumps([read(Path(directory)) for directory in sys.argv[2:]]))
    else:
        print(json.dumps([log_probabilities(*case) for case in json.loads(sys.argv[2])]), flush=True)
        os._exit(0)  # the threads of llama.cpp's servers never end
