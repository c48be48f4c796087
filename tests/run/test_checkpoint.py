"""Tests of saving on a failing disk: one message, no remains, and older checkpoints intact."""

import errno
from pathlib import Path

import pytest
from synthetic_checkpoints import Small, save

from offload_trainer.errors import TrainerError
from offload_trainer.run import checkpoint
from offload_trainer.run.checkpoint import read_manifest
from offload_trainer.storage.atomic_io import bytes_below
from offload_trainer.storage.retention import bytes_that_go, complete_checkpoints, find_resume


@pytest.mark.parametrize("file", ["state.json", "MANIFEST.json", "master.safetensors"])
def test_a_disk_that_fills_up_while_saving(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(tmp_path, 1)

    def full(path: Path, *_: object) -> None:
        if path.name == file:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, *_)  # type: ignore[arg-type]

    write = checkpoint.write_text
    monkeypatch.setattr(checkpoint, "write_text", full)
    if file.endswith("safetensors"):
        monkeypatch.setattr(Small, "write", lambda self, directory, group: full(directory / file))
    with pytest.raises(TrainerError, match=r"step-00000002 could not be written: No space left.*untouched"):
        save(tmp_path, 2)
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    read_manifest(first)
    monkeypatch.undo()
    assert save(tmp_path, 2) == complete_checkpoints(first.parent)[-1]


def test_only_named_checkpoints_are_pruned_or_resumed(tmp_path: Path) -> None:
    messages: list[str] = []
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=9, say=messages.append)
    root = tmp_path / "checkpoints"
    (root / "step-00000001").rename(root / "step-00000001-best")
    (root / "step-00000004").rename(root / "step-00000004.damaged")
    (root / "step-00000002/notes.txt").write_text("the one for the paper")
    (tmp_path / "elsewhere").mkdir()
    (root / "step-00000003").rename(tmp_path / "elsewhere/step-00000003")
    (root / "step-00000003").symlink_to(tmp_path / "elsewhere/step-00000003")
    (root / ".step-x").symlink_to(tmp_path / "elsewhere")
    assert find_resume("auto", output=tmp_path) == root / "step-00000003"
    assert bytes_that_go(root) == 0
    for step in (5, 6):
        save(tmp_path, step, keep=1, say=messages.append)
    assert sorted(path.name for path in root.iterdir()) == [
        *(".step-x", "step-00000001-best", "step-00000002", "step-00000003", "step-00000004.damaged", "step-00000006"),
    ]
    read_manifest(tmp_path / "elsewhere/step-00000003")
    told = "\n".join(messages)
    assert "step-00000002 is not pruned: notes.txt in it is not the checkpoint's" in told
    assert "step-00000003 is not pruned: it is a link" in told
    assert bytes_that_go(root) == bytes_below(root / "step-00000006") > 0
