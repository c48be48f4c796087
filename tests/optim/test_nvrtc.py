"""Tests of finding NVRTC as pip, conda and CUDA's installer lay it out: it is checked, and skipped if unusable.

The stand-in is the emulated GPU's, which reports version 1.2; NVIDIA's own wheels come from PyPI.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from emulated import library
from test_cuda_adam import ROOT

from offload_trainer.errors import TrainerError
from offload_trainer.optim import cuda_adam, nvrtc
from offload_trainer.optim.cuda_adam import SOURCE, choose_cuda_kernel, defines, why_no_cuda_kernel
from offload_trainer.optim.kernel_cache import kept
from offload_trainer.optim.nvrtc import Nvrtc, find_nvrtc
from offload_trainer.optim.torch_adam import TorchKernel

pytestmark = pytest.mark.slow

NAME = "libnvrtc.so.1"
ENTRIES = "site/nvidia/cuda_nvrtc/lib", "site/nvidia/cu1/lib"
BESIDE = ("libnvrtc-builtins.so.1.2", "libnvrtc-builtins.alt.so.1.2", "libnvrtc.alt.so.1")


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate a machine without NVRTC: every searched place is below this directory."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *(one for one in sys.path if not holds_nvrtc(one))])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(nvrtc, "_SYSTEM", tmp_path / "usr")
    for key in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"):
        monkeypatch.delenv(key, raising=False)
    return tmp_path


def holds_nvrtc(entry: str) -> bool:
    return any((Path(entry) / "nvidia").glob("*/lib/libnvrtc*"))


def put(folder: Path, name: str = NAME, *, source: Path | None = None) -> Path:
    """Copy the stand-in, or `source`, into a folder under this name."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(source or Path(library()._name), folder / name)
    return folder / name


@pytest.fixture(scope="module")
def other_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a shared library without NVRTC's functions, such as its helper libraries."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "other.cpp").write_text('extern "C" int other() { return 1; }')
    subprocess.run(["g++", "-shared", "-fPIC", "-o", folder / "other.so", folder / "other.cpp"], check=True)
    return folder / "other.so"


@pytest.mark.parametrize(
    ("place", "name"),
    [
        *((entry, NAME) for entry in ENTRIES),
        ("torch/lib", NAME),
        ("torch/lib", "libnvrtc-672ee683.so.1"),
        ("torch/lib", "libnvrtc-b51b459d.so.1"),
        ("prefix/lib", NAME),
        ("usr/cuda/lib64", NAME),
        ("usr/cuda-1.2/lib64", NAME),
        ("home/lib64", NAME),
    ],
)
def test_every_layout_is_found_among_libraries_of_similar_names(
    place: str, name: str, empty: Path, other_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(empty / "home"))
    for beside in BESIDE:
        put(empty / place, beside, source=other_library)
    right = put(empty / place, name)
    assert find_nvrtc("1")._library._name == str(right)


