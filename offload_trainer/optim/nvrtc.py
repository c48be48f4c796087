"""CUDA C compiled at run time and launched on torch's streams: NVRTC, which comes with torch, and the driver.

    source ──NVRTC──> code for the device ──driver──> kernels ──launch──> torch's current stream

Through ctypes, since torch's own way (torch.cuda._compile_kernel) is private and another one in each version. Neither
needs nvcc, a C++ compiler, nor headers.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from offload_trainer.errors import TrainerError
from offload_trainer.optim.kernel_cache import kept
from offload_trainer.safe_files import file_bytes

Keep = Callable[[str, str, Callable[[Path], bytes]], Path]  # as `kernel_cache.kept`

# Subnormal numbers count; division and root round to nearest; no product is fused with a sum but where it says so.
_EXACT = ("--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--fmad=false")


_SYSTEM = Path("/usr/local")  # where CUDA's installer puts cuda-VERSION
_OF_NVRTC = (
    *("nvrtcGetErrorString", "nvrtcVersion", "nvrtcGetNumSupportedArchs", "nvrtcGetSupportedArchs"),
    *("nvrtcCreateProgram", "nvrtcCompileProgram", "nvrtcDestroyProgram", "nvrtcGetProgramLogSize"),
    *("nvrtcGetProgramLog", "nvrtcGetPTXSize", "nvrtcGetPTX", "nvrtcGetCUBINSize", "nvrtcGetCUBIN"),
)
_OF_DRIVER = (
    *("cuInit", "cuGetErrorName", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"),
    *("cuCtxPopCurrent_v2", "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"),
)


def find_nvrtc(major: str | None = None) -> Nvrtc:
    """Return NVRTC of CUDA `major`, by default of the CUDA that torch was built for.

    Every place where pip, conda, the system or CUDA's installer may have put it is tried in turn; a file that cannot be
    loaded, is no NVRTC or is of another version is passed over. Raise TrainerError, with what was wrong with each file
    that was found, where none is left.
    """
    if major is None:
        if torch.version.cuda is None:
            raise TrainerError("this torch was not built for CUDA")
        major = torch.version.cuda.split(".")[0]
    name, wrong = f"libnvrtc.so.{major}", []
    for path in _places(name, major):
        try:
            found = Nvrtc(load_nvrtc(path))
            if found.version.split(".")[0] == major:
                return found
            wrong.append(f"{path} is NVRTC {found.version}")
        except OSError as error:
            if Path(path).is_absolute():  # a bare name that the loader does not know says nothing new
                wrong.append(f"{path} cannot be loaded: {error}")
        except TrainerError as error:
            wrong.append(f"{path}: {error}")
    package = f"nvidia-cuda-nvrtc-cu{major}" if int(major) < 13 else f"nvidia-cuda-nvrtc=={major}.*"
    found_but = f" ({'; '.join(dict.fromkeys(wrong))})" if wrong else ""
    raise TrainerError(f"no usable {name} beside torch or where the loader looks{found_but}: pip install {package}")


def load_nvrtc(path: str) -> ctypes.CDLL:
    """The library at `path`, and before it the one that it looks for by name only: 13.0 does not look beside itself.

    OSError where it cannot be loaded.
    """
    if Path(path).is_absolute():
        for beside in (*sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")), Path(path)):
            _refuse_cut_short(beside)
            if beside != Path(path):
                ctypes.CDLL(str(beside))
    return ctypes.CDLL(path)


def _refuse_cut_short(path: Path) -> None:
    """OSError for a library whose end is missing, as a full disk leaves it: the loader ends the process with SIGBUS."""
    with path.open("rb") as file:
        header = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if header[:4] == b"\x7fELF" and len(header) == 64:
        (table,), (each, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
        if table + each * count > size:  # of its sections, which is what a file ends with
            raise OSError(f"it is cut short: it has {size} bytes and speaks of {table + each * count}")


def _places(name: str, major: str) -> Iterator[str]:
    """Yield paths of files called `name` that are there, and last the bare name for the loader.

    pip's wheels have nvidia/cuda_nvrtc/lib up to CUDA 12 and nvidia/cu13/lib from 13 on; torch's own wheels of some
    platforms carry the library, with a hash in its name, in torch/lib. CUDA's installer has /usr/local/cuda-VERSION.
    Libraries of other names beside it, "builtins" and "alt", are no NVRTC of their own.
    """
    for entry in filter(None, sys.path):  # not the package `nvidia`, which may be in several of them
        for package in ("cuda_nvrtc", f"cu{major}"):
            yield from _there(Path(entry) / "nvidia" / package / "lib" / name)
    beside_torch = Path(torch.__file__).parent / "lib"
    yield from _there(beside_torch / name)
    for path in sorted(beside_torch.glob(f"libnvrtc-*.so.{major}*")):
        if "builtins" not in path.name:
            yield str(path)
    homes = [Path(os.environ[key]) for key in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX") if os.environ.get(key)]
    homes += [Path(sys.prefix), _SYSTEM / "cuda", *sorted(_SYSTEM.glob(f"cuda-{major}*"), reverse=True)]
    for home in homes:
        for folder in ("lib64", "lib"):
            yield from _there(home / folder / name)
    yield name


def _refuse_lacking(library: ctypes.CDLL, names: Sequence[str], *, what: str) -> None:
    """Raise TrainerError where `library` lacks one of these functions."""
    lacking = [name for name in names if not hasattr(library, name)]
    if lacking:
        raise TrainerError(f"this is not {what}: it lacks {', '.join(lacking[:3])}")


def _there(path: Path) -> Iterator[str]:
    if os.path.exists(path):  # Path.exists() raises for a directory that this user may not enter
        yield str(path)


class Nvrtc:
    """The compiler. TrainerError, with its words, where it fails."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raise TrainerError where `library` lacks a function of NVRTC."""
        _refuse_lacking(library, _OF_NVRTC, what="NVRTC of CUDA 11.2 or later")
        self._library = library
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    @property
    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def architectures(self) -> list[int]:
        """Capabilities that it compiles for, ascending: 90 for sm_90."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return sorted(found)

    def compile_for(self, capability: int, source: bytes, *, name: str, defines: Mapping[str, int]) -> bytes:
        """Code for a device of `capability`: for it alone, or, where it is younger than NVRTC, PTX for the driver."""
        architecture = self.architecture_for(capability)
        return self.compile(
            source, name=name, defines=defines, architecture=architecture, ptx=architecture != capability
        )

    def architecture_for(self, capability: int) -> int:
        """The youngest that is no younger than the device."""
        known = [architecture for architecture in self.architectures() if architecture <= capability]
        if not known:
            oldest = self.architectures()[0]
            raise TrainerError(f"NVRTC {self.version} compiles for sm_{oldest} and up, not for this sm_{capability}")
        return known[-1]

    def compile(self, source: bytes, *, name: str, defines: Mapping[str, int], architecture: int, ptx: bool) -> bytes:
        """The code of `source`, C++17 without headers: a cubin, or PTX as text that ends with a zero."""
        target = f"--gpu-architecture={'compute' if ptx else 'sm'}_{architecture}"
        options = [target, "--std=c++17", *_EXACT, *(f"-D{key}={value}" for key, value in defines.items())]
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source, name.encode(), 0, None, None)
        try:
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            if self._library.nvrtcCompileProgram(program, len(options), given) != 0:
                log = self._bytes("ProgramLog", program).rstrip(b"\0").decode(errors="replace").strip()
                raise TrainerError(f"NVRTC {self.version} cannot compile {name} ({target}): {log[:2000]}")
            return self._bytes("PTX" if ptx else "CUBIN", program)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            raise TrainerError(f"NVRTC: {name}: {self._library.nvrtcGetErrorString(result).decode()}")


def gpu_of(place: torch.device) -> Gpu:
    """The device that torch calls `place`. TrainerError where it is not NVIDIA's, or has no NVRTC or driver."""
    if torch.version.hip:
        raise TrainerError("kernels are compiled for NVIDIA's GPUs only, and this torch was built for ROCm")
    nvrtc = find_nvrtc()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TrainerError(f"the driver's library cannot be loaded: {error}") from error
    index = torch.cuda.current_device() if place.index is None else place.index
    major, minor = torch.cuda.get_device_capability(index)
    nvrtc.architecture_for(10 * major + minor)
    return Gpu(torch.device("cuda", index), 10 * major + minor, nvrtc=nvrtc, driver=driver, keep=kept)


