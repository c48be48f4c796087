"""A GPU for tests: adam.cu compiled for the CPU, with a stand-in for the driver and NVRTC (cuda_on_cpu.cpp)."""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache
from pathlib import Path

import torch

from offload_trainer.optim.cuda_adam import SOURCE, defines
from offload_trainer.optim.kernel_cache import built
from offload_trainer.optim.nvrtc import Gpu, Nvrtc

_SOURCE = Path(__file__).with_name("cuda_on_cpu.cpp")


@cache
def library() -> ctypes.CDLL:
    bytes_of_pages = defines(fuses=True)["PAGES_BYTES"]
    of = hashlib.sha256(SOURCE.read_bytes()).hexdigest()
    flags = (
        "-O2",
        "-march=native",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-shared",
        "-fPIC",
        f"-DPAGES_BYTES={bytes_of_pages}",
    )
    found = ctypes.CDLL(str(built(_SOURCE, flags=(*flags, f"-DOF_{of}", f"-I{SOURCE.parent}"))))
    found.emulated_options.restype = ctypes.c_char_p
    return found


class EmulatedGpu(Gpu):
    """A GPU whose memory is the CPU's, and whose launches are synchronous."""

    def __init__(self, capability: int = 90) -> None:
        super().__init__(torch.device("cpu"), capability, nvrtc=Nvrtc(library()), driver=library())

    def stream(self) -> int:
        return 0

    @staticmethod
    def options() -> list[str]:
        """Return the options of the last NVRTC compilation."""
        return library().emulated_options().decode().split()
