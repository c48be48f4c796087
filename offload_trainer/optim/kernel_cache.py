"""A per-user cache of compiled kernels, and the choice of a prebuilt one; each is verified before it is loaded.

    <cache>/kernels/<key>/adam.so              in directories with mode 0700 that this user owns
                          adam.so.sha256       its SHA-256; a file that does not match (a power cut) is built again

A loaded library runs with this user's rights, so no directory of the cache that another user can write to is accepted.
Prebuilt libraries (`prebuilt_kernels.py`) are in the package, which is trusted as its Python files are, or in the
cache.
"""

import hashlib
import os
import platform
import stat
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from offload_trainer.errors import TrainerError
from offload_trainer.optim.prebuilt_kernels import FOLDER, LEVELS, SOURCE, key_of, place_prebuilt, texts_of
from offload_trainer.safe_files import file_bytes, open_file
from offload_trainer.stdio import write_now
from offload_trainer.storage.atomic_io import make_directories, write_bytes, write_text
from offload_trainer.storage.locks import exclusive_lock
from offload_trainer.storage.owned_dirs import MODE, cache_directory, is_ours, open_owned, scratch

_ELSEWHERE = "name a cache directory of your own with OFFLOAD_TRAINER_CACHE"


def built(source: Path, *, flags: tuple[str, ...]) -> Path:
    """Return the library for this CPU from `source`, compiled with `flags` if the cache does not have it.

    Raises TrainerError if there is no compiler, or it failed (the message has its output), or the cache is unusable.
    """
    compiler = os.environ.get("CXX", "g++")
    # -march=native depends on the CPU's features, and several machines may share one home directory.
    key = key_of(compiler, *flags, f"{platform.machine()} {_line_of_features()}", *texts_of(source))
    file = private_directory(key) / source.with_suffix(".so").name
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
                    content = made.read_bytes()
                write_bytes(file, content, mode=MODE)
                write_text(file.with_suffix(".so.sha256"), hashlib.sha256(content).hexdigest(), mode=MODE)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename == compiler:
            what = f"{source.name} needs a C++ compiler, and there is no {compiler}: install g++"
            raise TrainerError(what) from error
        raise TrainerError(f"{file}: cannot be built: {error.strerror}; {_ELSEWHERE}") from error
    return file


def prebuilt() -> Path | None:
    """Return the best prebuilt library for this CPU, from the package or else from the cache; None in a checkout.

    Raises TrainerError if the package has prebuilt libraries, and none of them can be used; the message says why.
    """
    here = frozenset(_line_of_features().partition(":")[2].split()) if platform.machine() == "x86_64" else frozenset()
    fitting = [level for level, (_, needed) in LEVELS.items() if needed <= here]
    places = [place_prebuilt(level) for level in fitting]
    for place in places:
        if _is_whole(FOLDER / place, opener=partial(open_file, links=True)):  # some installers make links
            return FOLDER / place
    for file in (cache_directory() / "kernels" / place for place in places):
        with suppress(OSError):  # `built` reports a cache that cannot be used
            if file.exists() and _is_whole(private_directory(file.parent.name) / file.name):
                return file
    if not FOLDER.is_dir():
        return None
    if not fitting:
        lowest, (_, needed) = list(LEVELS.items())[-1]
        cpu = f"lacks {', '.join(sorted(needed - here))}" if here else f"is {platform.machine()}"
        raise TrainerError(f"the prebuilt ones need a CPU of {lowest} or later, and this one {cpu}")
    if any((FOLDER / place).exists() for place in places):
        raise TrainerError(f"the prebuilt one in {FOLDER} is damaged; install the package again")
    raise TrainerError(f"the prebuilt ones were made from other sources than those in {SOURCE.parent}")


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


def _is_whole(library: Path, *, opener: Callable[[Path], int] = open_owned) -> bool:
    """Return whether `library` exists and matches its .sha256 file. `open_owned` accepts files of this user alone."""
    with suppress(OSError, ValueError):
        expected = file_bytes(library.with_name(f"{library.name}.sha256"), opener=opener)
        return hashlib.sha256(file_bytes(library, opener=opener)).hexdigest().encode() == expected
    return False


def _line_of_features() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
