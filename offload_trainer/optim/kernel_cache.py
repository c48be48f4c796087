"""A compiled kernel in this user's cache: built once for this CPU, and loaded only as it was built.

    <cache>/kernels/<key>/adam.so           in directories of 0700 that are this user's
                          adam.so.sha256    its sum: what a power cut or anybody else has changed is built again

What is loaded runs as this user, so nothing is loaded from where another user may put files.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offload_trainer.errors import TrainerError
from offload_trainer.places import cache_directory
from offload_trainer.readback import file_bytes
from offload_trainer.storage.durable import make_directories, write_bytes, write_text
from offload_trainer.storage.locks import NoLocks, turn
from offload_trainer.storage.removal import is_ours, scratch
from offload_trainer.streams import write_now

_ELSEWHERE = "name a cache directory of your own with OFFLOAD_TRAINER_CACHE"


def built(source: Path, *, flags: tuple[str, ...]) -> Path:
    """The library that `source` makes; compiled unless this source was, by these flags, for this CPU.

    Headers beside it count as the source.

    TrainerError with the compiler's words, or with what is wrong with the cache.
    """
    compiler = os.environ.get("CXX", "g++")
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    key = hashlib.sha256("\n".join((compiler, *flags, _cpu(), *texts)).encode()).hexdigest()[:16]
    library = cache_directory() / "kernels" / key / source.with_suffix(".so").name
    try:
        _make_private(library.parent)
        if not _is_whole(library):
            with _one_at_a_time(library.parent / "turn"):
                if not _is_whole(library):  # while this process waited another has built it
                    _compile(source, library, command=[compiler, *flags])
    except OSError as error:
        raise TrainerError(f"{library}: cannot be built: {error.strerror}; {_ELSEWHERE}") from error
    return library


def _compile(source: Path, library: Path, *, command: list[str]) -> None:
    with scratch("build-", directory=library.parent) as folder:
        made = folder / library.name
        try:
            done = subprocess.run([*command, "-o", made, source], capture_output=True, text=True)
        except FileNotFoundError as error:
            what = f"{source.name} needs a C++ compiler, and there is no {command[0]}: install g++"
            raise TrainerError(what) from error
        if done.returncode:
            raise TrainerError(f"{command[0]} cannot build {source}: {done.stderr.strip()[:2000]}")
        content = made.read_bytes()
    write_bytes(library, content)
    write_text(_sum_of(library), hashlib.sha256(content).hexdigest())


def _sum_of(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _is_whole(library: Path) -> bool:
    """Whether it is there as this user has built it."""
    try:
        for path in (library, _sum_of(library)):
            if not is_ours(path.lstat().st_uid, path.parent):
                return False
        return hashlib.sha256(file_bytes(library)).hexdigest().encode() == file_bytes(_sum_of(library))
    except (OSError, ValueError):
        return False


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Builds take turns; where there are no locks two may build at once, and the sum tells which pair is whole."""
    try:
        with turn(lock, say=write_now):
            yield
    except NoLocks:
        yield


def _make_private(directory: Path) -> None:
    """The directory, for this user only. TrainerError where others may change what lies there."""
    make_directories(directory)
    for place in (directory, directory.parent, directory.parent.parent):
        about = place.lstat()
        if not stat.S_ISDIR(about.st_mode):
            raise TrainerError(f"{place} is a link, and kernels in it are not run; {_ELSEWHERE}")
        if about.st_uid != 0 and not is_ours(about.st_uid, place):
            raise TrainerError(f"{place} belongs to another user, and kernels in it are not run; {_ELSEWHERE}")
    for place in (directory.parent, directory):
        if stat.S_IMODE(place.lstat().st_mode) != 0o700:
            os.chmod(place, 0o700)
    for place in directory.resolve().parents:
        mode = place.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise TrainerError(f"anybody may change {place}, and kernels below it are not run; {_ELSEWHERE}")


def _cpu() -> str:
    """What -march=native depends on: a home directory may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {features}"
