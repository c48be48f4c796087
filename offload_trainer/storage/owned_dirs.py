"""Directories that this program creates, marks as its own, and may therefore remove. All directory removal is here.

The mark is a file directly in the directory that says what it is for and the name under which it was created; it is
removed last. A checkpoint's manifest serves as one (`remove_known`). A link, another user's directory, or a
directory with another name, no mark or another mark is left alone: it may be the only copy of somebody's work. Removal
follows no link below the directory and enters no other filesystem.
"""

import errno
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.common.safe_files import open_file
from offload_trainer.storage.atomic_io import make_directories, sync_directory
from offload_trainer.storage.locks import NoLocks, open_lock, try_lock

MODE = 0o644  # mode of cached files: a umask of 002 would let the group change files that `open_owned` reads back
_UNNAMED = re.compile(r"~[0-9a-f]{8}$")  # behind the name of a directory that is being made
MARK = ".lock"  # the mark, locked as long as its process lives
_REPLACED = "replaced"  # name in a scratch directory for the replaced directory
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # flags
SCRATCH = "files of"  # the mark of what `scratch` yields

Say = Callable[[str], None]


class NotOwned(TrainerError):
    """Raised, with the reason, for a directory that this program may not remove."""


def _content(what: str, name: str) -> bytes:
    return os.fsencode(f"offload-trainer made this directory and removes it with everything in it: {what} {name}\n")


class ScratchDirectory:
    """A directory of this process. As a context manager it is removed on exit."""

    def __init__(
        self,
        path: Path,
        *,
        what: str,
        mode: int = 0o777,
        say: Say = lambda line: None,
        take_over: bool = False,
    ) -> None:
        """Create, lock and mark the directory; `say` is called with a note if it cannot be removed later.

        It gets its name once it is marked, so that it is not taken for an abandoned one. Raises OSError, also if the
        name is taken, unless by an empty directory. `take_over` takes the directory of a process that has died,
        including its content, and raises as `remove_dead`.
        """
        self.path, self._what, self._say, self.locked, self._lock = path, what, say, True, -1
        if take_over:
            self._lock = _lock_dead(path, what=what)
            return
        new = path.with_name(f"{path.name}~{secrets.token_hex(4)}")  # `_UNNAMED` matches this name
        new.mkdir(mode=mode)
        try:
            self._lock = open_lock(new / MARK, create=True)
            try:
                try_lock(self._lock)
            except NoLocks:
                self.locked, self._what = False, f"{self._what} (no locks here)"
            os.write(self._lock, _content(self._what, path.name))
            os.fsync(self._lock)
            sync_directory(new)
            os.rename(new, path)
        except BaseException:
            self.leave()
            with suppress(FileNotFoundError):
                (new / MARK).unlink(missing_ok=True)
                new.rmdir()
            raise

    def leave(self) -> None:
        """Release the lock and leave the directory in place, as if the process had died."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def close(self) -> None:
        """Remove the directory. A second call does nothing."""
        if self._lock < 0:
            return
        lock, self._lock = self._lock, -1
        try:
            _remove(self.path, self._what, lock=lock)
        except (OSError, NotOwned) as error:
            self._say(f"note: {self.path} stays: {reason(error)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def scratch(prefix: str, *, directory: Path | None = None) -> Iterator[Path]:
    """Yield a scratch directory that only this user can access, in `directory` or the default temporary directory."""
    place = Path(directory or tempfile.gettempdir()) / f"{prefix}{secrets.token_hex(8)}"
    with ScratchDirectory(place, what=SCRATCH, mode=0o700):
        yield place


@contextmanager
def replacing(final: Path, *, what: str, say: Say = lambda line: None) -> Iterator[Path]:
    """Yield a path in a scratch directory next to `final`. What the context makes there replaces `final` at its end.

    Parents are created. After an exception `final` is unchanged. A replaced directory is for an instant only in the
    scratch directory, from which `clear` restores it after a kill. A scratch directory left by a killed process is
    removed first. Raises TrainerError if that is impossible, and OSError.
    """
    make_directories(final.parent)
    clear(final, what=what)
    with ScratchDirectory(workplace_of(final), what=what, say=say) as place:
        try:
            yield name_in_workplace(final)
            if final.exists():
                os.rename(final, place.path / _REPLACED)
            os.rename(name_in_workplace(final), final)
            sync_directory(final.parent)
        finally:
            _restore(final, place.path)


def workplace_of(final: Path) -> Path:
    return final.with_name(f".{final.name}.tmp")


def name_in_workplace(final: Path) -> Path:
    """Return the path that `replacing(final)` yields."""
    return workplace_of(final) / "new"


def _restore(final: Path, place: Path) -> None:
    """Undo an interrupted replacement, which has moved `final` into the scratch directory `place`."""
    if not final.exists() and (place / _REPLACED).is_dir():
        os.rename(place / _REPLACED, final)
        sync_directory(final.parent)


def clear(final: Path, *, what: str) -> None:
    """Remove the scratch directory for `final` that a killed process has left.

    If `final` is only there, because the process was killed while it replaced it, restore it first. Raises TrainerError
    if the directory is not a scratch directory, or is in use.
    """
    place = workplace_of(final)
    try:
        remove_dead(place, what=what, final=final)
    except FileNotFoundError:
        pass
    except BlockingIOError:
        raise TrainerError(f"{place}: another process is writing {final.name} there; wait for it") from None
    except (OSError, TrainerError) as error:
        raise TrainerError(
            f"{place} is in the way of {final.name} and stays: {reason(error)}. If nobody needs it, remove it"
        ) from error


def is_removable(directory: Path, *, what: str) -> bool:
    """Return whether the directory is this user's and contains the mark, so that it is removed once it is unlocked."""
    with suppress(OSError, NotOwned):
        os.close(_opened(directory, what))
        return True
    return False


