"""Tests of data sources: the files that a path or a data set of the hub means, their forms, and what is refused."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow
import pytest
import yaml
from pyarrow import csv as arrow_csv
from pyarrow import ipc, parquet
from sample_chats import CHATS, chats, documents_of, lines, prepared, turns

from offload_trainer.common.errors import UserError
from offload_trainer.data import documents, sources
from offload_trainer.data.sources import BUILTIN_CORPUS, find_sources


def test_directories_are_walked_in_order_and_files_taken_as_named(tmp_path: Path) -> None:
    inside = ("b.txt", "a/z.md", "a/c.JSONL", "a/skip.py", "k.rst", ".git/x.md", "a/.hidden.txt")
    contents = {"a.py": "x = {}", "b.tex": "{text}", "README": "{", "c.txt": '{"text": "as it is"}', "d.log": ""}
    for name, content in (dict.fromkeys((f"d/{name}" for name in inside), "x") | contents).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    sources = find_sources([*(str(tmp_path / name) for name in (*contents, "d")), "builtin"])
    assert sources == [*(tmp_path / name for name in (*contents, "d/a/c.JSONL", "d/a/z.md", "d/b.txt")), BUILTIN_CORPUS]


def test_paths_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"\0\0")
    with pytest.raises(UserError, match=r"no \.txt, \.md, \.jsonl.*--data .*train\.bin"):
        find_sources([str(tmp_path)])
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="holds tokens"):
        find_sources([str(tmp_path / "a.txt"), str(tmp_path / "train.bin")])
    shards = [tmp_path / "train.bin", tmp_path / "train.bin"]
    assert find_sources([str(shard) for shard in shards]) == shards
    gone = f"no such file or directory: {tmp_path}/gone.txt, {tmp_path}/lost; correct the path"
    with pytest.raises(UserError, match=f"^{re.escape(gone)}$"):
        find_sources([str(tmp_path / name) for name in ("gone.txt", "a.txt", "lost")])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="only once"):
        find_sources([str(tmp_path / "pipe")])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.dump", b"PAR1\0", r"\.parquet, \.arrow, or \.bin"),
        ("a.txt", b"%PDF-1.7", r"these compressed \(NAME\.jsonl\.gz\)"),
        ("a.gz", gzip.compress(b"text", mtime=0), r"a name that shows its kind: \.txt, .*NAME\.jsonl\.gz"),
        ("a.tar.gz", gzip.compress(b"text", mtime=0), "decompress it"),
        ("a.tar.zst", b"(\xb5/\xfd", r"NAME\.jsonl\.zst"),
        ("a.xz", b"", r"NAME\.jsonl\.xz"),
        ("a", "text".encode("utf-16"), "neither UTF-8 text nor what its name says"),
        ("a.dump", b'{"text": "a"}\n{"text": "b"}\n', r"a JSON object; rename it to \.jsonl"),
    ],
)
def test_what_would_be_learned_as_raw_text_is_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        find_sources([str(tmp_path / name)])


def test_files_of_a_directory_that_are_not_read_are_reported(tmp_path: Path) -> None:
    data, elsewhere = filled(tmp_path / "data", ["a.txt", "a.pdf", "b.zip", "c.py"]), filled(tmp_path / "x", ["a.txt"])
    (data / "linked").symlink_to(elsewhere)
    (data / "b.txt").symlink_to(elsewhere / "a.txt")
    messages: list[str] = []
    assert find_sources([str(data)], say=messages.append) == [data / "a.txt", data / "b.txt"]
    links, left = messages
    assert "1 linked directories" in links
    assert "(linked)" in links
    assert "2 of 5 files are read (a.txt, b.txt), and not a.pdf, b.zip, c.py; name one" in left
    assert left.endswith("of those to read it too, with --data or --validation-data")
    directory, messages[:] = filled(tmp_path / "set", SHARDS, readme=PUSHED), []
    find_sources([f"stream:{directory}"], say=messages.append)
    (left,) = messages
    assert f"data: {directory}: 2 of 5 files are read, the train split (data/train-00000-of-00002.parquet, " in left
    assert ", and not README.md, data/test-00000-of-00001.parquet, data/validation-00000-of-00001.parquet; name" in left


# -- directories of data sets, as a download from the hub leaves them --------------------------------------------------


def card(**configurations: dict[str, object]) -> str:
    """Return a data set's card that names the files of each split of each configuration."""
    configs = [
        {"config_name": name, "data_files": [{"split": split, "path": path} for split, path in splits.items()]}
        for name, splits in configurations.items()
    ]
    return f"---\nlicense: mit\n{yaml.safe_dump({'configs': configs})}---\n# A data set\n"


