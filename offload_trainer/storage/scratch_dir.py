"""A run's private directory on an NVMe drive: locked while the run lives, removed when the run ends or has died.

DIR/offload-trainer/              root of one user
    run-0123abcd/.lock            the mark, locked while its run lives; the kernel releases the lock even after kill -9
    run-0123abcd/.for             for page files that can be resumed after a kill: path of the list that names them
    run-0123abcd/.ranks           locked (shared) as long as another rank lives that writes there

A run's list names its directories, one a line; a named one stays until that run has started again. If the list is
missing, the directory may hold the only copy of a training state: it stays too, and the next start says so.
"""

import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.common.safe_files import file_bytes
from offload_trainer.storage.atomic_io import remove_abandoned, write_text
from offload_trainer.storage.locks import NoLocks, exclusive_lock, open_lock, shared_lock, try_lock
from offload_trainer.storage.owned_dirs import MARK, Say, ScratchDirectory, is_ours, is_removable, reason, remove_dead

PAGES = "pages"  # name of a run's list in its run directory
_NAME = re.compile(r"run-[0-9a-f]{8}(~[0-9a-f]{8})?")  # the second part marks one that is not complete yet
_WHAT = "page files of"
_FOR, _RANKS = ".for", ".ranks"
_LONGEST = 1 << 16  # limit on the bytes of a list and of a `.for`


@contextmanager
def leased(
    drive: Path,
    *,
    say: Say = lambda line: None,
    listed: Path | None = None,
    instead: ScratchDirectory | None = None,
) -> Iterator[Path]:
    """Yield a private directory for one run under `drive`, and remove it at the end. Two runs never share files.

    Remove and report first what dead runs of this user have left, those on this run's list `listed` too. `instead` is a
    directory that was taken over, in place of a new one. After an error, a directory that this run could resume from
    stays. Raises TrainerError if no directory can be created.
    """
    try:
        root_of(drive).mkdir(exist_ok=True)
        clear(drive, say=say, listed=listed, but=instead.path if instead else None)
        place = instead or ScratchDirectory(root_of(drive) / f"run-{secrets.token_hex(4)}", what=_WHAT, say=say)
    except OSError as error:
        raise TrainerError(f"{drive}: cannot make a private directory there: {error}") from error
    if not place.locked:
        say(f"note: locks do not work on {drive}: what a killed run leaves there is not removed by the next one")
    with place:
        try:
            yield place.path
        except BaseException as error:
            # A lease that was not closed, perhaps in a forked child, is left to the next start.
            if isinstance(error, GeneratorExit) or _need_for(place.path)[1]:
                place.leave()
            raise


def root_of(drive: Path) -> Path:
    """Return the directory under `drive` that contains, or will contain, this user's private directories.

    Raises UserError if another user's directory, a link or a file has its name.
    """
    root = drive / "offload-trainer"
    with suppress(FileNotFoundError):
        about = root.lstat()
        ours, folder = is_ours(about.st_uid, drive), stat.S_ISDIR(about.st_mode)
        if not (ours and folder):
            what = f"{'a directory' if folder else 'a link or a file'} of {'yours' if ours else 'another user'}"
            raise UserError(
                f"{root} is {what}, and page files cannot go there: move it away, or name another directory with --nvme"
            )
    return root


def take_over(folder: Path, *, say: Say) -> ScratchDirectory:
    """Take over a dead run's private directory with its files. Raises as `ScratchDirectory`."""
    place = ScratchDirectory(folder, what=_WHAT, say=say, take_over=True)
    remove_abandoned(folder)
    return place


def has_locks(folder: Path) -> bool:
    """Return whether a later process can find out that the run of this private directory has died."""
    return is_removable(folder, what=_WHAT)


def hold(folder: Path) -> int:
    """Mark the directory as in use by another rank than its owner. The rank keeps the returned descriptor open."""
    descriptor = open_lock(folder / _RANKS, create=True)
    with suppress(NoLocks):  # without locks no other process takes the directory over
        try_lock(descriptor, shared=True)
    return descriptor


def wait_for_ranks(folder: Path, *, say: Say) -> None:
    """Wait until no rank of the dead run uses its directory; raise TrainerError after a minute."""
    with exclusive_lock(folder / _RANKS, say=say):
        pass


