"""Tests of tokenizers: the built-in one encodes any text, and an unavailable one is refused with a remedy."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offload_trainer.data.sources import BUILTIN_CORPUS
from offload_trainer.data.tokenizer import load_tokenizer, tokenizer_fingerprint, vocabulary_size
from offload_trainer.errors import UserError


def small_tokenizer(words: dict[str, int]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_the_builtin_tokenizer_matches_its_description() -> None:
    tokenizer = load_tokenizer("builtin")
    assert len(tokenizer) == vocabulary_size(tokenizer) == 2048
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>") == 0
    assert (
        tokenizer("Out, damned spot!")["input_ids"]
        == tokenizer("Out, damned spot!", add_special_tokens=False).input_ids
    )


def test_the_builtin_text_round_trips() -> None:
    tokenizer = load_tokenizer("builtin")
    text = BUILTIN_CORPUS.read_text("utf-8")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert 150_000 <= len(text.encode()) <= 200_000
    assert len(ids) < len(text) / 2.5
    assert 0 not in ids


def test_any_text_round_trips(seed: int) -> None:
    draw = random.Random(seed)
    tokenizer = load_tokenizer("builtin")
    text = draw.randbytes(4000).decode("utf-8", errors="replace")
    text += "".join(chr(draw.choice([draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)])) for _ in range(500))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert max(ids) < 2048
    assert tokenizer.decode(ids) == text


def test_loading_needs_no_network_and_warns_of_nothing(
    recwarn: pytest.WarningsRecorder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("reached for the network"))
    load_tokenizer("builtin")
    assert not recwarn.list
    assert capsys.readouterr() == ("", "")


def test_the_fingerprint_tells_tokenizers_apart_and_ignores_call_settings() -> None:
    one = small_tokenizer({"?": 0, "a": 1, "b": 2})
    fingerprint = tokenizer_fingerprint(one)
    assert fingerprint == tokenizer_fingerprint(small_tokenizer({"?": 0, "a": 1, "b": 2}))
    assert fingerprint != tokenizer_fingerprint(small_tokenizer({"?": 0, "b": 1, "a": 2}))
    one(["a b a"], truncation=True, max_length=2)
    assert one.backend_tokenizer.truncation is not None
    assert tokenizer_fingerprint(one) == fingerprint


def test_vocabulary_size_counts_holes() -> None:
    assert vocabulary_size(small_tokenizer({"?": 0, "a": 9})) == 10


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no tokenizer.*data\.tokenizer=builtin"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 50257}')
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(UserError, match="no such directory"):
        load_tokenizer(str(tmp_path / "gone"))


def test_an_unreachable_hub_id_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to the hub\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(UserError, match=r"someone/model is no directory here.*couldn't connect to the hub\).*network"):
        load_tokenizer("someone/model")
