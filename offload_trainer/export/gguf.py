"""Weights out: a stream of (name, tensor) becomes one GGUF file, which llama.cpp and what is built on it read.

    config.json ─┐
    tokenizer   ─┼─ refused? ─ metadata, then every tensor's name, shape and type, then the tensors one after another
    shapes      ─┘

A GGUF file holds no code: llama.cpp computes what it knows by the architecture's name, and splits text by the
tokenizer's. What it would do differently from transformers is therefore refused before a byte is written.

Keys, names and layouts are facts of https://github.com/ggml-org/llama.cpp (convert_hf_to_gguf.py and conversion/;
src/llama-vocab.cpp for tokenizers), the file is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from offload_trainer.errors import TrainerError, UserError, reason
from offload_trainer.export.directory import EXPORT, check_destination
from offload_trainer.export.gguf_check import check_file
from offload_trainer.export.gguf_tokenizer import ELSEWHERE, Config, add_tokenizer
from offload_trainer.model.conversions import read_model_config
from offload_trainer.storage.durable import put_in_place
from offload_trainer.storage.removal import replacing
from offload_trainer.units import format_bytes

if TYPE_CHECKING:  # an extra, so it is imported where it is used
    import gguf
    import numpy as np

DTYPES = ("f32", "f16", "q8_0")
_SAMPLE = 32  # weights that a check compares


@dataclass(frozen=True)
class WrittenFile:
    """What a check compared, and what llama.cpp will do otherwise with text."""

    compared: int  # tensors
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp knows one of transformers' models, and the only values it has for what it takes as given."""

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


def write_gguf(
    weights: Iterable[tuple[str, torch.Tensor]],
    destination: Path,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    model: Path,
    dtype: str,
    read: Callable[[str], torch.Tensor] | None = None,
) -> WrittenFile:
    """Write `weights` (whole fp32 tensors on the CPU, tied ones once, in the order of `shapes`) as `dtype`.

    `dtype` is one of DTYPES; vectors, norms, learned positions and routers stay f32, and a matrix whose rows are no
    multiple of 32 is f16 in a q8_0 file. `model` holds config.json and the tokenizer. One tensor is in memory at a
    time. With `read`, which gives a weight once more, the file is read back before it has its name. Raises UserError
    for a destination that exists, too little space, a model or a tokenizer that llama.cpp would compute differently, or
    values too large for `dtype`; TrainerError where the disk refuses, or the file holds anything else.
    """
    assert destination.suffix == ".gguf", destination
    assert dtype in DTYPES, dtype
    if importlib.util.find_spec("gguf") is None:
        raise UserError("GGUF files need the gguf package: pip install 'offload-trainer[gguf]'")
    config = _read_config(model)
    tensors = _layout(shapes, config=config, dtype=dtype)
    total = sum(tensor.bytes for tensor in tensors)
    writer, notes = _described(tensors, config=config, model=model, name=destination.stem, dtype=dtype)
    check_destination(destination, total)
    written = 0
    try:
        with replacing(destination, what=EXPORT) as temporary:
            try:
                _write(writer, weights, temporary, shapes=shapes, tensors=tensors, config=config)
            finally:
                written = temporary.stat().st_size if temporary.exists() else 0
            compared = 0
            if read:
                told = {key: held.value for key, held in writer.kv_data[0].items()}
                places = {tensor.name: (tensor.shape, tensor.kind) for tensor in tensors}
                sample = _sampled(shapes, read, tensors=tensors, config=config)
                compared = check_file(temporary, metadata=told, tensors=places, sample=sample)
            put_in_place(temporary, destination)
    except OSError as error:
        raise TrainerError(
            f"{destination}: {reason(error, destination.parent)} after {format_bytes(written)} of "
            f"{format_bytes(total)}; free space on that disk and run again"
        ) from error
    return WrittenFile(compared, tuple(notes))


# What llama.cpp can compute


def _read_config(model: Path) -> Config:
    """config.json as transformers saves it, with every option in it; UserError if llama.cpp computes another model."""
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


