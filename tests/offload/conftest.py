"""Fixtures of tests of the update's schedules."""

import time
from pathlib import Path

import pytest
from engine_bench import model_directory
from placements import Build, gpt2, record_kept
from seen_calls import run_before

from offload_trainer.engine.tiered import TieredEngine
from offload_trainer.offloading.update.updater import Updater


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start every step speculatively, however often steps are clipped."""
    monkeypatch.setattr(TieredEngine, "_as_expected", True)


@pytest.fixture
def slow_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow down each page's update, so that the next forward, or the backward, is ahead of it."""
    run_before(monkeypatch.setattr, Updater, "_update_page", lambda *_, **__: time.sleep(0.0007))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record how many pages each speculative step has updated, and how many of these were kept."""
    return record_kept(monkeypatch)


@pytest.fixture
def build(folder: Path, drive: Path) -> Build:
    return Build(gpt2(folder), drive)


@pytest.fixture
def qwen3(folder: Path) -> Path:
    return model_directory(folder / "qwen3", "qwen3", tied=False)
