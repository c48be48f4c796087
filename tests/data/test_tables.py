"""Tests of lines, compressed text, CSV, JSON arrays, Parquet, Arrow and saved data sets: all give what lines give."""

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from datasets import Dataset, DatasetDict
from pyarrow import csv as arrow_csv
from pyarrow import ipc, parquet
from sample_chats import CHATS, documents_of, lines, prepared, turns

from offload_trainer.common.errors import UserError
from offload_trainer.data import documents
from offload_trainer.data.sources import find_sources

PACKERS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
PACKERS[".zst"] = lambda data: bytes(pyarrow.compress(data, codec="zstd", asbytes=True))
TEXTS = [{"id": n, "text": f"Line {n} é, of many.\nAnd more" * (n % 5 + 1)} for n in range(700)]
TALKS = [turns(*talk) for talk in CHATS * 60]


def forms_of(records: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Write the same records in each form that is read; return the paths. Compressed files have two members."""
    content, table = lines(records).encode(), pyarrow.Table.from_pylist(records)
    for name in ("lines.json", "a.ndjson"):
        (folder / name).write_bytes(content)
    (folder / "array.json").write_text(json.dumps(records))
    half = len(content) // 2
    for kind, pack in PACKERS.items():
        (folder / f"a.jsonl{kind}").write_bytes(pack(content[:half]) + pack(content[half:]))
    if "text" in records[0]:
        with open(folder / "a.csv", "w", newline="") as file:
            csv.writer(file).writerows([records[0], *(record.values() for record in records)])
    parquet.write_table(table, folder / "a.parquet", row_group_size=300)
    for name, make in (("stream.arrow", ipc.new_stream), ("file.arrow", ipc.new_file)):
        with make(folder / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=333)
    Dataset.from_list(records).save_to_disk(folder / "saved", num_shards=3)
    (folder / "saved" / "cache-1234.arrow").write_bytes(b"somebody's")
    return sorted(folder.iterdir())


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_every_form_gives_what_its_lines_give(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed files are longer than any block read at a time. A table adds a message's field to all, as null."""
    monkeypatch.setattr(documents, "_BLOCK", 1000)
    records: list[dict[str, Any]] = [{"messages": talk, "source": "x"} for talk in TALKS]
    records[3] = {"messages": [*TALKS[3][:1], TALKS[3][1] | {"weight": 0}, *TALKS[4]], "source": "y"}
    records = TEXTS if kind == "text" else records
    (tmp_path / "forms").mkdir()
    paths = forms_of(records, tmp_path / "forms")
    (tmp_path / "a.jsonl").write_text(lines(records))
    expected = prepared(tmp_path / "a.jsonl")
    assert len(expected) > 10_000
    assert [path.name for path in paths if prepared(path, cache=tmp_path / "cache").sums != expected.sums] == []
    if kind == "text":
        rows = documents.read_records(tmp_path / "forms/a.parquet", column="text")
        assert {key for _, row in rows for key in row} == {"text"}


def test_a_text_is_one_document_in_blocks_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is a packed one. Blocks may cut characters of one to four bytes; a byte-order mark is dropped."""
    content = "aé€\U0001f600\n".encode() * 7
    for kind, pack in {"": bytes, **PACKERS}.items():
        (tmp_path / f"b.txt{kind}").write_bytes(pack(b"\xef\xbb\xbf" + content[:15]) + pack(content[15:]))
        for size in (3, 4, 5, 7, 100):
            monkeypatch.setattr(documents, "_BLOCK", size)
            assert documents_of(tmp_path / f"b.txt{kind}") == [content.decode()]


@pytest.mark.parametrize("packing", PACKERS)
def test_a_packed_file_that_is_cut_short_is_refused(packing: str, tmp_path: Path) -> None:
    file = tmp_path / f"a.jsonl{packing}"
    file.write_bytes(PACKERS[packing](lines(TEXTS).encode())[:-40])
    with pytest.raises(UserError, match=r"a\.jsonl\.\w+ cannot be decompressed: .*is it damaged or incomplete"):
        prepared(file)
    file.write_bytes(b"Once upon a time, and so on.")
    with pytest.raises(UserError, match="cannot be decompressed"):
        prepared(file)
    assert not list((tmp_path / "cache").glob("*.bin*"))


# Fields that are easily read wrong: a length beyond the csv module's limit, newlines, quotes, spelled nulls and numbers
FIELDS = ["x" * 200_000, 'a "b"\r\nc\n\nd', "NA", "", "007", " é, ", "true", "\u2028 \x85 end"]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz", "a.tsv.zst"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rows_of_csv_are_those_that_pyarrow_reads(name: str, mark: str, end: str, tmp_path: Path) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter="\t" if ".tsv" in name else ",", lineterminator=end)
    writer.writerows([["id", "text"], *enumerate(FIELDS)])
    plain, kind = (mark + text.getvalue()).encode(), Path(name).suffix
    (tmp_path / name).write_bytes(PACKERS[kind](plain) if kind in PACKERS else plain)
    expected = arrow_csv.read_csv(
        io.BytesIO(plain),
        parse_options=arrow_csv.ParseOptions(delimiter=writer.dialect.delimiter, newlines_in_values=True),
        convert_options=arrow_csv.ConvertOptions(column_types={"id": pyarrow.string(), "text": pyarrow.string()}),
    ).to_pylist()
    found = [row for _, row in documents.read_records(tmp_path / name)]
    assert found == expected
    assert [row["text"] for row in found] == FIELDS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", 'text,x\n"a\nb",1\nc\n', r"a\.csv, line 4: not one field for each of the 2 names in the first row"),
        ("a.csv", 'text\na\n"b" c\n', r"a\.csv, line 3: cannot be read as CSV: ',' expected after '\"'"),
        ("a.tsv", 'text\n"a\n', r"a\.tsv, line 2: cannot be read as CSV: unexpected end of data"),
        ("a.csv", "text,x,text\na,b,c\n", r"line 2: not one field for each of the 3 names in the first row: text, x"),
        ("a.csv", "text;x\na;1\n", r"line 2: no field 'text'; there are: text;x"),
        ("a.csv", 'messages\n"[{""role"": ""user""}]"\n', r"line 2: 'messages' holds a string, .*CSV has strings only"),
        ("a.parquet", "Once upon a time there was no table.", r"a\.parquet cannot be read as parquet: "),
        ("a.arrow", "Once upon a time there was no table.", r"a\.arrow cannot be read as arrow: "),
        ("a.json", '[{"text": "a"}, {"text": 1}]', r"record 2: field 'text' holds a number, where a string"),
        ("a.json", '[{"text": "a"}, {"text": "b', r"a\.json, record 2: not JSON \(Unterminated string"),
        ("a.json", '[{"text": "a"}', r"a\.json, record 2: not JSON \(Expecting value"),
        ("a.json", '[{"text": "a"}, "b"]', r"record 2: a string, where an object is needed"),
        ("a.json", '[{"text": "a"}]\n[{"text": "b"}]', r"the array has ended, and more text follows"),
        ("a.json", '{\n "text": "a"\n}', r"a\.json, line 1: not JSON"),
        ("a.json", '[{"text": "a", "x": ' + "7" * 5000 + "}]", r"record 1: JSON that cannot be read"),
        ("a.jsonl", '{"text": ""}\n\n', "it contains no text"),
        ("a.jsonl", '{"text": "a"}\n\n{"text": "cut', r"a\.jsonl, line 3: not JSON"),
        ("a.jsonl", '{"Text": "a", "id": 1}', r"no field 'text'; there are: Text, id\. Set data\.text_field=Text"),
        ("a.jsonl", '{"text": "\\ud800"}', "line 1: .*surrogate"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "\\ud800"}]}', "1: message 1 holds half a surrogate"),
        ("a.jsonl", '{"text": "a", "deep": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 1: .*nested too deeply"),
        ("a.jsonl", '{"text": "a", "x": ' + "7" * 5000 + "}", r"line 1: .*cannot be read \(Exceeds the limit"),
        ("a.jsonl", '{"a\\u001b[31mred": 1, "x": 2}', r"line 1: .*there are: a\\x1b\[31mred, x\."),
        ("a\x1b[31m.jsonl", "{", r"a\\x1b\[31m\.jsonl', line 1: not JSON"),
    ],
)
def test_what_is_refused_names_its_place(name: str, content: str, message: str, tmp_path: Path) -> None:
    pack = PACKERS.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(content.encode(errors="surrogateescape")))
    with pytest.raises(UserError, match=message):
        prepared(tmp_path / name)
    assert not list((tmp_path / "cache").glob("*.bin*"))


def test_records_beyond_the_limit_and_rows_without_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet.write_table(pyarrow.table({"body": ["a", None]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet, row 2: field 'body' holds null"):
        prepared(tmp_path / "a.parquet", text_field="body")
    monkeypatch.setattr(documents, "LINE_BYTES", 50)
    monkeypatch.setattr(documents, "_BLOCK", 16)
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a"}, {"text": "b" * 900}, {"text": "c"}]))
    with pytest.raises(UserError, match=r"record 2: longer than 50 B"):
        prepared(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('[{"text": "a"}, {"text": b}' + ', {"text": "c"}' * 60)
    with pytest.raises(UserError, match=r"record 2: not JSON \(Expecting value, character 10\)"):
        prepared(tmp_path / "a.json")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a" * 37}) + "\n" + json.dumps({"text": "b" * 60}) + "\n")
    with pytest.raises(UserError, match=r"line 2: longer than 50 B"):
        prepared(tmp_path / "a.jsonl")
    (tmp_path / "a.csv").write_text("text\n" + '"' + "a\n" * 60)
    with pytest.raises(UserError, match=r"line \d+: cannot be read as CSV: field larger than field limit \(50\)"):
        prepared(tmp_path / "a.csv")


def test_a_saved_data_set_has_the_splits_of_its_folders_and_missing_files_are_named(tmp_path: Path) -> None:
    one, said = Dataset.from_list(TEXTS[:5]), list[str]()
    DatasetDict({"a": one, "b": one}).save_to_disk(tmp_path / "neither")
    with pytest.raises(UserError, match="holds no train split, only files named a and b"):
        prepared(tmp_path / "neither")
    DatasetDict({"train": one, "test": Dataset.from_list(TEXTS[5:])}).save_to_disk(
        tmp_path / "both", num_shards={"train": 2, "test": 1}
    )
    assert prepared(tmp_path / "both", say=said.append).sums == prepared(tmp_path / "neither" / "a").sums
    assert not [line for line in said if line.startswith("note: only")]
    (tmp_path / "both/train/data-00001-of-00002.arrow").unlink()
    prepared(tmp_path / "both", say=said.append)
    (note,) = [line for line in said if line.startswith("note: only")]
    assert note == f"note: only 1 of the 2 files {tmp_path / 'both/train/data'}-*-of-00002 are there"
    one.save_to_disk(tmp_path / "neither" / "a", num_shards=2)  # which leaves the file of the earlier save
    assert documents_of(*find_sources([str(tmp_path / "neither" / "a")])) == [row["text"] for row in TEXTS[:5]]


def test_marks_are_skipped_and_lines_of_wrong_bytes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"é€ {number}" * 5 for number in range(3)]
    content = "\ufeff" + "\n\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    (tmp_path / "a.jsonl").write_text(content, encoding="utf-8")
    assert documents_of(tmp_path / "a.jsonl") == texts
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_bytes(content.encode().replace(b"2", b"\xff"))
        for block in (1, 7, 1 << 18):
            monkeypatch.setattr(documents, "_BLOCK", block)
            with pytest.raises(UserError, match=r"line 5: not UTF-8: its byte 0xff"):
                documents_of(tmp_path / name)
