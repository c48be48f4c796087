"""Tests of compressed text, Parquet, Arrow and saved data sets: they give the ids and rows of the same plain lines."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from datasets import Dataset, DatasetDict
from pyarrow import ipc, parquet
from sample_chats import CHATS, prepared

from offload_trainer.data import documents
from offload_trainer.errors import UserError


def zstd(data: bytes) -> bytes:
    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}
TEXTS = [f"Line {n} é, of many.\nAnd more" * (n % 5 + 1) for n in range(700)]
TALKS = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in CHATS * 60]


def ids_of(*paths: Path, **section: Any) -> list[int]:
    tokens = prepared(*paths, **section)
    found: list[int] = tokens.read(0, len(tokens)).tolist()
    return found


def lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def texts() -> list[dict[str, Any]]:
    return [{"id": number, "text": text} for number, text in enumerate(TEXTS)]


@pytest.mark.slow
@pytest.mark.parametrize("packing", PACKERS)
def test_packed_files_give_what_they_hold(packing: str, tmp_path: Path) -> None:
    """A compressed file of two concatenated members, longer than any block read at a time, gives its whole content."""
    content = lines(texts() * 12)
    assert len(content) > 1 << 19
    half = len(content) // 2
    for name in ("a.jsonl", "a.txt"):
        (tmp_path / name).write_bytes(content)
        packed = tmp_path / f"b{Path(name).suffix}{packing}"
        packed.write_bytes(PACKERS[packing](content[:half]) + PACKERS[packing](content[half:]))
        assert ids_of(packed) == ids_of(tmp_path / name)
    assert ids_of(tmp_path / "a.jsonl") != ids_of(tmp_path / "a.txt")


@pytest.mark.parametrize("packing", PACKERS)
def test_a_packed_file_that_is_cut_short_is_refused(packing: str, tmp_path: Path) -> None:
    file = tmp_path / f"a.jsonl{packing}"
    file.write_bytes(PACKERS[packing](lines(texts()))[:-40])
    with pytest.raises(UserError, match=r"a\.jsonl\.\w+ cannot be decompressed: .*is it damaged or incomplete"):
        prepared(file)
    file.write_bytes(b"Once upon a time, and so on.")
    with pytest.raises(UserError, match="cannot be decompressed"):
        prepared(file)
    assert not list((tmp_path / "cache").glob("*.bin*"))


def test_errors_in_packed_lines_name_their_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": 1}\n'))
    with pytest.raises(UserError, match=r"a\.jsonl\.gz, line 2: field 'text' holds a number"):
        prepared(tmp_path / "a.jsonl.gz")


def tables_of(records: list[dict[str, Any]], folder: Path) -> dict[str, Path]:
    """Write the same records in each table format; return the paths."""
    table = pyarrow.Table.from_pylist(records)
    parquet.write_table(table, folder / "a.parquet", row_group_size=300)
    with ipc.new_stream(folder / "stream.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=333)
    with ipc.new_file(folder / "file.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=333)
    saved = Dataset.from_list(records)
    saved.save_to_disk(folder / "saved", num_shards=3)
    (folder / "saved" / "cache-1234.arrow").write_bytes(b"somebody's")
    (folder / "more").mkdir()
    parquet.write_table(table.slice(0, 100), folder / "more" / "part-0.parquet")
    parquet.write_table(table.slice(100), folder / "more" / "part-1.parquet")
    names = ("a.parquet", "stream.arrow", "file.arrow", "saved", "more")
    return {name: folder / name for name in names}


def test_tables_of_text_give_what_their_lines_give(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(texts()))
    expected = ids_of(tmp_path / "a.jsonl")
    for name, path in tables_of(texts(), tmp_path).items():
        assert ids_of(path) == expected, name


def test_tables_of_conversations_give_what_their_lines_give(tmp_path: Path) -> None:
    """Tables give the rows of the same lines, although a table adds a field of some messages to all, as null."""
    records: list[dict[str, Any]] = [{"messages": talk, "source": "x"} for talk in TALKS]
    records[3] = {"messages": [*TALKS[3][:1], TALKS[3][1] | {"weight": 0}, *TALKS[4]], "source": "y"}
    (tmp_path / "a.jsonl").write_bytes(lines(records))
    expected = prepared(tmp_path / "a.jsonl")
    for path in tables_of(records, tmp_path).values():
        assert prepared(path).sums == expected.sums
    wanted = {"messages"}
    names = {key for _, row in documents.read_records(tmp_path / "a.parquet", wanted=wanted) for key in row}
    assert names == wanted


def test_a_table_of_other_columns_names_those_it_has(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"body": ["a"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet, row 1: no field 'text'; there are: body, id"):
        prepared(tmp_path / "a.parquet")
    assert len(prepared(tmp_path / "a.parquet", text_field="body")) == 2
    parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b\.parquet, row 2: field 'text' holds null"):
        prepared(tmp_path / "b.parquet")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_what_is_no_table_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"Once upon a time there was no table at all.")
    with pytest.raises(UserError, match=rf"{name} cannot be read as (parquet|arrow): "):
        prepared(tmp_path / name)


def test_a_table_is_found_again_and_seen_to_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, said = tmp_path / "a.parquet", []
    parquet.write_table(pyarrow.table({"text": TEXTS}), file)
    first = prepared(file)
    assert prepared(file, say=said.append).path == first.path
    assert any("already there" in line for line in said)
    parquet.write_table(pyarrow.table({"text": TEXTS[1:]}), file)
    read = documents._table_batches

    def changed(*given: Any) -> Any:
        yield from read(*given)
        file.write_bytes(file.read_bytes() + b"x")

    with monkeypatch.context() as patch:
        patch.setattr(documents, "_table_batches", changed)
        with pytest.raises(Exception, match="the text changed while it was being tokenised"):
            prepared(file)


def test_splits_and_half_copied_data_sets_are_refused(tmp_path: Path) -> None:
    one = Dataset.from_list(texts()[:5])
    DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "both")
    with pytest.raises(
        UserError, match=r"holds several datasets: choose one, --data .*both/train or --data .*both/test"
    ):
        prepared(tmp_path / "both")
    assert len(prepared(tmp_path / "both" / "train")) > 5
    (tmp_path / "both/train/data-00000-of-00001.arrow").unlink()
    with pytest.raises(UserError, match=r"data-00000-of-00001\.arrow does not exist, but .*state\.json names it"):
        prepared(tmp_path / "both" / "train")
    (tmp_path / "both/train/state.json").write_text('{"_data_files": [{"filename": "../../x"}]}')
    with pytest.raises(UserError, match="names no files of a dataset"):
        prepared(tmp_path / "both" / "train")
