"""DeepSpeed's compiled kernels: built on first use, loaded afterwards, and never waited for in vain.

torch guards a build with a file named `lock` that stays when its process is killed; every later run then waits
without a word, forever. Here builds of our own take turns by a lock that the kernel lets go of, and a `lock` that
nobody builds behind is removed.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from offload_trainer.errors import TrainerError
from offload_trainer.packages import is_installed, lacks, to_install
from offload_trainer.plan.deepspeed.zero_buffers import Placement
from offload_trainer.stdio import write_now
from offload_trainer.storage.locks import NoLocks, turn
from offload_trainer.storage.owned_dirs import reason

logger = logging.getLogger(__name__)

_BUILDS = {"cpu_adam": ("cpu_adam",), "async_io": ("async_io", "pin_memory")}  # what loading each of them builds
_LONGEST = 1800.0  # seconds that a build by another process may take
PATIENCE = 5.0  # seconds in which a living build must show itself; loading a finished one holds the lock for less


def load_kernels(placement: Placement) -> None:
    """Build or load what the placement needs; by the CPU's builders, which do not look for a CUDA toolkit.

    Raises TrainerError with the compiler's words.
    """
    if placement.optimizer != "gpu":
        load_cpu_adam()
    if "nvme" in (placement.params, placement.optimizer):
        load_async_io()


def load_cpu_adam() -> Any:
    """DeepSpeedCPUAdam's kernel, built or loaded."""
    with importing("deepspeed", wish="its kernel cpu_adam"):
        from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

    return _load(CPUAdamBuilder())


def load_async_io() -> Any:
    """DeepSpeed's libaio kernel, built or loaded."""
    with importing("deepspeed", wish="its kernel async_io"):
        from deepspeed.ops.op_builder import AsyncIOBuilder

    return _load(AsyncIOBuilder())


@contextmanager
def importing(package: str, *, wish: str) -> Iterator[None]:
    """TrainerError with what to do where one of the packages that are not part of every installation fails inside.

    They raise more than ImportError: for a toolkit of CUDA that is not there, a library that does not load.
    """
    try:
        yield
    except Exception as error:
        if not is_installed(package):
            raise TrainerError(lacks(wish, package)) from error
        told = " ".join(str(error).split())[:300]
        raise TrainerError(
            f"{wish} needs {package}, which is installed but cannot be imported: {told}; reinstall it: "
            f"{to_install(package)} --force-reinstall --no-deps"
        ) from error


def is_built(name: str) -> bool:
    """Whether one of DeepSpeed's kernels lies compiled in torch's cache of extensions, loadable; builds nothing."""
    try:
        return is_installed("deepspeed") and (_build_directory(name) / f"{name}.so").exists()
    except OSError:  # torch makes the directory in order to name it
        return False


def _build_directory(name: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, False))


def _load(builder: Any) -> Any:
    # ninja lies beside this interpreter, which need not be on the path when the program is called by its own.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    try:
        directory = _build_directory(builder.name)
    except OSError as error:
        raise TrainerError(
            f"DeepSpeed's kernel {builder.name} could not be built: {reason(error)}; name a directory for it with "
            "TORCH_EXTENSIONS_DIR"
        ) from error
    with _a_turn(directory.with_name(f"{builder.name}.turn")) as alone:
        for name in _BUILDS[builder.name] if alone else ():
            remove_stale_lock(_build_directory(name))
        try:
            return builder.load(verbose=False)
        except Exception as error:
            raise TrainerError(
                f"DeepSpeed's kernel {builder.name} could not be built: {' '.join(str(error).split())[:500]}\n"
                "It needs g++ and ninja, and async_io needs Debian's libaio-dev."
            ) from error


@contextmanager
def _a_turn(path: Path) -> Iterator[bool]:
    """Inside, no other process of ours builds; False where there are no locks, and nobody knows."""
    with ExitStack() as stack:
        try:
            stack.enter_context(turn(path, say=write_now, patience=_LONGEST))
            alone = True
        except NoLocks:
            alone = False
        yield alone


def stale_locks() -> list[Path]:
    """Locks that nobody builds behind."""
    try:
        locks = [_build_directory(name) / "lock" for names in _BUILDS.values() for name in names]
    except OSError:  # nothing was ever built there
        return []
    return [lock for lock in locks if lock.exists() and not _someone_works_in(lock.parent)]


def remove_stale_lock(directory: Path, *, patience: float = PATIENCE) -> None:
    """Remove `directory/lock` if it stays for `patience` seconds while no process works in `directory`."""
    lock = directory / "lock"
    deadline = time.monotonic() + patience
    while lock.exists():
        if _someone_works_in(directory):
            deadline = time.monotonic() + patience
        elif time.monotonic() > deadline:
            logger.warning("%s: left behind by a killed build; removed", lock)
            lock.unlink(missing_ok=True)
        time.sleep(0.1)


def _someone_works_in(directory: Path) -> bool:
    """Whether a compiler runs there: ninja and what it starts have the build's directory as their own."""
    place = str(directory.resolve())
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd") == place:
                return True
        except OSError:
            continue
    return False
