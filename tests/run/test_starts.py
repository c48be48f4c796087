"""Tests of two simultaneous starts in one directory: which one gets it, and the state that each resumes from."""

from __future__ import annotations

import fcntl
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offload_trainer.errors import UserError
from offload_trainer.run import directory, resume
from offload_trainer.run.directory import Log, held
from offload_trainer.run.planning import Planned
from offload_trainer.settings import load_config


def test_checking_a_free_directory_blocks_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check for another run holds the lock for an instant only, and blocks no start."""
    with open(tmp_path / ".lock", "w") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr(directory.time, "sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
        with held(tmp_path, Log(loud=False)), pytest.raises(BlockingIOError):
            fcntl.flock(looking, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_a_start_does_not_wait_long_for_a_living_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(directory.time, "sleep", waits.append)
    with (
        held(tmp_path, Log(loud=False)),
        pytest.raises(UserError, match="another run is using this directory"),
        held(tmp_path, Log(loud=False)),
    ):
        pass
    assert 0 < len(waits) <= 20
    assert max(waits) < 0.1


def test_never_is_never_once_another_run_has_ended_there(tmp_path: Path) -> None:
    """--resume never is checked again after waiting for another run, so that their checkpoints do not mix."""
    config = load_config(["--resume", "never", "--output", str(tmp_path)])
    unused: Any = None
    plan: Any = SimpleNamespace(cannot_save=None, refuse=lambda force: None)  # a plan that fits
    planned = Planned(config, plan, unused, unused)
    setup: Any = SimpleNamespace(planned=planned, save=config.save, output=tmp_path, log=Log(loud=False))

    def hold() -> Path | None:
        with ExitStack() as stack:
            return resume.hold(stack, setup, resume=None)[0]

    assert hold() is None
    (tmp_path / "checkpoints/step-00000002").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000002/MANIFEST.json").touch()
    with pytest.raises(UserError, match=r"--resume never, but .* holds checkpoints"):
        hold()


def test_the_checkpoint_is_chosen_again_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends there while the older checkpoint is checked leaves a newer one, which is checked too."""
    older, newer = tmp_path / "step-00000002", tmp_path / "step-00000004"
    checked: list[Path | None] = []
    monkeypatch.setattr(resume, "refuse", lambda planned: None)
    monkeypatch.setattr(resume, "refuse_output", lambda planned: newer)
    monkeypatch.setattr(resume, "verify", lambda setup, checkpoint: checked.append(checkpoint))
    setup: Any = SimpleNamespace(planned=None, output=tmp_path, log=Log(loud=False))
    for chosen in (older, newer):
        with ExitStack() as stack:
            assert resume.hold(stack, setup, resume=chosen)[0] == newer
    assert checked == [newer]