def remove_dead(directory: Path, *, what: str, final: Path | None = None) -> None:
    """Remove a scratch directory whose process has died. `final`: first restore what it was replacing there.

    Raises FileNotFoundError if it is gone, BlockingIOError if its process lives or another process reads it, NoLocks if
    that cannot be found out, NotOwned, and OSError.
    """
    with suppress(OSError):
        # A kill at the end of a removal leaves it empty. With another name, a process is just making it.
        if not _UNNAMED.search(directory.name) and is_ours(directory.lstat().st_uid, directory.parent):
            os.rmdir(directory)
            return
    _remove(directory, what, lock=_lock_dead(directory, what=what), final=final)


def _lock_dead(directory: Path, *, what: str) -> int:
    """Lock a dead process's scratch directory and return the descriptor of its mark. Raises as `remove_dead`."""
    os.close(_opened(directory, what))
    lock = open_lock(directory / MARK)
    try:
        try_lock(lock)
        if os.fstat(lock).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "removed meanwhile", str(directory))
    except BaseException:
        os.close(lock)
        raise
    return lock


def _remove(directory: Path, what: str, *, lock: int, final: Path | None = None) -> None:
    """Remove a scratch directory and close `lock`, the descriptor of its mark. Raises NotOwned and OSError."""
    with open(lock):  # closed before rmdir: NFS keeps a name for an open file that was removed
        if final:
            _restore(final, directory)
        _empty(_opened(directory, what), last=MARK)
    os.rmdir(directory)


def remove_known(directory: Path, *, last: str) -> None:
    """Remove a directory whose files, if any, the caller has found to be this program's: its file `last` goes last."""
    _empty(os.open(directory, _DIRECTORY), last=last)
    os.rmdir(directory)


def _empty(inside: int, *, last: str = "", device: int | None = None) -> None:
    """Remove everything in an open directory, then `last`, which says whose it is after a kill, and close it."""
    try:
        here = os.fstat(inside).st_dev
        if device not in (None, here):
            place = os.readlink(f"/proc/self/fd/{inside}")
            raise OSError(errno.EXDEV, "another filesystem is mounted there", place)
        with os.scandir(inside) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries if entry.name != last]
        for name, is_directory in found:
            if is_directory:
                _empty(os.open(name, _DIRECTORY, dir_fd=inside), device=here)
                os.rmdir(name, dir_fd=inside)
            else:
                os.unlink(name, dir_fd=inside)
        if last:
            with suppress(FileNotFoundError):
                os.unlink(last, dir_fd=inside)
    finally:
        os.close(inside)


def _opened(directory: Path, what: str) -> int:
    """Return a descriptor of a directory of this user's, marked as made for `what` by its name. Raises NotOwned."""
    try:
        inside = os.open(directory, _DIRECTORY)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise NotOwned("it is a link or no directory") from error
        raise
    try:
        owner = os.fstat(inside).st_uid
        if not is_ours(owner, directory.parent):
            raise NotOwned(f"it belongs to another user (number {owner})")
        try:
            descriptor = open_lock(Path(MARK), directory=inside)
        except OSError as error:
            raise NotOwned(f"it holds no {MARK} that can be read, so this program did not make it") from error
        with open(descriptor, "rb") as file:
            if (writer := os.fstat(descriptor).st_uid) != owner:
                raise NotOwned(f"its {MARK} belongs to another user (number {writer})")
            expected = _content(what, _UNNAMED.sub("", directory.name))
            if file.read(len(expected) + 1) != expected:
                raise NotOwned(f"its {MARK} does not say that this program made it for this purpose, by this name")
    except BaseException:
        os.close(inside)
        raise
    return inside


def is_ours(owner: int, place: Path) -> bool:
    """Return whether files with this owner UID belong to this process's user.

    A network file server may map UIDs, so if the UID differs a temporary file is created in `place` to compare owners.
    """
    if owner == os.geteuid():
        return True
    with suppress(OSError), tempfile.TemporaryFile(dir=place) as file:
        return os.fstat(file.fileno()).st_uid == owner
    return False


def reason(error: BaseException) -> str:
    """Return an error's message, with the file's name for an OSError."""
    return f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)


# -- files of the cache ------------------------------------------------------------------------------------------------
# The cache for tokens, measured rates and kernels may be a directory where others can write. Their files must not
# become training data, measured speeds or code that runs.


def cache_directory() -> Path:
    """Return ``$OFFLOAD_TRAINER_CACHE``, ``$XDG_CACHE_HOME/offload-trainer`` or ``~/.cache/offload-trainer``.

    Raises UserError if none of them can be determined.
    """
    named, base = os.environ.get("OFFLOAD_TRAINER_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        if named:
            return Path(named).expanduser()
        return (Path(base) if base else Path.home() / ".cache") / "offload-trainer"
    except RuntimeError as error:
        raise UserError(f"no cache directory: {error} Set HOME, or name one with OFFLOAD_TRAINER_CACHE") from error


def open_owned(path: Path) -> int:
    """Open a file of the cache for reading.

    The open descriptor is checked, so that the file cannot be exchanged between the check and the reading. Raises
    ValueError if another user owns it or others may change it; otherwise raises as `open_file`.
    """
    descriptor = open_file(path)
    about = os.fstat(descriptor)
    if about.st_uid != 0 and not is_ours(about.st_uid, path.parent):
        wrong = f"it belongs to another user (number {about.st_uid}), and is not trusted"
    elif about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        wrong = f"others may change it (mode {stat.S_IMODE(about.st_mode):o}; chmod go-w), and it is not trusted"
    else:
        return descriptor
    os.close(descriptor)
    raise ValueError(wrong)
