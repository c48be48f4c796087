"""Tests of model loading and loss: transformers' weights block by block, and its loss without whole logits."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_architectures import _COMMON, ARCHITECTURES, reference
from transformers import AutoConfig, AutoModelForCausalLM, GPT2PreTrainedModel

from offload_trainer.config import ModelSection
from offload_trainer.errors import UserError
from offload_trainer.model.init_weights import initial_weights
from offload_trainer.model.loader import resolve_model
from offload_trainer.model.presets import PRESETS, gpt2_shape


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_weights_are_those_of_transformers_bit_for_bit(name: str) -> None:
    expected = dict(reference(ARCHITECTURES[name]).named_parameters())
    torch.manual_seed(1)  # the global generator must not matter, nor change
    before = torch.get_rng_state()
    given = dict(initial_weights(ARCHITECTURES[name], seed=5))
    assert torch.equal(before, torch.get_rng_state())
    assert given.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(given[key], value), key


def test_norms_initialised_by_constructors_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = GPT2PreTrainedModel._init_weights

    def without_norms(model: GPT2PreTrainedModel, module: torch.nn.Module) -> None:
        if not isinstance(module, torch.nn.LayerNorm):
            whole(model, module)

    monkeypatch.setattr(GPT2PreTrainedModel, "_init_weights", without_norms)
    expected = dict(reference(ARCHITECTURES["gpt2"]).named_parameters())
    given = dict(initial_weights(ARCHITECTURES["gpt2"], seed=5))
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[key], value) for key, value in expected.items())


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("chunk", [7, 1000])
def test_loss_gradients_and_buffers_are_those_of_transformers(name: str, chunk: int, tmp_path: Path) -> None:
    """The loss and every gradient of pretrained weights match whole logits."""
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
    expected = torch.nn.functional.cross_entropy(model(inputs).logits.float().flatten(0, 1), targets.flatten())
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


@pytest.mark.parametrize("name", PRESETS)
def test_closed_form_counts_match_transformers(name: str) -> None:
    shape = resolve_model(ModelSection(name=name), seed=0).shape
    assert gpt2_shape(PRESETS[name]) == shape
    if name == "gpt2-10b":
        assert shape.parameters == 10_279_239_680


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-mini", "gpt2-10b"])
def test_step_0_loss_of_every_preset_is_ln_of_the_vocabulary(name: str) -> None:
    """Only the depth is reduced: two layers, or one in wide models, so that the test stays small."""
    overrides = {"n_layer": 2 if PRESETS[name]["n_embd"] <= 1280 else 1}
    source = resolve_model(ModelSection(name=name, overrides=overrides, activation_checkpointing="off"), seed=0)
    ours = source.build(dtype=torch.float32)
    with torch.no_grad():
        parameters = dict(ours.model.named_parameters())
        for key, value in source.weights():
            parameters[key].copy_(value)
        ids = torch.randint(0, source.shape.vocabulary, (2, 65), generator=torch.Generator().manual_seed(0))
        loss = float(ours(ids[:, :-1], ids[:, 1:]))
    print(f"{name}: {loss:.3f}, ln(vocabulary) {math.log(source.shape.vocabulary):.3f}")
    assert loss == pytest.approx(math.log(source.shape.vocabulary), abs=0.1)


def test_frozen_parameters_stay_frozen() -> None:
    source = resolve_model(ModelSection(freeze=("wte", r"h\.0\.")), seed=0)
    frozen = {weight.name for weight in source.shape.weights if not weight.trainable}
    assert "transformer.wte.weight" in frozen
    assert len(frozen) == 13
    built = source.build(dtype=torch.float32)
    assert {name for name, p in built.model.named_parameters() if not p.requires_grad} == frozen


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


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "gpt2", "n_layer": 10**9, "n_embd": 64, "n_head": 2}, "n_layer is 1000000000"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers is 1000000000"),
    ],
)
def test_a_configuration_that_no_machine_could_build_is_refused(
    config: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """The refusal is immediate: transformers would build lists and modules of all the layers."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=re.escape(expected)):
        resolve_model(ModelSection(name=str(tmp_path), random_init=True), seed=0)


