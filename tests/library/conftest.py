"""Fixtures of the library's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hf_trainers import model_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a small model, which tests do not change."""
    return model_folder(tmp_path_factory.mktemp("model"))
