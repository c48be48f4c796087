"""Tests of the prebuilt CPU kernels: a start uses the one that fits and has torch's bits, and says why it does not."""

import platform
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import gpu_folder
import pytest
import torch
from build_release import build_release
from fresh_environment import fresh_environment
from test_newcomer import CARRIED

from offload_trainer.optim import kernel_cache, kernels, prebuilt_kernels
from offload_trainer.optim.kernel_api import PageUpdate
from offload_trainer.optim.kernels import choose_kernel
from offload_trainer.optim.native_kernel import UNKNOWN, NativeKernel
from offload_trainer.optim.prebuilt_kernels import LEVELS

LOWEST = "x86-64-v3"
FEATURES = frozenset(kernel_cache._line_of_features().partition(":")[2].split())
HERE = [level for level, (_, needed) in LEVELS.items() if needed <= FEATURES]  # best first
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels are prebuilt for x86-64"),
    pytest.mark.skipif(not HERE, reason="this CPU is older than those that kernels are prebuilt for"),
]


# -- the choice of a kernel --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library for the lowest level, as the folder for GPU machines has it; it takes seconds to compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_folder, "LEVELS", [LOWEST])
        (made,) = gpu_folder.build_kernels(tmp_path_factory.mktemp("compiled"))
    assert made.stat().st_size < 2_000_000
    return made


