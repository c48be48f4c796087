"""The one place that removes directories, and only those that this program has made and marked.

    Workplace(path, what=...)     a new directory, locked and marked while its process lives, removed when it is closed
    remove_dead(path, what=...)   the same after its process has died
    remove(path, mark)            any directory that holds `mark`, which goes last

A mark is a file directly inside that says what the directory is and which name it was made under. What is a link, what
is another user's, has another name, no mark or another one is left alone, whatever it is called: it may be the only
copy of somebody's work. Below a directory no link is followed and no other filesystem entered.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from offload_trainer import errors
from offload_trainer.errors import TrainerError
from offload_trainer.storage.atomic_io import REPLACED, sync_directory
from offload_trainer.storage.locks import NoLocks, open_lock, take

MARK = ".lock"  # the mark of a workplace, locked as long as its process lives
_LARGEST = 1 << 28  # bytes of a mark that are read


class NotOwned(TrainerError):
    """A directory that is not this program's to remove; says why."""


@dataclass(frozen=True)
class OwnershipMark:
    """The file in a directory that makes it ours to remove."""

    name: str
    holds: Callable[[bytes], bool]  # whether its content is right


def made_as(what: str, name: str) -> OwnershipMark:
    """The mark of a workplace for `what` that was made under this name."""
    return OwnershipMark(MARK, lambda content: content == _content(what, name))


def _content(what: str, name: str) -> bytes:
    return os.fsencode(f"offload-trainer made this directory and removes it with everything in it: {what} {name}\n")


class ScratchDirectory:
    """A new directory of this process. As a context manager it removes itself on the way out."""

    def __init__(
        self, path: Path, *, what: str, mode: int = 0o777, say: Callable[[str], None] = lambda line: None
    ) -> None:
        """`say` hears of what cannot be removed. FileExistsError where something has that name; OSError.

        FileNotFoundError or BlockingIOError where another process takes it for a dead one's before it is marked.
        """
        self.path, self._what, self._say, self.locked = path, what, say, True
        path.mkdir(mode=mode)
        try:
            self._lock = open_lock(path / MARK, create=True)
            self._mark()
        except BaseException:
            with suppress(FileNotFoundError):
                (path / MARK).unlink(missing_ok=True)
                path.rmdir()
            raise

    @classmethod
    def taken_over(cls, path: Path, *, what: str, say: Callable[[str], None] = lambda line: None) -> ScratchDirectory:
        """That of a process that has died, with everything in it: from now on it is this process's.

        BlockingIOError where its process lives or somebody reads it, FileNotFoundError, NoLocks, NotOurs, OSError.
        """
        os.close(_opened(path, made_as(what, path.name)))
        lock = open_lock(path / MARK)
        try:
            take(lock)
            if os.fstat(lock).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "removed meanwhile", str(path))
        except BaseException:
            os.close(lock)
            raise
        place = cls.__new__(cls)
        place.path, place._what, place._say, place.locked, place._lock = path, what, say, True, lock
        return place

    def _mark(self) -> None:
        try:  # before the mark: without it nobody takes the directory for a dead one
            take(self._lock)
        except NoLocks:
            self.locked, self._what = False, f"{self._what} (no locks here)"
        if os.fstat(self._lock).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "removed while it was being made", str(self.path))
        os.write(self._lock, _content(self._what, self.path.name))
        os.fsync(self._lock)
        sync_directory(self.path)

    def leave(self) -> None:
        """Let go of it as a process does that dies: it stays."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def close(self) -> None:
        """Remove it. Calling it again does nothing."""
        if self._lock < 0:
            return
        lock, self._lock = self._lock, -1
        try:
            remove(self.path, made_as(self._what, self.path.name), lock=lock)
        except (OSError, NotOwned) as error:
            self._say(f"note: {self.path} stays: {reason(error)}")

    def __enter__(self) -> ScratchDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def replacing(final: Path, *, what: str, say: Callable[[str], None] = lambda line: None) -> Iterator[Path]:
    """A name in a workplace beside `final`, to build in what shall have that name (`durable.put_in_place`).

    What a killed process left of the same is removed first. TrainerError where that cannot be.
    """
    clear(final, what=what)
    with ScratchDirectory(workplace_of(final), what=what, say=say):
        try:
            yield name_in_workplace(final)
        except OSError as error:
            error.strerror = errors.reason(error, final.parent)  # what fills the filesystem goes with the workplace
            raise


def name_in_workplace(final: Path) -> Path:
    """What `replacing(final)` gives."""
    return workplace_of(final) / "new"


def workplace_of(final: Path) -> Path:
    return final.with_name(f".{final.name}.tmp")


def clear(final: Path, *, what: str) -> None:
    """Remove the workplace that a killed process has left of `final`. TrainerError where it is none, or is in use."""
    place = workplace_of(final)
    try:
        remove_dead(place, what=what, final=final)
    except FileNotFoundError:
        return
    except BlockingIOError:
        raise TrainerError(f"{place}: another process is writing {final.name} there; wait for it") from None
    except (OSError, TrainerError) as error:
        raise TrainerError(
            f"{place} is in the way of {final.name} and stays: {reason(error)}. If nobody needs it, remove it"
        ) from error


@contextmanager
def scratch(prefix: str, *, directory: Path | None = None) -> Iterator[Path]:
    """A workplace for this user only, in `directory` or where temporary files go."""
    place = Path(directory or tempfile.gettempdir()) / f"{prefix}{secrets.token_hex(8)}"
    with ScratchDirectory(place, what="files of", mode=0o700):
        yield place


def anew(path: Path, *, what: str) -> Path:
    """A workplace that stays, in the place of the one that an earlier process has made; NotOurs where it made none."""
    try:
        remove_dead(path, what=what)
    except FileNotFoundError:
        pass
    return ScratchDirectory(path, what=what).path


def is_removable(directory: Path, mark: OwnershipMark) -> bool:
    """Whether `remove` would take it for ours."""
    try:
        os.close(_opened(directory, mark))
    except (OSError, NotOwned):
        return False
    return True


def remove_dead(directory: Path, *, what: str, final: Path | None = None) -> None:
    """Remove a workplace whose process has died; where it holds what `final` was before, that goes back first.

    FileNotFoundError where it is gone, BlockingIOError where its process lives or it is being read, NoLocks where that
    cannot be known, NotOurs, OSError.
    """
    if remove_unfinished(directory):
        return
    mark = made_as(what, directory.name)
    os.close(_opened(directory, mark))
    lock = open_lock(directory / MARK)
    try:
        take(lock)
        if os.fstat(lock).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "removed meanwhile", str(directory))
        if final is not None and not final.exists() and (directory / REPLACED).is_dir():
            os.rename(directory / REPLACED, final)
            sync_directory(final.parent)
    except BaseException:
        os.close(lock)
        raise
    remove(directory, mark, lock=lock)


def is_unfinished(directory: Path) -> bool:
    """Whether it is a directory of ours that holds nothing, or a mark that says nothing: nobody's work is in it.

    A kill leaves that between making and marking one, and between the last two steps of a removal.
    """
    try:
        about = directory.lstat()
        if not stat.S_ISDIR(about.st_mode) or not is_ours(about.st_uid, directory.parent):
            return False
        names = os.listdir(directory)
        mark = (directory / MARK).lstat() if names == [MARK] else None
    except OSError:
        return False
    return not names or (mark is not None and stat.S_ISREG(mark.st_mode) and mark.st_size == 0)


def remove_unfinished(directory: Path) -> bool:
    """Remove it if `is_unfinished`; whether it was. BlockingIOError where it is just being made, NoLocks, OSError."""
    if not is_unfinished(directory):
        return False
    with suppress(FileNotFoundError):
        lock = open_lock(directory / MARK)
        try:
            take(lock)
            if os.fstat(lock).st_size:
                raise BlockingIOError(errno.EWOULDBLOCK, "marked meanwhile", str(directory))
            (directory / MARK).unlink()
        finally:
            os.close(lock)
    os.rmdir(directory)  # which refuses if there is something in it by now
    return True


def remove(directory: Path, mark: OwnershipMark, *, lock: int = -1) -> None:
    """Remove a directory that holds `mark`, the mark last, so that a removal that is cut off can be done again.

    `lock`: a descriptor of the mark, closed here. NotOurs with the reason, OSError where the filesystem refuses.
    """
    try:
        inside = _opened(directory, mark)
        try:
            _empty(inside, device=os.fstat(inside).st_dev, but=mark.name)
            os.unlink(mark.name, dir_fd=inside)
        finally:
            os.close(inside)
    finally:
        if lock >= 0:
            os.close(lock)  # NFS keeps a name for an open file that was removed, and the directory is not empty then
    os.rmdir(directory)


def _opened(directory: Path, mark: OwnershipMark) -> int:
    """A descriptor of the directory, which holds `mark` and is ours; NotOurs says why not."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        inside = os.open(directory, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise NotOwned("it is a link or no directory") from error
        raise
    try:
        owner = os.fstat(inside).st_uid
        if not is_ours(owner, directory.parent):
            raise NotOwned(f"it belongs to {user(owner)}")
        _refuse_unmarked(inside, mark, owner=owner)
    except BaseException:
        os.close(inside)
        raise
    return inside


