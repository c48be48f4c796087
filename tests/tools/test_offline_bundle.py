"""Tests of the offline bundle: it has all dependencies, pip finds its wheels, and its kernels are used."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from importlib.metadata import requires
from itertools import pairwise
from pathlib import Path

import pytest
from commands import environment
from packaging.requirements import Requirement

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import offline_bundle  # noqa: E402
from offline_bundle import BUNDLED, INSTALL, LARGEST, RIVALS, THERE, command, pinned, requirements, same  # noqa: E402

from offload_trainer.optim import kernel_cache, kernels  # noqa: E402
from offload_trainer.optim.kernels import choose_kernel  # noqa: E402
from offload_trainer.optim.prebuilt_kernels import LEVELS  # noqa: E402

LINUX = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux", "extra": ""}
LINUX |= {
    "platform_system": "Linux",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "implementation_name": "cpython",
}
LINUX |= {"platform_python_implementation": "CPython"}


def needs(name: str) -> set[str]:
    found = (Requirement(text) for text in requires(name) or ())
    return {same(one.name) for one in found if one.marker is None or one.marker.evaluate(LINUX)}


@pytest.mark.parametrize("name", BUNDLED)
def test_needs_of_a_bundled_package_are_bundled(name: str) -> None:
    assert needs(name) <= {same(one) for one in (*BUNDLED, *THERE)}


def test_every_need_of_the_package_is_bundled_or_there() -> None:
    """All requirements are bundled or on the machine, except those of the stock DeepSpeed engine."""
    text = (SCRIPTS.parent / "pyproject.toml").read_text()
    import tomllib

    own = {same(Requirement(line).name) for line in tomllib.loads(text)["project"]["dependencies"]}
    assert own - {"deepspeed", "bitsandbytes"} <= {same(one) for one in (*BUNDLED, *THERE)}


def test_the_bundle_is_pinned_and_for_one_machine(tmp_path: Path) -> None:
    words = command(tmp_path, python="3.12", more=["transformers==5.23.0"])
    assert {"--only-binary=:all:", "--no-deps", "cp312", "manylinux_2_28_x86_64", "transformers==5.23.0"} <= set(words)
    assert all("==" in pin for pin in pinned())
    assert not any(word.startswith(("torch==", "nvidia")) for word in words[:-1])
    assert "transformers==5.23.0" in requirements(["transformers==5.23.0"])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels are built ahead for x86-64")
def test_a_prebuilt_kernel_is_used_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = kernel_cache._line_of_features()
    here = frozenset(line.partition(":")[2].split())
    level = next((name for name, (_, needed) in LEVELS.items() if needed <= here), None)
    if level is None:
        pytest.skip("this processor is older than those that kernels are built ahead for")
    levels = {level: LEVELS[level]}
    monkeypatch.setattr(offline_bundle, "LEVELS", levels)  # one level, since each takes seconds
    (made,) = offline_bundle.build_kernels(tmp_path / "bundle" / "kernels")
    assert made.stat().st_size < 2_000_000
    install, cache = tmp_path / "bundle" / "install.sh", tmp_path / "cache"
    install.write_text(INSTALL.format(requirements=""))
    install.chmod(0o755)
    for _ in range(2):  # the second time over the first installation
        command = [install, "--quiet"]
        subprocess.run(command, check=True, env=environment(PYTHON="true", OFFLOAD_TRAINER_CACHE=str(cache)))

    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(cache))
    monkeypatch.setenv("CXX", "no-such-compiler")
    kernel, words = choose_kernel("auto")
    assert (kernel.name, f"prebuilt for {level} and checked" in words) == ("native", True), words

    without = f"flags: {' '.join(here - {'fma'})}"  # a processor that cannot run it
    monkeypatch.setattr(kernel_cache, "_line_of_features", lambda: without)
    kernels._checked_native.cache_clear()
    assert choose_kernel("auto")[0].name == "torch"
    monkeypatch.setattr(kernel_cache, "_line_of_features", lambda: line)
    installed = next(cache.rglob(made.name))
    content = installed.read_bytes()
    installed.unlink()  # not overwritten, since it is mapped here
    installed.write_bytes(content[:-1])
    kernel, words = choose_kernel("auto")
    assert (kernel.name, "no-such-compiler" in words) == ("torch", True), words


def test_levels_require_the_features_that_their_code_uses() -> None:
    """The best level comes first, and requires every feature of the later ones."""
    needed = [flags for _, flags in LEVELS.values()]
    assert all(more > fewer for more, fewer in pairwise(needed))
    assert [options[0] for options, _ in LEVELS.values()][-1] == "-march=x86-64-v3"


@pytest.mark.network
def test_the_bundle_is_small_and_installs_without_an_index(tmp_path: Path) -> None:
    """The bundle is small, and the one for this Python installs without an index."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    bundle = SCRIPTS / "offline_bundle.sh"
    no_kernels = environment(PYTHON=sys.executable, CXX="no-such-compiler")  # kernels take minutes; see the test above
    for python in ("3.12", here):
        folder = tmp_path / python
        done = subprocess.run([bundle, folder, "--python", python], capture_output=True, text=True, env=no_kernels)
        if done.returncode and "No matching distribution" in done.stderr:
            pytest.skip("pip reaches no index here")
        assert done.returncode == 0, done.stderr
        wheels = list(folder.glob("*.whl"))
        assert len(wheels) == len(BUNDLED) + len(RIVALS)
        assert re.search(r"no kernel for x86-64-v3: .*no-such-compiler", done.stderr)
        assert sum(wheel.stat().st_size for wheel in wheels) < LARGEST
    assert any("cp312" in wheel.name for wheel in (tmp_path / "3.12").glob("pydantic_core-*.whl"))
    site = tmp_path / "site"
    install = [tmp_path / here / "install.sh", "--quiet", "--target", site]
    subprocess.run(install, check=True, capture_output=True, env=environment(PYTHON=sys.executable))
    code = f"import pydantic; assert pydantic.__file__.startswith({str(site)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(PYTHONPATH=str(site)))
