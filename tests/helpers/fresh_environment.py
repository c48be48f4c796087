"""A new virtual environment without this repository, whose libraries are those of this interpreter."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from commands import environment

TOOLS = "/usr/local/bin:/usr/bin:/bin"


def fresh_environment(place: Path, *, tools: str = TOOLS) -> dict[str, str]:
    """Create the environment in `place`/venv; return the variables of its processes, with a separate cache.

    PATH has the environment's commands and `tools`.
    """
    subprocess.run([sys.executable, "-m", "venv", str(place / "venv")], check=True)
    # Python's bundled setuptools is too old to build the project.
    drop = [str(place / "venv/bin/python"), "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"]
    subprocess.run(drop, check=True)
    (site,) = (place / "venv/lib").glob("python3*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    path = ":".join(filter(None, (str(place / "venv/bin"), tools)))
    given = environment(PATH=path, HOME=str(place), OFFLOAD_TRAINER_CACHE=str(place / "cache"))
    # The build requirements are installed, so nothing is downloaded.
    given |= {"PIP_NO_BUILD_ISOLATION": "false", "PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1"}
    return {name: value for name, value in given.items() if name not in ("PYTHONPATH", "CXX")}
