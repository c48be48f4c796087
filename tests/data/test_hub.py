"""Tests of data sets named on the hub: they give the rows that `datasets` loads.

No network is used: a local folder stands for the repository.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from sample_chats import prepared

from offload_trainer.data import sources
from offload_trainer.data.documents import read_records
from offload_trainer.data.sources import find_sources
from offload_trainer.errors import UserError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
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


def texts(*wishes: str) -> list[str]:
    rows = [row for file in find_sources(wishes) for row in read_records(file, wanted=("text",))]
    return [record["text"] for _, record in rows]


def test_its_rows_are_the_splits() -> None:
    assert texts("hub:someone/corpus") == [f"train {number}" for number in range(3)]
    assert texts("hub:someone/corpus:test") == [f"test {number}" for number in range(3)]
    both = texts("hub:someone/corpus:test", "hub:someone/corpus/default:train")
    assert both == [*(f"test {number}" for number in range(3)), *(f"train {number}" for number in range(3))]


def test_it_is_read_as_any_text(tmp_path: Path) -> None:
    """A data set gives the same tokens as its rows in a jsonl file."""

    ours, expected = (
        prepared(Path(path), cache=tmp_path / path.replace("/", "-"), format="text").paths[0].read_bytes()
        for path in ("hub:someone/corpus", "someone/corpus/train.jsonl")
    )
    assert ours == expected
    assert len(ours) > 40


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ("hub:corpus", "hub:OWNER/NAME, with"),
        ("hub:someone/corpus:nowhere", "could not be loaded.*nowhere"),
        ("hub:someone/other", "hf download --repo-type dataset someone/other --local-dir data"),
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


def test_without_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "is_installed", lambda module: module != "datasets")
    with pytest.raises(UserError, match=r"hub:a/b needs datasets, which is not installed: pip install 'datasets>=4.7'"):
        find_sources(["hub:a/b"])
