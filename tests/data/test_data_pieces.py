"""Tests of tokenizers, and of chunked tokenisation, whose ids are those of the whole text."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sample_chats import TEMPLATE, lines, prepared, run_data, token_spec, turns
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from offload_trainer.common.errors import UserError
from offload_trainer.data import packing
from offload_trainer.data.documents import example_of
from offload_trainer.data.loss_mask import AnswerEncoder
from offload_trainer.data.packing import DocumentEncoder
from offload_trainer.data.rows import RowReader
from offload_trainer.data.sources import BUILTIN_CORPUS
from offload_trainer.data.stream import StreamedTokens
from offload_trainer.data.tokenizer import load_tokenizer, tokenizer_fingerprint, vocabulary_size

CORPUS = BUILTIN_CORPUS.read_text("utf-8")[:60_000]
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = pre_tokenizers.Split(Regex(_LLAMA3), "isolated")
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_MARKED_SPACES = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def trained(pre_tokenizer: Any, normalizer: Any = None, *, model: str = "bpe") -> PreTrainedTokenizerFast:
    """Train a tokenizer of this kind on the built-in text."""
    backend = Tokenizer(models.BPE(unk_token="<unk>") if model == "bpe" else models.Unigram())
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    words: dict[str, Any] = {"vocab_size": 600, "special_tokens": ["<unk>", "</s>"], "show_progress": False}
    if model == "bpe":
        trainer: Any = trainers.BpeTrainer(**words, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    else:
        trainer = trainers.UnigramTrainer(**words, unk_token="<unk>")
    # Without a pre-tokenizer, BPE would learn merges across words; sentencepiece learns from words.
    backend.train_from_iterator(CORPUS[:20_000].splitlines(keepends=True) if pre_tokenizer else CORPUS.split(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


KINDS = {
    "byte level": lambda: load_tokenizer("builtin"),
    "byte level, a space before the first word": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "words as in Llama 3": lambda: trained(pre_tokenizers.Sequence([_WORDS, _BYTES])),
    "Metaspace": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "Metaspace before the first word": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "as in Llama 2": lambda: trained(None, _MARKED_SPACES),
    "Unigram": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="always"), model="unigram"),
}


def test_pieces_are_bounded_and_join_to_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PIECE", 37)
    cutter = DocumentEncoder(load_tokenizer("builtin"), text_field="text")
    texts = [
        "short",
        "one\ntwo\n\n\nthree four\n" * 20,
        "no line end at all but spaces " * 20,
        "é" * 100 + "€" * 100 + "\U0001f600" * 100,
        "\n" * 100,
        "crlf\r\nlines\r\n" * 20,
    ]
    for text, size in product(texts, (1, 10, 37, 50, 1000)):
        found = list(cutter.pieces(text[i : i + size] for i in range(0, len(text), size)))
        assert "".join(piece.text for piece in found) == text
        assert all(0 < len(piece.text) <= 37 for piece in found)
        assert [piece.ends_document for piece in found] == [False] * (len(found) - 1) + [True]
    assert list(cutter.pieces([])) == list(cutter.pieces(["", ""])) == []


def test_pieces_end_between_lines_and_other_cuts_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PIECE", 12)
    cutter = DocumentEncoder(ByT5Tokenizer(), text_field="text")  # its tokens are bytes
    found = [piece.text for piece in cutter.pieces(["aaa\nbbb\n\n\n", "\n\nccc\nddd"])]
    assert found == ["aaa\n", "bbb\n\n\n\n\nccc\n", "ddd"]
    assert cutter.note == ""
    monkeypatch.setattr(packing, "PIECE", 50)
    (tmp_path / "a.txt").write_text("x" * 500)
    messages: list[str] = []
    prepared(tmp_path / "a.txt", tokenizer=load_tokenizer("builtin"), vocabulary=2048, say=messages.append)
    assert [line for line in messages if "9 splits text that has no lines or words" in line]


# -- the ids that begin and end a document -----------------------------------------------------------------------------

# How the tokenizers of published models mark a text: kind, tokens before and behind it, BOS and EOS
CONVENTIONS: dict[str, tuple[str, list[str], list[str], str | None, str | None]] = {
    "Llama 2": ("as in Llama 2", ["<s>"], [], "<s>", "</s>"),
    "Llama 2 with add_eos_token": ("as in Llama 2", ["<s>"], ["</s>"], "<s>", "</s>"),
    "Llama 3": ("words as in Llama 3", ["<|begin_of_text|>"], [], "<|begin_of_text|>", "<|end_of_text|>"),
    "Mistral": ("Metaspace before the first word", ["<s>"], [], "<s>", "</s>"),
    "Gemma": ("Metaspace", ["<bos>"], [], "<bos>", "<eos>"),
    "Command-R": ("byte level", ["<BOS_TOKEN>"], [], "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "GPT-2": ("byte level", [], [], "<|endoftext|>", "<|endoftext|>"),
    "OPT": ("byte level", ["</s>"], [], "</s>", "</s>"),
    "Qwen": ("byte level", [], [], None, "<|im_end|>"),
    "GLM-4": ("byte level", ["[gMASK]", "<sop>"], [], None, "<|endoftext|>"),
    "T5": ("Unigram", [], ["</s>"], None, "</s>"),
    "RoBERTa": ("byte level", ["<s>"], ["</s>"], "<s>", "</s>"),
    "BERT": ("byte level", ["[CLS]"], ["[SEP]"], None, None),
}


class Marked(NamedTuple):
    """A tokenizer that marks texts as a published one does, and the ids before a text, behind it, and of its EOS."""

    tokenizer: Any
    before: list[int]
    behind: list[int]
    eos: list[int]

    @classmethod
    def of(cls, name: str) -> Marked:
        if name == "ByT5":
            return cls(ByT5Tokenizer(), [], [1], [1])
        kind, before, behind, bos, eos = CONVENTIONS.get(name, (name, [], [], None, "</s>"))
        backend = Tokenizer.from_str(KINDS[kind]().backend_tokenizer.to_str())
        backend.add_special_tokens([token for token in (*before, *behind, bos, eos) if token])
        ids = {token: backend.token_to_id(token) for token in (*before, *behind)}
        if ids:
            single = " ".join([*before, "$A", *behind])
            backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
        end = [] if eos is None else [tokenizer.eos_token_id]
        return cls(tokenizer, [ids[token] for token in before], [ids[token] for token in behind], end)

    def expected(self, text: str) -> list[int]:
        """Return transformers' ids and EOS, each mark once."""
        inner, end = self.tokenizer(text, add_special_tokens=False)["input_ids"], self.behind or self.eos
        begin = [] if inner[: len(self.before)] == self.before else self.before
        end = [] if inner[len(inner) - len(end) :] == end else end
        if begin == self.before and end:
            assert self.tokenizer(text)["input_ids"] == begin + inner + self.behind
        return begin + inner + end


