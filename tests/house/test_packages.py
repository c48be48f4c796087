"""Tests of packages: version bounds have one source, a missing one is reported, and docs/install.md installs them."""

import json
import os
import pty
import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from commands import TINY, environment
from sample_plans import SHAPES

from offload_trainer.common import packages
from offload_trainer.common.errors import TrainerError, UserError, explain
from offload_trainer.common.packages import OPTIONAL, REQUIRED, explain_import, is_installed, to_install, too_old
from offload_trainer.engine import deepspeed as stock
from offload_trainer.plan.machine import _CU126, read_machine
from offload_trainer.plan.planner import make_plan
from offload_trainer.run.commands import doctor
from offload_trainer.settings import load_config

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LIBRARIES = set(OPTIONAL)
EXTRAS = PROJECT["optional-dependencies"]


def bounds(requirements: list[str]) -> dict[str, str]:
    return dict(line.split(">=") for line in requirements if ">=" in line)


def test_bounds_are_pyprojects() -> None:
    assert bounds(PROJECT["dependencies"]) == REQUIRED
    assert len(PROJECT["dependencies"]) == len(REQUIRED)
    assert bounds([line for name, lines in EXTRAS.items() if name != "test" for line in lines]) == OPTIONAL


# A module that is None in sys.modules can neither be imported nor found.
REFUSING = """
import sys
sys.modules.update(dict.fromkeys({names}))
sys.argv[0] = "offload-train"
from offload_trainer.__main__ import main
raise SystemExit(main())
"""


