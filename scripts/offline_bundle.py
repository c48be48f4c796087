"""Gather wheels and compiled kernels for a machine without network; scripts/offline_bundle.sh documents its use.

    requirements.lock ──> pip download (for that Python, manylinux x86-64) ──> FOLDER/*.whl, install.sh, bundle.txt
    optim/native/     ──> g++, once for each x86-64 processor level        ──> FOLDER/kernels, for that machine's cache

The target machine supplies torch, CUDA and transformers, and keeps packages that it has in a suitable version. The
bundled kernels belong to the sources next to this script; the package ignores them with other sources.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from offload_trainer.optim.prebuilt_kernels import LEVELS, build_prebuilt  # noqa: E402

LARGEST = 40_000_000  # limit in bytes of all wheels

# Dependencies of the package and its tests except THERE, including indirect ones; a test compares them with the
# packages' metadata. requirements.lock has the versions; install.sh requires the lower bounds here.
BUNDLED = {
    "pydantic": ">=2.11",
    "pydantic_core": "",  # pydantic pins its version
    "annotated-types": ">=0.6",
    "typing-inspection": ">=0.4.2",
    "typing_extensions": ">=4.14.1",
    "safetensors": ">=0.4.3",
    "psutil": "",
    "tqdm": "",
    "PyYAML": "",
    "ninja": "",
    "pytest": ">=8",
    "pytest-xdist": "",
    "execnet": "",
    "iniconfig": "",
    "packaging": "",
    "pluggy": "",
    "Pygments": "",
}
RIVALS = ["torchao==0.18.0"]  # scripts/gpu_suite.sh compares with it; it depends on torch alone
THERE = ("torch", "transformers", "numpy")  # installed on the target machine, with their dependencies
# pip matches platform tags literally, so tags of older glibc versions must be listed too.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]

INSTALL = """\
#!/usr/bin/env bash
# Install what is here into the Python that PYTHON names (default python3) and into the cache of kernels, without
# network. What it has already in a version that will do stays. Words are pip's: --target DIR, and then PYTHONPATH=DIR;
# --user; --break-system-packages.
set -euo pipefail
umask 077
cache="${{OFFLOAD_TRAINER_CACHE:-${{XDG_CACHE_HOME:-$HOME/.cache}}/offload-trainer}}"
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
if [ -d "$here/kernels" ]; then  # for a machine without a compiler; beside what another bundle has put there
  mkdir -p "$cache/kernels"
  cp -r --remove-destination "$here/kernels/." "$cache/kernels/"
  chmod 700 "$cache/kernels" "$cache"/kernels/*/
fi
umask 022
exec "${{PYTHON:-python3}}" -m pip install --no-index --no-cache-dir --disable-pip-version-check \\
  --find-links "$here" "$@" {requirements}
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="offline_bundle.sh", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine that the wheels are for")
    parser.add_argument("more", nargs="*", metavar="NAME==VERSION")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command(options.folder, python=options.python, more=options.more), check=False)
    if done.returncode:
        return done.returncode
    kernels = build_kernels(options.folder / "kernels")
    wheels = sorted(options.folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    install = options.folder / "install.sh"
    install.write_text(INSTALL.format(requirements=" ".join(f"'{one}'" for one in requirements(options.more))))
    install.chmod(0o755)
    listed = [f"{file.relative_to(options.folder)} {file.stat().st_size}" for file in (*wheels, *kernels)]
    (options.folder / "bundle.txt").write_text("\n".join(listed) + "\n")
    print(f"{options.folder}: {len(wheels)} wheels, {size / 1e6:.1f} MB; {len(kernels)} kernels; there: {install.name}")
    if size > LARGEST and not options.more:
        print(f"offline_bundle: more than {LARGEST / 1e6:.0f} MB", file=sys.stderr)
        return 1
    return 0


def build_kernels(folder: Path) -> list[Path]:
    """Compile the update kernel for each x86-64 processor level; return the libraries.

    The list is empty without a compiler or on another kind of machine. The target machine then compiles it, if it can.
    """
    made = []
    for level in LEVELS:
        try:
            made.append(build_prebuilt(level, folder=folder))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"offline_bundle: no kernel for {level}: {error}", file=sys.stderr)
    return made


def command(folder: Path, *, python: str, more: list[str]) -> list[str]:
    """Return the pip command that downloads exactly these wheels for that Python and platform, without dependencies."""
    for_there = [word for platform in PLATFORMS for word in ("--platform", platform)]
    cpython = f"cp{python.replace('.', '')}"
    for_there += ["--python-version", python, "--implementation", "cp"]
    for_there += ["--abi", cpython, "--abi", "abi3", "--abi", "none"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    return [*pip, "--only-binary=:all:", *for_there, "--dest", str(folder), *pinned(), *RIVALS, *more]


def pinned() -> list[str]:
    """Return NAME==VERSION of every bundled package.

    Raises KeyError for a name that requirements.lock lacks.
    """
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked = {same(line.partition("==")[0]): line for line in lines if "==" in line and not line.startswith("#")}
    return [locked[same(name)] for name in BUNDLED]


def requirements(more: list[str]) -> list[str]:
    """Return what install.sh requires: lower bounds, so that a sufficient version on the machine stays."""
    return [*(f"{name}{bound}" for name, bound in BUNDLED.items() if name != "pydantic_core"), *RIVALS, *more]


def same(name: str) -> str:
    """Return a package's name, normalised (PEP 503)."""
    return name.lower().replace("_", "-").replace(".", "-")


if __name__ == "__main__":
    raise SystemExit(main())
