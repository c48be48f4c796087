"""Build a wheel as a package index would: from the source distribution, and nothing else of this repository."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Python files, and the data files that they read.
CARRIED = {path.relative_to(ROOT).as_posix() for path in (ROOT / "offload_trainer").rglob("*") if path.is_file()}
CARRIED = {name for name in CARRIED if "__pycache__" not in name}


def wheel_in(folder: Path) -> Path:
    """Build the wheel and return its path; its sources are in the same folder."""
    copy = folder / "copy"
    for name in ("pyproject.toml", "README.md", "LICENSE", *CARRIED):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    with tarfile.open(_built("sdist", copy, folder / "sdist")) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    return _built("wheel", source, folder / "wheel")


def _built(kind: str, source: Path, into: Path) -> Path:
    """Build a distribution of `source` with the backend that pyproject.toml names."""
    into.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(into)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (made,) = into.iterdir()
    return made
