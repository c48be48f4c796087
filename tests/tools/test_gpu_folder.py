"""Tests of the folder for a GPU machine without network: it has all dependencies, and its versions are pinned."""

import platform
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from itertools import pairwise
from pathlib import Path

import gpu_folder
import pytest
from commands import environment
from gpu_folder import CARRIED, LEVELS, THERE, command, pinned
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from offload_trainer.optim.kernels import choose_kernel

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
LINUX = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux", "extra": ""}
LINUX |= {"platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64"}
LINUX |= {"implementation_name": "cpython", "platform_python_implementation": "CPython"}


def needs(name: str) -> set[str]:
    found = (Requirement(text) for text in requires(name) or ())
    return {canonicalize_name(one.name) for one in found if one.marker is None or one.marker.evaluate(LINUX)}


def test_every_need_of_the_package_is_carried_or_there() -> None:
    known = {canonicalize_name(one) for one in (*CARRIED, *THERE)}
    own = tomllib.loads((SCRIPTS.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {canonicalize_name(Requirement(line).name) for line in own} <= known
    for name in CARRIED:
        assert needs(name) <= known


def test_versions_are_pinned_and_for_one_machine(tmp_path: Path) -> None:
    words = command(tmp_path, python="3.12", more=["transformers==5.23.0"])
    assert {"--only-binary=:all:", "--no-deps", "cp312", "manylinux_2_28_x86_64", "transformers==5.23.0"} <= set(words)
    assert all("==" in pin for pin in pinned())
    assert not any(word.startswith(("torch==", "nvidia")) for word in words)


def test_levels_require_the_features_that_their_code_uses() -> None:
    needed = [flags for _, flags in LEVELS.values()]
    assert all(more > fewer for more, fewer in pairwise(needed))
    assert [options[0] for options, _ in LEVELS.values()][-1] == "-march=x86-64-v3"


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the folder is for x86-64")
def test_a_machine_without_a_compiler_uses_the_folders_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no libstdc++ there. Kernels of other sources, or for another CPU, are not used."""
    monkeypatch.setattr(gpu_folder, "LEVELS", {"x86-64-v3": LEVELS["x86-64-v3"]})
    (made,) = gpu_folder.build_kernels(tmp_path / "kernels")
    assert b"libstdc++.so" not in made.read_bytes()
    assert made.stat().st_size < 2_000_000
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert choose_kernel("auto")[0].name == "torch"
    if not (placed := gpu_folder.place_kernel(tmp_path / "kernels")):
        pytest.skip("this CPU is older than those that kernels are built for")
    assert placed == "x86-64-v3"
    assert choose_kernel("native")[0].name == "native"
    for name, change in (("line_of_features", lambda: "flags: avx"), ("texts_of", lambda source: ["other"])):
        with monkeypatch.context() as patch:
            patch.setattr(gpu_folder.kernel_cache, name, change)
            assert gpu_folder.place_kernel(tmp_path / "kernels") == ""


@pytest.mark.network
def test_the_folder_is_small_and_its_packages_are_importable(tmp_path: Path) -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    no_kernels = environment(CXX="no-such-compiler")  # each takes seconds; the test above builds one
    script = [sys.executable, str(SCRIPTS / "gpu_folder.py"), str(tmp_path), "--python", here]
    done = subprocess.run(script, capture_output=True, text=True, env=no_kernels)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip("pip reaches no index here")
    assert done.returncode == 0, done.stderr  # 1 if it is larger than 40 MiB
    assert "no kernel for x86-64-v3: " in done.stderr
    site = str(tmp_path / "site")
    code = f"import pydantic, torchao; assert pydantic.__file__.startswith({site!r})"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(PYTHONPATH=site))
