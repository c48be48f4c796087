"""Build a release in FOLDER (default dist): the source distribution, and a wheel with compiled CPU kernels.

    checkout ──> sdist ──> unpacked ──> g++, once for each x86-64 level ──> py3-none-manylinux_2_N_x86_64.whl

The kernels have plain C functions, so one wheel serves every Python and torch. N is the newest glibc that they refer
to, which is set by the distribution that compiles them: 36 on Debian 12. Compile on an older one for older machines.
On other architectures than x86-64 the wheel has no kernels and any platform's tag; it compiles them at the first start.

Needed are setuptools and g++, but not torch.
"""

from __future__ import annotations

import argparse
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build_release(folder: Path, *, kernels: bool = True) -> Path:
    """Build sdist and wheel in `folder`, with `kernels` or for any platform; return the wheel's path."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "copy"
        compiled = shutil.ignore_patterns("__pycache__", "prebuilt")
        shutil.copytree(ROOT / "offload_trainer", copy / "offload_trainer", ignore=compiled)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy2(ROOT / name, copy)
        source = unpacked(distribution("sdist", copy, folder), Path(place))
        return distribution("bdist_wheel", source, folder, plat_name=add_kernels(source) if kernels else "")


def distribution(kind: str, source: Path, folder: Path, *, plat_name: str = "") -> Path:
    """Build an "sdist" or "bdist_wheel" of `source` in `folder` with setuptools; return its path.

    `plat_name` is the last part of a wheel's tag; without it, the wheel is for any platform.
    """
    options = {"--build-option": [f"--plat-name={plat_name}"]} if plat_name else None
    build = {"sdist": "build_sdist", "bdist_wheel": "build_wheel"}[kind]
    code = f"from setuptools import build_meta; print(build_meta.{build}({str(folder.resolve())!r}, {options!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"build_release: {kind} failed: {done.stderr[-2000:]}")
    return folder / done.stdout.splitlines()[-1]


def unpacked(archive: Path, folder: Path) -> Path:
    """Unpack a source distribution in `folder`; return the directory of its sources."""
    with tarfile.open(archive) as files:
        files.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 of Debian 12 has none
        files.extractall(folder)
    return folder / archive.name.removesuffix(".tar.gz")


def add_kernels(source: Path) -> str:
    """Compile the kernels for all levels into unpacked sources; return the last part of the tag."""
    if platform.machine() != "x86_64":
        return ""
    kernels = runpy.run_path(str(source / "offload_trainer/optim/prebuilt_kernels.py"))
    try:
        files = [kernels["build_prebuilt"](level) for level in kernels["LEVELS"]]
    except (OSError, subprocess.CalledProcessError) as error:
        what = f"build_release: a kernel cannot be compiled: {error}. Install g++, or name another compiler with CXX"
        raise SystemExit(what) from error
    return f"manylinux_2_{max(map(glibc_of, files))}_x86_64"


def glibc_of(library: Path) -> int:
    """Return the minor version of the newest glibc 2.N whose symbols a library refers to."""
    content = library.read_bytes()
    assert b"libstdc++.so" not in content, f"{library} needs the machine's libstdc++"
    return max(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", content))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "dist")
    print(build_release(parser.parse_args().folder))


if __name__ == "__main__":
    main()
