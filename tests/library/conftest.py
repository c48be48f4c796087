"""Fixtures of the library's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hf_trainers import loaded, model_folder
from transformers import PreTrainedModel


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a small model, which tests do not change."""
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def untrained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PreTrainedModel]:
    """Yield an offloaded model for Trainers that are refused."""
    with loaded(folder, tmp_path_factory.mktemp("drive"), seq_len=64, micro_batch_size=4) as model:
        yield model
