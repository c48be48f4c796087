"""Build and load DeepSpeed's compiled kernels, and remove stale build locks.

torch guards a build with a file named `lock`. If the building process is killed, the file stays, and every later run
waits forever without a message. Here builds take turns with a lock that the kernel releases when a process ends, and a
`lock` file without a running build is removed. `importing` turns a missing or broken package into advice.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from offload_trainer.errors import TrainerError
from offload_trainer.packages import is_installed, lacks, to_install
from offload_trainer.stdio import write_now
from offload_trainer.storage.locks import exclusive_lock
from offload_trainer.storage.owned_dirs import reason

logger = logging.getLogger(__name__)

_BUILDS = {"cpu_adam": ("cpu_adam",), "async_io": ("async_io", "pin_memory")}  # the extensions that each kernel builds
_LONGEST = 1800.0  # seconds that a build by another process may take
PATIENCE = 5.0  # seconds after which a lock without a build is stale; loading a built extension takes less


def load_kernel(name: str) -> Any:
    """Build or load DeepSpeed's kernel `cpu_adam` or `async_io` with a builder that needs no CUDA toolkit.

    Return its module. Raises TrainerError if the build failed; the message contains the compiler's output.
    """
    with importing("deepspeed", feature=f"its kernel {name}"):
        if name == "cpu_adam":
            from deepspeed.ops.op_builder.cpu import CPUAdamBuilder as Builder
        else:
            from deepspeed.ops.op_builder import AsyncIOBuilder as Builder

    return _load(Builder())


@contextmanager
def importing(package: str, *, feature: str) -> Iterator[None]:
    """Turn errors of importing an optional package into TrainerError with advice; `feature` is what needs it.

    Such packages raise more than ImportError, for example if a CUDA toolkit or a shared library is missing.
    """
    if package == "deepspeed" and not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"  # without it, DeepSpeed warns that it found none
    try:
        yield
    except Exception as error:
        if not is_installed(package):
            raise TrainerError(lacks(feature, package)) from error
        reason = " ".join(str(error).split())[:300]
        raise TrainerError(
            f"{feature} needs {package}, which is installed but cannot be imported: {reason}; reinstall it: "
            f"{to_install(package)} --force-reinstall --no-deps"
        ) from error


def is_built(name: str) -> bool:
    """Return whether a DeepSpeed kernel is compiled in torch's extension cache, without building it."""
    try:
        return is_installed("deepspeed") and (_build_directory(name) / f"{name}.so").exists()
    except OSError:  # torch creates the directory when it returns its name
        return False


def _build_directory(name: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, False))


def _load(builder: Any) -> Any:
    # ninja is next to this interpreter, whose directory may be missing in PATH if the program is called by its path.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    try:
        directory = _build_directory(builder.name)
    except OSError as error:
        raise TrainerError(
            f"DeepSpeed's kernel {builder.name} could not be built: {reason(error)}; name a directory for it with "
            "TORCH_EXTENSIONS_DIR"
        ) from error
    turn = directory.with_name(f"{builder.name}.turn")
    with exclusive_lock(turn, say=write_now, patience=_LONGEST) as (_, unlocked):  # exclude our other builds
        for name in () if unlocked else _BUILDS[builder.name]:
            remove_stale_lock(_build_directory(name))
        try:
            return builder.load(verbose=False)
        except Exception as error:
            raise TrainerError(
                f"DeepSpeed's kernel {builder.name} could not be built: {' '.join(str(error).split())[:500]}\n"
                "It needs g++ and ninja, and async_io needs Debian's libaio-dev."
            ) from error


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
    """Return whether a build runs in `directory`: ninja and its compilers use it as their working directory."""
    place = str(directory.resolve())
    return any(process.info["cwd"] == place for process in psutil.process_iter(["cwd"]))
