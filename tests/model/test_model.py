"""Tests of loading and loss: transformers' weights block by block, and its loss, a few rows of logits at a time."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_architectures import ARCHITECTURES, reference
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GPT2PreTrainedModel, PreTrainedModel

from offload_trainer.common.errors import UserError
from offload_trainer.config import ModelSection
from offload_trainer.model.init_weights import initial_weights
from offload_trainer.model.loader import resolve_model
from offload_trainer.optim.cross_entropy import cross_entropy
from offload_trainer.plan.shape import loss_pieces

pytestmark = pytest.mark.usefixtures("counted_once")


def test_norms_initialised_by_constructors_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_every_architecture.py compares all weights, as transformers initialises them."""
    whole = GPT2PreTrainedModel._init_weights

    def without_norms(model: GPT2PreTrainedModel, module: torch.nn.Module) -> None:
        if not isinstance(module, torch.nn.LayerNorm):
            whole(model, module)

    monkeypatch.setattr(GPT2PreTrainedModel, "_init_weights", without_norms)
    expected = dict(reference(ARCHITECTURES["gpt2"]).named_parameters())
    torch.manual_seed(1)  # the global generator must not matter, nor change
    before = torch.get_rng_state()
    given = dict(initial_weights(ARCHITECTURES["gpt2"], seed=5))
    assert torch.equal(before, torch.get_rng_state())
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[key], value) for key, value in expected.items())


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("chunk", [7, 1000])
def test_loss_gradients_and_buffers_are_those_of_transformers(name: str, chunk: int, tmp_path: Path) -> None:
    model = reference(ARCHITECTURES[name])
    model.save_pretrained(tmp_path)
    section = ModelSection(name=str(tmp_path), loss_chunk=chunk, attention="eager", activation_checkpointing="off")
    source = resolve_model(section, seed=0)
    assert not source.random
    ours = source.build(dtype=torch.float32)
    weights = dict(source.weights())
    with torch.no_grad():
        for key, parameter in ours.model.named_parameters():
            parameter.copy_(weights.pop(key))
    assert not weights
    ids = torch.randint(0, 99, (2, 21))
    inputs, targets = ids[:, :-1], ids[:, 1:]
    expected = functional.cross_entropy(model(inputs).logits.float().flatten(0, 1), targets.flatten())
    expected.backward()
    loss = ours(inputs, targets)
    loss.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    for key, parameter in ours.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-4, atol=1e-6, msg=key)
    plain_buffers = dict(model.named_buffers())
    assert source.buffers().keys() == plain_buffers.keys()
    for key, value in source.buffers().items():
        assert torch.equal(value, plain_buffers[key]), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 31, 100])
