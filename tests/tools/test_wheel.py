"""A test that the wheel has every file that a run reads.

test_newcomer.py installs it without the repository.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "offload_trainer"
# Python files, and the data files that they read.
CARRIED = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
CARRIED = {name for name in CARRIED if "__pycache__" not in name}


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == CARRIED
    assert {"offload_trainer/py.typed", "offload_trainer/recipes/tiny.yaml"} <= held
