"""Compile CUDA C at run time with NVRTC, which comes with torch, and launch it on torch's streams through the driver.

    source ──NVRTC──> code for the device ──driver──> kernels ──launch──> torch's current stream

Both libraries are called through ctypes and need neither nvcc, a C++ compiler nor headers. torch's equivalent
(torch.cuda._compile_kernel) is private and changes between versions.
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

Keep = Callable[[str, str, Callable[[Path], bytes]], Path]  # the signature of `kernel_cache.kept`

# Keep subnormal numbers, round division and square root to nearest, and use FMA only where the source asks for it.
_EXACT = ("--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--fmad=false")


_SYSTEM = Path("/usr/local")  # CUDA's installer creates cuda-VERSION here
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
    """Load NVRTC of CUDA `major`, by default of the CUDA version that torch was built for.

    The locations used by pip, conda, the system and CUDA's installer are tried in turn. A file that cannot be loaded,
    is not NVRTC or has another version is skipped.

    Raises:
        TrainerError: no file is usable; the message says what is wrong with each.
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
            if Path(path).is_absolute():  # the loader's error for the bare name carries no information
                wrong.append(f"{path} cannot be loaded: {error}")
        except TrainerError as error:
            wrong.append(f"{path}: {error}")
    package = f"nvidia-cuda-nvrtc-cu{major}" if int(major) < 13 else f"nvidia-cuda-nvrtc=={major}.*"
    found_but = f" ({'; '.join(dict.fromkeys(wrong))})" if wrong else ""
    raise TrainerError(f"no usable {name} beside torch or where the loader looks{found_but}: pip install {package}")


def load_nvrtc(path: str) -> ctypes.CDLL:
    """Load the library at `path`, after libnvrtc-builtins from the same directory.

    NVRTC 13.0 looks that library up by name only and does not search its own directory.

    Raises:
        OSError: a library cannot be loaded.
    """
    if Path(path).is_absolute():
        for beside in (*sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")), Path(path)):
            _refuse_cut_short(beside)
            if beside != Path(path):
                ctypes.CDLL(str(beside))
    return ctypes.CDLL(path)


def _refuse_cut_short(path: Path) -> None:
    """Raise OSError for a truncated library, for example after a full disk: loading it would end the process by SIGBUS.

    The section table is the last part of an ELF file, so its end is compared with the file's size.
    """
    with path.open("rb") as file:
        header = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if header[:4] == b"\x7fELF" and len(header) == 64:
        (table,), (each, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
        if table + each * count > size:
            raise OSError(f"it is cut short: it has {size} bytes and speaks of {table + each * count}")


def _places(name: str, major: str) -> Iterator[str]:
    """Yield the existing paths of files called `name`, and finally the bare name for the loader.

    pip's wheels use nvidia/cuda_nvrtc/lib up to CUDA 12 and nvidia/cu13/lib from 13 on. torch's wheels for some
    platforms have the library in torch/lib, with a hash in its name. CUDA's installer uses /usr/local/cuda-VERSION.
    The libraries "builtins" and "alt" in the same directories are not NVRTC.
    """
    for entry in filter(None, sys.path):  # importing the package `nvidia` would find only one of several such folders
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
    """Raise TrainerError if `library` lacks one of the functions `names`."""
    lacking = [name for name in names if not hasattr(library, name)]
    if lacking:
        raise TrainerError(f"this is not {what}: it lacks {', '.join(lacking[:3])}")


def _there(path: Path) -> Iterator[str]:
    if os.path.exists(path):  # Path.exists() raises if this user may not enter the directory
        yield str(path)


class Nvrtc:
    """The NVRTC compiler. Its methods raise TrainerError with NVRTC's message if a call fails."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raise TrainerError if `library` lacks a function of NVRTC."""
        _refuse_lacking(library, _OF_NVRTC, what="NVRTC of CUDA 11.2 or later")
        self._library = library
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    @property
    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def architectures(self) -> list[int]:
        """Return the compute capabilities that this NVRTC can compile for, ascending: 90 means sm_90."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return sorted(found)

    def compile_for(self, capability: int, source: bytes, *, name: str, defines: Mapping[str, int]) -> bytes:
        """Compile for a device of `capability`: to a cubin, or to PTX if the device is newer than NVRTC knows."""
        architecture = self.architecture_for(capability)
        return self.compile(
            source, name=name, defines=defines, architecture=architecture, ptx=architecture != capability
        )

    def architecture_for(self, capability: int) -> int:
        """Return the newest known architecture that is not newer than `capability`; raise TrainerError if none is."""
        known = [architecture for architecture in self.architectures() if architecture <= capability]
        if not known:
            oldest = self.architectures()[0]
            raise TrainerError(f"NVRTC {self.version} compiles for sm_{oldest} and up, not for this sm_{capability}")
        return known[-1]

    def compile(self, source: bytes, *, name: str, defines: Mapping[str, int], architecture: int, ptx: bool) -> bytes:
        """Compile `source` (C++17 without headers) to a cubin, or with `ptx` to zero-terminated PTX text."""
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
    """Return the `Gpu` of torch's device `place`. Raise TrainerError if there is no NVIDIA GPU, NVRTC or driver."""
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
    """A CUDA device accessed through the driver API, in torch's context. Failed driver calls raise TrainerError."""

    def __init__(
        self, place: torch.device, capability: int, *, nvrtc: Nvrtc, driver: ctypes.CDLL, keep: Keep | None = None
    ) -> None:
        """Attach to torch's context. `capability` is 90 for sm_90; `keep` caches compiled code between processes."""
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
        """Return the handle of torch's current stream on this device."""
        return torch.cuda.current_stream(self.place).cuda_stream

    def load(self, source: Path, names: Sequence[str], *, defines: Mapping[str, int]) -> dict[str, ctypes.c_void_p]:
        """Compile `source`, load it onto the device and return its kernels `names` (extern "C") for `launch`."""
        code = self._compiled(source, defines)
        module, found = ctypes.c_void_p(), {}
        with self._current():
            self._call("cuModuleLoadData", ctypes.byref(module), code)
            for name in names:
                found[name] = ctypes.c_void_p()
                self._call("cuModuleGetFunction", ctypes.byref(found[name]), module, name.encode())
        return found

    def _compiled(self, source: Path, defines: Mapping[str, int]) -> bytes:
        """Return the code of `source` for this device, from the cache if it was compiled before."""
        text = source.read_bytes()

        def compiled() -> bytes:
            return self.nvrtc.compile_for(self.capability, text, name=source.name, defines=defines)

        if self._keep is None:
            return compiled()
        of = (self.nvrtc.version, str(self.capability), repr(sorted(defines.items())), *_EXACT)
        key = hashlib.sha256("\n".join(of).encode() + text).hexdigest()[:16]
        try:
            return file_bytes(self._keep(f"{source.stem}.cubin", key, lambda _: compiled()))
        except (TrainerError, OSError):  # without a usable cache, compiling again costs only seconds
            return compiled()

    def launch(self, kernel: ctypes.c_void_p, argument: ctypes.Structure, *, blocks: int, threads: int) -> None:
        """Launch `kernel` on torch's current stream; the driver copies `argument` before this returns."""
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        with self._current():
            self._call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, self.stream(), arguments, None)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make torch's context current for the calling thread.

        A new thread has no context, and torch.cuda.device does not always set one.
        """
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
