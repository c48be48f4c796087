"""What is built from here has all that a run reads, and works where nothing else of the repository is."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import environment
from wheels import CARRIED, wheel_in


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_in(tmp_path_factory.mktemp("built"))


def test_it_holds_every_file_of_the_package(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == CARRIED
    assert {"offload_trainer/py.typed", "offload_trainer/recipes/demo.yaml"} <= held


def test_installed_it_works_by_itself(wheel: Path, tmp_path: Path) -> None:
    target, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    words = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, capture_output=True)
    train = [sys.executable, "-P", "-m", "offload_trainer", str(target / "offload_trainer/recipes/tiny.yaml")]
    train += ["--nvme", str(empty), "--steps", "2", "--output", str(tmp_path / "run"), "--ram-fraction", "0.5"]
    there = environment(PYTHONPATH=str(target))
    done = subprocess.run(train, cwd=empty, env=there, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    code = "import offload_trainer; print(offload_trainer.__file__)"
    where = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=empty, env=there, capture_output=True, text=True, check=True
    )
    assert where.stdout.startswith(str(target))
