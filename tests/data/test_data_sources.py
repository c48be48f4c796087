"""Tests of data sources: the files that a path or a data set of the hub means, and those that are refused by name."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from sample_chats import prepared

from offload_trainer.data import sources, stream
from offload_trainer.data.documents import read_records
from offload_trainer.data.sources import BUILTIN_CORPUS, find_sources
from offload_trainer.data.stream import check_stream
from offload_trainer.errors import UserError


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
    with pytest.raises(UserError, match="holds tokens"):
        find_sources([str(tmp_path / "a.txt"), str(tmp_path / "train.bin")])
    shards = [tmp_path / "train.bin", tmp_path / "train.bin"]
    assert find_sources([str(shard) for shard in shards]) == shards


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"text": "a"}]', r"json\.load\(sys\.stdin\).*rename it to \.jsonl"),
        ("a.JSON", b'{"text": "a"}\n{"text": "b"}', r"rename it to \.jsonl"),
        ("a.ndjson", b'{"text": "a"}', r"rename it to \.jsonl"),
        ("a.csv", b"text\na", r"csv\.DictReader"),
        ("a.tsv", b"text\na", r"csv\.DictReader"),
        ("a.dump", b"PAR1 and more", r"rename it to \.parquet"),
        ("a.txt", gzip.compress(b"text", mtime=0), r"it is compressed: .*NAME\.txt\.gz or NAME\.jsonl\.gz"),
        ("a.gz", gzip.compress(b"text", mtime=0), r"it is compressed: .*NAME\.txt\.gz or NAME\.jsonl\.gz"),
        ("a.tar.gz", gzip.compress(b"text", mtime=0), "or decompress it"),
        ("a.tar.zst", b"(\xb5/\xfd", r"NAME\.txt\.zst"),
        ("a.xz", b"", r"NAME\.txt\.xz"),
        ("a", "text".encode("utf-16"), "zero bytes"),
        ("a.dump", b'{"text": "a"}\n{"text": "b"}\n', r"a JSON object; rename it to \.jsonl"),
    ],
)
def test_what_would_be_trained_on_as_raw_text_is_refused_with_what_to_do(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        find_sources([str(tmp_path / name)])


def test_text_by_any_other_name_is_taken(tmp_path: Path) -> None:
    contents = {"a.py": "x = {}", "b.tex": "{text}", "README": "{", "c.txt": '{"text": "as it is"}', "d.log": ""}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    assert find_sources([str(tmp_path / name) for name in contents]) == [tmp_path / name for name in contents]


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="only once"):
        find_sources([str(tmp_path / "pipe")])


def test_files_of_a_directory_that_are_not_read_are_reported(tmp_path: Path) -> None:
    for name in ("data", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("x")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "b.txt").symlink_to(tmp_path / "elsewhere" / "a.txt")
    for name in ("a.json", "b.csv", "c.py"):
        (tmp_path / "data" / name).write_text("x")
    messages: list[str] = []
    found = find_sources([str(tmp_path / "data")], say=messages.append)
    assert found == [tmp_path / "data" / "a.txt", tmp_path / "data" / "b.txt"]
    assert len(messages) == 2
    assert "1 linked directories are not followed" in messages[0]
    assert str(tmp_path / "data" / "linked") in messages[0]
    assert "2 files" in messages[1]
    assert str(tmp_path / "data" / "a.json") in messages[1]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '[{"text": "one\\ntwo", "x": 1}, {"text": "é"}]'),
        ("a.csv", 'x,text\n1,"one\ntwo"\n2,é\n'),
        ("a.tsv", 'x\ttext\n1\t"one\ntwo"\n2\té\n'),
    ],
)
def test_the_suggested_command_makes_lines_of_it(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        find_sources([str(tmp_path / name)])
    command = re.search(r"python -c .*? > data\.jsonl", str(caught.value))
    assert command
    made = subprocess.run(["sh", "-c", command[0].replace("python", sys.executable, 1)], cwd=tmp_path, timeout=600)
    assert made.returncode == 0
    lines = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == ["one\ntwo", "é"]
    assert find_sources([str(tmp_path / "data.jsonl")])


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.zst", "hub:a/b", "stream:a/b"])
def test_without_a_library_the_line_says_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = "datasets" if ":" in name else "pyarrow"
    for module in (sources, stream):
        monkeypatch.setattr(module, "is_installed", lambda wanted: wanted != library)
    if library == "pyarrow":
        name = str(tmp_path / name)
        Path(name).write_bytes(b"")
    told = f"{name} needs {library}, which is not installed: pip install '{library}>="
    with pytest.raises(UserError, match=re.escape(told)):
        check_stream(name) if name.startswith("stream:") else find_sources([name])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}'))
    assert len(prepared(tmp_path / "b.jsonl.gz")) == 2  # the standard library suffices


# -- data sets of the hub: without a network, a local folder stands for the repository ---------------------------------


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in a folder where someone/corpus has two splits; it also has the cache of `datasets`."""
    folder = tmp_path / "someone/corpus"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        lines = [{"text": f"{split} {number}", "id": number} for number in range(3)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    sources.hub_files.cache_clear()
    yield
    sources.hub_files.cache_clear()


@pytest.mark.usefixtures("corpus")
def test_rows_of_a_data_set_are_the_splits(tmp_path: Path) -> None:
    """A data set gives the same tokens as its rows in a jsonl file."""

    def texts(*wishes: str) -> list[str]:
        rows = [row for file in find_sources(wishes) for row in read_records(file, wanted=("text",))]
        return [record["text"] for _, record in rows]

    assert texts("hub:someone/corpus") == [f"train {number}" for number in range(3)]
    both = texts("hub:someone/corpus:test", "hub:someone/corpus/default:train")
    assert both == [*(f"test {number}" for number in range(3)), *(f"train {number}" for number in range(3))]
    ours, expected = (
        prepared(Path(path), cache=tmp_path / path.replace("/", "-"), format="text").paths[0].read_bytes()
        for path in ("hub:someone/corpus", "someone/corpus/train.jsonl")
    )
    assert ours == expected
    assert len(ours) > 40


@pytest.mark.usefixtures("corpus")
@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ("hub:corpus", "hub:OWNER/NAME, with"),
        ("hub:someone/corpus:nowhere", "could not be loaded.*nowhere"),
        ("hub:someone/other", "hf download --repo-type dataset someone/other --local-dir data"),
        ("nobody/corpus", "for a dataset of the hub use --data hub:nobody/corpus"),
    ],
)
def test_data_sets_that_cannot_be_loaded_say_what_to_do(
    wish: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # they read the environment on import
    for libraries in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(libraries, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=message):
        find_sources([wish])
