"""List the checkpoints of a run directory and remove the oldest ones.

    step-00000100/MANIFEST.json   a complete checkpoint; the oldest of these are pruned
    .step-00000100.tmp            a checkpoint that is being written
    .step-00000100.pruned         a checkpoint that is being removed

Any other name belongs to the user: a checkpoint that was renamed, moved or copied is not pruned, and the run resumes
from it only if it is named explicitly.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

from offload_trainer.errors import TrainerError, UserError
from offload_trainer.manifest import MANIFEST, Manifest
from offload_trainer.safe_files import file_bytes, is_there, parsed, shown
from offload_trainer.storage.atomic_io import bytes_below
from offload_trainer.storage.locks import NoLocks, open_lock, try_lock
from offload_trainer.storage.owned_dirs import (
    Say,
    ScratchDirectory,
    clear,
    is_ours,
    is_removable,
    reason,
    remove_dead,
    remove_unmarked,
)

WORK = "the checkpoint being written,"
_NAME = re.compile(r"step-(?P<step>[0-9]+)")
_HIDDEN = re.compile(rf"\.(?P<name>{_NAME.pattern})\.(?P<end>tmp|pruned|(tmp|pruned)~[0-9a-f]{{8}})")


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

    Returns a note for each other checkpoint that is not removed. Each one is moved into a scratch directory before its
    removal, so a kill leaves no partial checkpoint under a valid name.
    """
    notes: list[str] = []
    try:
        found = complete_checkpoints(root)
    except UserError as error:
        return [str(error)]
    for old in found[:-keep]:
        try:
            why = _why_kept(old) or _remove(old, say=lambda line: notes.append(line.removeprefix("note: ")))
        except NoLocks as error:
            return [*notes, f"older checkpoints are not pruned: {error}"]
        if why:
            notes.append(f"{old} is not pruned: {why}")
    return notes


def _why_kept(checkpoint: Path) -> str:
    """Return why a checkpoint is not one that this program may remove; "" if it is.

    It may have another user's files, or files that its manifest does not list, so that the user must have added them.
    """
    try:
        manifest = parsed(file_bytes(checkpoint / MANIFEST), Manifest)
        owner, writer = checkpoint.stat().st_uid, (checkpoint / MANIFEST).stat().st_uid
    except (OSError, ValueError) as error:
        return f"its {MANIFEST} cannot be read: {error}"
    ours = owner == writer and is_ours(owner, checkpoint.parent)
    if checkpoint.is_symlink() or not ours or manifest.step != step_of(checkpoint):
        return "it is a link, another user's, or its manifest is of another step"
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        if (path.is_symlink() or not path.is_dir()) and name != MANIFEST and name not in manifest.files:
            return f"{shown(name)} in it is not the checkpoint's"
    return ""


def _remove(checkpoint: Path, *, say: Say) -> str:
    """Remove a checkpoint; return why it stays, "" if it is removed or being read.

    Raises NoLocks if the filesystem has no file locks.
    """
    try:
        lock = open_lock(checkpoint / MANIFEST)
        try:
            try_lock(lock)
            with ScratchDirectory(checkpoint.with_name(f".{checkpoint.name}.pruned"), what=WORK, say=say) as place:
                os.rename(checkpoint, place.path / checkpoint.name)
                os.close(lock)  # NFS does not remove a directory with an open file
                lock = -1
        finally:
            if lock >= 0:
                os.close(lock)
    except BlockingIOError:
        return ""
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return reason(error)
        # No room for a marked directory. All files were just found to be the checkpoint's own (`_why_kept`).
        hidden = checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.pruned"))
        remove_unmarked(hidden)
    return ""


def bytes_that_go(root: Path) -> int:
    """Return the bytes of checkpoints that a run can remove; those that it would not prune do not count."""
    found = [path for path in complete_checkpoints(root) if not _why_kept(path)]
    if root.is_dir():
        found += [path for path in root.iterdir() if _HIDDEN.fullmatch(path.name) and is_removable(path, what=WORK)]
    return sum(map(bytes_below, found))


def remove_leftovers(root: Path) -> None:
    """Remove the leftovers of a killed save or prune. The caller must hold the lock of the run directory.

    Raises TrainerError for a leftover of a save that must not be removed, since it blocks the next save.
    """
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if found := _HIDDEN.fullmatch(path.name):
            if found["end"] == "tmp":
                clear(root / found["name"], what=WORK)
            else:
                with suppress(OSError, TrainerError):  # it does not block later saves
                    remove_dead(path, what=WORK)
