"""Print one JSON line: processor, memory, GPU and versions, of which a missing one is null.

facts.py kernels    the update kernels of the CPU and the GPU instead, and whether their bits agree
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("transformers", "pydantic", "safetensors", "deepspeed", "bitsandbytes", "triton")


def main() -> None:
    about = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in about if line.startswith("model name")), platform.machine())
    print(
        json.dumps(
            {
                "gpu": _gpu(),
                "CPU": f"{cpu}, {len(os.sched_getaffinity(0))} cores",
                "RAM": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
                "system": platform.platform(),
                "Python": platform.python_version(),
                "torch": f"{torch.__version__} for {torch.version.cuda or torch.version.hip or 'the CPU alone'}",
                **{name: _version(name) for name in _PACKAGES},
                "compiler": shutil.which(os.environ.get("CXX", "g++")),
            }
        )
    )


def _gpu() -> str | None:
    if not torch.cuda.is_available():
        return None
    about: Any = torch.cuda.get_device_properties(0)
    return f"{about.name}, {about.total_memory / 2**30:.1f} GiB, sm_{about.major}{about.minor}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def kernels() -> None:
    from offload_trainer.optim.cuda_adam import choose_cuda_kernel
    from offload_trainer.optim.kernels import choose_kernel

    start = time.perf_counter()
    kernel, on_cpu = choose_kernel("auto")
    taken = {"CPU seconds": time.perf_counter() - start}
    found = {"CPU": on_cpu, "same": None, "GPU": "no GPU here"}
    if torch.cuda.is_available():
        start = time.perf_counter()
        chosen, found["GPU"] = choose_cuda_kernel(torch.device("cuda"), kernel)
        taken["GPU seconds"] = time.perf_counter() - start
        found["same"] = chosen is not None
    print(json.dumps(found | taken))


if __name__ == "__main__":
    kernels() if "kernels" in sys.argv else main()
