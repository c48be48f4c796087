"""Which checkpoints a run directory holds, and which of them go.

    step-00000100/MANIFEST.json   whole, of that step: the oldest of these are pruned
    .step-00000100.tmp            a workplace: one that is being written
    .step-00000100.pruned         one that is being removed

What has any other name is somebody's own: a checkpoint that was renamed, moved aside or copied is neither pruned nor
resumed from unasked.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from offload_trainer.errors import UserError
from offload_trainer.manifest import MANIFEST, Manifest
from offload_trainer.safe_files import file_bytes, is_there, parsed, shown
from offload_trainer.storage.atomic_io import bytes_below
from offload_trainer.storage.locks import NoLocks, open_lock, take
from offload_trainer.storage.owned_dirs import (
    NotOwned,
    OwnershipMark,
    clear,
    is_removable,
    made_as,
    reason,
    remove,
    remove_unfinished,
)

WORK = "the checkpoint being written,"
_NAME = re.compile(r"step-(?P<step>[0-9]+)")
_HIDDEN = re.compile(rf"\.(?P<name>{_NAME.pattern})\.(?P<end>tmp|pruned)")


def complete_checkpoints(root: Path) -> list[Path]:
    """Checkpoints with a manifest, the oldest first; what has another name than a save gives is somebody's own.

    UserError for one that cannot be looked into: an older one would be gone on from, and this one be overwritten.
    """
    return sorted((path for path in steps_in(root) if is_there(path / MANIFEST)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name; -1 for a name that no save has given."""
    found = _NAME.fullmatch(checkpoint.name)
    return int(found["step"]) if found else -1


def steps_in(root: Path) -> list[Path]:
    """What has a checkpoint's name, whole or not. UserError where that cannot be looked at."""
    try:
        return [path for path in root.iterdir() if step_of(path) >= 0]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{root} cannot be read: {error.strerror}. Let it be read, or name another") from error


def prune(root: Path, *, keep: int) -> list[str]:
    """Remove the oldest beyond `keep`, but none that is being read; says what else stays, and why.

    A kill in between leaves no half of one.
    """
    notes = []
    try:
        found = complete_checkpoints(root)
    except UserError as error:
        return [str(error)]
    for old in found[:-keep]:
        if strangers := _strangers(old):
            notes.append(f"{old} is not pruned: {shown(strangers[0])} in it is not the checkpoint's")
            continue
        try:
            why = _removed(old, step=step_of(old), hidden=old.with_name(f".{old.name}.pruned"))
        except NoLocks as error:
            return [*notes, f"older checkpoints are not pruned: {error}"]
        if why:
            notes.append(f"{old} is not pruned: {why}")
    return notes


def _strangers(checkpoint: Path) -> list[str]:
    """What lies in a checkpoint and is not named in its manifest: somebody has put it there."""
    try:
        named = {MANIFEST, *parsed(file_bytes(checkpoint / MANIFEST), Manifest).files}
    except (OSError, ValueError):
        return [MANIFEST]
    found = (path for path in sorted(checkpoint.rglob("*")) if path.is_symlink() or not path.is_dir())
    return [name for path in found if (name := path.relative_to(checkpoint).as_posix()) not in named]


def _removed(directory: Path, *, step: int, hidden: Path | None = None) -> str:
    """Remove a checkpoint of this step, under its `hidden` name, unless it is read; why it stays, or "". NoLocks."""
    try:
        held = lock = open_lock(directory / MANIFEST)
    except OSError as error:
        return reason(error)
    try:
        take(lock)
        if not is_removable(directory, _manifest_of(step)):
            return "it is a link, another user's, or its manifest is of another step"
        if hidden is not None:
            os.rename(directory, hidden)
        held = -1
        remove(hidden or directory, _manifest_of(step), lock=lock)
    except BlockingIOError:
        return ""
    except (OSError, NotOwned) as error:
        return reason(error)
    finally:
        if held >= 0:
            os.close(held)
    return ""


def _manifest_of(step: int) -> OwnershipMark:
    """What makes a directory a checkpoint of ours, of this step."""
    return OwnershipMark(MANIFEST, lambda content: _step_in(content) == step)


def bytes_that_go(root: Path) -> int:
    """Bytes that a run's checkpoints take and its pruning will give back; what is not pruned does not count."""
    whole = [path for path in complete_checkpoints(root) if not _strangers(path)]
    marks = {path: _manifest_of(step_of(path)) for path in whole}
    for path in root.iterdir() if root.is_dir() else ():
        if found := _HIDDEN.fullmatch(path.name):
            mark = made_as(WORK, path.name) if found["end"] == "tmp" else _manifest_of(int(found["step"]))
            marks[path] = mark
    return sum(bytes_below(path) for path, mark in marks.items() if is_removable(path, mark))


def _step_in(manifest: bytes) -> int | None:
    """The step that a manifest of ours is of."""
    try:
        return parsed(manifest, Manifest).step
    except ValueError:
        return None


def remove_leftovers(root: Path) -> None:
    """Remove what a killed save or prune has left. Only for the run that holds the directory.

    TrainerError for what a save has left, or seems to have, and must not be removed: it is in the way of the next one.
    """
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if found := _HIDDEN.fullmatch(path.name):
            if found["end"] == "tmp":
                clear(root / found["name"], what=WORK)
                continue
            try:
                if not remove_unfinished(path):
                    _removed(path, step=int(found["step"]))
            except NoLocks:
                pass  # it is in nobody's way