@pytest.mark.parametrize("name", [*CONVENTIONS, "ByT5", "byte level, a space before the first word"])
def test_documents_have_the_ids_of_the_whole_text_and_marks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "PIECE", 1000)
    monkeypatch.setattr(packing, "BATCH_CHARACTERS", 3000)
    marked = Marked.of(name)
    texts = ["one", "a second text\n", CORPUS[:2000]]
    begin, end = marked.tokenizer.decode(marked.before), marked.tokenizer.decode(marked.eos)
    texts += [*(begin + text for text in texts), *(text + end for text in texts), f"one{end}{begin}two", f"one{end}\n"]
    texts.append(CORPUS)
    expected = [id_ for text in texts for id_ in marked.expected(text)]
    path = tmp_path / "a.jsonl"
    path.write_text(lines({"text": text} for text in ["", *texts, ""]))
    said: list[str] = []
    tokens = prepared(path, tokenizer=marked.tokenizer, vocabulary=4000, say=said.append)
    assert tokens.read(0, len(tokens)).tolist() == expected
    assert any("no end-of-text: document boundaries are not marked" in line for line in said) == (not marked.eos)
    stream = StreamedTokens(token_spec(f"stream:{path}", tokenizer=marked.tokenizer, vocabulary=4000))
    assert stream.read(0, len(expected)).tolist() == expected


def test_a_document_without_ids_ends_in_every_batch_alike() -> None:
    tokenizer = trained(pre_tokenizers.ByteLevel(), normalizers.Strip())
    encoder = DocumentEncoder(tokenizer, text_field="text")
    documents = [["one"], [" \n"], ["two"]]
    alone = [id_ for document in documents for ids in encoder.encode([document]) for id_ in ids.tolist()]
    assert [id_ for ids in encoder.encode(documents) for id_ in ids.tolist()] == alone
    assert alone.count(tokenizer.eos_token_id) == 3


