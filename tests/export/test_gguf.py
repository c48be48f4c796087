"""Tests of GGUF export: transformers reads the weights back, and the gguf package names, types and metadata."""

from __future__ import annotations

import copy
import json
import resource
import shutil
import sys
import weakref
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from offload_trainer.data.tokenizer import BUILTIN_TOKENIZER
from offload_trainer.errors import TrainerError, UserError
from offload_trainer.export import gguf as export_gguf
from offload_trainer.export.gguf import write_gguf

ROWS = 2051  # three more than the tokens of the built-in tokenizer
_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 80,  # no multiple of 32: down_proj's rows cannot be q8_0
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": ROWS,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_GPT2 = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": ROWS, "n_positions": 96, "n_inner": 80}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "gpt2, tied": GPT2Config(**_GPT2, initializer_range=0.3),
    "gpt2, untied": GPT2Config(**_GPT2, initializer_range=0.3, tie_word_embeddings=False),
    "llama, untied": LlamaConfig(**_COMMON),
    "llama, tied, one group": LlamaConfig(**_COMMON | {"num_key_value_heads": 4}, tie_word_embeddings=True),
    "llama, biases, wide heads": LlamaConfig(**_COMMON, attention_bias=True, mlp_bias=True, head_dim=32),
    "mistral": MistralConfig(**_COMMON, sliding_window=96),
    "qwen2, tied": Qwen2Config(**_COMMON, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_COMMON, head_dim=32),
    "qwen2 experts": Qwen2MoeConfig(**_COMMON, **_EXPERTS, shared_expert_intermediate_size=96),
    "qwen3 experts": Qwen3MoeConfig(**_COMMON, **_EXPERTS, norm_topk_prob=True, head_dim=32),
}
# Options that the file has and transformers' reader ignores: (its option, the file's key).
UNREAD = {
    "gpt2": (("n_positions", "context_length"), ("n_inner", "feed_forward_length")),
    "qwen3": (("head_dim", "attention.key_length"),),
    "qwen2_moe": (
        ("moe_intermediate_size", "expert_feed_forward_length"),
        ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
    ),
    "qwen3_moe": (("moe_intermediate_size", "expert_feed_forward_length"),),
}


def random_model(config):
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # ones and zeros would hide exchanged vectors
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save(model, directory: Path, tokenizer=None) -> Path:
    """Save a model's config and tokenizer, as a run does next to its weights."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    (tokenizer or AutoTokenizer.from_pretrained(BUILTIN_TOKENIZER)).save_pretrained(directory)
    return directory


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def write(model, path: Path, *, dtype: str = "f32", tokenizer=None, given=None) -> gguf.GGUFReader:
    held = weights_of(model)
    shapes = {name: tuple(weight.shape) for name, weight in held.items()}
    directory = save(model, path.parent / "model", tokenizer)
    write_gguf(given or iter(held.items()), path, shapes=shapes, model=directory, dtype=dtype)
    return gguf.GGUFReader(path)


def value(reader: gguf.GGUFReader, key: str):
    field = reader.fields.get(key)
    return field and field.contents()


def kinds(reader: gguf.GGUFReader) -> dict[str, Kind]:
    return {tensor.name: tensor.tensor_type for tensor in reader.tensors}


def reloaded(path: Path):
    """Return the model that transformers builds from the file alone.

    `from_pretrained(gguf_file=...)` does the same but requires accelerate.
    """
    options = dict(load_gguf_checkpoint(path)["config"])
    reader = gguf.GGUFReader(path)
    kind = options.pop("model_type")
    for option, key in UNREAD.get(kind, ()):
        options[option] = value(reader, f"{value(reader, 'general.architecture')}.{key}")
    if kind == "llama":  # its file has no flag for biases
        options |= {
            "attention_bias": "blk.0.attn_q.bias" in kinds(reader),
            "mlp_bias": "blk.0.ffn_up.bias" in kinds(reader),
        }
    config = AutoConfig.for_model(kind, **options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    return model


@pytest.mark.parametrize("name", MODELS)
def test_f32_has_all_bits_and_the_same_logits(name: str, tmp_path: Path) -> None:
    model = random_model(MODELS[name])
    write(model, tmp_path / "out.gguf")
    again = reloaded(tmp_path / "out.gguf")
    held = weights_of(again)
    for key, weight in weights_of(model).items():
        assert torch.equal(held[key], weight), key
    ids = torch.randint(0, ROWS, (2, 33))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["gpt2, tied", "llama, untied", "qwen2 experts"])
def test_f16_is_rounded_once_and_what_is_small_stays_f32(name: str, tmp_path: Path) -> None:
    model = random_model(MODELS[name])
    reader = write(model, tmp_path / "out.gguf", dtype="f16")
    held = weights_of(reloaded(tmp_path / "out.gguf"))
    whole = (".wpe.weight", ".mlp.gate.weight", ".shared_expert_gate.weight")
    for key, weight in weights_of(model).items():
        exact = weight.dim() == 1 or key.endswith(whole)
        assert torch.equal(held[key], weight if exact else weight.half().float()), key
    assert value(reader, "general.file_type") == gguf.LlamaFileType.MOSTLY_F16
    assert kinds(reader)["token_embd.weight"] is Kind.F16


def blocks_of_q8(tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return (values, scale of each) of q8_0 bytes: blocks of 32, with an f16 scale and 32 signed bytes."""
    raw = np.asarray(tensor.data).reshape(-1, 34)
    scales = raw[:, :2].copy().view(np.float16).astype(np.float64)
    values = raw[:, 2:].copy().view(np.int8) * scales
    return values, scales.repeat(32, axis=1)