@pytest.mark.parametrize("content", ["", "[" * 100_000, "pipe"])
def test_a_configuration_that_cannot_be_read(content: str, tmp_path: Path) -> None:
    if content == "pipe":
        os.mkfifo(tmp_path / "config.json")
    else:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json cannot be read: .*It is no model's configuration"):
        resolve_model(ModelSection(name=str(tmp_path), random_init=True), seed=0)


# Architectures with keys of their published checkpoints that today's models have no place for
_ROTARY = "self_attn.rotary_emb.inv_freq"
_LLAMA = {**_COMMON, "num_attention_heads": 2, "num_key_value_heads": 2}
_GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
_LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}  # fmt: skip
LEFTOVERS = {
    "llama": (_LLAMA, [f"model.layers.{{}}.{_ROTARY}"]),
    "llama, without the prefix": (_LLAMA, [f"layers.{{}}.{_ROTARY}"]),
    "llama, with scales of a cache": (_LLAMA, ["model.layers.{}.self_attn.k_scale"]),
    "llama, of more layers": (_LLAMA, ["model.layers.{}7.mlp.up_proj.weight"]),
    "mistral": (_LLAMA, [f"model.layers.{{}}.{_ROTARY}"]),
    "qwen2": (_LLAMA, [f"model.layers.{{}}.{_ROTARY}"]),
    "phi": (_LLAMA, [f"model.layers.{{}}.{_ROTARY}"]),
    "stablelm": (_LLAMA, [f"model.layers.{{}}.{_ROTARY}"]),
    "persimmon": (_LLAMA, [f"model.layers.{{}}.{_ROTARY}"]),
    "falcon": (_LLAMA, ["transformer.h.{}.self_attention.rotary_emb.inv_freq"]),
    "gpt_neox": (
        _LLAMA, [f"gpt_neox.layers.{{}}.attention.{key}" for key in ("bias", "masked_bias", "rotary_emb.inv_freq")]
    ),
    "gpt2": (_GPT, ["transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias"]),
    "gptj": ({**_GPT, "rotary_dim": 8}, ["transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias"]),
    "gpt_neo": (
        {**_COMMON, "num_layers": 2, "num_heads": 2, "attention_types": [[["global"], 2]]},
        ["transformer.h.{}.attn.attention.bias", "transformer.h.{}.attn.attention.masked_bias"],
    ),
    "codegen": ({**_GPT, "rotary_dim": 8}, ["transformer.h.{}.attn.causal_mask"]),
    "deepseek_v3": ({**_LLAMA, **_LATENT}, ["model.layers.2{}.eh_proj.weight"]),
    "qwen3_next": (
        {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16,
         "shared_expert_intermediate_size": 16},
        ["mtp.{}.fc.weight"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFTOVERS)
def test_keys_that_transformers_does_not_read(name: str, tmp_path: Path) -> None:
    """They are left out, and the plan names those that transformers warns about. Every weight has its bits.

    Of buffers that the model computes, by their own names, it says nothing.
    """
    words, keys = LEFTOVERS[name]
    reference(AutoConfig.for_model(name.split(",")[0], **words)).save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    held |= {key.format(layer): torch.ones(4) for key in keys for layer in range(2)}
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    source = resolve_model(ModelSection(name=str(tmp_path)), seed=0)
    given = dict(source.weights())
    assert given.keys() == dict(expected.named_parameters()).keys()
    assert all(torch.equal(given[key], value) for key, value in expected.named_parameters())
    warned = sorted(info["unexpected_keys"] - dict(expected.named_buffers()).keys())
    notes = [note for note in source.shape.notes if note.startswith("weights: ")]
    assert len(notes) == bool(warned)
    if warned:
        assert notes[0].startswith(f"weights: {len(warned)} tensors have no place in {type(expected).__name__}")
        assert notes[0].endswith(": " + ", ".join(warned))


@pytest.mark.parametrize(("shards", "single"), [(True, False), (False, True), (True, True), ("gone", True)])
def test_a_single_file_comes_before_an_index(shards: Any, single: bool, tmp_path: Path) -> None:
    """As transformers chooses; the plan says that the index is not read."""
    model = reference(ARCHITECTURES["llama, untied"])
    if shards:
        model.save_pretrained(tmp_path, max_shard_size="20kB")
    if single:
        weights = {key: value * 2 for key, value in model.state_dict().items()}
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        model.config.save_pretrained(tmp_path)
    for path in tmp_path.glob("model-*") if shards == "gone" else ():
        path.unlink()
    expected = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert torch.equal(expected["lm_head.weight"], model.lm_head.weight * (2 if single else 1))
    source = resolve_model(ModelSection(name=str(tmp_path)), seed=0)
    assert all(torch.equal(value, expected[key]) for key, value in source.weights())
    said = [note for note in source.shape.notes if "model.safetensors.index.json are not read" in note]
    assert len(said) == bool(shards and single)


def test_weights_in_the_file_that_the_configuration_names(tmp_path: Path) -> None:
    model = reference(ARCHITECTURES["llama, untied"])
    model.save_pretrained(tmp_path)
    doubled = {key: value * 2 for key, value in model.state_dict().items()}
    save_file(doubled, tmp_path / "second.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": "second.safetensors"}))
    expected = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert torch.equal(expected["lm_head.weight"], model.lm_head.weight * 2)
    given = dict(resolve_model(ModelSection(name=str(tmp_path)), seed=0).weights())
    assert all(torch.equal(value, expected[key]) for key, value in given.items())
    for wrong in ("../second.safetensors", 5):
        (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": wrong}))
        with pytest.raises(UserError, match="transformers_weights"):
            resolve_model(ModelSection(name=str(tmp_path)), seed=0)


@pytest.mark.parametrize("kind", ["integers", "scales of a quantization_config"])
def test_quantised_weights_are_refused(kind: str, tmp_path: Path) -> None:
    """transformers would dequantise them by its configuration; read as they are, they would be other weights."""
    model, name = reference(ARCHITECTURES["llama, untied"]), "model.layers.1.mlp.up_proj.weight"
    model.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors") | {f"{name}_scale": torch.ones(1)}
    if kind == "integers":
        held[name] = held[name].to(torch.uint8)
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "own"}}))
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = f"quantised, which is not read here: {name}{'' if kind == 'integers' else '_scale'}\n"
    with pytest.raises(UserError, match=re.escape(expected)):
        resolve_model(ModelSection(name=str(tmp_path)), seed=0)


def test_weights_that_do_not_fit_are_all_named(tmp_path: Path) -> None:
    reference(ARCHITECTURES["llama, untied"]).save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    held["model.norm.weight"] = torch.zeros(7)
    held["extra.weight"] = torch.zeros(2)
    del held["model.layers.1.self_attn.k_proj.weight"]
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError) as caught:
        resolve_model(ModelSection(name=str(tmp_path), attention="eager"), seed=0)
    text = str(caught.value)
    assert "missing: model.layers.1.self_attn.k_proj.weight" in text
    assert "unexpected: extra.weight" in text
    assert "misshapen: model.norm.weight is (7,), the model wants (32,)" in text


def test_a_directory_without_weights_asks_for_scratch(tmp_path: Path) -> None:
    ARCHITECTURES["llama, untied"].save_pretrained(tmp_path)
    with pytest.raises(UserError, match="add --scratch"):
        resolve_model(ModelSection(name=str(tmp_path), attention="eager"), seed=0)
    assert resolve_model(ModelSection(name=str(tmp_path), attention="eager", random_init=True), seed=0).random
