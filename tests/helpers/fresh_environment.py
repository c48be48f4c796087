"""Run commands in a new virtual environment without this repository, with the libraries of this interpreter."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from commands import environment


def shell(command: str, there: dict[str, str], folder: Path, *, typed: str = "") -> str:
    """Run a command line in `folder` with these variables and this standard input; return what it printed."""
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=there, input=typed, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def fresh_environment(place: Path) -> dict[str, str]:
    """Create the environment in `place`/venv; return the variables of its processes, with a separate cache."""
    subprocess.run([sys.executable, "-m", "venv", str(place / "venv")], check=True)
    # Python's bundled setuptools is too old to build the project.
    drop = [str(place / "venv/bin/python"), "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"]
    subprocess.run(drop, check=True)
    (site,) = (place / "venv/lib").glob("python3*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    path = f"{place}/venv/bin:/usr/local/bin:/usr/bin:/bin"
    given = environment(PATH=path, HOME=str(place), OFFLOAD_TRAINER_CACHE=str(place / "cache"))
    # The build requirements are installed, so nothing is downloaded.
    given |= {"PIP_NO_BUILD_ISOLATION": "false", "PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1"}
    return {name: value for name, value in given.items() if name not in ("PYTHONPATH", "CXX")}


def installed_environment(place: Path, *requirements: str) -> dict[str, str]:
    """Return the variables of an environment with torch and what pip downloads; skip the test if pip finds no index."""
    there = fresh_environment(place)
    (site,) = (place / "venv/lib").glob("python3*/site-packages")
    (site / "libraries.pth").unlink()
    for found in Path(sysconfig.get_path("purelib")).iterdir():
        if found.name.startswith(("torch", "functorch", "nvidia", "triton")):
            (site / found.name).symlink_to(found)
    online = {name: value for name, value in there.items() if name not in ("PIP_NO_INDEX", "PIP_NO_BUILD_ISOLATION")}
    pip = ["python", "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary", ":all:"]
    words = [*pip, f"torch=={torch.__version__}", *requirements]
    done = subprocess.run(words, env=online, capture_output=True, text=True, check=False)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip(f"pip finds none of these here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    return there