# Tensors: transformers' parameters -> llama.cpp's


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType

    @property
    def bytes(self) -> int:
        import gguf

        elements, size = gguf.GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // elements * size


def _layout(shapes: Mapping[str, tuple[int, ...]], *, config: Config, dtype: str) -> list[Tensor]:
    """The file's tensors in the order in which the weights come, a model's own rotary factors before them."""
    import gguf

    architecture = ARCHITECTURES[config["model_type"]]
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(number, config["n_layer" if architecture.name == "gpt2" else "num_hidden_layers"])
    factors = _rotary_factors(config)
    tensors = [Tensor("rope_freqs.weight", (len(factors),), gguf.GGMLQuantizationType.F32)] if len(factors) else []
    for parameter, shape in shapes.items():
        for part, piece in _pieces(parameter, torch.empty(shape, device="meta"), config=config):
            name = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert name is not None, f"{architecture.name} has no place for {part}"
            tensors.append(Tensor(name, tuple(piece.shape), _kind(name, piece.shape, dtype=dtype)))
    return tensors


def _pieces(name: str, tensor: torch.Tensor, *, config: Config) -> list[tuple[str, torch.Tensor]]:
    """A parameter as llama.cpp wants it: turned, its rows in another order, or in two (views where that can be)."""
    module, _, last = name.rpartition(".")
    if config["model_type"] == "gpt2" and module.endswith((".c_attn", ".c_proj", ".c_fc")) and last == "weight":
        return [(name, tensor.T)]  # transformers' Conv1D holds (in, out)
    if ARCHITECTURES[config["model_type"]].name == "llama" and module.endswith((".q_proj", ".k_proj")):
        heads = config["num_attention_heads"] if module.endswith(".q_proj") else _key_value_heads(config)
        return [(name, _interleaved(tensor, heads=heads))]
    if name.endswith(".experts.gate_up_proj"):  # (expert, gate's rows then up's, hidden)
        gate, up = tensor.chunk(2, dim=1)
        return [(f"{module}.gate_proj.weight", gate), (f"{module}.up_proj.weight", up)]
    if name.endswith(".experts.down_proj"):
        return [(f"{name}.weight", tensor)]
    if module.endswith(".shared_expert_gate"):
        return [(name, tensor.squeeze(0))]  # one output: a vector
    return [(name, tensor)]


