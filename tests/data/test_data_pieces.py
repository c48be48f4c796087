"""Tests of chunked tokenisation: chunks are bounded and join to the text, and their ids are those of the whole text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sample_chats import prepared
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from offload_trainer.data import chunked_tokenize
from offload_trainer.data.chunked_tokenize import TextSplitter
from offload_trainer.data.sources import BUILTIN_CORPUS
from offload_trainer.data.tokenfile import sidecar_path
from offload_trainer.data.tokenizer import load_tokenizer

CORPUS = BUILTIN_CORPUS.read_text("utf-8")[:60_000]
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(pre_tokenizer: Any, normalizer: Any = None, *, model: str = "bpe") -> PreTrainedTokenizerFast:
    """Train a tokenizer of this kind on the built-in text."""
    backend = Tokenizer(models.BPE(unk_token="<unk>") if model == "bpe" else models.Unigram())
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    special = ["<unk>", "</s>"]
    if model == "bpe":
        trainer: Any = trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
    else:
        trainer = trainers.UnigramTrainer(
            vocab_size=600, special_tokens=special, show_progress=False, unk_token="<unk>"
        )
    # Without a pre-tokenizer, BPE would learn merges across words; sentencepiece learns from words.
    backend.train_from_iterator(CORPUS[:20_000].splitlines(keepends=True) if pre_tokenizer else CORPUS.split(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


KINDS = {
    "byte level": lambda: load_tokenizer("builtin"),
    "byte level, a space before the first word": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "words as in Llama 3": lambda: trained(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_LLAMA3), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    ),
    "Metaspace": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "Metaspace before the first word": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "as in Llama 2": lambda: trained(
        None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    "Unigram": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="always"), model="unigram"),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]()


def test_ids_are_those_of_the_text_in_one_piece(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty chunks of a text give the ids of the uncut text."""
    monkeypatch.setattr(chunked_tokenize, "PIECE", 1000)
    monkeypatch.setattr(chunked_tokenize, "BATCH_CHARACTERS", 3000)
    path = tmp_path / "a.txt"
    path.write_text(CORPUS)
    messages: list[str] = []
    tokens = prepared(path, tokenizer=tokenizer, vocabulary=4000, say=messages.append)
    whole = tokenizer(CORPUS, add_special_tokens=False)["input_ids"]
    assert tokens.read(0, len(tokens)).tolist() == [*whole, tokenizer.eos_token_id]
    assert json.loads(sidecar_path(tokens.paths[0]).read_text())["text_bytes"] == len(CORPUS.encode())
    assert not [line for line in messages if "cuts" in line]


def test_the_plain_cut_would_change_ids() -> None:
    """Cutting after every line end changes Metaspace's ids, so the test above can fail."""
    tokenizer = KINDS["Metaspace"]()
    place = CORPUS.index("\n", 1000) + 1

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    assert ids(CORPUS[:place]) + ids(CORPUS[place:2000]) != ids(CORPUS[:2000])


TEXTS = [
    "short",
    "one\ntwo\n\n\nthree four\n" * 20,
    "no line end at all but spaces " * 20,
    "é" * 100 + "€" * 100 + "\U0001f600" * 100,
    "\n" * 100,
    "crlf\r\nlines\r\n" * 20,
]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_bounded_and_join_to_the_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_tokenize, "PIECE", 37)
    tokenizer = load_tokenizer("builtin")
    cutter = TextSplitter(lambda part: tokenizer(part, add_special_tokens=False)["input_ids"])
    for size in (1, 10, 37, 50, 1000):
        found = list(cutter.pieces(text[i : i + size] for i in range(0, len(text), size)))
        assert "".join(piece.text for piece in found) == text
        assert all(0 < len(piece.text) <= 37 for piece in found)
        assert [piece.ends_document for piece in found] == [False] * (len(found) - 1) + [True]
    assert list(cutter.pieces([])) == list(cutter.pieces(["", ""])) == []


def test_pieces_are_cut_between_lines_that_are_not_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_tokenize, "PIECE", 12)
    cutter = TextSplitter(lambda text: list(text.encode()))
    found = [piece.text for piece in cutter.pieces(["aaa\nbbb\n\n\n", "\n\nccc\nddd"])]
    assert found == ["aaa\n", "bbb\n\n\n\n\nccc\n", "ddd"]
    assert cutter.inexact == 0


def test_cuts_that_may_change_ids_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_tokenize, "PIECE", 50)
    (tmp_path / "a.txt").write_text("x" * 500)
    messages: list[str] = []
    prepared(tmp_path / "a.txt", tokenizer=load_tokenizer("builtin"), vocabulary=2048, say=messages.append)
    assert [line for line in messages if "9 splits text that has no lines or words" in line]
