"""Build DeepSpeed's CPU kernels ahead of the tests: cpu_adam and, where libaio's header is installed, async_io.

The build takes two minutes on a fresh machine and a moment afterwards, since torch caches the compiled extensions.
"""

import os
import shlex
import shutil
import time
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))

from offload_trainer.engine.deepspeed import load_kernel
from offload_trainer.storage.owned_dirs import scratch


def compile_without_debugger(folder: Path) -> None:
    """Put a c++ wrapper with -g0 first on PATH.

    The debug symbols that DeepSpeed requests take a third of the build time.
    """
    if compiler := shutil.which("c++"):
        (folder / "c++").write_text(f'#!/bin/sh\nexec {shlex.quote(compiler)} "$@" -g0\n')
        (folder / "c++").chmod(0o755)
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def main() -> None:
    with scratch("compiler-") as folder:
        compile_without_debugger(folder)
        for name in ("cpu_adam", "async_io"):
            start = time.perf_counter()
            load_kernel(name)
            print(f"{name}: ready after {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
