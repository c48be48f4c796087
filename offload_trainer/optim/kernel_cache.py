"""Compile the CPU's update kernel at its first use, into a per-user cache; it is verified before it is loaded.

    <cache>/kernels/<key>/adam.so              in directories with mode 0700 that this user owns
                          adam.so.sha256       its SHA-256; a file that does not match (a power cut) is built again

The key is a hash of compiler, options, CPU and sources. A loaded library runs with this user's rights, so no directory
of the cache that another user can write to is accepted. This module does not import torch.
"""

import hashlib
import os
import platform
import stat
import subprocess
from contextlib import suppress
from pathlib import Path

from offload_trainer.common.errors import TrainerError
from offload_trainer.common.safe_files import file_bytes
from offload_trainer.common.stdio import write_now
from offload_trainer.storage.atomic_io import make_directories, write_bytes, write_text
from offload_trainer.storage.locks import exclusive_lock
from offload_trainer.storage.owned_dirs import MODE, cache_directory, is_ours, open_owned, scratch

SOURCE = Path(__file__).with_name("native") / "adam.cpp"
# Without errno and traps the compiler can vectorise square roots and selections; neither option changes a result.
FLAGS: tuple[str, ...] = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
FLAGS += ("-shared", "-fPIC", "-pthread")
_ELSEWHERE = "name a cache directory of your own with OFFLOAD_TRAINER_CACHE"


def built(source: Path, *, flags: tuple[str, ...]) -> Path:
    """Return the library for this CPU from `source`, compiled with `flags` if the cache does not have it.

    Raises TrainerError if there is no compiler, or it failed (the message has its output), or the cache is unusable.
    """
    file, compiler = library_of(source, flags=flags), _compiler()
    if _is_whole(file):
        return file
    try:
        with exclusive_lock(file.parent / "turn", say=write_now):
            if not _is_whole(file):  # another process may have built it while this one waited for the lock
                with scratch("build-", directory=file.parent) as workplace:
                    made = workplace / file.name
                    done = subprocess.run([compiler, *flags, "-o", made, source], capture_output=True, text=True)
                    if done.returncode:
                        raise TrainerError(f"{compiler} cannot build {source}: {done.stderr.strip()[:2000]}")
                    store(file, made.read_bytes())
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename == compiler:
            what = f"{source.name} needs a C++ compiler, and there is no {compiler}: install g++"
            raise TrainerError(what) from error
        raise TrainerError(f"{file}: cannot be built: {error.strerror}; {_ELSEWHERE}") from error
    return file


def library_of(source: Path, *, flags: tuple[str, ...]) -> Path:
    """Return where the cache has, or will have, the library of `source` and `flags` for this CPU. Raises TrainerError.

    -march=native depends on the CPU's features, and several machines may share one home directory.
    """
    key = key_of(_compiler(), *flags, platform.machine(), line_of_features(), *texts_of(source))
    return private_directory(key) / source.with_suffix(".so").name


def store(file: Path, content: bytes) -> None:
    """Write a library to its place in the cache, with its SHA-256 next to it. Raises OSError."""
    write_bytes(file, content, mode=MODE)
    write_text(file.with_suffix(".so.sha256"), hashlib.sha256(content).hexdigest(), mode=MODE)


def key_of(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def texts_of(source: Path) -> list[str]:
    """Return the contents of `source` and of the headers in its directory."""
    return [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]


def line_of_features() -> str:
    """Return the line of /proc/cpuinfo that names this CPU's features."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def private_directory(name: str) -> Path:
    """Return the cache's directory `name` for code, made if missing. Raises TrainerError if others may write there."""
    directory = cache_directory() / "kernels" / name
    try:
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
    except OSError as error:
        raise TrainerError(f"{directory}: cannot be created: {error.strerror}; {_ELSEWHERE}") from error
    return directory


def _is_whole(library: Path) -> bool:
    """Return whether `library` exists, matches its .sha256 file, and only this user can change both."""
    with suppress(OSError, ValueError):
        expected = file_bytes(library.with_name(f"{library.name}.sha256"), opener=open_owned)
        return hashlib.sha256(file_bytes(library, opener=open_owned)).hexdigest().encode() == expected
    return False


def _compiler() -> str:
    return os.environ.get("CXX", "g++")