@pytest.mark.parametrize("name", CONVENTIONS)
def test_pairs_and_chats_begin_and_end_as_the_tokenizer_marks_them(name: str, tmp_path: Path) -> None:
    """A prompt begins unlearned as transformers begins it, a completion ends once, a template prints its own marks."""
    marked = Marked.of(name)
    tokenizer, before, behind, eos = marked
    begin, end = tokenizer.decode(before), tokenizer.decode(behind or eos)
    tokenizer.chat_template = TEMPLATE
    encoder = AnswerEncoder(tokenizer, everything=False)
    for prompt, completion in product(("The hour is", f"{begin}The hour is"), (" late", f" late{end}")):
        record = {"prompt": prompt, "completion": completion}
        (found,) = encoder.encode([example_of(record, form="pairs", where="here")])
        given = marked.expected(prompt)[: -len(behind or eos) or None]
        assert found.ids == marked.expected(prompt + completion)
        assert found.counted == [False] * len(given) + [True] * (len(found.ids) - len(given))
    talk = turns("Why?", "So.")
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": talk}) + "\n")
    for template in (None, "{{ bos_token }}" + TEMPLATE.replace("<end>", "{{ eos_token }}")):
        tokenizer.chat_template = template
        # Without an end-of-text these templates have nothing that ends an answer.
        train_on = "answers" if tokenizer.eos_token else "all"
        tokens = prepared(path, tokenizer=tokenizer, vocabulary=4000, train_on=train_on)
        expected = tokenizer.apply_chat_template(talk, return_dict=True)["input_ids"]
        batch = RowReader(tokens, seq_len=64, rows=range(1), vocabulary=4000).rows_at([0])
        assert batch.inputs[0, : 64 - batch.padding].tolist() == expected
        if template is None:
            assert expected[: len(before)] == before
            assert expected[len(before)] not in before


def test_packed_documents_begin_with_their_marks(tmp_path: Path) -> None:
    """Positions restart at each BOS behind an EOS. A tokenizer with one token for both cannot tell them apart."""
    tokenizer, before, _, (end,) = Marked.of("Llama 3")
    path = tmp_path / "a.jsonl"
    path.write_text(lines({"text": text} for text in ("one", "two lines", "three", "one", "two lines", "three", "end")))
    tokens = prepared(path, tokenizer=tokenizer, vocabulary=4000)
    begins = (tokens.read(0, len(tokens)) == before[0]).nonzero()[0]
    reader = RowReader(tokens, seq_len=int(begins[3]), rows=range(2), vocabulary=4000, apart=end)
    batch = reader.rows_at([0, 1])
    assert batch.positions is not None
    assert ((batch.positions == 0) == (batch.inputs == before[0])).all()
    assert (batch.positions == 0).sum(1).tolist() == [3, 3]
    Marked.of("OPT").tokenizer.save_pretrained(tmp_path / "opt")
    with pytest.raises(UserError, match="a token that ends documents and does not begin them"):
        run_data(path, vocabulary=4000, seq_len=4, packing="on", tokenizer=str(tmp_path / "opt"))


# -- tokenizers -----------------------------------------------------------------------------------------------------


def small_tokenizer(words: dict[str, int]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_the_builtin_tokenizer_encodes_any_text(
    seed: int, recwarn: pytest.WarningsRecorder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("reached for the network"))
    draw = random.Random(seed)
    tokenizer = load_tokenizer("builtin")
    assert not recwarn.list
    assert capsys.readouterr() == ("", "")
    assert len(tokenizer) == vocabulary_size(tokenizer) == 2048
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>") == 0
    drawn = draw.randbytes(4000).decode("utf-8", errors="replace")
    drawn += "".join(chr(draw.choice([draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)])) for _ in range(500))
    for text in (BUILTIN_CORPUS.read_text("utf-8"), drawn):
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
    first, second = (Marked.of(name).tokenizer for name in ("Llama 2", "Llama 2 with add_eos_token"))
    assert tokenizer_fingerprint(first) != tokenizer_fingerprint(second)
    other = ByT5Tokenizer()
    other.build_inputs_with_special_tokens = lambda ids, _=None: [5, *ids]
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(ByT5Tokenizer())
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
