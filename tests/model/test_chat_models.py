"""Tests that a run keeps all that a chat model's directory defines about its tokenizer and end-of-text tokens."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic_checkpoints import exported
from tokenizers import Tokenizer, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

from offload_trainer.config import ModelSection
from offload_trainer.data.tokenizer import BUILTIN_TOKENIZER, load_tokenizer, save_tokenizer
from offload_trainer.errors import UserError
from offload_trainer.model.loader import resolve_model, save_model_config
from offload_trainer.run.directory import stop_at

END, TURN = 0, 2048
KEPT = (
    *("generation_config.json", "chat_template.jinja", "special_tokens_map.json", "processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json"),
)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
GENERATION = {
    "eos_token_id": [TURN, END],
    "pad_token_id": END,
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "transformers_version": "4.40.0",
}
CONFIG: dict[str, Any] = {
    **{"vocab_size": 2050, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a chat model as found on the hub: older tokenizer files, and end-of-turn tokens only in the generation
    config.
    """
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
    for name in KEPT:
        assert (kept / name).read_bytes() == (given / name).read_bytes(), name


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
    """Its class and lists have the names of transformers 4, and it says whether it adds BOS."""
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
    """The saved tokenizer gives the ids of training, though transformers splits otherwise next to a Qwen2
    config.json.
    """
    given = tmp_path / "given"
    given.mkdir()
    for path in BUILTIN_TOKENIZER.iterdir():
        (given / path.name).write_bytes(path.read_bytes())
    (given / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    AutoModelForCausalLM.from_config(Qwen2Config(**CONFIG)).save_pretrained(given)
    tokenizer = load_tokenizer(str(given))
    kept = through_a_run(given, tmp_path / "run")
    from_file = Tokenizer.from_file(str(kept / "tokenizer.json"))
    for text in ("1234 567", "It's\n\n  odd", "a.b"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert from_file.encode(text, add_special_tokens=False).ids == ids
        assert load_tokenizer(str(kept))(text, add_special_tokens=False)["input_ids"] == ids


def test_random_weights_end_where_their_tokenizer_does(given: Path, tmp_path: Path) -> None:
    kept = through_a_run(given, tmp_path / "run", scratch=True)
    generation = json.loads((kept / "generation_config.json").read_text())
    assert generation["eos_token_id"] == TURN
    assert "temperature" not in generation


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
    for path in given.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text("[1")
    with pytest.raises(UserError, match=r"generation_config\.json cannot be read: it is not JSON"):
        resolve_model(ModelSection(name=str(tmp_path)), seed=0)
