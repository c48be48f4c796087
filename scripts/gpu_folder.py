"""Build the folder that the GPU suite needs on a machine without network or compiler: packages and kernels.

    gpu_folder.py .gpu [--python 3.12] [NAME==VERSION ...]

    .gpu/site       packages that such a machine lacks, unpacked for its Python (x86-64 Linux)
    .gpu/kernels    the update kernel of the sources next to this script, for each x86-64 level
    .gpu/cache      a cache directory of the package, into which --place-kernel copies the best one for the CPU

`scripts/gpu_suite.sh` uses the folder `.gpu` of its own checkout, so nothing is installed on that machine. It has
torch, transformers and their dependencies; more packages can be named. The kernels are linked to libstdc++ statically,
since an older machine's would lack symbols.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from offload_trainer.optim import kernel_cache  # noqa: E402
from offload_trainer.optim.kernel_cache import FLAGS, SOURCE  # noqa: E402

LARGEST = 40 << 20  # limit on the bytes of the folder
CARRIED = ("pydantic", "pydantic_core", "annotated-types", "typing-inspection")  # requirements.lock has the versions
RIVALS = ("torchao==0.18.0",)  # compared with by the suite; it depends on torch alone
THERE = ("torch", "transformers", "safetensors", "psutil", "tqdm", "PyYAML", "typing_extensions", "numpy")
# pip matches platform tags literally, so tags of older glibc versions must be listed too.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]

# The levels, best first: compiler options, and the instruction sets they need as /proc/cpuinfo names them. Checksums
# need carry-less multiplication, which no level of x86-64 includes.
_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave", "pclmulqdq"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
LEVELS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "x86-64-v4-bf16": (("-march=x86-64-v4", "-mpclmul", "-mavx512bf16"), _V4 | {"avx512_bf16"}),
    "x86-64-v4": (("-march=x86-64-v4", "-mpclmul"), _V4),
    "x86-64-v3": (("-march=x86-64-v3", "-mpclmul"), _V3),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_folder.py", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine that the packages are for")
    parser.add_argument("more", nargs="*", metavar="NAME==VERSION")
    parser.add_argument("--place-kernel", action="store_true", help="on that machine: into its cache, and no packages")
    options = parser.parse_args()
    if options.place_kernel:
        print(f"gpu_folder: update kernel for {place_kernel(options.folder / 'kernels') or 'no level'}")
        return 0
    site = options.folder / "site"
    done = subprocess.run(command(site, python=options.python, more=options.more), check=False)
    if done.returncode:
        return done.returncode
    kernels = build_kernels(options.folder / "kernels")
    size = sum(path.stat().st_size for path in options.folder.rglob("*") if path.is_file())
    print(f"{options.folder}: {size / 2**20:.1f} MiB, {len(kernels)} kernels")
    if size > LARGEST:
        print(f"gpu_folder: more than {LARGEST >> 20} MiB", file=sys.stderr)
    return int(size > LARGEST)


def build_kernels(folder: Path) -> list[Path]:
    """Compile the update kernel for each x86-64 processor level; return the libraries.

    The list is empty without a compiler or on another kind of machine. The target machine then compiles it, if it can.
    """
    made = []
    folder.mkdir(parents=True, exist_ok=True)
    common = [flag for flag in FLAGS if flag != "-march=native"]
    for level, (options, _) in LEVELS.items():
        file = _kernel_in(folder, level)
        # Hidden, the symbols of libstdc++ cannot be mixed with those of the library that torch has loaded.
        flags = [*options, *common, "-static-libstdc++", "-Wl,--exclude-libs,ALL", "-s"]
        try:
            subprocess.run([os.environ.get("CXX", "g++"), *flags, "-o", file, SOURCE], check=True)
            made.append(file)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"gpu_folder: no kernel for {level}: {error}", file=sys.stderr)
    return made


def place_kernel(folder: Path) -> str:
    """Copy the best kernel in `folder` that this CPU can run to where the package keeps what it compiles for it.

    Return its level; "" if the folder has none for this CPU and these sources.
    """
    here = frozenset(kernel_cache.line_of_features().partition(":")[2].split())
    for level, (_, needed) in LEVELS.items():
        if needed <= here and (file := _kernel_in(folder, level)).exists():
            kernel_cache.store(kernel_cache.library_of(SOURCE, flags=FLAGS), file.read_bytes())
            return level
    return ""


def _kernel_in(folder: Path, level: str) -> Path:
    return folder / f"{level}.{kernel_cache.key_of(*FLAGS, *kernel_cache.texts_of(SOURCE))}.so"


def command(site: Path, *, python: str, more: list[str]) -> list[str]:
    """Return the pip command that unpacks exactly these packages for that Python and platform, without dependencies."""
    there = [word for platform in PLATFORMS for word in ("--platform", platform)]
    there += ["--python-version", python, "--implementation", "cp"]
    there += ["--abi", f"cp{python.replace('.', '')}", "--abi", "abi3", "--abi", "none"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip += ["--upgrade", "--no-compile", "--only-binary=:all:", *there, "--target", str(site)]
    return [*pip, *pinned(), *RIVALS, *more]


def pinned() -> list[str]:
    """Return NAME==VERSION of every carried package. Raises KeyError for a name that requirements.lock lacks."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked = {canonicalize_name(line.partition("==")[0]): line for line in lines}
    return [locked[canonicalize_name(name)] for name in CARRIED]


if __name__ == "__main__":
    raise SystemExit(main())