def run_without(names: set[str], *words: object, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Run `offload-train WORDS` in a process that cannot import these packages."""
    argv = [sys.executable, "-c", REFUSING.format(names=names), *map(str, words)]
    return subprocess.run(argv, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment(), timeout=500)


@pytest.mark.slow
def test_a_whole_run_without_the_optional_ones(drive: Path, tmp_path: Path) -> None:
    """A feature that needs one of them is refused in one line."""
    words = ["--nvme", drive, "--ram-fraction", "0.5", *TINY, "--steps", 1, "--output", tmp_path / "out"]
    done = run_without(LIBRARIES, *words)
    assert done.returncode == 0, done.stderr
    exported = run_without(LIBRARIES, "export", tmp_path / "out", tmp_path / "weights", "--dtype", "bf16")
    assert exported.returncode == 0, exported.stderr
    looked = run_without(LIBRARIES, "doctor", "--json")
    assert looked.returncode == 0, looked.stdout
    found = next(check for check in json.loads(looked.stdout) if check["name"] == "deepspeed")
    assert (found["state"], found["found"]) == ("ok", "not installed (only --engine deepspeed needs it)")
    said = json.loads((tmp_path / "out/machine.json").read_text())
    assert said["packages"] == []
    done = run_without(LIBRARIES, "--engine", "deepspeed", "--gpus", "2", *TINY, "--output", tmp_path / "other")
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    install = f"pip install 'deepspeed>={OPTIONAL['deepspeed']}'"
    assert re.fullmatch(rf"offload-train: .* needs deepspeed, which is not installed: {re.escape(install)}.*", line)
    assert not (tmp_path / "other").exists()


def test_auto_never_picks_what_is_not_installed() -> None:
    def engine(*words: str, installed: tuple[str, ...] | None = ()) -> str:
        here = replace(read_machine("h200"), packages=installed)
        return make_plan(load_config(["--model", "gpt2", *words]), SHAPES["gpt2"], here).engine

    eight = ("--engine", "deepspeed", "optim.moment_dtype=8bit")
    assert engine() == "tiered"
    with pytest.raises(UserError, match=r"--engine deepspeed needs deepspeed, which is not installed: pip install"):
        engine(*eight)
    with pytest.raises(UserError, match=r"8bit with --engine deepspeed needs bitsandbytes, .*'bitsandbytes>=0\.50\.2'"):
        engine(*eight, installed=("deepspeed",))
    assert engine(*eight, installed=("deepspeed", "bitsandbytes")) == "deepspeed"
    assert engine(*eight, installed=None) == "deepspeed"  # a machine known only from its description


def test_a_broken_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "is_installed", lambda name: True)
    broken = "--engine deepspeed needs deepspeed, which is installed but cannot be imported: CUDA_HOME does not exist"
    with pytest.raises(TrainerError, match=broken), stock.importing("deepspeed", feature="--engine deepspeed"):
        raise RuntimeError("CUDA_HOME does not exist")


@pytest.mark.slow
@pytest.mark.parametrize("package", ["PyYAML", "torch", "psutil"])
def test_a_missing_required_library_is_named(package: str, tmp_path: Path) -> None:
    module = {"PyYAML": "yaml"}.get(package, package)
    done = run_without({module}, *TINY, "--steps", "1", "--output", tmp_path / "out")
    assert done.returncode == 1, done.stderr
    assert done.stderr == f"offload-train: the package {package} is not installed: {to_install(package)}\n"


@pytest.mark.slow
@pytest.mark.parametrize("words", [["train"], ["plan"], ["sample", "runs/none"], ["export", "runs/none", "out"]])
def test_a_terminal_is_told_before_torch_is_loaded(words: list[str]) -> None:
    ours, theirs = pty.openpty()
    assert run_without({"torch"}, *words, stderr=theirs).returncode
    os.close(theirs)
    told = b""
    with suppress(OSError):  # raised at the end
        while more := os.read(ours, 10_000):
            told += more
    os.close(ours)
    first, *_, last = told.decode().splitlines()
    assert first == "loading torch and transformers"
    assert "torch is not installed" in last


def test_a_library_that_is_too_old_is_named_and_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version", lambda name: {"transformers": "4.57.6", "torch": "2.9.0+cu128"}[name])
    assert too_old("transformers") == "4.57.6"
    assert too_old("torch") is None
    error = ModuleNotFoundError("No module named ...", name="transformers.core_model_loading")
    assert explain(error) == "transformers 4.57.6 is too old: pip install 'transformers>=5.8'"
    monkeypatch.setattr(doctor, "too_old", lambda name: "4.57.6" if name == "transformers" else None)
    (check,) = doctor._packages()
    assert (check.state, check.fix) == ("failure", "pip install 'transformers>=5.8'")
    assert explain_import(ModuleNotFoundError("no", name="offload_trainer.nowhere")) is None
    assert explain_import(ImportError("cannot import name", name="json")) is None
    assert not is_installed("no_such_module")


# -- docs/install.md and the Dockerfile install the same torch for a card, and name every extra ------------------------

PAGE = (ROOT / "docs/install.md").read_text()
IMAGE = re.sub(r"\\\n", "", (ROOT / "Dockerfile").read_text())  # one instruction a line


def of_card(card: str) -> str:
    """Return the command for a card from the table of docs/install.md."""
    (line,) = re.findall(rf"^\| [^|]*{card}[^|]* \| `(pip install [^`]+)`", PAGE, re.MULTILINE)
    return line


def test_the_page_describes_each_extra_and_names_one_build_for_volta() -> None:
    assert _CU126.replace("--force-reinstall ", "") == of_card("Volta")
    (everything,) = EXTRAS["all"]
    named = re.fullmatch(r"offload-trainer\[(.*)\]", everything)
    assert named
    assert sorted(named[1].split(",")) == sorted(set(EXTRAS) - {"all", "test"})
    table = {name for row in re.findall(r"^\| (`[^|]+) \|", PAGE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert set(EXTRAS) - {"test"} <= table


def built(folder: Path, **arguments: str) -> tuple[int, list[str]]:
    """Execute the RUN instructions with commands that only record their words; return status and records."""
    for name in ("pip", "apt-get", "rm"):
        (folder / name).write_text(f'#!/bin/sh\nfor word; do printf "%s " "$word"; done >> {folder}/{name}.log\n')
        (folder / name).chmod(0o755)
    given = dict(re.findall(r"^ARG (\w+)=(.*)$", IMAGE, re.MULTILINE))
    assert set(arguments) <= set(given)
    env = {"PATH": f"{folder}:/usr/bin:/bin", **given, **arguments}
    for command in re.findall(r"^RUN (.*)$", IMAGE, re.MULTILINE):
        done = subprocess.run(["sh", "-c", command], env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            return done.returncode, [done.stderr]
    logs = [folder / f"{name}.log" for name in ("pip", "apt-get")]
    return 0, [log.read_text() if log.exists() else "" for log in logs]


@pytest.mark.parametrize(
    ("card", "row"), [("turing", "Turing"), ("turing", "Ampere"), ("volta", "Volta"), ("cpu", "none")]
)
def test_the_image_has_the_torch_of_the_page(card: str, row: str, tmp_path: Path) -> None:
    status, (pip, debian) = built(tmp_path, CARD=card)
    assert status == 0
    words = of_card(row).removeprefix("pip ").replace("'", "").replace("install", "install --no-cache-dir")
    assert pip.startswith(f"{words} install ")
    assert pip.endswith("/src[tensorboard,hf] ")
    assert {"g++", "libaio-dev"} <= set(debian.split())  # kernels are compiled with these at first use
    status, (told,) = built(tmp_path, CARD="kepler")
    assert status == 2
    assert told.startswith("CARD=kepler: volta")