CARD = card(all={"train": ["a.jsonl", "b/**"], "test": "held_out.jsonl"})
SEVERAL = card(small={"train": "small/train-*"}, default={"train": "large/train-*"})
PUSHED = card(default={"train": "data/train-*", "validation": "data/validation-*", "test": "data/test-*"})
SHARDS = {"data/train-00000-of-00002.parquet": 1, "data/train-00001-of-00002.parquet": 1}
SHARDS |= {"data/validation-00000-of-00001.parquet": 0, "data/test-00000-of-00001.parquet": 0}
LEFTOVERS = dict.fromkeys(
    (".gitattributes", ".cache/huggingface/download/data/train.jsonl", "dataset_infos.json", "a.bin.json"), 0
)
# Each layout: README.md, if not empty; the other files, with 1 for those to train on; whether `datasets` reads the same
# rows. Where not, it drops files, takes lines of text for documents, or finds no split named train.
LAYOUTS: dict[str, tuple[str, dict[str, int], bool]] = {
    "pushed to the hub": (PUSHED, SHARDS | LEFTOVERS, True),
    "a card without files": ("# A data set\n", SHARDS, True),
    "splits in the root": ("# A data set\n", {"train.jsonl": 1, "test.jsonl": 0}, True),
    "words in names": ("", {"train_a.jsonl": 1, "test_b.jsonl": 0, "c.jsonl": 0}, True),
    "arrays": ("", {"train-v2.0.json": 1, "dev-v2.0.json": 0}, True),
    "tab-separated": ("", {"x.training.tsv": 1, "x.eval.tsv": 0}, True),
    "folders of splits": ("", {"train/a.jsonl": 1, "train/b.jsonl": 1, "test/a.jsonl": 0}, True),
    "folders of parts": ("", {"en/train-0.jsonl": 1, "de/train-0.jsonl": 1, "en/test-0.jsonl": 0}, True),
    "named by the card": (CARD, {"a.jsonl": 1, "b/c/d.jsonl": 1, "held_out.jsonl": 0, "more.jsonl": 0}, True),
    "paths of the card from its folder": (card(default={"train": "./data/train-*"}), SHARDS, True),
    "a default among several": (SEVERAL, {"small/train-0.jsonl": 0, "large/train-0.jsonl": 1}, True),
    "several formats": ("# Data\n", {"a.jsonl": 1, "b.parquet": 1, "c.csv": 1, "d.json": 1, "e.ndjson": 1}, False),
    "one split is named": ("", {"a.jsonl": 1, "test.jsonl": 0}, False),
    "capitals": ("", {"Train.csv": 1, "Test.csv": 0, "LICENSE.txt": 0}, False),
    "documentation": ("", dict.fromkeys(("README.md", "dev/setup.md", "testing.md", "training.md"), 1), False),
    "splits of text": ("---\nlicense: mit\n---\n", {"x-train.txt": 1, "x-valid.txt": 0}, False),
    "chapters": ("", {"01-introduction.txt": 1, "02-training.txt": 1, "dev_blog/a.txt": 1, "metadata.json": 0}, False),
    "text with a card": ("---\nlicense: mit\n---\n", {"a.txt": 1, "b.txt": 1, "NOTICE": 0}, False),
}


def filled(directory: Path, files: Iterable[str], *, readme: str = "") -> Path:
    """Write files of any content, which is not read here, and a README.md; return the directory."""
    for name in (*files, *(["README.md"] if readme else [])):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"id": number, "text": f"{name} {number}"} for number in range(3)]
        kind = path.suffix
        if name == "dataset_infos.json":
            path.write_text("{}")
        elif kind == ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        elif kind in (".csv", ".tsv"):
            cells = [("id", "text"), *((str(row["id"]), row["text"]) for row in rows)]
            path.write_text("".join(("," if kind == ".csv" else "\t").join(row) + "\n" for row in cells))
        elif kind in (".json", ".jsonl", ".ndjson"):
            path.write_text(json.dumps(rows, indent=1) if kind == ".json" else lines(rows))
        else:
            path.write_text(f"{name} 0")
    if readme:
        (directory / "README.md").write_text(readme)
    return directory


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_train_split_of_a_directory_is_read(name: str, tmp_path: Path) -> None:
    """Both the prepared data and a stream read it, as `datasets` does where it does not drop files."""
    readme, files, same = LAYOUTS[name]
    directory, said = filled(tmp_path / "data", files, readme=readme), list[str]()
    found = find_sources([str(directory)], say=said.append)
    assert {str(path.relative_to(directory)) for path in found} == {name for name, is_read in files.items() if is_read}
    left = [line for line in said if "and not" in line]
    expects_line = not all(is_read for file, is_read in files.items() if not file.startswith(".")) or readme
    assert bool(left) == bool(expects_line)
    if all(path.suffix not in (".txt", ".md") for path in found):
        assert find_sources([f"stream:{directory}"]) == found
    if same:
        loaded = datasets.load_dataset(str(directory), split="train", streaming=True)
        assert sorted(row["text"] for row in loaded) == sorted(documents_of(*found))


