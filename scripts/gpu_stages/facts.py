"""Print one JSON line: processor, memory, GPU and versions, of which a missing one is null."""

import json
import os
import platform
import shutil
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("transformers", "pydantic", "safetensors", "deepspeed", "bitsandbytes", "triton", "torchao")


def main() -> None:
    about: dict[str, Any] = {"gpu": None, "GiB": 0.0}
    if torch.cuda.is_available():
        card: Any = torch.cuda.get_device_properties(0)
        about = {"gpu": f"{card.name}, sm_{card.major}{card.minor}", "GiB": round(card.total_memory / 2**30, 1)}
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    about["CPU"] = f"{cpu}, {len(os.sched_getaffinity(0))} cores"
    about["RAM"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    about |= {"system": platform.platform(), "Python": platform.python_version(), **dict.fromkeys(_PACKAGES)}
    about |= {found.name: found.version for found in reversed([*distributions()]) if found.name in _PACKAGES}
    about["torch"] = f"{torch.__version__} for {torch.version.cuda or torch.version.hip or 'the CPU alone'}"
    print(json.dumps(about | {"compiler": shutil.which(os.environ.get("CXX", "g++"))}))


if __name__ == "__main__":
    main()