@pytest.mark.parametrize("name", ["gpt2, tied", "llama, untied", "qwen3 experts"])
def test_q8_0_is_within_half_a_step(name: str, tmp_path: Path) -> None:
    model = random_model(MODELS[name])
    reader = write(model, tmp_path / "out.gguf", dtype="q8_0")
    again = reloaded(tmp_path / "out.gguf")
    held, found = weights_of(again), kinds(reader)
    assert value(reader, "general.file_type") == gguf.LlamaFileType.MOSTLY_Q8_0
    down = "ffn_down_exps" if "experts" in name else "ffn_down"
    assert found[f"blk.0.{down}.weight"] is Kind.F16  # rows of 80 or 48 elements
    assert found["token_embd.weight"] is found["blk.1.attn_output.weight"] is Kind.Q8_0
    assert {kind for key, kind in found.items() if "norm" in key or key.endswith("bias")} == {Kind.F32}
    errors = []
    for key, weight in weights_of(model).items():
        turned = "gpt2" in name and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        rows, got = (tensor.T if turned else tensor for tensor in (weight, held[key]))
        if weight.dim() > 1 and rows.shape[-1] % 32 == 0 and not key.endswith(("wpe.weight", "mlp.gate.weight")):
            rows, got = (tensor.reshape(-1, 32).double() for tensor in (rows, got))
            largest = rows.abs().amax(1, keepdim=True)
            # Half a quantisation step, plus the rounding of the scale to f16's 11 bits, times at most 127.
            assert ((rows - got).abs() <= largest / 127 / 2 + largest * 2**-11).all(), key
            errors.append(((rows - got).abs() / (largest / 127)).max().item())
    assert max(errors) > 0.45  # the steps are not finer than q8_0's
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    expected = (held.get("model.embed_tokens.weight", held.get("transformer.wte.weight"))).double().numpy()
    assert np.array_equal(blocks_of_q8(embedding)[0].reshape(expected.shape), expected)


def test_metadata_and_names_of_a_llama(tmp_path: Path) -> None:
    model = random_model(MODELS["llama, biases, wide heads"])
    reader = write(model, tmp_path / "out.gguf", dtype="f16")
    shared = {key: value(reader, key) for key in reader.fields if not key.startswith(("GGUF.", "tokenizer."))}
    epsilon = shared.pop("llama.attention.layer_norm_rms_epsilon")
    assert epsilon == pytest.approx(1e-6)
    assert shared == {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "out",
        "general.file_type": 1,
        "general.quantization_version": 2,
        "llama.block_count": 2,
        "llama.context_length": 96,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 80,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 32,
        "llama.attention.value_length": 32,
        "llama.rope.dimension_count": 32,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": ROWS,
    }
    matrices = [f"attn_{part}" for part in ("q", "k", "v", "output")] + [
        f"ffn_{part}" for part in ("gate", "up", "down")
    ]
    expected = {"token_embd.weight": Kind.F16, "output_norm.weight": Kind.F32, "output.weight": Kind.F16}
    for block in range(2):
        expected |= {f"blk.{block}.{part}.weight": Kind.F16 for part in matrices}
        expected |= {f"blk.{block}.{part}.bias": Kind.F32 for part in matrices}
        expected |= {f"blk.{block}.{part}_norm.weight": Kind.F32 for part in ("attn", "ffn")}
    assert kinds(reader) == expected


