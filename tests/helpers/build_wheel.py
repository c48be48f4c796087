"""Build a wheel as a package index would: from the source distribution, and nothing else of this repository."""

from __future__ import annotations

from pathlib import Path

from build_release import copy_of, distribution, unpacked

ROOT = Path(__file__).resolve().parents[2]

# Python files, and the data files that they read.
CARRIED = {path.relative_to(ROOT).as_posix() for path in (ROOT / "offload_trainer").rglob("*") if path.is_file()}
CARRIED = {name for name in CARRIED if "__pycache__" not in name}


def wheel_in(folder: Path) -> Path:
    """Build the wheel and return its path; its sources are in the same folder."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "offload_trainer"):
        copy_of(name, folder / "copy")
    source = unpacked(distribution("sdist", folder / "copy", folder), folder / "source")
    return distribution("bdist_wheel", source, folder / "wheel")