def _refuse_unmarked(inside: int, mark: OwnershipMark, *, owner: int) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(mark.name, flags, dir_fd=inside)
    except OSError as error:
        raise NotOwned(f"it holds no {mark.name} that can be read, so this program did not make it") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != owner:
            raise NotOwned(f"its {mark.name} is no regular file of {user(owner)}")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(_LARGEST)
    finally:
        os.close(descriptor)
    if not mark.holds(content):
        raise NotOwned(f"its {mark.name} does not say that this program made it for this purpose, by this name")


def _empty(inside: int, *, device: int, but: str = "") -> None:
    """Remove everything in an open directory, except the file `but` directly in it."""
    with os.scandir(inside) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries if entry.name != but]
    for name, is_directory in found:
        if not is_directory:
            os.unlink(name, dir_fd=inside)
            continue
        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
        try:
            if os.fstat(below).st_dev != device:
                raise OSError(errno.EXDEV, "another filesystem is mounted there", name)
            _empty(below, device=device)
        finally:
            os.close(below)
        os.rmdir(name, dir_fd=inside)


def is_ours(owner: int, place: Path) -> bool:
    """Whether files of this user number are this process's; a server may number us otherwise (`place` is there)."""
    if owner == os.geteuid():
        return True
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            return os.fstat(file.fileno()).st_uid == owner
    except OSError:
        return False


def user(number: int) -> str:
    return "this user" if number == os.geteuid() else f"another user (number {number})"


def reason(error: BaseException) -> str:
    return f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)
