"""List the checkpoints of a run directory and remove the oldest ones.

    step-00000100/MANIFEST.json   a complete checkpoint; the oldest of these are pruned
    .step-00000100.tmp            a checkpoint that is being written
    .step-00000100.pruned         a checkpoint that is being removed

Any other name belongs to the user: a checkpoint that was renamed, moved or copied is not pruned, and the run resumes
from it only if it is named explicitly.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from offload_trainer.errors import UserError
from offload_trainer.manifest import MANIFEST, Manifest
from offload_trainer.safe_files import file_bytes, is_there, parsed, shown
from offload_trainer.storage.atomic_io import bytes_below
from offload_trainer.storage.locks import NoLocks, open_lock, try_lock
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
    """Return the checkpoints that have a manifest, oldest first; directories with other names are ignored.

    Raises UserError for a checkpoint that cannot be accessed: skipping it would resume from an older one and later
    overwrite it.
    """
    return sorted((path for path in steps_in(root) if is_there(path / MANIFEST)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name; -1 for any other name."""
    found = _NAME.fullmatch(checkpoint.name)
    return int(found["step"]) if found else -1


def steps_in(root: Path) -> list[Path]:
    """Return everything with a checkpoint's name, complete or not. Raises UserError if `root` cannot be listed."""
    try:
        return [path for path in root.iterdir() if step_of(path) >= 0]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{root} cannot be read: {error.strerror}. Let it be read, or name another") from error


def prune(root: Path, *, keep: int) -> list[str]:
    """Remove the oldest checkpoints beyond `keep`, except any that is being read.

    Returns a note for each other checkpoint that is not removed. Each one is renamed before its removal, so a kill
    leaves no partial checkpoint under a valid name.
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
    """Return the names of files in a checkpoint that its manifest does not list, so that the user must have added."""
    try:
        named = {MANIFEST, *parsed(file_bytes(checkpoint / MANIFEST), Manifest).files}
    except (OSError, ValueError):
        return [MANIFEST]
    found = (path for path in sorted(checkpoint.rglob("*")) if path.is_symlink() or not path.is_dir())
    return [name for path in found if (name := path.relative_to(checkpoint).as_posix()) not in named]


def _removed(directory: Path, *, step: int, hidden: Path | None = None) -> str:
    """Rename a checkpoint of this step to `hidden` and remove it; return why it stays, "" if removed or being read.

    Raises NoLocks if the filesystem has no file locks.
    """
    try:
        held = lock = open_lock(directory / MANIFEST)
    except OSError as error:
        return reason(error)
    try:
        try_lock(lock)
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
    """Return the mark by which a directory is recognized as a checkpoint of this step written by this program."""

    def is_of_step(content: bytes) -> bool:
        try:
            return parsed(content, Manifest).step == step
        except ValueError:
            return False

    return OwnershipMark(MANIFEST, is_of_step)


def bytes_that_go(root: Path) -> int:
    """Return the bytes of checkpoints that a run can remove; those that it would not prune do not count."""
    whole = [path for path in complete_checkpoints(root) if not _strangers(path)]
    marks = {path: _manifest_of(step_of(path)) for path in whole}
    for path in root.iterdir() if root.is_dir() else ():
        if found := _HIDDEN.fullmatch(path.name):
            mark = made_as(WORK, path.name) if found["end"] == "tmp" else _manifest_of(int(found["step"]))
            marks[path] = mark
    return sum(bytes_below(path) for path, mark in marks.items() if is_removable(path, mark))


def remove_leftovers(root: Path) -> None:
    """Remove the leftovers of a killed save or prune. The caller must hold the lock of the run directory.

    Raises TrainerError for a leftover of a save that must not be removed, since it blocks the next save.
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
                pass  # a half-removed checkpoint does not block later saves