def _interleaved(tensor: torch.Tensor, *, heads: int) -> torch.Tensor:
    """Rows of each head from (first half, second half) to pairs: which rows llama.cpp's llama rotates together."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _key_value_heads(config: Config) -> int:
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def _kind(name: str, shape: torch.Size, *, dtype: str) -> gguf.GGMLQuantizationType:
    import gguf

    kinds = gguf.GGMLQuantizationType
    small = ("_norm.weight", "position_embd.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")
    if dtype == "f32" or len(shape) < 2 or name.endswith(small):
        return kinds.F32
    return kinds.Q8_0 if dtype == "q8_0" and shape[-1] % gguf.GGML_QUANT_SIZES[kinds.Q8_0][0] == 0 else kinds.F16


def _rotary_factors(config: Config) -> torch.Tensor:
    """What llama.cpp divides each rotary frequency by, (head's size / 2,) in fp32; empty for plain frequencies.

    Llama 3 leaves wavelengths below `original / high_freq_factor` as they are, divides the frequencies of those
    above `original / low_freq_factor` by `factor`, and blends between
    (transformers' modeling_rope_utils.py, `_compute_llama3_parameters`).
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


def _head_size(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


# The file


def _described(
    tensors: list[Tensor], *, config: Config, model: Path, name: str, dtype: str
) -> tuple[gguf.GGUFWriter, list[str]]:
    """A writer that knows all but the data, and what llama.cpp will do otherwise with text."""
    import gguf
    import numpy as np

    types = gguf.LlamaFileType
    writer = gguf.GGUFWriter(None, ARCHITECTURES[config["model_type"]].name)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_file_type({"f32": types.ALL_F32, "f16": types.MOSTLY_F16, "q8_0": types.MOSTLY_Q8_0}[dtype])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if config["model_type"] == "gpt2":
        _add_gpt2(writer, config)
    else:
        _add_llama_like(writer, config)
        _add_experts(writer, config)
    notes = add_tokenizer(writer, model, config=config)
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.bytes, raw_dtype=tensor.kind)
    return writer, notes


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
    writer.add_head_count_kv(_key_value_heads(config))
    writer.add_key_length(_head_size(config))
    writer.add_value_length(_head_size(config))
    writer.add_rope_dimension_count(_head_size(config))
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


def _write(
    writer: gguf.GGUFWriter,
    weights: Iterable[tuple[str, torch.Tensor]],
    path: Path,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: list[Tensor],
    config: Config,
) -> None:
    stream, places = iter(weights), iter(tensors)
    overflowing: list[str] = []
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        factors = _rotary_factors(config)
        if len(factors):
            writer.write_tensor_data(_encoded(factors, next(places).kind))
        for expected in shapes:
            overflowing += _write_next(writer, stream, places, expected=expected, config=config)
        assert next(stream, None) is None, "more weights came than shapes"
    finally:
        with contextlib.suppress(OSError):  # the first failure is the one to tell of
            writer.close()
    if overflowing:
        raise UserError(
            f"{len(overflowing)} weights hold values beyond what the file's types can: {', '.join(overflowing)}; "
            "export f32"
        )
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _write_next(
    writer: gguf.GGUFWriter,
    stream: Iterator[tuple[str, torch.Tensor]],
    places: Iterator[Tensor],
    *,
    expected: str,
    config: Config,
) -> list[str]:
    """Write the stream's next weight; what in it overflows. A function, so that it is let go of before the next."""
    name, weight = next(stream)
    assert name == expected, f"{expected} was to come, not {name}"
    overflowing = []
    for _, piece in _pieces(name, weight, config=config):
        place = next(places)
        assert tuple(piece.shape) == place.shape, f"{name}: {tuple(piece.shape)} for {place}"
        largest = _largest(piece)
        if not largest < _limit(place.kind):  # not a number, too
            overflowing.append(f"{name} (largest {largest:.4g})")
        writer.write_tensor_data(_encoded(piece, place.kind))
    return overflowing


def _sampled(
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], torch.Tensor],
    *,
    tensors: list[Tensor],
    config: Config,
) -> Iterator[tuple[str, np.ndarray]]:
    """Of the first weight, the last and others evenly between: (a tensor's name, what it is to hold)."""
    names, places = list(shapes), iter(tensors)
    if len(_rotary_factors(config)):
        next(places)
    taken = {*names[:: max(1, len(names) // _SAMPLE)], names[-1]}
    for name in names:
        meant = _pieces(name, torch.empty(shapes[name], device="meta"), config=config)
        here = [next(places) for _ in meant]
        if name in taken:
            for place, (_, piece) in zip(here, _pieces(name, read(name), config=config), strict=True):
                yield place.name, _encoded(piece, place.kind)


def _largest(tensor: torch.Tensor) -> float:
    low, high = tensor.aminmax()  # as one pass without a copy
    return torch.maximum(-low, high).item()


def _limit(kind: gguf.GGMLQuantizationType) -> float:
    """Values from here on become infinite: f16 rounds to it halfway from 65504 to 65536; a q8_0 block's scale is f16.

    Infinite itself for f32, which holds what was trained.
    """
    import gguf

    kinds = gguf.GGMLQuantizationType
    return {kinds.F32: math.inf, kinds.F16: 65520.0, kinds.Q8_0: 65520.0 * 127}[kind]


def _encoded(tensor: torch.Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    import gguf
    import numpy as np

    if kind is gguf.GGMLQuantizationType.F16:
        return tensor.half().contiguous().numpy()
    with np.errstate(all="ignore"):  # overflow is told of by name
        return gguf.quants.quantize(tensor.contiguous().numpy(), kind)