def test_metadata_of_a_gpt2(tmp_path: Path) -> None:
    reader = write(random_model(GPT2Config(**_GPT2 | {"n_inner": None})), tmp_path / "out.gguf")
    assert value(reader, "gpt2.feed_forward_length") == 256
    assert value(reader, "gpt2.context_length") == 96
    assert value(reader, "gpt2.attention.head_count") == 4
    assert value(reader, "gpt2.attention.layer_norm_epsilon") == pytest.approx(1e-5)
    assert "output.weight" not in kinds(reader)


def test_mixtral(tmp_path: Path) -> None:
    """Mixtral's tensors are compared in the file, since transformers' reader does not know its experts."""
    model = random_model(MixtralConfig(**_COMMON, num_local_experts=4))
    reader = write(model, tmp_path / "out.gguf")
    held = {tensor.name: torch.from_numpy(np.array(tensor.data)) for tensor in reader.tensors}
    for block, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        gate, up = experts.gate_up_proj.detach().split(80, dim=1)
        assert torch.equal(held[f"blk.{block}.ffn_gate_exps.weight"], gate)
        assert torch.equal(held[f"blk.{block}.ffn_up_exps.weight"], up)
        assert torch.equal(held[f"blk.{block}.ffn_down_exps.weight"], experts.down_proj.detach())
        assert torch.equal(held[f"blk.{block}.ffn_gate_inp.weight"], layer.mlp.gate.weight.detach())
    assert value(reader, "llama.expert_count") == 4
    assert value(reader, "llama.expert_used_count") == 2


def test_llama3s_rotary_frequencies(tmp_path: Path) -> None:
    config = LlamaConfig(**_COMMON, head_dim=32, rope_parameters=LLAMA3)
    reader = write(random_model(config), tmp_path / "out.gguf", dtype="q8_0")
    factors = torch.from_numpy(np.array(next(t.data for t in reader.tensors if t.name == "rope_freqs.weight")))
    assert kinds(reader)["rope_freqs.weight"] is Kind.F32
    plain = 1 / 10000.0 ** (torch.arange(0, 32, 2) / 32)
    torch.testing.assert_close(plain / factors, ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0])
    assert factors.min() == 1
    assert factors.max() == 8
    assert ((factors > 1) & (factors < 8)).any()


# the tokenizer


def test_the_builtin_tokenizer(tmp_path: Path) -> None:
    reader = write(random_model(MODELS["qwen2, tied"]), tmp_path / "out.gguf")
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_TOKENIZER)
    assert len(tokenizer) == ROWS - 3
    tokens = [*tokenizer.convert_ids_to_tokens(range(ROWS - 3)), *(f"[PAD{row}]" for row in range(ROWS - 3, ROWS))]
    assert value(reader, "tokenizer.ggml.tokens") == tokens
    types = [TokenType.CONTROL] + [TokenType.NORMAL] * (ROWS - 4) + [TokenType.UNUSED] * 3
    assert value(reader, "tokenizer.ggml.token_type") == types
    merges = json.loads((BUILTIN_TOKENIZER / "tokenizer.json").read_text())["model"]["merges"]
    assert value(reader, "tokenizer.ggml.merges") == [" ".join(pair) for pair in merges]
    assert value(reader, "tokenizer.ggml.model") == "gpt2"
    # Not "qwen2": with it, transformers' AutoTokenizer would build a Qwen tokenizer for this config.json.
    assert value(reader, "tokenizer.ggml.pre") == "gpt-2"
    assert value(reader, "tokenizer.ggml.bos_token_id") == value(reader, "tokenizer.ggml.eos_token_id") == 0
    assert value(reader, "tokenizer.ggml.add_bos_token") is False
    assert value(reader, "tokenizer.ggml.add_eos_token") is False


QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def trained(regex: str, *, whole_words: bool = False, added: AddedToken | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole_words))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    tokenizer.train_from_iterator(["the cat and the hat of the 1234 567"] * 9, trainer)
    tokenizer.add_tokens([added] if added else [])
    return tokenizer


def wrapped(tokenizer: Tokenizer, **options) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{"bos_token": "<s>", "eos_token": "</s>"} | options)


def test_llama_3s_and_qwens_tokenizers(tmp_path: Path) -> None:
    model = random_model(MODELS["llama, untied"])
    llama = trained(LLAMA_3, whole_words=True, added=AddedToken("<tool>", normalized=False))
    llama.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    wrapper = wrapped(llama, chat_template="{{ messages }}", pad_token="<tool>")
    reader = write(model, tmp_path / "llama.gguf", tokenizer=wrapper)
    assert value(reader, "tokenizer.ggml.pre") == "llama-bpe"
    assert value(reader, "tokenizer.ggml.add_bos_token") is True
    assert value(reader, "tokenizer.ggml.add_eos_token") is False
    special = {role: value(reader, f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "padding")}
    tool = llama.token_to_id("<tool>")
    assert special == {"bos": 0, "eos": 1, "padding": tool}
    assert value(reader, "tokenizer.chat_template") == "{{ messages }}"
    types = value(reader, "tokenizer.ggml.token_type")
    assert (types[0], types[tool], types[tool + 1]) == (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNUSED)

    shutil.rmtree(tmp_path / "model")
    qwen = trained(QWEN2, added=AddedToken("<tool>", normalized=False))
    qwen.normalizer = normalizers.NFC()
    reader = write(model, tmp_path / "qwen.gguf", tokenizer=wrapped(qwen))
    assert value(reader, "tokenizer.ggml.pre") == "qwen2"
    assert value(reader, "tokenizer.ggml.add_bos_token") is False
    tool = value(reader, "tokenizer.ggml.tokens").index("<tool>")
    assert value(reader, "tokenizer.ggml.token_type")[tool] == TokenType.USER_DEFINED


def spaced() -> Tokenizer:
    tokenizer = trained(QWEN2)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def suffixed() -> Tokenizer:
    tokenizer = trained(QWEN2)
    tokenizer.post_processor = processors.TemplateProcessing("$A <s>", special_tokens=[("<s>", 0)])
    return tokenizer


def lowercased() -> Tokenizer:
    tokenizer = trained(QWEN2)
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


ODD_TOKENIZERS = {
    "another regex": (lambda: trained(r"\p{N}| ?\p{L}+|\s+"), r"none whose splitting .* gpt-2, llama-bpe, qwen2.*p\{N"),
    "a space before": (spaced, "none whose splitting .*add_prefix_space"),
    "Llama's words by merges alone": (lambda: trained(LLAMA_3), "none whose splitting .*ignore_merges"),
    "lower case": (lowercased, "none whose splitting .*Lowercase"),
    "no BPE": (lambda: Tokenizer(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, "a")), "model.type is 'WordLevel'"),
    "a beginning at the end": (suffixed, "adds a bos_token and an eos_token only"),
    "a token with its spaces": (lambda: trained(QWEN2, added=AddedToken("<x>", lstrip=True)), "'<x>' takes in"),
}


@pytest.mark.parametrize("case", ODD_TOKENIZERS)
def test_other_tokenizers_are_refused(case: str, tmp_path: Path) -> None:
    build, message = ODD_TOKENIZERS[case]
    model = random_model(MODELS["llama, untied"])
    with pytest.raises(UserError, match=message):
        write(model, tmp_path / "out.gguf", tokenizer=wrapped(build()))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    small = random_model(LlamaConfig(**_COMMON | {"vocab_size": 2047}))
    with pytest.raises(UserError, match="ids up to 2047 and the model 2047 rows"):
        write(small, tmp_path / "out.gguf")
    endless = random_model(LlamaConfig(**_COMMON | {"eos_token_id": None}))
    with pytest.raises(UserError, match="end of text"):
        write(endless, tmp_path / "out.gguf", tokenizer=wrapped(trained(QWEN2), eos_token=None))


