"""Tests of the weights that a run exports at its end: their record describes the weights that are there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offload_trainer.errors import UserError
from offload_trainer.export import directory
from offload_trainer.export.directory import done_before, write_final
from offload_trainer.export.sources import final_export
from offload_trainer.settings import load_config

pytestmark = pytest.mark.slow


def test_a_kill_while_they_are_written_leaves_an_earlier_run_s_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill during writing, the record of the new weights does not apply to an earlier run's weights."""
    record: Any = SimpleNamespace(identity={}, run={"config": {}})

    def written(source: Any, destination: Path, **_: Any) -> None:
        new = destination.with_name("new")
        new.mkdir()
        if destination.exists():
            destination.rename(destination.with_name("old"))
        new.rename(destination)

    def killed(source: Any, destination: Path, **_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(directory, "write_model", written)
    write_final(iter(()), [], tmp_path, record=record, step=10)
    found = final_export(tmp_path)
    assert found is not None
    assert found.step == 10
    monkeypatch.setattr(directory, "write_model", killed)
    with pytest.raises(KeyboardInterrupt):
        write_final(iter(()), [], tmp_path, record=record, step=20)
    assert final_export(tmp_path) is None
    monkeypatch.setattr(directory, "write_model", written)
    write_final(iter(()), [], tmp_path, record=record, step=20)
    found = final_export(tmp_path)
    assert found is not None
    assert found.step == 20


def test_a_finished_run_is_the_same_by_what_its_weights_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(*words: str) -> Any:
        return SimpleNamespace(identity={}, run={"config": load_config(list(words)).model_dump(mode="json")})

    monkeypatch.setattr(directory, "write_model", lambda source, destination, **_: destination.mkdir())
    write_final(iter(()), [], tmp_path, record=record("--steps", "10"), step=10)
    same = record("--steps", "10", "optim.kernel=torch", "train.eval_every=3", "--ram-fraction", "0.5", "--nvme", "/")
    told = done_before(tmp_path, same, begins_at=0, restarts=False, exports=True)
    assert told is not None
    assert told.startswith("done before: 10 steps")
    with pytest.raises(UserError, match=r"which differs in optim\.lr and left no checkpoint"):
        done_before(tmp_path, record("--steps", "10", "--lr", "1"), begins_at=0, restarts=False, exports=True)
