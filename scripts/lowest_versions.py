#!/usr/bin/env python3
"""Install and test the lowest versions that pyproject.toml allows.

    lowest_versions.py [--install] [VENV]

VENV (default .venv-lowest) is reused while the bounds, this interpreter and its torch stay the same. It links to this
interpreter's torch, since another copy takes gigabytes with GPU support. DeepSpeed's lower bound is the version that
all other tests run with. Without a package index the script reports that, and tests nothing. With --install it only
installs.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

from offload_trainer.common.packages import OPTIONAL, REQUIRED

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("pytest", "pytest-xdist")
_LINKED = ("torch", "functorch", "nvidia", "triton")  # prefixes of the directories that torch's wheels install
TESTS = (
    "tests/house/test_settings.py",
    "tests/model/test_model.py",  # weights, losses and checkpointing of transformers
    "tests/offload/test_against_torch.py",
    "tests/house/test_packages.py::test_a_whole_run_without_the_optional_ones",  # train, resume, export
    "tests/export/test_export.py::test_round_trip",  # load and save, as transformers does
    "tests/run/test_telemetry.py",
    "tests/data/test_data_sources.py",  # tables through pyarrow
    "tests/library/test_hf.py",
    "tests/library/test_trl.py",
    "tests/library/test_peft.py",
)


def main() -> int:
    """Return 0 if the tests passed or nothing could be tested, else the exit code of pytest or pip."""
    venv = Path(next((word for word in sys.argv[1:] if word != "--install"), ROOT / ".venv-lowest"))
    pins = [f"{name}=={bound}" for name, bound in (REQUIRED | OPTIONAL).items() if name not in ("torch", "deepspeed")]
    wanted = hashlib.sha256(json.dumps([pins, TOOLS, sys.version, version("torch")]).encode()).hexdigest()
    ready = venv / "ready"
    if not ready.exists() or ready.read_text() != wanted:
        if code := _install(venv, pins):
            return 0 if code == _UNREACHABLE else code
        ready.write_text(wanted)
    if "--install" in sys.argv:
        return 0
    print(f"lowest versions: {' '.join(pins)}", flush=True)
    command = [venv / "bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *_CHOSEN, *TESTS]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False).returncode


_UNREACHABLE = -1
_CHOSEN = ("-n", "2", "--dist", "worksteal", "-m", "not ops", "-k", "not killed")  # no long tests of no library


def _install(venv: Path, pins: list[str]) -> int:
    """Create the environment with these pins and TOOLS; return pip's exit code, or _UNREACHABLE."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", venv / "bin/python"]
    asked = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1", "index", "versions", "tqdm"]
    if subprocess.run(asked, capture_output=True, check=False).returncode:
        print("lowest versions: not tried, since pip finds no package index from here")
        return _UNREACHABLE
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", venv], check=True)
    here = Path(sysconfig.get_paths()["purelib"])
    there = venv / "lib" / here.parent.name / here.name
    for found in here.iterdir():
        if found.name.startswith(_LINKED):
            (there / found.name).symlink_to(found)
    # Pinned, since another torch would be installed through the links, over this interpreter's own.
    words = ["install", "--quiet", "--only-binary", ":all:", f"torch=={version('torch')}", *pins, *TOOLS]
    return subprocess.run([*pip, *words], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