# refusals and failures

REFUSED = {
    "an architecture": (Gemma2Config(**_COMMON, head_dim=16), "Gemma2ForCausalLM .* only GPT2LMHeadModel, Llama"),
    "activation": (
        GPT2Config(**_GPT2, activation_function="gelu"),
        "activation_function is 'gelu', there it is 'gelu_n",
    ),
    "scaled attention": (GPT2Config(**_GPT2, scale_attn_by_inverse_layer_idx=True), "inverse_layer_idx is True"),
    "yarn": (
        LlamaConfig(**_COMMON, rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}),
        "rope_parameters",
    ),
    "llama3's rope elsewhere": (Qwen2Config(**_COMMON, rope_parameters=LLAMA3), "rope_parameters"),
    "a window": (MistralConfig(**_COMMON, sliding_window=32), "sliding_window is 32 and the context 96"),
    "layers with a window": (
        Qwen2Config(**_COMMON, use_sliding_window=True, sliding_window=200, max_window_layers=1),
        "sliding_window is 200",
    ),
    "biases": (Qwen3Config(**_COMMON, attention_bias=True), "attention_bias is True, there it is False"),
    "routing": (Qwen3MoeConfig(**_COMMON, **_EXPERTS), "norm_topk_prob is False, there it is True"),
    "dense blocks": (
        Qwen2MoeConfig(**_COMMON, **_EXPERTS, mlp_only_layers=[0], norm_topk_prob=True),
        r"mlp_only_layers is \[0\].*norm_topk_prob is True",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_computes_differently_is_refused(case: str, tmp_path: Path) -> None:
    config, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        write(random_model(config), tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_no_destination_and_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(MODELS["llama, untied"])
    (tmp_path / "here.gguf").write_text("mine")
    with pytest.raises(UserError, match="already holds something"):
        write(model, tmp_path / "here.gguf")
    assert (tmp_path / "here.gguf").read_text() == "mine"
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 200_000))
    with pytest.raises(UserError, match=r"takes 1\.\d+ MB and 200 kB are free"):
        write(model, tmp_path / "out.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install 'offload-trainer\[gguf\]'"):
        write(model, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(("dtype", "scale"), [("f16", 1), ("q8_0", 127)])
def test_overflow_names_every_weight(dtype: str, scale: int, tmp_path: Path) -> None:
    model = random_model(MODELS["llama, untied"])
    held = weights_of(model)
    held["model.layers.0.self_attn.q_proj.weight"][3, 5] = -65521.0 * scale
    held["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    held["model.layers.1.mlp.gate_proj.weight"][0, 0] = 65519.0 * scale  # rounds to 65504
    held["model.norm.weight"][0] = 1e30  # f32 in every file
    with pytest.raises(
        UserError, match=r"2 weights .*q_proj.weight \(largest .*up_proj.weight \(largest nan.*export f32"
    ):
        write(model, tmp_path / "out.gguf", dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    held["model.layers.0.self_attn.q_proj.weight"][3, 5] = 0
    held["model.layers.1.mlp.up_proj.weight"][0, 0] = 0
    write(model, tmp_path / "out.gguf", dtype=dtype)
    again = weights_of(reloaded(tmp_path / "out.gguf"))
    assert again["model.layers.1.mlp.gate_proj.weight"][0, 0].item() == 65504.0 * scale


def test_a_disk_that_refuses_leaves_nothing(tmp_path: Path) -> None:
    model = random_model(MODELS["llama, untied"])
    save(model, tmp_path / "model")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
    try:
        with pytest.raises(TrainerError, match=r"out.gguf: .* after 4\d\d kB of 1\.\d+ MB; free space") as raised:
            write(model, tmp_path / "out.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert not isinstance(raised.value, UserError)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_stream_that_breaks_off_or_is_in_another_order_leaves_nothing(tmp_path: Path) -> None:
    model = random_model(MODELS["llama, untied"])
    held = list(weights_of(model).items())

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from held[:5]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(model, tmp_path / "out.gguf", given=broken())
    with pytest.raises(AssertionError, match="was to come"):
        write(model, tmp_path / "out.gguf", given=reversed(held))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_one_weight_is_held_at_a_time(dtype: str, tmp_path: Path) -> None:
    model = random_model(MODELS["qwen3 experts"])
    seen: list[weakref.ref] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights_of(model).items():
            assert not [None for ref in seen if ref() is not None], f"still there when {name} is asked for"
            fresh = weight.clone()
            seen.append(weakref.ref(fresh))
            item = (name, fresh)
            del fresh
            yield item
            del item

    write(model, tmp_path / "out.gguf", dtype=dtype, given=stream())
    assert len(seen) == len(weights_of(model))


# reading back


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("name", ["gpt2, tied", "llama, biases, wide heads", "qwen3 experts", "llama 3's rope"])
def test_a_file_that_is_right_passes_its_check(name: str, dtype: str, tmp_path: Path) -> None:
    config = LlamaConfig(**_COMMON, rope_parameters=LLAMA3) if name == "llama 3's rope" else MODELS[name]
    held = weights_of(model := random_model(config))
    shapes = {key: tuple(weight.shape) for key, weight in held.items()}
    asked: list[str] = []

    def read(key: str) -> torch.Tensor:
        asked.append(key)
        return held[key]

    path, folder = tmp_path / "out.gguf", save(model, tmp_path / "model")
    done = write_gguf(iter(held.items()), path, shapes=shapes, model=folder, dtype=dtype, read=read)
    split = sum(key.endswith(".experts.gate_up_proj") for key in asked)  # each is split into two tensors
    assert done.compared == len(asked) + split
    assert asked == list(held)  # a small model is compared completely
    assert done.notes == ()


def _value(data: bytearray, reader: gguf.GGUFReader) -> None:
    """Flip the lowest bit of the last element of a weight."""
    tensor = next(one for one in reader.tensors if one.name == "blk.1.ffn_up.weight")
    data[tensor.data_offset + tensor.n_bytes - 1] ^= 1


def _name(data: bytearray, reader: gguf.GGUFReader) -> None:
    place = data.index(b"blk.1.ffn_up.weight")
    data[place : place + 5] = b"blk.7"


def _shape(data: bytearray, reader: gguf.GGUFReader) -> None:
    """Swap the dimensions 80 x 64."""
    place = data.index(b"blk.1.ffn_up.weight") + len(b"blk.1.ffn_up.weight") + 4
    data[place : place + 16] = data[place + 8 : place + 16] + data[place : place + 8]


def _token(data: bytearray, reader: gguf.GGUFReader) -> None:
    field = reader.fields["tokenizer.ggml.tokens"]
    data[data.index(field.parts[field.data[1000]].tobytes(), field.offset)] ^= 1


def _epsilon(data: bytearray, reader: gguf.GGUFReader) -> None:
    data[reader.fields["llama.attention.layer_norm_rms_epsilon"].offset + 8 + 38 + 4] ^= 1


def _cut(data: bytearray, reader: gguf.GGUFReader) -> None:
    del data[-5000:]


SPOILED = {
    _value: "blk.1.ffn_up.weight holds other values",
    _name: "blk.7.ffn_up.weight is .*, and should be None",
    _shape: r"blk.1.ffn_up.weight is \(\(64, 80\)",
    _token: "tokenizer.ggml.tokens is",
    _epsilon: "layer_norm_rms_epsilon is",
    _cut: "cannot be read back",
}


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__.strip("_"))
def test_a_wrong_file_is_found_and_removed(spoil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check finds any change after writing, and the damaged file is removed."""
    held = weights_of(model := random_model(MODELS["llama, untied"]))
    shapes = {key: tuple(weight.shape) for key, weight in held.items()}
    true_check = export_gguf.check_file

    def spoiled(path: Path, **words) -> int:
        data = bytearray(path.read_bytes())
        spoil(data, gguf.GGUFReader(path))
        path.write_bytes(data)
        return true_check(path, **words)

    monkeypatch.setattr(export_gguf, "check_file", spoiled)
    path, folder = tmp_path / "out.gguf", save(model, tmp_path / "model")
    with pytest.raises(TrainerError, match=SPOILED[spoil]):
        write_gguf(iter(held.items()), path, shapes=shapes, model=folder, dtype="f32", read=held.__getitem__)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