@pytest.mark.parametrize("vocabulary", [2, 5003])
@pytest.mark.parametrize("pieces", [32, 2, 1])
def test_loss_and_gradient_have_torchs_bits(pieces: int, rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    """Whatever the number of pieces, which is another on a GPU."""
    torch.manual_seed(rows)
    logits = (3 * torch.randn(rows, vocabulary)).to(dtype)
    targets = torch.randint(0, vocabulary, (rows,))
    targets[1::7] = -100
    theirs, ours = (logits.clone().requires_grad_() for _ in range(2))

    expected = functional.cross_entropy(theirs.float(), targets, reduction="sum")
    loss = cross_entropy(ours, targets, pieces=pieces)
    (expected / 7).backward()
    (loss / 7).backward()

    assert loss.dtype is torch.float32
    assert torch.equal(loss, expected)
    assert ours.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


class _Sizes(TorchDispatchMode):
    """Notes the bytes of fp32 tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.fp32: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's signature
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype is torch.float32:
            self.fp32.append(found.nbytes)
        return found


@pytest.mark.parametrize("pieces", [32, 4])
def test_fp32_tensors_have_the_rows_of_a_piece(pieces: int) -> None:
    logits = torch.randn(64, 1000).bfloat16().requires_grad_()
    with _Sizes() as sizes:
        cross_entropy(logits, torch.arange(64), pieces=pieces).backward()
    assert max(sizes.fp32) == 4 * 1000 * 64 // pieces


def test_a_gpu_has_few_pieces_of_bounded_size() -> None:
    found = {words: loss_pieces(words, chunk=1024, gpu=True) for words in (2, 32_000, 50_257, 128_256, 262_144)}
    assert list(found.values()) == [1, 2, 4, 8, 16]
    assert all(4 * words * 1024 / pieces <= 64 * 2**20 for words, pieces in found.items())
    assert loss_pieces(50_257, chunk=1024, gpu=False) == loss_pieces(50_257, chunk=10**6, gpu=True) == 32


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (ModelSection(name="gpt3"), "did you mean gpt2"),
        (ModelSection(name="./nowhere"), "neither a preset"),
        (ModelSection(overrides={"n_layers_typo": 3}), "has no n_layers_typo"),
        (ModelSection(overrides={"n_layer": 10**9}), "n_layer is 1000000000, and at most 10000 layers"),
        (ModelSection(overrides={"vocab_size": 10**15}), "makes 2.6e+17 weights, and at most 1e+13"),
        (ModelSection(freeze=("nothing_like_this",)), "no parameter matches"),
        (ModelSection(freeze=("(",)), "not a regular expression"),
    ],
)
def test_refused_models(section: ModelSection, expected: str) -> None:
    with pytest.raises(UserError, match=re.escape(expected)):
        resolve_model(section, seed=0)


def test_configurations_that_cannot_be_used(tmp_path: Path) -> None:
    """The refusal is immediate: transformers would build modules of all the layers, or wait for a pipe."""
    unusable = {  # content of a config.json: the message
        json.dumps({"model_type": "gpt2", "n_layer": 10**9, "n_embd": 64, "n_head": 2}): "n_layer is 1000000000",
        json.dumps({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}}): "layers is 1000000000",
        **dict.fromkeys(("", "[" * 100_000, "pipe"), r"config\.json cannot be read: .*It is no model's configuration"),
    }
    for number, (content, told) in enumerate(unusable.items()):
        file = tmp_path / str(number) / "config.json"
        file.parent.mkdir()
        if content == "pipe":
            os.mkfifo(file)
        else:
            file.write_text(content)
        with pytest.raises(UserError, match=told):
            resolve_model(ModelSection(name=str(file.parent), random_init=True), seed=0)


Held = dict[str, torch.Tensor]  # tensors of a file by name


def added(*keys: str) -> Callable[[Held], Held]:
    return lambda held: held | {key.format(layer): torch.ones(4) for key in keys for layer in range(2)}


def renamed(before: str, after: str) -> Callable[[Held], Held]:
    return lambda held: {key.replace(before, after): value for key, value in held.items()}


# Published checkpoints have keys that today's models have no place for, and other names of weights.
SPELLINGS: dict[str, tuple[str, Callable[[Held], Held]]] = {
    "old buffers": ("llama, untied", added("model.layers.{}.self_attn.rotary_emb.inv_freq")),
    "old buffers, gpt2": ("gpt2", added("transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias")),
    "a key without the prefix": ("llama, untied", added("layers.{}.self_attn.rotary_emb.inv_freq")),
    "scales of a cache": ("llama, untied", added("model.layers.{}.self_attn.k_scale")),
    "more layers": ("llama, untied", added("model.layers.{}7.mlp.up_proj.weight")),
    "no prefix": ("llama, untied", renamed("model.", "")),
    "no prefix, gpt2": ("gpt2", renamed("transformer.", "")),
    "tied under its other name": ("qwen3, tied", renamed("model.embed_tokens", "lm_head")),
    "tied twice": (
        "qwen3, tied", lambda held: held | {"lm_head.weight": held["model.embed_tokens.weight"].clone()}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_other_spellings_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Every weight has the bits that transformers reads; the plan names the keys that transformers warns about."""
    architecture, change = SPELLINGS[name]
    model = reference(ARCHITECTURES[architecture])
    save_changed(model, tmp_path, change)
    expected, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    source = resolve_model(ModelSection(name=str(tmp_path)), seed=0)
    given = dict(source.weights())
    assert given.keys() == dict(expected.named_parameters()).keys() == dict(model.named_parameters()).keys()
    for one in (expected, model):
        assert all(torch.equal(given[key], value) for key, value in one.named_parameters())
    warned = sorted(info["unexpected_keys"] - dict(expected.named_buffers()).keys())
    notes = [note for note in source.shape.notes if note.startswith("weights: ")]
    assert len(notes) == bool(warned)
    if warned:
        assert notes[0].startswith(f"weights: {len(warned)} tensors have no place in {type(expected).__name__}")
        assert notes[0].endswith(": " + ", ".join(warned))


def save_changed(model: PreTrainedModel, folder: Path, change: Callable[[Held], Held], **config: Any) -> None:
    """Save a model with what `change` makes of its tensors, and more keys in its configuration."""
    model.save_pretrained(folder)
    held = change(load_file(folder / "model.safetensors"))
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    there = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(there | config))


