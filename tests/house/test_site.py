"""Tests of the documentation site: it builds without a warning, has each page once, and has no broken link."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def pages(part: object) -> list[str]:
    """Return the pages of a part of the navigation."""
    if isinstance(part, str):
        return [part]
    parts = part.values() if isinstance(part, dict) else part
    return [page for one in parts for page in pages(one)]  # type: ignore[attr-defined]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    words = ["-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert "Choosing a placement" in (tmp_path / "site" / "tuning" / "index.html").read_text()


def test_each_page_is_in_the_site() -> None:
    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    written = (path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    assert sorted(listed) == sorted(written)