def write_list(listed: Path, folders: Sequence[Path]) -> None:
    """Write the run's list, so that these directories survive a kill or an error. Raises OSError.

    The list comes last, so it never names a directory that another run would remove for lack of a `.for`. A list must
    exist before that, because a directory whose list is missing may never be removed.
    """
    if not listed.exists():
        write_text(listed, "")
    for folder in folders:
        write_text(folder / _FOR, str(listed.resolve()))
    write_text(listed, "".join(f"{folder.resolve()}\n" for folder in folders))


def empty_list(listed: Path) -> None:
    """Empty the run's list, so that its directories may be removed. Raises OSError."""
    if listed.exists():
        write_text(listed, "")


def named_in(listed: Path) -> list[Path]:
    """Return the directories that a run's list names. Raises ValueError if the list cannot be read."""
    try:
        return [Path(line) for line in file_bytes(listed, most=_LONGEST).decode().splitlines()]
    except FileNotFoundError:
        return []


def folders_in(listed: Path) -> list[Path]:
    """Return the directories named in the list that exist. Raises ValueError if the list cannot be read."""
    return [folder for folder in named_in(listed) if folder.is_dir()]


def _need_for(folder: Path) -> tuple[Path | None, bool]:
    """Return the list for which a directory is kept (None: not known), and whether the list's run may need it.

    It may if the list names the directory, is missing or cannot be read: its drive may have an error.
    """
    listed = None
    try:
        listed = Path(file_bytes(folder / _FOR, most=_LONGEST).decode())
        return listed, not os.path.exists(listed) or folder.resolve() in named_in(listed)
    except (OSError, ValueError) as error:
        return listed, not isinstance(error, FileNotFoundError)


def _dead_in(drive: Path, own: Path | None = None) -> Iterator[tuple[Path, Path | None, bool]]:
    """Yield each dead run's directory under `drive`, its list, and whether a run other than `own`'s may need it."""
    root = root_of(drive)
    names = sorted(path.name for path in root.iterdir()) if root.exists() else []
    for folder in (root / name for name in names if _NAME.fullmatch(name)):
        with suppress(OSError, UserError):
            empty = "~" not in folder.name and not os.listdir(folder)  # a kill during its removal may leave it so
            if (empty or has_locks(folder)) and not is_alive(folder):
                listed, needed = _need_for(folder)
                yield folder, listed, needed and not (own and listed == own.resolve())


def kept_for(listed: Path, drive: Path) -> list[Path]:
    """Return the dead runs' directories under `drive` that are kept for the run with the list `listed`."""
    return [folder for folder, place, _ in _dead_in(drive) if place == listed.resolve()]


def dead_runs(drive: Path, *, listed: Path | None = None) -> list[Path]:
    """Return the dead runs' directories that no run but `listed`'s may need, which the next lease there removes."""
    return [folder for folder, _, needed in _dead_in(drive, listed) if not needed]


def clear(drive: Path, *, say: Say, listed: Path | None = None, but: Path | None = None) -> None:
    """Remove and report the directories that `dead_runs` returns, except `but`.

    Also report each that stays because its run's list is missing. Raises OSError if the drive cannot be searched.
    """
    removed = 0
    for folder, place, needed in _dead_in(drive, listed):
        if folder == but:
            continue
        if needed:
            if place is not None and not os.path.exists(place):
                say(
                    f"note: {folder} stays: it has the page files of the run in {place.parent}, which is not there "
                    f"now. Bring that back, or remove {folder}"
                )
            continue
        try:
            remove_dead(folder, what=_WHAT)
            removed += 1
        except (FileNotFoundError, BlockingIOError):
            pass  # another process has removed it, or looks whether it is alive
        except (OSError, TrainerError) as error:
            say(f"note: {folder}, which a dead run left, stays: {reason(error)}")
    if removed:
        say(f"{root_of(drive)}: removed what {removed} run(s) left that died")


def is_alive(folder: Path) -> bool:
    """Return whether the run of these page files holds their lock. Raises UserError if that cannot be found out."""
    try:
        with shared_lock(folder / MARK) if os.path.lexists(folder / MARK) else nullcontext():
            return False
    except BlockingIOError:
        return True
    except (OSError, NoLocks) as error:
        raise UserError(
            f"{folder}: whether its run is alive cannot be known ({reason(error)}); export its newest checkpoint"
        ) from error