@pytest.mark.parametrize(
    ("readme", "files", "split"),
    [
        (PUSHED, list(SHARDS), "validation"),
        ("", ["train.jsonl", "test.jsonl", "more.jsonl"], "test"),
        ("", ["valid-0.jsonl", "test-0.jsonl"], "valid"),
        ("", ["held_out.jsonl"], "held_out"),
        (card(default={"train": "a.jsonl", "test": "b-test.jsonl"}), ["a.jsonl", "b-test.jsonl"], "b-test"),
    ],
)
def test_validation_reads_no_training_files(readme: str, files: list[str], split: str, tmp_path: Path) -> None:
    directory = filled(tmp_path / "data", files, readme=readme)
    expected = [path for path in sorted(directory.rglob("*")) if path.name.startswith(split)]
    found = find_sources([str(directory)], validation=True)
    assert found == expected
    assert found == find_sources([f"stream:{directory}"], validation=True)
    datasets.DatasetDict({name: chats() for name in ("test", "train")}).save_to_disk(tmp_path / "saved")
    assert {path.parent.name for path in find_sources([str(tmp_path / "saved")], validation=True)} == {"test"}


@pytest.mark.parametrize(
    ("readme", "files", "message"),
    [
        ("", ["test-0.jsonl", "valid-0.jsonl"], r"no train split, only files named test and validation \(test-0"),
        ("", ["train.jsonl"], "no validation or test split, only files named train"),
        (card(a={"train": "a/*"}, b={"train": "b/*"}), ["a/0.jsonl", "b/0.jsonl"], "the configurations a, b: name"),
        (card(default={"sft": "a-*", "gen": "b-*"}), ["a-0.jsonl", "b-0.jsonl"], "lists the splits sft, gen: name"),
        (card(default={"train": "../x/*"}), ["test.jsonl"], r"no text or table is there, \.\./x/\*: name the files"),
        ("---\nconfigs: [{data_dir: a}, {config_name: b}]\n---\n", ["a/0.jsonl"], "configurations default, b: name"),
    ],
)
def test_a_directory_with_a_choice_is_refused(readme: str, files: list[str], message: str, tmp_path: Path) -> None:
    filled(tmp_path / "x", ["outside.jsonl"])
    with pytest.raises(UserError, match=message):
        find_sources([str(filled(tmp_path / "data", files, readme=readme))], validation=files == ["train.jsonl"])


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.zst", "hub:a/b", "stream:a/b"])
def test_the_library_to_install_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = "datasets" if ":" in name else "pyarrow"
    monkeypatch.setattr(sources, "is_installed", lambda wanted: wanted != library)
    if library == "pyarrow":
        name = str(tmp_path / name)
        Path(name).write_bytes(b"")
    told = f"{name} needs {library}, which is not installed: pip install '{library}>="
    with pytest.raises(UserError, match=re.escape(told)):
        find_sources([name])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}'))
    assert len(prepared(tmp_path / "b.jsonl.gz")) == 2  # the standard library suffices


# -- data sets of the hub: without a network, a local folder stands for the repository ---------------------------------


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in a folder where someone/corpus has two splits; it also has the cache of `datasets`."""
    folder = tmp_path / "someone/corpus"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        rows = [{"text": f"{split} {number}", "id": number} for number in range(3)]
        (folder / f"{split}.jsonl").write_text(lines(rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    sources.hub_files.cache_clear()
    yield
    sources.hub_files.cache_clear()


@pytest.mark.usefixtures("corpus")
def test_rows_of_a_data_set_are_the_splits(tmp_path: Path) -> None:
    both = documents_of(*find_sources(["hub:someone/corpus:test", "hub:someone/corpus/default:train"]))
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
def test_data_sets_that_cannot_be_loaded(wish: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # they read the environment on import
    for libraries in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(libraries, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=message):
        find_sources([wish])


# -- files of each form ------------------------------------------------------------------------------------------------

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
    datasets.Dataset.from_list(records).save_to_disk(folder / "saved", num_shards=3)
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
    """A compressed text is one too. Blocks may cut characters of one to four bytes; a byte-order mark is dropped."""
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
    one, said = datasets.Dataset.from_list(TEXTS[:5]), list[str]()
    datasets.DatasetDict({"a": one, "b": one}).save_to_disk(tmp_path / "neither")
    with pytest.raises(UserError, match="holds no train split, only files named a and b"):
        prepared(tmp_path / "neither")
    datasets.DatasetDict({"train": one, "test": datasets.Dataset.from_list(TEXTS[5:])}).save_to_disk(
        tmp_path / "both", num_shards={"train": 2, "test": 1}
    )
    assert prepared(tmp_path / "both", say=said.append).sums == prepared(tmp_path / "neither" / "a").sums
    assert not [line for line in said if line.startswith("note: only")]
    (tmp_path / "both/train/data-00001-of-00002.arrow").unlink()
    prepared(tmp_path / "both", say=said.append)
    (note,) = [line for line in said if line.startswith("note: only")]
    assert note == f"note: only 1 of the 2 files {tmp_path / 'both/train/data'}-*-of-00002 are there"
    one.save_to_disk(tmp_path / "neither" / "a", num_shards=2)  # leaves the file of the earlier save in place
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
