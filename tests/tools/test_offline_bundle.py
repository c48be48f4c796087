"""Wheels for a machine without network: the list is closed under what its packages need, and pip finds them all."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from conftest import environment
from packaging.requirements import Requirement

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from offline_bundle import BUNDLED, LARGEST, THERE, command, pinned, requirements, same  # noqa: E402

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
def test_what_a_bundled_package_needs_is_bundled(name: str) -> None:
    assert needs(name) <= {same(one) for one in (*BUNDLED, *THERE)}


def test_every_need_of_the_package_is_bundled_or_there() -> None:
    """But for those that only the stock engine has."""
    text = (SCRIPTS.parent / "pyproject.toml").read_text()
    import tomllib

    own = {same(Requirement(line).name) for line in tomllib.loads(text)["project"]["dependencies"]}
    assert own - {"deepspeed", "bitsandbytes"} <= {same(one) for one in (*BUNDLED, *THERE)}


def test_what_is_asked_for_is_pinned_and_for_that_machine_alone(tmp_path: Path) -> None:
    words = command(tmp_path, python="3.12", more=["transformers==5.23.0"])
    assert {"--only-binary=:all:", "--no-deps", "cp312", "manylinux_2_28_x86_64", "transformers==5.23.0"} <= set(words)
    assert all("==" in pin for pin in pinned())
    assert not any("torch" in word or "nvidia" in word for word in words[:-1])
    assert "transformers==5.23.0" in requirements(["transformers==5.23.0"])


@pytest.mark.network
def test_the_bundle_is_small_and_installs_without_an_index(tmp_path: Path) -> None:
    """For the Python that runs here, since that is the one to try it with."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    bundle = SCRIPTS / "offline_bundle.sh"
    for python in ("3.12", here):
        folder = tmp_path / python
        done = subprocess.run(
            [bundle, folder, "--python", python], capture_output=True, text=True, env=environment(PYTHON=sys.executable)
        )
        if done.returncode and "No matching distribution" in done.stderr:
            pytest.skip("pip reaches no index here")
        assert done.returncode == 0, done.stderr
        wheels = list(folder.glob("*.whl"))
        assert len(wheels) == len(BUNDLED)
        assert sum(wheel.stat().st_size for wheel in wheels) < LARGEST
    assert any("cp312" in wheel.name for wheel in (tmp_path / "3.12").glob("pydantic_core-*.whl"))
    site = tmp_path / "site"
    install = [tmp_path / here / "install.sh", "--quiet", "--target", site]
    subprocess.run(install, check=True, capture_output=True, env=environment(PYTHON=sys.executable))
    code = f"import pydantic; assert pydantic.__file__.startswith({str(site)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(PYTHONPATH=str(site)))
