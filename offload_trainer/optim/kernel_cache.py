"""A compiled kernel in this user's cache: built once for this CPU or GPU, and loaded only as it was built.

    <cache>/kernels/<key>/adam.so              in directories of 0700 that are this user's
                          adam.so.sha256       its sum: what a power cut or anybody else has changed is built again
    <cache>/kernels/<key>/adam.x86-64-v4.so    built ahead, for machines without a compiler (scripts/offline_bundle.sh)

What is loaded runs as this user, so nothing is loaded from where another user may put files.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from offload_trainer.cache_dir import cache_directory
from offload_trainer.errors import TrainerError
from offload_trainer.safe_files import file_bytes
from offload_trainer.stdio import write_now
from offload_trainer.storage.atomic_io import make_directories, write_bytes, write_text
from offload_trainer.storage.locks import NoLocks, turn
from offload_trainer.storage.owned_dirs import is_ours, scratch
from offload_trainer.storage.trusted_files import MODE, open_owned

_ELSEWHERE = "name a cache directory of your own with OFFLOAD_TRAINER_CACHE"


# The kinds of x86-64 processors that a library is built ahead for, best first, as `-march` and more options, with what
# /proc/cpuinfo calls the instructions that they use.
_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
LEVELS: Mapping[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "x86-64-v4-fp16": (
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi", "-mavx512fp16"),
        _V4 | {"avx512_bf16", "avx512vbmi", "avx512_fp16"},
    ),
    "x86-64-v4": (("-march=x86-64-v4",), _V4),
    "x86-64-v3": (("-march=x86-64-v3",), _V3),
}


def built(source: Path, *, flags: tuple[str, ...]) -> Path:
    """Return the library that `source` makes by these flags, headers beside it included.

    It is compiled for this CPU unless it was before. Where it cannot be compiled, one that was built ahead for a kind
    of processor (`LEVELS`) and put into the cache is taken. TrainerError with the compiler's words, or with what is
    wrong with the cache.
    """
    compiler = os.environ.get("CXX", "g++")
    key = _key(compiler, *flags, _cpu(), *_texts(source))
    try:
        return kept(
            source.with_suffix(".so").name,
            key,
            lambda folder: compiled(source, command=[compiler, *flags], folder=folder),
        )
    except TrainerError:
        ahead = _built_ahead(source, flags)
        if ahead is None:
            raise
        return ahead


def place_ahead(source: Path, *, flags: tuple[str, ...], level: str) -> Path:
    """Return where the cache has the library of `source` that was built ahead for `level`, below its "kernels"."""
    return Path(_key(level, *flags, *_texts(source))) / f"{source.stem}.{level}.so"


def _built_ahead(source: Path, flags: tuple[str, ...]) -> Path | None:
    """The best one that this processor runs, if it is in the cache and whole."""
    here = _features()
    for level, (_, needed) in LEVELS.items():
        file = cache_directory() / "kernels" / place_ahead(source, flags=flags, level=level)
        if platform.machine() == "x86_64" and needed <= here and file.exists():
            _make_private(file.parent)
            if _is_whole(file):
                return file
    return None


def kept(name: str, key: str, make: Callable[[Path], bytes]) -> Path:
    """Return the cache's file called `name` of this key, written with what `make` returns where it is not there.

    `make` is given the file's directory. TrainerError from `make`, or with what is wrong with the cache.
    """
    file = cache_directory() / "kernels" / key / name
    try:
        _make_private(file.parent)
        if not _is_whole(file):
            with _one_at_a_time(file.parent / "turn"):
                if not _is_whole(file):  # while this process waited another has made it
                    content = make(file.parent)
                    write_bytes(file, content, mode=MODE)
                    write_text(_sum_of(file), sum_of(content), mode=MODE)
    except OSError as error:
        raise TrainerError(f"{file}: cannot be built: {error.strerror}; {_ELSEWHERE}") from error
    return file


def compiled(source: Path, *, command: Sequence[str], folder: Path) -> bytes:
    """Return the library that `command` makes of `source`, in a workplace in `folder`.

    TrainerError with the compiler's words.
    """
    with scratch("build-", directory=folder) as workplace:
        made = workplace / source.with_suffix(".so").name
        try:
            done = subprocess.run([*command, "-o", made, source], capture_output=True, text=True)
        except FileNotFoundError as error:
            what = f"{source.name} needs a C++ compiler, and there is no {command[0]}: install g++"
            raise TrainerError(what) from error
        if done.returncode:
            raise TrainerError(f"{command[0]} cannot build {source}: {done.stderr.strip()[:2000]}")
        return made.read_bytes()


def sum_of(content: bytes) -> str:
    """Return what the file beside a kept one says of it."""
    return hashlib.sha256(content).hexdigest()


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _texts(source: Path) -> list[str]:
    return [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]


def _sum_of(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _is_whole(library: Path) -> bool:
    """Whether it is there as this user has built it."""
    try:
        told = file_bytes(_sum_of(library), opener=open_owned)
        return hashlib.sha256(file_bytes(library, opener=open_owned)).hexdigest().encode() == told
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
    return f"{platform.machine()} {_line_of_features()}"


def _features() -> frozenset[str]:
    """The instructions that this processor has, as /proc/cpuinfo names them."""
    return frozenset(_line_of_features().partition(":")[2].split())


def _line_of_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
