"""Documents: which files a path stands for, and that every mistake in them is named by file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offload_trainer.data import documents
from offload_trainer.data.documents import BUILTIN_CORPUS, find_sources, read_documents
from offload_trainer.errors import UserError


def read(source: Path, *, text_field: str = "text") -> list[tuple[str, bool]]:
    return [(text, ends) for text, ends in read_documents(source, text_field=text_field)]


def test_directories_are_walked_in_order_and_files_taken_as_named(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/c.JSONL", "a/skip.py", "k.rst", ".git/x.md", "a/.hidden.txt"):
        file = tmp_path / "d" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    (tmp_path / "code.py").write_text("pass")
    sources = find_sources([str(tmp_path / "code.py"), str(tmp_path / "d"), "builtin"])
    found = [tmp_path / "code.py", tmp_path / "d/a/c.JSONL", tmp_path / "d/a/z.md", tmp_path / "d/b.txt"]
    assert sources == [*found, BUILTIN_CORPUS]


def test_every_missing_path_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "here.txt").write_text("x")
    with pytest.raises(UserError) as caught:
        find_sources([str(tmp_path / name) for name in ("gone.txt", "here.txt", "lost")])
    assert "gone.txt" in str(caught.value)
    assert "lost" in str(caught.value)
    assert "here.txt" not in str(caught.value)


def test_a_directory_without_text_and_tokens_beside_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"\0\0")
    with pytest.raises(UserError, match=r"no \.txt, \.md, \.jsonl.*--data .*train\.bin"):
        find_sources([str(tmp_path)])
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="already tokens"):
        find_sources([str(tmp_path / "a.txt"), str(tmp_path / "train.bin")])
    shards = [tmp_path / "train.bin", tmp_path / "train.bin"]
    assert find_sources([str(shard) for shard in shards]) == shards


@pytest.mark.parametrize(
    "text",
    [
        "short",
        "one\ntwo\n\n\nthree four\n" * 20,
        "no line end at all but spaces " * 20,
        "é" * 100 + "€" * 100 + "\U0001f600" * 100,
        "\n" * 100,
        "crlf\r\nlines\r\n" * 20,
    ],
)
def test_pieces_are_bounded_and_join_to_the_text(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 37)
    (tmp_path / "a.txt").write_bytes(text.encode())
    pieces = read(tmp_path / "a.txt")
    assert "".join(piece for piece, _ in pieces) == text
    assert all(0 < len(piece.encode()) <= 37 for piece, _ in pieces)
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]


def test_pieces_are_cut_between_lines_that_are_not_blank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 12)
    (tmp_path / "a.txt").write_text("aaa\nbbb\n\n\n\n\nccc\nddd")
    pieces = [piece for piece, _ in read(tmp_path / "a.txt")]
    assert pieces == ["aaa\n", "bbb\n\n\n\n\nccc\n", "ddd"]


def test_jsonl_lines_are_documents_and_blank_ones_are_not(tmp_path: Path) -> None:
    texts = ["first\nwith a line end", "", "zweiter é"]
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n\n".join(lines), encoding="utf-8")
    assert read(tmp_path / "a.jsonl") == [("first\nwith a line end", True), ("zweiter é", True)]


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (b'{"text": "cut', "not JSON"),
        (b'{"Text": "a", "id": 1}', r"no field 'text'; there are: Text, id\. Set data\.text_field=Text"),
        (b'{"text": 5}', "holds a int"),
        (b'["text"]', "a JSON list"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_a_bad_jsonl_line_is_named(bad: bytes, told: str, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "good"}\n\n' + bad + b"\n")
    with pytest.raises(UserError, match=told) as caught:
        read(source)
    assert f"{source}, line 3:" in str(caught.value)


def test_bad_utf8_in_a_text_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 16)
    (tmp_path / "a.txt").write_bytes(b"a line of text\n" * 40 + b"and \xe9 here\n")
    with pytest.raises(UserError, match=r"a\.txt, line 41: not UTF-8 \(byte 0xe9\)"):
        read(tmp_path / "a.txt")
