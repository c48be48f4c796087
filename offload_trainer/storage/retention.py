"""List the checkpoints of a run directory, find the one to resume from, and remove the oldest ones.

    step-00000100/MANIFEST.json   a complete checkpoint; the oldest of these are pruned
    .step-00000100.tmp            a checkpoint that is being written, a scratch directory (storage/owned_dirs.py)
    .step-00000100.pruned         a checkpoint that is being removed, its manifest last

Any other name belongs to the user: a checkpoint that was renamed is not pruned, and resumed from only if it is named.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.common.safe_files import file_bytes, is_there, parsed, quoted
from offload_trainer.storage.atomic_io import bytes_below
from offload_trainer.storage.locks import NoLocks, open_lock, try_lock
from offload_trainer.storage.manifest import MANIFEST, Manifest
from offload_trainer.storage.owned_dirs import clear, is_ours, is_removable, reason, remove_dead, remove_known

WORK = "the checkpoint being written,"
_NAME = re.compile(r"step-(?P<step>[0-9]+)")
_HIDDEN = re.compile(rf"\.(?P<name>{_NAME.pattern})\.(?P<end>tmp|pruned|tmp~[0-9a-f]{{8}})")


def complete_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints that have a manifest, oldest first; directories with other names are ignored.

    Raises UserError for one that cannot be accessed: to skip it would resume from an older one and overwrite it later.
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


def find_resume(setting: str, *, output: Path) -> Path | None:
    """Return the checkpoint that `--resume` selects, or None to start from step 0.

    Raises UserError if the named path holds none, and for a dangling link on the way: its drive may not be mounted.
    """
    for place in (output / "checkpoints", output, *output.parents):
        if os.path.islink(place) and not os.path.exists(place):
            raise UserError(
                f"{place} is a link to {quoted(os.readlink(place))}, which does not exist: is its drive not mounted? "
                "Mount it; to start from step 0, remove the link or name another --output"
            )
    if setting == "never":
        return None
    if setting == "auto":
        found = complete_checkpoints(output / "checkpoints")
        if not found and (left := sorted(steps_in(output / "checkpoints"), key=step_of)):
            raise UserError(f"{left[-1]} has no {MANIFEST}, so it is damaged; to start from step 0, move it away")
        return found[-1] if found else None
    return find_checkpoint(Path(setting))


def find_checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint, else the newest in it, a run directory. Raises UserError without one."""
    if is_there(path / MANIFEST):
        return path
    if not (found := complete_checkpoints(path / "checkpoints") or complete_checkpoints(path)):
        if os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK):
            raise UserError(f"{path} cannot be read: permission denied")
        what = f"neither a checkpoint ({MANIFEST}) nor a run directory that holds one"
        raise UserError(f"{path}: {what if is_there(path) else 'no such directory'}; `offload-train runs` lists runs")
    return found[-1]


def prune(root: Path, *, keep: int) -> list[str]:
    """Remove the oldest checkpoints beyond `keep`, except any that is being read.

    Returns a note for each other one that stays. Each is renamed first, so a kill leaves no part under a valid name.
    """
    notes: list[str] = []
    try:
        found = complete_checkpoints(root)
    except UserError as error:
        return [str(error)]
    for old in found[:-keep]:
        try:
            if why := _why_kept(old, step=step_of(old)):
                notes.append(f"{old} is not pruned: {why}")
                continue
            with open(open_lock(old / MANIFEST)) as lock:  # closed before the removal, since NFS keeps open files
                try_lock(lock.fileno())
                hidden = old.rename(old.with_name(f".{old.name}.pruned"))
            remove_known(hidden, last=MANIFEST)
        except NoLocks as error:
            return [*notes, f"older checkpoints are not pruned: {error}"]
        except BlockingIOError:
            pass  # somebody reads it
        except OSError as error:
            notes.append(f"{old} is not pruned: {reason(error)}")
    return notes


def _why_kept(directory: Path, *, step: int) -> str:
    """Return why the directory is not a checkpoint of `step` with this program's files alone; "" if it is, or empty."""
    try:
        if not any(directory.iterdir()):
            return ""
        manifest = parsed(file_bytes(directory / MANIFEST), Manifest)
        owner, writer = directory.stat().st_uid, (directory / MANIFEST).stat().st_uid
    except (OSError, ValueError) as error:
        return f"its {MANIFEST} cannot be read: {error}"
    ours = owner == writer and is_ours(owner, directory.parent)
    if directory.is_symlink() or not ours or manifest.step != step:
        return "it is a link, another user's, or its manifest is of another step"
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if (path.is_symlink() or not path.is_dir()) and name != MANIFEST and name not in manifest.files:
            return f"{quoted(name)} in it is not the checkpoint's"
    return ""


def _leftovers(root: Path) -> list[tuple[Path, Path, bool]]:
    """Return (directory, its checkpoint, whether that was being removed) of each leftover of a killed save or prune."""
    found = [(path, _HIDDEN.fullmatch(path.name)) for path in (sorted(root.iterdir()) if root.is_dir() else ())]
    return [(path, root / match["name"], match["end"] == "pruned") for path, match in found if match]


def bytes_that_go(root: Path) -> int:
    """Return the bytes of checkpoints that a run can remove; those that it would not prune do not count."""
    found = [path for path in complete_checkpoints(root) if not _why_kept(path, step=step_of(path))]
    for path, checkpoint, pruned in _leftovers(root):
        if not _why_kept(path, step=step_of(checkpoint)) if pruned else is_removable(path, what=WORK):
            found.append(path)
    return sum(map(bytes_below, found))


def remove_leftovers(root: Path) -> None:
    """Remove the leftovers of a killed save or prune. The caller must hold the lock of the run directory.

    Raises TrainerError for a leftover of a save that must not be removed, since it blocks the next save.
    """
    for path, checkpoint, pruned in _leftovers(root):
        if path.name.endswith(".tmp"):
            clear(checkpoint, what=WORK)
            continue
        with suppress(OSError, TrainerError):  # it does not block later saves
            if not pruned:
                remove_dead(path, what=WORK)
            elif not _why_kept(path, step=step_of(checkpoint)):
                remove_known(path, last=MANIFEST)
