"""Tests of a hundred randomly changed files of each kind, made from the seed that `--seed` gives.

soak/fuzz_files.py makes any number.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "soak"))

import fuzz_files
from fuzz_files import Violation, Watch, fuzz, fuzz_one, made
from fuzz_kinds import KINDS, Kind

from offload_trainer.errors import UserError


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


def test_a_busy_machine_does_not_fail_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only CPU time counts, so a process that waits for a busy machine is not late."""
    monkeypatch.setattr(fuzz_files, "SECONDS", 0.05)
    with fuzz_files.bounded():
        time.sleep(0.5)


@pytest.mark.parametrize("name", KINDS)
def test_any_content_of_a_file_is_handled(
    name: str, watch: Watch, seed: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", "")
    came, wrong = fuzz(made(name, tmp_path_factory.mktemp(name)), each=100, seed=seed, watch=watch)
    assert wrong == []
    assert came["refused"] > 30
    assert came["taken"] > 0


def test_the_fuzzer_finds_failures(watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer detects tracebacks, messages that are long or have escapes, reads of other files, and endless work."""
    (tmp_path / "secret").write_text("")
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "a.json").write_text("{}")

    def raising(error: Exception) -> None:
        raise error

    for wrong, use in {
        "KeyError": lambda: raising(KeyError("a")),
        "not one clean line": lambda: raising(UserError("\x1b[2J")),
        "secret": lambda: (tmp_path / "secret").read_text(),
        "took more": lambda: [None for _ in iter(int, 1)],
        "waited": signal.pause,
    }.items():
        with monkeypatch.context() as patch:
            if wrong == "took more":
                patch.setattr(fuzz_files, "SECONDS", 0.05)
            if wrong == "waited":
                patch.setattr(fuzz_files, "HANGING", 0.05)
            with pytest.raises(Violation, match=wrong):
                fuzz_one(Kind("any", folder, ["a.json"], use=use), random.Random(3), watch)
        watch.outside.clear()
    taken = Counter(
        fuzz_one(Kind("any", folder, ["a.json"], use=lambda: None), random.Random(n), watch) for n in range(20)
    )
    assert taken == {"taken": 20}
    assert (folder / "a.json").read_text() == "{}"
