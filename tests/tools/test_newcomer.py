"""Tests of the wheel, and of the README's quickstart from it: its exact commands, in a fresh environment."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from fresh_environment import fresh_environment, shell
from sample_chats import CHATS
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow(90)

ROOT = Path(__file__).resolve().parents[2]
# Python files of the package, and the data files that they read.
CARRIED = {path.relative_to(ROOT).as_posix() for path in (ROOT / "offload_trainer").rglob("*") if path.is_file()}
CARRIED = {name for name in CARRIED if "__pycache__" not in name}
SECTION = re.search(r"^## Quickstart\n(.*?)^## ", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
assert SECTION
DEMO, INSTALL, *COMMANDS = re.findall(r"^ {4}(.+)$", SECTION[1], re.MULTILINE)
TWICE = next(line for line in COMMANDS if COMMANDS.count(line) == 2)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, because setuptools writes next to its sources."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "offload_trainer", copy / "offload_trainer", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, copy)
    build = [sys.executable, "-c", "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"]
    done = subprocess.run(build, cwd=copy, capture_output=True, text=True, check=True)
    return copy / "dist" / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the variables of a new virtual environment without this repository."""
    return fresh_environment(tmp_path_factory.mktemp("fresh"))


def cloned(folder: Path) -> Path:
    """Copy the files that `make demo` reads; the package itself is the installed one."""
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "scripts", "configs"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy2)(ROOT / name, folder / name)
    return folder


def killed(command: str, folder: Path, there: dict[str, str]) -> None:
    """Kill the command with SIGKILL after its first checkpoint; retry if it finished before."""
    output = folder / command.partition("--output ")[2].split()[0]
    for _ in range(5):
        with open(folder / "killed.log", "wb") as log:
            process = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=folder, env=there, stdout=log, stderr=log)
        while process.poll() is None and not list(output.glob("checkpoints/step-*/MANIFEST.json")):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        if process.wait(300) == -signal.SIGKILL:
            return
        assert process.returncode == 0, (folder / "killed.log").read_text()[-2000:]
        shutil.rmtree(output)
    pytest.fail("it was always done before it could be killed")


def steps(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_each_command_of_the_quickstart_works(fresh: dict[str, str], wheel: Path, tmp_path: Path) -> None:
    """From a wheel: the demo without a network, and in an empty directory all others."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "mine.txt").write_text("It was the best of times, it was the worst of times.\n" * 1500)
    talks = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in CHATS] * 12
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    assert INSTALL == "pip install ."
    shell(f"pip install '{wheel}'", fresh, folder)
    where = shell("python -P -c 'import offload_trainer; print(offload_trainer.__file__)'", fresh, folder)
    assert where.startswith(os.fspath(Path(fresh["PATH"].partition(":")[0]).parent))

    assert DEMO == "make demo"
    venv, clone = Path(fresh["PATH"].partition(":")[0]).parent, cloned(tmp_path / "clone")
    (venv / ".ready").touch()  # `make setup` was run
    offline = {"UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path / "uv")}  # another test may have loaded the model
    shown = shell(f"{DEMO} VENV={venv}", fresh | offline, clone)
    assert "PyPI must be reachable" in shown  # tests/tools/test_tutorial.py has the demo with its model
    assert "\nMACBETH." in shown
    assert len(steps(clone / "demo-run/run")) == 20

    told: dict[str, str] = {}
    for command in COMMANDS:
        if command == TWICE and command not in told:
            killed(command, folder, fresh)
            told[command] = ""
        else:
            told[command] = shell(command, fresh, folder)
    assert "resumed from" in told[TWICE]
    assert [step["step"] for step in steps(folder / "runs/mine")] == list(range(1, 21))

    for name in ("tiny", "mine", "chat"):
        assert "</html>" in (folder / "runs" / name / "report.html").read_text()
        assert re.search(rf"^runs/{name} +20/20 .*done$", told["offload-train runs"], re.MULTILINE)
    assert re.search(r"\btiny +mine\b", told["offload-train report runs/tiny runs/mine"])
    assert f"{len(talks)} conversations" in told[next(command for command in COMMANDS if "prepare" in command)]
    assert all("read back: every header" in text for command, text in told.items() if " export " in command)
    model = AutoModelForCausalLM.from_pretrained(folder / "mine-bf16", dtype=torch.bfloat16)
    assert model.num_parameters() > 4_000_000
    assert AutoTokenizer.from_pretrained(folder / "mine-bf16")("It was").input_ids


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == CARRIED
    assert {"offload_trainer/py.typed", "offload_trainer/recipes/tiny.yaml"} <= held
