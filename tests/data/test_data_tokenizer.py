"""Tests of tokenizers: the built-in one encodes any text, and a fingerprint tells them apart."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offload_trainer.data.sources import BUILTIN_CORPUS
from offload_trainer.data.tokenizer import load_tokenizer, tokenizer_fingerprint, vocabulary_size
from offload_trainer.errors import UserError

SHIPPED = BUILTIN_CORPUS.read_text("utf-8")


def small_tokenizer(words: dict[str, int]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_the_builtin_tokenizer_encodes_any_text(
    seed: int, recwarn: pytest.WarningsRecorder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading it needs no network and warns of nothing."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("reached for the network"))
    draw = random.Random(seed)
    tokenizer = load_tokenizer("builtin")
    assert not recwarn.list
    assert capsys.readouterr() == ("", "")
    assert len(tokenizer) == vocabulary_size(tokenizer) == 2048
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>") == 0
    drawn = draw.randbytes(4000).decode("utf-8", errors="replace")
    drawn += "".join(chr(draw.choice([draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)])) for _ in range(500))
    for text in (SHIPPED, drawn):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer(text)["input_ids"] == ids
        assert 0 < min(ids) <= max(ids) < 2048
        assert tokenizer.decode(ids) == text


def test_the_fingerprint_tells_tokenizers_apart_and_ignores_call_settings() -> None:
    one = small_tokenizer({"?": 0, "a": 1, "b": 2})
    fingerprint = tokenizer_fingerprint(one)
    assert fingerprint == tokenizer_fingerprint(small_tokenizer({"?": 0, "a": 1, "b": 2}))
    assert fingerprint != tokenizer_fingerprint(small_tokenizer({"?": 0, "b": 1, "a": 2}))
    one(["a b a"], truncation=True, max_length=2)
    assert one.backend_tokenizer.truncation is not None
    assert tokenizer_fingerprint(one) == fingerprint
    assert vocabulary_size(small_tokenizer({"?": 0, "a": 9})) == 10  # the ids between them count


def test_a_name_without_a_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to the hub\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "gpt2", "vocab_size": 50257}')
    for name, told in (
        (tmp_path, r"holds no tokenizer.*data\.tokenizer=builtin"),
        (tmp_path / "model", "holds no tokenizer"),
        (tmp_path / "gone", "no such directory"),
        ("someone/model", r"someone/model is no directory here.*couldn't connect to the hub\).*network"),
    ):
        with pytest.raises(UserError, match=told):
            load_tokenizer(str(name))