class Gpu:
    """A CUDA device that torch computes on, as the driver sees it. TrainerError with the name of what goes wrong."""

    def __init__(
        self, place: torch.device, capability: int, *, nvrtc: Nvrtc, driver: ctypes.CDLL, keep: Keep | None = None
    ) -> None:
        """`capability`: 90 for sm_90. `keep`: what keeps compiled code between processes."""
        _refuse_lacking(driver, _OF_DRIVER, what="the driver's library of CUDA")
        self.place, self.capability, self.nvrtc, self._driver = place, capability, nvrtc, driver
        self._keep = keep
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        driver.cuLaunchKernel.argtypes = (pointer, *[number] * 7, pointer, pointer, pointer)
        driver.cuGetErrorName.argtypes = (ctypes.c_int, pointer)
        self._call("cuInit", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), place.index or 0)
        self._context = pointer()  # the one that torch uses
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def stream(self) -> int:
        """torch's current stream."""
        return torch.cuda.current_stream(self.place).cuda_stream

    def load(self, source: Path, names: Sequence[str], *, defines: Mapping[str, int]) -> dict[str, ctypes.c_void_p]:
        """The kernels called `names` (extern "C") of `source`, compiled and on the device; for `launch`."""
        code = self._compiled(source, defines)
        module, found = ctypes.c_void_p(), {}
        with self._current():
            self._call("cuModuleLoadData", ctypes.byref(module), code)
            for name in names:
                found[name] = ctypes.c_void_p()
                self._call("cuModuleGetFunction", ctypes.byref(found[name]), module, name.encode())
        return found

    def _compiled(self, source: Path, defines: Mapping[str, int]) -> bytes:
        """Return the code of `source` for this device, from the cache where it was compiled before."""
        text = source.read_bytes()

        def compiled() -> bytes:
            return self.nvrtc.compile_for(self.capability, text, name=source.name, defines=defines)

        if self._keep is None:
            return compiled()
        of = (self.nvrtc.version, str(self.capability), repr(sorted(defines.items())), *_EXACT)
        key = hashlib.sha256("\n".join(of).encode() + text).hexdigest()[:16]
        try:
            return file_bytes(self._keep(f"{source.stem}.cubin", key, lambda _: compiled()))
        except (TrainerError, OSError):  # a cache that cannot be used costs seconds, and no more
            return compiled()

    def launch(self, kernel: ctypes.c_void_p, argument: ctypes.Structure, *, blocks: int, threads: int) -> None:
        """Put `kernel` on torch's current stream, with a copy of `argument` as it is now."""
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        with self._current():
            self._call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, self.stream(), arguments, None)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """The context is the calling thread's: a new thread has none, and torch.cuda.device does not always set one."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._driver, name)(*arguments)
        if result != 0:
            words = ctypes.c_char_p()
            self._driver.cuGetErrorName(result, ctypes.byref(words))
            raise TrainerError(f"CUDA: {name}: {(words.value or b'error ' + str(result).encode()).decode()}")
