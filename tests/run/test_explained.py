"""Tests of how errors are reported: one line unless it is a bug, with the file concerned, also in log.txt."""

import errno
import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from offload_trainer.config import PlacementSection
from offload_trainer.errors import Interrupted, Stopped, TrainerError, UserError, exit_code, explain
from offload_trainer.machine import probe
from offload_trainer.run.directory import Log, hold, run_directory
from offload_trainer.storage.atomic_io import write_text

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/disk/out/file")


@pytest.mark.parametrize(
    ("error", "code", "expected_text"),
    [
        (TrainerError("a drive failed"), 1, "a drive failed"),
        (UserError("no such key"), 2, "no such key"),
        (Interrupted("stopped after step 3", code=143), 143, "stopped after step 3"),
        (Stopped(1), 129, "stopped by SIGHUP, with nothing to save"),
        (Stopped(3, unsaved="stopped at once"), 131, "SIGQUIT: stopped at once; the same command resumes"),
        (KeyboardInterrupt(), 130, "stopped by SIGINT"),
        (NO_SPACE, 1, "/disk/out/file: No space left on device. Free space or mend that disk"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/out/a"), 1, "/out/a: Permission denied"),
    ],
)
def test_ends_in_one_line(error: BaseException, code: int, expected_text: str, tmp_path: Path) -> None:
    """The line is on the screen and last in log.txt."""
    assert exit_code(error) == code
    assert str(explain(error)).startswith(expected_text)
    assert logged(error, tmp_path).startswith(f"ended: {expected_text}")


def test_a_bug_leaves_its_traceback_in_the_log(tmp_path: Path) -> None:
    assert explain(ZeroDivisionError()) is explain(FileNotFoundError(errno.ENOENT, "no such file", "x")) is None
    text = logged(ZeroDivisionError("by zero"), tmp_path)
    assert "Traceback" in text
    assert "ZeroDivisionError: by zero" in text


def logged(error: BaseException, folder: Path) -> str:
    """Return the content of log.txt after a run that ended with this error, without times."""
    log = Log(loud=True)
    with ExitStack() as stack:
        lock = hold(stack, folder, log, create=True)
        with pytest.raises(type(error)), run_directory(folder, log, lock=lock):
            raise error
    return "\n".join(line[20:] for line in (folder / "log.txt").read_text().splitlines())


def test_a_read_only_filesystem_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(UserError, match="is mounted read-only; name another directory"):
        probe.probe_machine(PlacementSection(), output="out")


def test_a_write_that_fails_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_text(tmp_path / "config.yaml", "a")
    assert str(explain(caught.value)).startswith(f"{tmp_path / 'config.yaml'}: No space left on device")
    assert not list(tmp_path.iterdir())