@pytest.fixture
def package(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of prebuilt kernels of a package that was installed with one."""
    shutil.copytree(library.parent.parent, tmp_path / "prebuilt")
    monkeypatch.setattr(kernel_cache, "FOLDER", tmp_path / "prebuilt")
    return tmp_path / "prebuilt"


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(tmp_path / "cache"))


class Off(NativeKernel):
    """A kernel whose prebuilt library is wrong in one bit."""

    def update_page(self, page: PageUpdate) -> None:
        super().update_page(page)
        if self.level:
            page.fields["exp_avg"].view(torch.uint8)[-1] ^= 1


@pytest.mark.usefixtures("package", "no_compiler")
def test_the_packages_kernel_is_used_without_a_compiler(tmp_path: Path) -> None:
    kernel, words = choose_kernel("native")
    assert words == f"The update on the CPU: the native kernel, prebuilt for {LOWEST} and checked to give torch's bits."
    assert kernel.name == "native"
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("package")
def test_a_prebuilt_kernel_with_a_wrong_bit_is_replaced_by_a_compiled_one(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(kernels, "NativeKernel", Off)
    kernel, words = choose_kernel("auto")
    wrong = f"the prebuilt one for {LOWEST} differs from torch's in its last bits"
    assert f"built for this machine ({wrong}) and checked" in words
    assert isinstance(kernel, Off)
    assert not kernel.level
    request.getfixturevalue("no_compiler")
    kernels._checked_native.cache_clear()
    kernel, words = choose_kernel("auto")
    assert (kernel.name, "no-such-compiler" in words, wrong in words) == ("torch", True, True)


def of_another_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "_line_of_features", lambda: f"flags: {' '.join(FEATURES - {'avx2', 'fma'})}")


def of_other_sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(prebuilt_kernels.SOURCE.parent, folder.parent / "native")
    with open(folder.parent / "native/formats.h", "a") as file:
        file.write("// a newer version\n")
    monkeypatch.setattr(prebuilt_kernels, "SOURCE", folder.parent / "native/adam.cpp")


def damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = folder.rglob("*.so")
    content = file.read_bytes()
    file.unlink()  # not overwritten, since it may be mapped here
    file.write_bytes(content[:-1])


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (of_another_cpu, f"need a CPU of {LOWEST} or later, and this one lacks avx2, fma"),
        (of_other_sources, "were made from other sources than those in .*/native"),
        (damaged, "the prebuilt one in .*/prebuilt is damaged; install the package again"),
    ],
)
def test_a_prebuilt_kernel_that_does_not_fit_is_not_used(
    change: Callable[[Path, pytest.MonkeyPatch], None], reason: str, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(package, monkeypatch)
    kernel, words = choose_kernel("auto")
    assert kernel.name == "torch"
    assert re.search(rf"needs a C\+\+ compiler.*; .*{reason}", words), words


@pytest.mark.usefixtures("no_compiler")
def test_a_kernel_in_the_cache_is_used_without_a_compiler(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without network or compiler gets the folder's cache."""
    cache = tmp_path / "cache/kernels"
    shutil.copytree(library.parent.parent, cache)
    kernel, words = choose_kernel("auto")
    assert (kernel.name, f"prebuilt for {LOWEST} and checked" in words) == ("native", True), words
    for change in (of_another_cpu, damaged):
        with monkeypatch.context() as patch:
            change(cache, patch)
            kernels._checked_native.cache_clear()
            kernel, words = choose_kernel("auto")
        assert (kernel.name, "no-such-compiler" in words) == ("torch", True), words


@pytest.mark.usefixtures("no_compiler")
def test_a_checkout_without_prebuilt_kernels_does_not_mention_them() -> None:
    assert "prebuilt" not in choose_kernel("auto")[1]


# -- the wheel ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_release(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(release: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the variables of a new environment with the wheel, an empty cache, and no command of this machine."""
    place = tmp_path_factory.mktemp("installed")
    there = fresh_environment(place, tools="")
    pip = [place / "venv/bin/python", "-m", "pip", "install", "--quiet", "--no-deps", release]
    subprocess.run(pip, env=there, check=True)
    assert not any(shutil.which(name, path=there["PATH"]) for name in ("g++", "c++", "gcc", "cc", "clang", "ld"))
    return there


def run(words: list[str], there: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = Path(there["PATH"]) / words[0]
    return subprocess.run(
        [command, *words[1:]], cwd=folder, env=there, capture_output=True, text=True, check=False, timeout=500
    )


def readelf(option: str, file: Path) -> str:
    return subprocess.run(["readelf", "-W", option, file], capture_output=True, text=True, check=True).stdout


def test_the_wheel_needs_the_glibc_of_its_name(release: Path, tmp_path: Path) -> None:
    """It has the package and a library for each level, which need no newer glibc and no libstdc++."""
    tag = re.fullmatch(r"offload_trainer-[\d.]+-py3-none-manylinux_2_(\d+)_x86_64\.whl", release.name)
    assert tag
    with zipfile.ZipFile(release) as archive:
        archive.extractall(tmp_path)
    held = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    more = {name for name in held - CARRIED if ".dist-info/" not in name}
    assert held >= CARRIED
    libraries = [name for name in more if name.endswith(".so")]
    assert {f"{name}.sha256" for name in libraries} | set(libraries) == more
    assert sorted(Path(name).name for name in libraries) == sorted(f"adam.{level}.so" for level in LEVELS)
    (wheel_facts,) = tmp_path.glob("*.dist-info/WHEEL")
    assert f"Tag: py3-none-manylinux_2_{tag[1]}_x86_64\n" in wheel_facts.read_text()
    for name in libraries:
        needed = set(re.findall(r"NEEDED.*\[(.*)\]", readelf("--dynamic", tmp_path / name)))
        assert needed <= {"libc.so.6", "libm.so.6", "libpthread.so.0", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
        versions = re.findall(r"GLIBC_2\.(\d+)", readelf("--version-info", tmp_path / name))
        assert max(map(int, versions)) <= int(tag[1])
        exported = readelf("--dyn-syms", tmp_path / name)
        assert re.search(r"FUNC +GLOBAL +DEFAULT +\d+ update_page$", exported, re.MULTILINE)
        assert not re.search(r"FUNC +\w+ +DEFAULT +\d+ _ZNSt18condition_variable4wait", exported)  # hidden


def test_a_first_step_without_a_compiler(installed: dict[str, str], tmp_path: Path) -> None:
    done = run(["python", "-P", "-c", "import offload_trainer; print(offload_trainer.__file__)"], installed, tmp_path)
    assert done.stdout.startswith(str(Path(installed["PATH"]).parent))
    assert run(["offload-train", "cp", "tiny"], installed, tmp_path).returncode == 0
    words = ["offload-train", "tiny.yaml", "--nvme", ".", "--steps", "1", "--output", "run"]
    done = run(words, installed, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 1
    assert f"prebuilt for {HERE[0]} and checked to give torch's bits" in done.stdout + done.stderr
    assert not list(Path(installed["OFFLOAD_TRAINER_CACHE"]).rglob("*.so"))


@pytest.mark.parametrize("level", LEVELS)
def test_each_prebuilt_kernel_has_torchs_bits(
    level: str, release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel's library for a level passes the comparison of a start, and has all of its functions."""
    if level not in HERE:
        pytest.skip(f"this CPU cannot run {level}")
    with zipfile.ZipFile(release) as archive:
        archive.extractall(tmp_path)
    monkeypatch.setattr(kernel_cache, "FOLDER", tmp_path / "offload_trainer/optim/prebuilt")
    monkeypatch.setattr(kernel_cache, "_line_of_features", lambda: f"flags: {' '.join(LEVELS[level][1])}")
    kernel, words = choose_kernel("native")
    assert f"prebuilt for {level} and checked" in words
    assert kernel.lanes != UNKNOWN
    assert kernel.page_sum(torch.arange(100, dtype=torch.uint8)) >= 0