@pytest.mark.parametrize(
    ("shards", "named"),
    [(True, ""), (False, "model"), (True, "model"), ("gone", "model"), (False, "second")],
)
def test_the_files_that_transformers_would_read_are_read(shards: Any, named: str, tmp_path: Path) -> None:
    """A single file comes before an index, which the plan says is not read; the configuration may name one."""
    model = reference(ARCHITECTURES["llama, untied"])
    model.save_pretrained(tmp_path, max_shard_size="20kB" if shards else "5GB")
    if named:
        weights = {key: value * 2 for key, value in model.state_dict().items()}
        save_file(weights, tmp_path / f"{named}.safetensors", metadata={"format": "pt"})
    for path in tmp_path.glob("model-*") if shards == "gone" else ():
        path.unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    names = {"transformers_weights": "second.safetensors"} if named == "second" else {}
    (tmp_path / "config.json").write_text(json.dumps(config | names))
    expected = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert torch.equal(expected["lm_head.weight"], model.lm_head.weight * (2 if named else 1))
    source = resolve_model(ModelSection(name=str(tmp_path)), seed=0)
    assert all(torch.equal(value, expected[key]) for key, value in source.weights())
    said = [note for note in source.shape.notes if "model.safetensors.index.json are not read" in note]
    assert len(said) == bool(shards and named)
    for wrong in ("../second.safetensors", 5, "a\nb"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": wrong}))
        with pytest.raises(UserError, match="transformers_weights") as refused:
            resolve_model(ModelSection(name=str(tmp_path)), seed=0)
        assert str(refused.value).isprintable()


def misfitting(held: Held) -> Held:
    del held["model.layers.1.self_attn.k_proj.weight"]
    return held | {"model.norm.weight": torch.zeros(7), "extra.weight": torch.zeros(2)}


UP = "model.layers.1.mlp.up_proj.weight"
QUANTISED = "quantised, which is not read here: "
REFUSED: dict[str, tuple[str, Callable[[Held], Held], list[str]]] = {
    # transformers would dequantise them by its configuration; read as they are, they would be other weights.
    "integers": (
        "llama, untied",
        lambda held: held | {UP: held[UP].to(torch.uint8), f"{UP}_scale": torch.ones(1)},
        [f"{QUANTISED}{UP}\n"],
    ),
    "scales of a quantization_config": (
        "llama, untied", lambda held: held | {f"{UP}_scale": torch.ones(1)}, [f"{QUANTISED}{UP}_scale\n"]
    ),
    "weights that do not fit": (
        "llama, untied",
        misfitting,
        [
            "missing: model.layers.1.self_attn.k_proj.weight",
            "unexpected: extra.weight",
            r"misshapen: model\.norm\.weight is \(7,\), the model wants \(32,\)",
        ],
    ),
    # transformers would keep both weights; training the tied one would silently lose the other.
    "a separate head in a model that ties it": (
        "qwen3, tied",
        lambda held: held | {"lm_head.weight": held["model.embed_tokens.weight"] + 1},
        ["lm_head.weight and model.embed_tokens.weight hold different values"],
    ),
    "experts that are not all there": (
        "mixtral, experts",
        lambda held: {key: held[key] for key in held if "layers.0." not in key or "experts.2.w1" not in key},
        [r"experts\.0\.w1|gate_up_proj is"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_cannot_be_used_are_named(name: str, tmp_path: Path) -> None:
    architecture, change, told = REFUSED[name]
    config = {"quantization_config": {"quant_method": "own"}} if "quantization_config" in name else {}
    save_changed(reference(ARCHITECTURES[architecture]), tmp_path, change, **config)
    with pytest.raises(UserError) as caught:
        resolve_model(ModelSection(name=str(tmp_path), attention="eager"), seed=0)
    assert all(re.search(pattern, str(caught.value)) for pattern in told)
