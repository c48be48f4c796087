"""A wheel as an index has it: built from what the source distribution holds, and nothing else of this repository."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Python files, and what they read beside them.
CARRIED = {path.relative_to(ROOT).as_posix() for path in (ROOT / "offload_trainer").rglob("*") if path.is_file()}
CARRIED = {name for name in CARRIED if "__pycache__" not in name}


def wheel_in(folder: Path) -> Path:
    """The wheel; what it is made of lies beside it."""
    copy = folder / "copy"
    for name in ("pyproject.toml", "README.md", "LICENSE", *CARRIED):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    with tarfile.open(_built("sdist", copy, folder / "sdist")) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    return _built("wheel", source, folder / "wheel")


def _built(kind: str, source: Path, into: Path) -> Path:
    """By the backend that pyproject.toml names, in `source`."""
    into.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(into)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (made,) = into.iterdir()
    return made
