"""Tests of documents: how files divide into them, and that errors name file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offload_trainer.data import documents
from offload_trainer.data.chunked_tokenize import TextSplitter
from offload_trainer.data.documents import read_documents
from offload_trainer.errors import UserError


def read(source: Path, *, text_field: str = "text") -> list[tuple[str, bool]]:
    splitter = TextSplitter(lambda text: list(text.encode()))
    documents = read_documents(source, text_field=text_field)
    return [(piece.text, piece.ends_document) for blocks in documents for piece in splitter.pieces(blocks)]


def test_jsonl_lines_are_documents_and_blank_ones_are_not(tmp_path: Path) -> None:
    texts = ["first\nwith a line end", "", "zweiter é"]
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n\n".join(lines), encoding="utf-8")
    assert read(tmp_path / "a.jsonl") == [("first\nwith a line end", True), ("zweiter é", True)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b'{"text": "cut', "not JSON"),
        (b'{"Text": "a", "id": 1}', r"no field 'text'; there are: Text, id\. Set data\.text_field=Text"),
        (b'{"text": 5}', "holds a number, where a string"),
        (b'["text"]', "a list, where an object"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": "\\ud800"}', "surrogate"),
        (b'{"text": "a", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"text": "a", "number": ' + b"7" * 5000 + b"}", r"cannot be read \(Exceeds the limit"),
        (b'{"a\\u001b[31mred": 1, "x": 2}', r"there are: a\\x1b\[31mred, x\."),
    ],
)
def test_a_bad_jsonl_line_is_named(bad: bytes, message: str, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "good"}\n\n' + bad + b"\n")
    with pytest.raises(UserError, match=message) as caught:
        read(source)
    assert f"{source}, line 3:" in str(caught.value)


def test_a_character_that_a_text_file_cuts_at_its_end_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a line of text\n" * 40 + b"and \xe2\x82")
    with pytest.raises(UserError, match=r"a\.txt, line 41: not UTF-8: its byte 0xe2"):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize(("line", "mark"), [(1, b""), (1, b"\xef\xbb\xbf"), (3, b"\xef\xbb\xbf")])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_the_line_of_a_wrong_byte_is_named(
    name: str, line: int, mark: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [json.dumps({"text": f"é€ {number}" * 5}, ensure_ascii=False).encode() for number in range(4)]
    bad = lines[line - 1].replace(str(line - 1).encode(), b"\xff")
    (tmp_path / name).write_bytes(mark + b"\n".join([*lines[: line - 1], bad, *lines[line:]]))
    for block in (1, 7, 1 << 18):
        monkeypatch.setattr(documents, "_BLOCK", block)
        with pytest.raises(UserError, match=rf"line {line}: not UTF-8: its byte 0xff"):
            read(tmp_path / name)


def test_a_text_is_the_same_in_blocks_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text decodes alike wherever blocks cut its characters of one to four bytes; a byte-order mark is dropped."""
    text = "aé€\U0001f600\n" * 7
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    for size in (3, 4, 5, 7, 100):
        monkeypatch.setattr(documents, "_BLOCK", size)
        assert read(tmp_path / "a.txt") == [(text, True)]
    (tmp_path / "a.txt").write_bytes(b"")
    assert read(tmp_path / "a.txt") == []


def test_a_line_beyond_the_limit_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LINE_BYTES", 50)
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": "a" * 37}) + "\n" + json.dumps({"text": "b" * 60}) + "\n")
    with pytest.raises(UserError, match=r"line 2: longer than 50 B"):
        read(source)


def test_names_with_control_characters_are_escaped(tmp_path: Path) -> None:
    source = tmp_path / "a\x1b[31m.jsonl"
    source.write_text("{")
    with pytest.raises(UserError, match=r"a\\x1b\[31m\.jsonl', line 1: not JSON"):
        read(source)