def test_an_entry_of_the_path_that_has_another_part_of_cuda_hides_no_other(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA 12's wheels make `nvidia` a regular package, which Python imports from its first directory only."""
    (empty / "site/nvidia/cublas").mkdir(parents=True)
    (empty / "site/nvidia/__init__.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(empty / "user")])
    right = put(empty / "user/nvidia/cuda_nvrtc/lib")
    assert find_nvrtc("1")._library._name == str(right)


BROKEN = {
    "no ELF": (lambda path, _: path.write_text("a link that git made a file of"), "cannot be loaded"),
    "empty": (lambda path, _: path.write_bytes(b""), "cannot be loaded"),
    "cut short": (lambda path, _: path.write_bytes(path.read_bytes()[:5000]), "cannot be loaded"),
    "another library": (lambda path, other: shutil.copy(other, path), "this is not NVRTC .* nvrtcGetErrorString"),
    "a directory": (lambda path, _: (path.unlink(), path.mkdir()), "cannot be loaded"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_library_is_named_and_the_next_one_is_used(how: str, empty: Path, other_library: Path) -> None:
    spoil, words = BROKEN[how]
    spoil(put(empty / ENTRIES[0]), other_library)
    with pytest.raises(TrainerError, match=rf"{ENTRIES[0]}/{NAME}.*{words}.*pip install nvidia-cuda-nvrtc-cu1"):
        find_nvrtc("1")
    right = put(empty / "usr/cuda/lib64")
    assert find_nvrtc("1")._library._name == str(right)


def test_a_library_of_another_version_is_skipped(empty: Path) -> None:
    put(empty / ENTRIES[0], "libnvrtc.so.2")
    with pytest.raises(TrainerError, match=r"libnvrtc\.so\.2 is NVRTC 1\.2"):
        find_nvrtc("2")


def test_without_nvrtc_the_message_says_what_to_install(empty: Path) -> None:
    with pytest.raises(TrainerError, match=r"no usable libnvrtc\.so\.97 beside torch .*nvidia-cuda-nvrtc==97"):
        find_nvrtc("97")


# -- errors of GPUs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("undefined symbol: cuCtxPushCurrent_v2"),
        OSError("libcuda.so.1: wrong ELF class"),
        RuntimeError("CUDA error: the launch failed"),
        torch.OutOfMemoryError("CUDA out of memory"),
        AssertionError("Invalid device id"),
    ],
)
def test_every_error_becomes_a_reason(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.device) -> None:
        raise error

    monkeypatch.setattr(cuda_adam, "gpu_of", fail)
    monkeypatch.setattr(cuda_adam, "_FIT", set())
    kernel, words = choose_cuda_kernel(torch.device("cuda"), TorchKernel())
    assert kernel is None
    assert str(error) in words
    assert str(error) in (why_no_cuda_kernel(torch.device("cuda")) or "")


def test_a_driver_that_lacks_a_function_is_a_reason(other_library: Path) -> None:
    with pytest.raises(TrainerError, match=r"not the driver's library of CUDA: it lacks cuInit"):
        nvrtc.Gpu(torch.device("cuda"), 90, nvrtc=Nvrtc(library()), driver=ctypes.CDLL(str(other_library)))


def test_code_is_compiled_once_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(tmp_path / "cache"))
    gpu, counted = nvrtc.Gpu(torch.device("cpu"), 90, nvrtc=Nvrtc(library()), driver=library(), keep=kept), []
    monkeypatch.setattr(gpu.nvrtc, "compile_for", lambda *_, **given: counted.append(given) or b"code")
    codes = [gpu._compiled(SOURCE, defines(fuses=fuses)) for fuses in (True, True, False)]
    assert codes == [b"code"] * 3
    assert len(counted) == 2
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", "/proc/nowhere")  # A cache that cannot be created is not used.
    assert gpu._compiled(SOURCE, defines(fuses=True)) == b"code"


# -- NVIDIA's wheels -------------------------------------------------------------------------------------------------


@pytest.mark.network
@pytest.mark.parametrize(
    ("wheel", "cards"),
    [
        ("nvidia-cuda-nvrtc-cu12==12.4.127", {70: 70, 120: 90}),  # 120 by PTX, which the driver translates
        ("nvidia-cuda-nvrtc-cu12==12.8.93", {80: 80, 89: 89}),
        ("nvidia-cuda-nvrtc==13.0.88", {70: None, 90: 90, 120: 120}),
    ],
)
def test_nvidias_wheels(wheel: str, cards: dict[int, int | None], tmp_path: Path) -> None:
    """A separate process is needed: a library loaded here would be found by its name from then on."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, wheel]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip("pip reaches no index here")
    assert done.returncode == 0, done.stderr
    code = f"""
from offload_trainer.errors import TrainerError
from offload_trainer.optim.cuda_adam import SOURCE, defines
from offload_trainer.optim.nvrtc import find_nvrtc
name, _, version = {wheel!r}.partition("==")
nvrtc = find_nvrtc(version.split(".")[0])
assert nvrtc.version == ".".join(version.split(".")[:2]), nvrtc.version
assert nvrtc._library._name.startswith({str(tmp_path)!r}), nvrtc._library._name
for card, architecture in {cards!r}.items():
    try:
        assert nvrtc.architecture_for(card) == architecture
        made = nvrtc.compile_for(card, SOURCE.read_bytes(), name=SOURCE.name, defines=defines(fuses=True))
        assert made.startswith(b"\\x7fELF" if architecture == card else b"//"), made[:20]
    except TrainerError as error:
        assert architecture is None and f"not for this sm_{{card}}" in str(error), error
"""
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": paths})
