"""Tests of trackers: they return the logged numbers, resume runs, and may fail or lag without effect on training."""

import json
import os
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from commands import TINY, call
from test_telemetry import a_step

from offload_trainer.errors import UserError
from offload_trainer.packages import OPTIONAL
from offload_trainer.telemetry import sinks
from offload_trainer.telemetry.metrics import EvalRecord
from offload_trainer.telemetry.sinks import Started, Trackers, refuse_missing

EVALUATION = EvalRecord(step=2, validation_loss=2.5, perplexity=None, bits_per_byte=None)
CONFIG = {"train.steps": 4, "data.path": ["a", "b"]}


def run(directory: Path, *names: str, steps: tuple[int, ...] = (1, 2), done: int = 0) -> list[str]:
    """Log steps and an evaluation to these trackers, and close them; return the messages."""
    messages: list[str] = []
    sink = Trackers(names, directory, CONFIG, done=done, say=messages.append)
    for step in steps:
        sink.put("train", a_step(step, grad_norm=None if step == 2 else 1.5))
    sink.put("validation", EVALUATION)
    sink.close()
    return messages


# -- each of the three -----------------------------------------------------------------------------------------------


def test_tensorboard_has_the_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert run(tmp_path, "tensorboard", steps=(1, 2, 3)) == []
    assert run(tmp_path, "tensorboard", steps=(3, 4), done=2) == []
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [
        (step, pytest.approx(4.0 - 0.01 * step)) for step in (1, 2, 3, 4)
    ]
    assert [e.step for e in found.Scalars("train/grad_norm")] == [1, 3, 4]
    assert [e.value for e in found.Scalars("train/tokens")] == [512, 1024, 1536, 2048]
    assert found.Scalars("phases/backward")[0].value == pytest.approx(0.2)
    assert found.Scalars("validation/loss")[0].value == 2.5


def test_wandb_offline_has_the_numbers_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "a project")
    assert run(tmp_path, "wandb", steps=(1, 2, 3)) == []
    time.sleep(1.1)  # wandb's file names have a resolution of a second
    assert run(tmp_path, "wandb", steps=(3, 4), done=2) == []
    identity = json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    until = time.monotonic() + 300  # its service may still write after `finish`
    expected = [{b"3.99", b"3.98", b"3.97"}, {b"3.97", b"3.96"}]
    while True:
        files = [path.read_bytes() for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))]
        found = [Counter(re.findall(rb"train/loss.{1,4}(3\.9\d)", data)) for data in files]
        # some versions write each twice
        if [set(counts) for counts in found] == expected and all(len({*counts.values()}) == 1 for counts in found):
            break
        assert time.monotonic() < until, found
        time.sleep(0.1)
    for data in files:
        assert all(name in data for name in (b"a project", identity.encode(), tmp_path.name.encode()))


def test_wandb_without_an_account_never_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"save.trackers=wandb cannot begin: there is no API key.*WANDB_MODE=offline"):
        Trackers(["wandb"], tmp_path, CONFIG, done=0, say=print)
    assert os.listdir(tmp_path) == []


def test_trackio_has_the_numbers_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read on import
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    assert run(tmp_path, "trackio", steps=(1, 2, 3)) == []
    assert run(tmp_path, "trackio", steps=(3, 4), done=2) == []
    name = json.loads((tmp_path / "trackers.json").read_text())["trackio"]
    logs = SQLiteStorage.get_logs("offload-trainer", name)
    losses = [(log["step"], log["train/loss"]) for log in logs if "train/loss" in log]
    assert sorted(losses) == [(step, pytest.approx(4.0 - 0.01 * step)) for step in (1, 2, 3, 3, 4)]


def test_a_missing_tracker_names_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a directory has the module's name."""
    (tmp_path / "none").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"save.trackers=none needs none, which is not installed: pip install none"):
        refuse_missing(["none"])
    assert sinks._KINDS.keys() <= OPTIONAL.keys()


# -- all of them, by one of this file's ------------------------------------------------------------------------------


def put(monkeypatch: pytest.MonkeyPatch, name: str, log: Any = lambda *_: None, close: Any = lambda: None) -> list:
    """Register a tracker `name` of these functions; return the ids that it is started with."""
    begun: list[str | None] = []

    def begin(*given: Any) -> Started:
        begun.append(given[-1])
        return given[-1] or "a new one", log, close

    monkeypatch.setitem(sinks._KINDS, name, (begin, "Mend it"))
    return begun


def test_trackers_that_fail_or_never_end_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing one is reported once; one that cannot start refuses the run."""
    taken: list[int | str] = []
    put(monkeypatch, "bad", Mock(side_effect=ConnectionError("the network\nis gone")))
    put(monkeypatch, "good", lambda numbers, step: taken.append(step), lambda: taken.append("end"))
    said = run(tmp_path, "bad", "good", steps=(1, 2, 3))
    assert said == ["note: bad gets nothing more of this run, metrics.jsonl has it all: the network is gone"]
    assert taken == [1, 2, 3, 2, "end"]
    go = threading.Event()
    monkeypatch.setattr(sinks, "_LAST", 0.05)
    put(monkeypatch, "slow", close=lambda: go.wait(300))
    assert run(tmp_path, "slow") == ["note: slow: not all was taken within 0 s; metrics.jsonl has it"]
    go.set()
    monkeypatch.setitem(sinks._KINDS, "far", (Mock(side_effect=OSError("no route to host")), "Go nearer"))
    with pytest.raises(UserError, match=r"^save.trackers=far cannot begin: no route to host. Go nearer$"):
        Trackers(["far"], tmp_path, CONFIG, done=0, say=print)


def test_a_resumed_run_continues_the_trackers_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = put(monkeypatch, "one")
    for done in (0, 2, 0):
        run(tmp_path, "one", done=done)
    assert begun == [None, "a new one", None]
    (tmp_path / "trackers.json").write_text('{"one": 7}')
    with pytest.raises(UserError, match=r"trackers.json cannot be read: .*Remove it"):
        run(tmp_path, "one", done=2)


def test_a_run_reports_each_step(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = call(*TINY, "save.trackers=tensorboard", "--steps", 3, "--save-every", 0, output=tmp_path / "out")
    found = accumulator.EventAccumulator(str(run.output / "tensorboard")).Reload()
    told = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert told == [(step["step"], pytest.approx(step["loss"])) for step in run.steps]
    assert len(told) == 3
