"""Tests that exports keep every bit of the weights, and what a chat model's directory says of tokens and ends."""

import copy
import json
import shutil
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_bench import assert_same, batches, engine, masters, model_directory, train
from published_models import write
from safetensors.torch import load_file, save_file
from small_architectures import _COMMON, ARCHITECTURES, reference
from synthetic_checkpoints import checkpoint_of, exported
from tokenizers import Tokenizer, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Glm4MoeConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.config import ModelSection
from offload_trainer.data.tokenizer import BUILTIN_TOKENIZER, load_tokenizer, save_tokenizer
from offload_trainer.model.loader import resolve_model, save_model_config, write_config
from offload_trainer.run import export as exports
from offload_trainer.run.directory import stop_at
from offload_trainer.run.export import export

pytestmark = pytest.mark.usefixtures("nothing_is_small", "counted_once")

ON_DRIVE = ["--params", "nvme", "--optimizer", "nvme", "placement.gradients=nvme", "tiered.weight_buffers=2"]


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("name", [*ARCHITECTURES, "llama, tied", "qwen3, untied", "glm4moe, buffers"])
def test_round_trip(name: str, tmp_path: Path, drive: Path) -> None:
    # A router's correction is a buffer that is saved with the weights; the first block has no experts.
    glm = Glm4MoeConfig(
        **{**_COMMON, "num_hidden_layers": 3},
        head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1,
        first_k_dense_replace=1, tie_word_embeddings=False,
    )  # fmt: skip
    given = {**ARCHITECTURES, "glm4moe, buffers": glm}
    if name not in given:
        twin = ARCHITECTURES["llama, untied" if name.startswith("llama") else "qwen3, tied"]
        given[name] = type(twin).from_dict(twin.to_dict() | {"tie_word_embeddings": name.endswith(", tied")})
    model = reference(given[name])
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if key.endswith("e_score_correction_bias"):
                value.copy_(torch.tensor([5.0, -5.0, 3.0, 1.0]))
    model.save_pretrained(tmp_path / "given", max_shard_size="20kB")
    assert len(list((tmp_path / "given").glob("*.safetensors"))) > 1
    words = ["model.random_init=false", "--dtype", "fp32", "model.attention=eager", *ON_DRIVE]
    with engine(tmp_path / "given", *words, drives=[drive]) as made:
        run = checkpoint_of(made, tmp_path / "given", tmp_path / "run")
    done = export(run, tmp_path / "out", dtype="fp32", shard_bytes=30_000, check=True)
    assert done.compared > 0
    assert_same(tensors_in(tmp_path / "out"), tensors_in(tmp_path / "given"))  # experts are separate, as on the hub
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_weights_in_16_bit_come_in_exactly(tmp_path: Path) -> None:
    model = reference(ARCHITECTURES["llama, untied"]).half()
    model.save_pretrained(tmp_path)
    with engine(tmp_path, "model.random_init=false", "--dtype", "fp32", "model.attention=eager") as made:
        assert_same(masters(made), {name: value.float() for name, value in model.state_dict().items()})


def test_files_that_are_not_whole(tmp_path: Path) -> None:
    reference(ARCHITECTURES["llama, untied"]).save_pretrained(tmp_path, max_shard_size="20kB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    data, torn = shard.read_bytes(), "is not a whole safetensors file"
    for damage, told in (
        (lambda: shard.write_bytes(data[:-8]), torn),
        (lambda: shard.write_bytes(b"no header" * 20), torn),
        (shard.unlink, ""),
        (shard.mkdir, "cannot be read: it is a directory"),
    ):
        damage()
        with pytest.raises(UserError, match=rf"{shard.name} ?{told}"):
            resolve_model(ModelSection(name=str(tmp_path), attention="eager"), seed=0)


@pytest.fixture
def trained(tmp_path: Path, drive: Path) -> Iterator[Path]:
    model = model_directory(tmp_path / "model", "gpt2")
    with engine(model, *ON_DRIVE, drives=[drive]) as made:
        train(made, batches(3))
        yield checkpoint_of(made, model, tmp_path / "run", step=3)


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_shards_an_index_and_the_dtype(name: str, dtype: torch.dtype, trained: Path, tmp_path: Path) -> None:
    done = export(trained, tmp_path / "out", dtype=name, shard_bytes=100_000, check=True)
    assert done.compared >= 30
    held = load_file(trained / "checkpoints/step-00000003/master.safetensors")
    assert_same(tensors_in(tmp_path / "out"), {name: value.to(dtype) for name, value in held.items()})
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 2
    assert all(path.stat().st_size < 100_000 or len(load_file(path)) == 1 for path in files)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.numel() for value in held.values()) * dtype.itemsize
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert config["n_ctx"] == config["n_positions"]  # the first for llama.cpp's converter
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype is dtype


_SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LAYERS = {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}}
_LAYERS |= {"sliding_attention": {"rope_type": "default", "rope_theta": 5.0}}
# Rotary embeddings of transformers 5, and the keys that transformers 4 reads of them
OLD_KEYS = {
    "llama": ({"rope_theta": 7.0, "rope_type": "default"}, {"rope_theta": 7.0, "rope_scaling": None}),
    "llama, scaled": (
        {"rope_theta": 7.0, "original_max_position_embeddings": 32, **_SCALED},
        {"rope_theta": 7.0, "rope_scaling": {"original_max_position_embeddings": 32, **_SCALED}},
    ),
    "gpt_neox": (
        {"rope_theta": 7.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        {"rotary_emb_base": 7.0, "rotary_pct": 0.5},
    ),
    "gemma3_text": (
        _LAYERS,
        {"rope_theta": 7.0, "rope_local_base_freq": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "modernbert-decoder": (
        {key: {**value, "rope_type": "default"} for key, value in _LAYERS.items()},
        {"global_rope_theta": 7.0, "local_rope_theta": 5.0},
    ),
    "olmo": (
        {"rope_theta": 7.0, "rope_type": "linear", "factor": 2.0}, {"rope_scaling": {"type": "linear", "factor": 2.0}}
    ),
    "mimo_v2_flash": (_LAYERS, {}),  # transformers 4 does not know it, and these keys would change what 5 reads
}  # fmt: skip


@pytest.mark.parametrize("name", OLD_KEYS)
def test_a_configuration_has_the_keys_of_transformers_4_and_5(name: str, tmp_path: Path) -> None:
    rope, old = OLD_KEYS[name]
    config = AutoConfig.for_model(name.split(",")[0], rope_parameters=copy.deepcopy(rope), dtype="bfloat16")
    write_config(config, tmp_path)
    held = json.loads((tmp_path / "config.json").read_text())
    assert {**old, "dtype": "bfloat16", "torch_dtype": "bfloat16"}.items() <= held.items()
    read = AutoConfig.from_pretrained(tmp_path).rope_parameters
    flat = {"": read} if "rope_theta" in read else read
    for key, wanted in {"": rope}.items() if "rope_theta" in rope else rope.items():
        assert wanted.items() <= flat[key].items()


def test_an_export_keeps_the_keys_of_the_configuration_that_it_began_from(tmp_path: Path) -> None:
    """Except those that describe the files of its source; `hf` and sessions use the same writer."""
    given = tmp_path / "given"
    write(given, "llama3.1")
    config = json.loads((given / "config.json").read_text())
    rope = config.pop("rope_parameters")
    own = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope | {"type": "llama3"}, "_name_or_path": "a/b"}
    own |= {"pretraining_tp": 1, "transformers_version": "4.43.0", "architectures": ["LlamaForCausalLM"]}
    own = {key: value for key, value in config.items() if key != "dtype"} | own
    of_files = {"quantization_config": {"quant_method": "fp8"}, "torch_dtype": "float32"}
    (given / "config.json").write_text(json.dumps(own | of_files))
    held = json.loads((exported(given, tmp_path, dtype="bf16") / "config.json").read_text())
    assert held.items() >= own.items()
    assert held.keys() - own.keys() == {"rope_parameters", "dtype", "torch_dtype"}
    assert held["torch_dtype"] == held["dtype"] == "bfloat16"


def test_the_check_finds_what_differs(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = exports._write_shards

    def wrong(weights: Any, place: Path, *, all_there: bool, **rest: Any) -> None:
        write(weights, place, **rest)
        held = load_file(place / "model.safetensors")
        if all_there:
            held["transformer.wte.weight"][3, 5] += 1
        else:
            del held["transformer.ln_f.bias"]
            held["transformer.ln_f.weight"] = held["transformer.ln_f.weight"].half()
        save_file(held, place / "model.safetensors")

    for all_there, said in (
        (True, r"transformer\.wte\.weight holds other values"),
        (False, r"ln_f\.weight is \('F16'.*ln_f\.bias is missing"),
    ):
        monkeypatch.setattr(exports, "_write_shards", partial(wrong, all_there=all_there))
        with pytest.raises(TrainerError, match=said):
            export(trained, tmp_path / "out", dtype="fp32", check=True)
        assert not [path for path in tmp_path.iterdir() if "out" in path.name]


@pytest.mark.slow
def test_a_link_in_a_checkpoint_is_not_followed(trained: Path, tmp_path: Path) -> None:
    link = trained / "checkpoints/step-00000003/model/leak"
    link.symlink_to("/etc/hostname")
    with pytest.raises(UserError, match="leak is a link"):
        export(trained, tmp_path / "out", dtype="fp32", check=False)
    assert not (tmp_path / "out").exists()
    link.unlink()


@pytest.mark.slow
def test_models_with_their_own_code_are_exported_unchanged(trained: Path, tmp_path: Path) -> None:
    for config in trained.rglob("config.json"):
        held = json.loads(config.read_text()) | {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
        config.write_text(json.dumps(held))
    manifest = trained / "checkpoints/step-00000003/MANIFEST.json"
    told = json.loads(manifest.read_text())
    data = (manifest.parent / "model/config.json").read_bytes()
    told["files"]["model/config.json"] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    manifest.write_text(json.dumps(told))
    moved = manifest.parent.rename(tmp_path / "elsewhere")  # a checkpoint is exported without its run
    export(moved, tmp_path / "out", dtype="fp32", check=True)
    assert_same(tensors_in(tmp_path / "out"), load_file(moved / "master.safetensors"))


def test_values_that_overflow_fp16_are_all_named(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "model", "gpt2")
    with engine(model, "--ram-fraction", "1") as made:
        for name, value in (("transformer.h.1.mlp.c_fc.weight", 1e5), ("transformer.wpe.weight", -7e4)):
            unit, place = made.offloaded.places[name]
            made.offloaded.store.put(unit.index, place.start + 256, torch.tensor([value]))
        run = checkpoint_of(made, model, tmp_path / "run")
    with pytest.raises(UserError, match=r"2 weights.*wpe\.weight \(largest 7e\+04\).*c_fc\.weight \(largest 1e\+05\)"):
        export(run, tmp_path / "out", dtype="fp16", check=False)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))
    export(run, tmp_path / "out", dtype="bf16", check=True)


END, TURN = 0, 2048
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
GENERATION = {"eos_token_id": [TURN, END], "do_sample": True, "temperature": 0.7, "transformers_version": "4.40.0"}
CONFIG: dict[str, Any] = {
    **{"vocab_size": 2050, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a chat model as on the hub: older tokenizer files, and ends of turns only in the generation config."""
    directory = tmp_path_factory.mktemp("chat")
    backend = Tokenizer.from_file(str(BUILTIN_TOKENIZER / "tokenizer.json"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    del settings["backend"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=3))
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    model = AutoModelForCausalLM.from_config(Qwen2Config(**CONFIG, eos_token_id=END, bos_token_id=None))
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps(GENERATION, indent=4))
    (directory / "processor_config.json").write_text("{}")
    return directory


def through_a_run(given: Path, output: Path, *, scratch: bool = False) -> Path:
    """Return the directory `model` of a run of `given`, from which exports are made."""
    source = resolve_model(ModelSection(name=str(given), random_init=scratch), seed=0)
    output.mkdir(exist_ok=True)
    save_model_config(source, output / "model", dtype=torch.bfloat16, end_of_text=TURN)
    save_tokenizer(load_tokenizer(str(given)), output / "model")
    return output / "model"


def test_files_of_the_model_directory_are_kept_byte_for_byte(given: Path, tmp_path: Path) -> None:
    kept = through_a_run(given, tmp_path / "run")
    save_tokenizer(load_tokenizer(str(kept)), kept)  # a run whose tokenizer is its own
    names = ("generation_config.json", "chat_template.jinja", "special_tokens_map.json", "processor_config.json")
    for name in (*names, "tokenizer.json", "tokenizer_config.json"):
        assert (kept / name).read_bytes() == (given / name).read_bytes(), name
    scratch = through_a_run(given, tmp_path / "scratch", scratch=True)
    generation = json.loads((scratch / "generation_config.json").read_text())
    assert generation["eos_token_id"] == TURN  # random weights end where their tokenizer does
    assert "temperature" not in generation


def test_another_template_changes_no_other_key_of_the_tokenizer(given: Path, tmp_path: Path) -> None:
    """The template of a run replaces that in tokenizer_config.json too, which some programs read."""
    shutil.copytree(given, tmp_path / "given")
    file = tmp_path / "given/tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"add_bos_token": False, "legacy": True}
    file.write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    (tmp_path / "given/chat_template.jinja").unlink()
    kept = through_a_run(tmp_path / "given", tmp_path / "run")
    assert (kept / file.name).read_bytes() == file.read_bytes()
    tokenizer = load_tokenizer(str(tmp_path / "given"))
    tokenizer.chat_template = "{{ messages }}"
    save_tokenizer(tokenizer, kept)
    assert (kept / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((kept / file.name).read_text()) == settings
    assert (kept / "tokenizer.json").read_bytes() == (given / "tokenizer.json").read_bytes()
    assert load_tokenizer(str(kept)).chat_template == "{{ messages }}"


def test_a_tokenizer_of_transformers_5_is_written_for_transformers_4(given: Path, tmp_path: Path) -> None:
    backend = Tokenizer.from_file(str(given / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 2049)])
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "extra_special_tokens": ["<|endoftext|>"]}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(tmp_path / "given")
    tokenizer = load_tokenizer(str(tmp_path / "given"))
    assert type(tokenizer).__name__ == "TokenizersBackend"
    save_tokenizer(tokenizer, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (settings["add_bos_token"], settings["add_eos_token"]) == (True, False)
    assert settings["additional_special_tokens"] == ["<|endoftext|>"]
    assert not {"backend", "extra_special_tokens"} & settings.keys()
    loaded = load_tokenizer(str(tmp_path))
    assert loaded("a <|im_end|>")["input_ids"] == tokenizer("a <|im_end|>")["input_ids"]
    assert sorted(loaded.all_special_ids) == sorted(tokenizer.all_special_ids)


def test_an_export_generates_and_splits_text_as_the_model_did(given: Path, tmp_path: Path) -> None:
    exported(given, tmp_path, dtype="fp32")
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (given, tmp_path / "fp32"))
    assert before.generation_config.eos_token_id == [TURN, END]
    assert after.generation_config == before.generation_config
    assert after.config.eos_token_id == before.config.eos_token_id == END
    assert all(torch.equal(after.state_dict()[name], tensor) for name, tensor in before.state_dict().items())
    one, other = (AutoTokenizer.from_pretrained(path) for path in (given, tmp_path / "fp32"))
    messages = [{"role": "user", "content": "Out, damned spot! é 123\n\n  x"}]
    told = one.apply_chat_template(messages, tokenize=False)
    assert told.endswith("<|im_end|>\n")
    assert other.apply_chat_template(messages, tokenize=False) == told
    assert other(told)["input_ids"] == one(told)["input_ids"]
    assert (other.eos_token, other.pad_token) == (one.eos_token, one.pad_token)


def test_a_tokenizer_that_transformers_would_rewrite_is_kept_unchanged(tmp_path: Path) -> None:
    """transformers would split text otherwise next to a Qwen2 config.json."""
    given = tmp_path / "given"
    shutil.copytree(BUILTIN_TOKENIZER, given)
    (given / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    AutoModelForCausalLM.from_config(Qwen2Config(**CONFIG)).save_pretrained(given)
    tokenizer = load_tokenizer(str(given))
    kept = through_a_run(given, tmp_path / "run")
    from_file = Tokenizer.from_file(str(kept / "tokenizer.json"))
    for text in ("1234 567", "It's\n\n  odd", "a.b"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert from_file.encode(text, add_special_tokens=False).ids == ids
        assert load_tokenizer(str(kept))(text, add_special_tokens=False)["input_ids"] == ids


def test_generation_stops_at_the_ends_of_answers(given: Path, tmp_path: Path) -> None:
    """Ends of a chat template that the model's own settings do not name are added to them, and nothing else changes."""
    for settings, expected in (
        (GENERATION, [TURN, END, 7]),
        ({"eos_token_id": END}, [END, TURN, 7]),
        ({"eos_token_id": None}, [TURN, 7]),
        ({}, [TURN, 7]),
    ):
        file = tmp_path / "generation_config.json"
        file.write_text(json.dumps(settings))
        stop_at(file, (TURN, 7))
        assert json.loads(file.read_text()) == settings | {"eos_token_id": expected}
        before = file.read_bytes()
        stop_at(file, (7,))
        stop_at(file, ())
        assert file.read_bytes() == before


def test_a_damaged_generation_config_is_refused_before_the_run(given: Path, tmp_path: Path) -> None:
    shutil.copytree(given, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text("[1")
    with pytest.raises(UserError, match=r"generation_config\.json cannot be read: it is not JSON"):
        resolve_model(ModelSection(name=str(tmp_path)), seed=0)
