"""Update kernels that are compiled before they are installed, one library for each x86-64 level.

    offload_trainer/optim/prebuilt/<key>/adam.x86-64-v4.so    in a wheel (scripts/build_release.py)
    <cache>/kernels/<key>/adam.x86-64-v4.so                   from scripts/gpu_folder.py

The key is a hash of level, options and sources, so libraries of other sources are not found. A library has plain C
functions, which ctypes calls: it depends neither on torch's C++ ABI nor on Python's. libstdc++ is linked statically,
since an older machine's would lack symbols. What remains are glibc, at least the version in the wheel's tag, and
libgcc_s.

This module imports the standard library alone, because a release is built where torch is not installed.
"""

import hashlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("native") / "adam.cpp"
FOLDER = Path(__file__).with_name("prebuilt")  # absent in a checkout
# Without errno and traps the compiler can vectorise square roots and selections; neither option changes a result.
FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-pthread",
)
# Hidden, the symbols of libstdc++ cannot be mixed with those of the library that torch has loaded.
_STATIC = ("-static-libstdc++", "-Wl,--exclude-libs,ALL", "-s")

# The levels, best first: compiler options, and the instruction sets they need as /proc/cpuinfo names them. Checksums
# need carry-less multiplication, which no level of x86-64 includes.
_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave", "pclmulqdq"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
LEVELS: Mapping[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "x86-64-v4-fp16": (
        ("-march=x86-64-v4", "-mpclmul", "-mavx512bf16", "-mavx512vbmi", "-mavx512fp16"),
        _V4 | {"avx512_bf16", "avx512vbmi", "avx512_fp16"},
    ),
    "x86-64-v4": (("-march=x86-64-v4", "-mpclmul"), _V4),
    "x86-64-v3": (("-march=x86-64-v3", "-mpclmul"), _V3),
}


def place_prebuilt(level: str) -> Path:
    """Return the path of the library for `level`, relative to the folder of all keys."""
    return Path(key_of(level, *LEVELS[level][0], *FLAGS, *texts_of(SOURCE))) / f"{SOURCE.stem}.{level}.so"


def build_prebuilt(level: str, *, folder: Path = FOLDER) -> Path:
    """Compile the update kernel for `level` below `folder`, with its SHA-256 in a file next to it; return its path.

    Raises OSError if there is no compiler, and CalledProcessError if it failed; its messages are on stderr.
    """
    file = folder / place_prebuilt(level)
    file.parent.mkdir(parents=True, exist_ok=True)
    options = (*LEVELS[level][0], *(flag for flag in FLAGS if flag != "-march=native"), *_STATIC)
    subprocess.run([os.environ.get("CXX", "g++"), *options, "-o", str(file), str(SOURCE)], check=True)
    file.with_name(f"{file.name}.sha256").write_text(hashlib.sha256(file.read_bytes()).hexdigest())
    return file


def key_of(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def texts_of(source: Path) -> list[str]:
    """Return the contents of `source` and of the headers in its directory."""
    return [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
