"""Tests of data sources: the files that a path or a data set of the hub means, and those that are refused by name."""

import gzip
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import yaml
from sample_chats import documents_of, lines, prepared

from offload_trainer.data import sources
from offload_trainer.data.sources import BUILTIN_CORPUS, find_sources
from offload_trainer.errors import UserError


def test_directories_are_walked_in_order_and_files_taken_as_named(tmp_path: Path) -> None:
    inside = ("b.txt", "a/z.md", "a/c.JSONL", "a/skip.py", "k.rst", ".git/x.md", "a/.hidden.txt")
    contents = {"a.py": "x = {}", "b.tex": "{text}", "README": "{", "c.txt": '{"text": "as it is"}', "d.log": ""}
    for name, content in (dict.fromkeys((f"d/{name}" for name in inside), "x") | contents).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    sources = find_sources([*(str(tmp_path / name) for name in (*contents, "d")), "builtin"])
    assert sources == [*(tmp_path / name for name in (*contents, "d/a/c.JSONL", "d/a/z.md", "d/b.txt")), BUILTIN_CORPUS]


def test_every_missing_path_is_named_at_once_and_a_pipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "here.txt").write_text("x")
    gone = f"no such file or directory: {tmp_path}/gone.txt, {tmp_path}/lost; correct the path"
    with pytest.raises(UserError, match=f"^{re.escape(gone)}$"):
        find_sources([str(tmp_path / name) for name in ("gone.txt", "here.txt", "lost")])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="only once"):
        find_sources([str(tmp_path / "pipe")])


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
def test_what_would_be_trained_on_as_raw_text_is_refused_with_what_to_do(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
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


# -- directories of data sets, as a download from the hub leaves them --------------------------------------------------


def card(*names: str) -> str:
    """Return a data set's card with these configurations."""
    configs = [{"config_name": name, "data_files": [{"split": "train", "path": f"{name}/*"}]} for name in names]
    return f"---\nlicense: mit\n{yaml.safe_dump({'configs': configs})}---\n# A data set\n"


LICENSED = "---\nlicense: mit\n---\n"
SHARDS = [f"data/train-0000{number}-of-00002.parquet" for number in range(2)]
# Each layout: README.md, if not empty; the files to read; those to leave
LAYOUTS: dict[str, tuple[str, list[str], list[str]]] = {
    "pushed to the hub": (
        card("default"),
        SHARDS,
        [".gitattributes", ".cache/huggingface/download/data/test.jsonl", "dataset_infos.json", "a.bin.json"],
    ),
    "folders of parts": ("# Data\n", ["en/train-0.jsonl", "de/train-0.csv"], ["LICENSE.txt"]),
    "several formats": ("# Data\n", ["a.jsonl", "b.parquet", "c.csv", "d.json", "e.ndjson", "f.jsonl.gz"], []),
    "a split of its own": ("", ["test/a.jsonl", "test-b.tsv"], []),
    "chapters": ("", ["01-introduction.txt", "02-training.txt", "dev_blog/a.txt"], []),
    "documentation": ("", ["README.md", "dev/setup.md", "testing.md", "training.md"], []),
    "text with a card": (LICENSED, ["a.txt", "b.txt"], ["NOTICE"]),
}


def filled(directory: Path, files: Iterable[str], *, readme: str = "") -> Path:
    """Write files of any content, which is not read here, and a README.md; return the directory."""
    for name in (*files, *(["README.md"] if readme else [])):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(readme)
    return directory


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_files_of_a_data_set_are_read_but_those_about_it(name: str, tmp_path: Path) -> None:
    readme, files, others = LAYOUTS[name]
    directory = filled(tmp_path / "data", [*files, *others], readme=readme)
    assert {str(path.relative_to(directory)) for path in find_sources([str(directory)])} == set(files)


@pytest.mark.parametrize(
    ("readme", "files"),
    [
        ("", [*SHARDS, "data/test-00000-of-00001.parquet"]),
        ("", ["train.jsonl", "more.jsonl"]),
        ("", ["Train.csv", "my test 1.csv"]),
        ("", ["train/a.jsonl", "val/a.jsonl"]),
        (LICENSED, ["x-train.txt", "x-valid.txt"]),
        (card("a", "b"), ["a/0.jsonl", "b/0.jsonl"]),
        ("dataset_dict.json", ["a/0.jsonl", "b/0.jsonl"]),
    ],
)
def test_a_directory_with_several_splits_is_refused(readme: str, files: list[str], tmp_path: Path) -> None:
    """Training on a test split would be noticed by nobody."""
    directory = filled(tmp_path / "data", files, readme=readme)
    if readme == "dataset_dict.json":
        (directory / readme).write_text("{}")
    for path in (str(directory), f"stream:{directory}"):
        with pytest.raises(UserError, match=r"holds several splits or configurations .*: name the files or the folder"):
            find_sources([path])


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.zst", "hub:a/b", "stream:a/b"])
def test_without_a_library_the_line_says_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    """A data set gives the same tokens as its rows in a jsonl file."""
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
        ("hub:someone/other", "hf download --repo-type dataset someone/other --local-dir data, and name its files"),
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
