"""A test of docs/tutorial.md: each of its commands in its order, with the pretrained model of the demo."""

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
from pathlib import Path

import pytest
import torch
from commands import environment
from fresh_environment import shell
from transformers import AutoModelForCausalLM, Qwen3Config

from offload_trainer.cli import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
TEXT = PAGE.read_text()
COMMANDS = re.findall(r"^ {4}(?! )(\S.*)$", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL), re.MULTILINE)
PLANS = re.findall(r"^ {4}(offload-train plan .*--machine .*)\n\n```text\n((?:.*\n)*?)```", TEXT, re.MULTILINE)
DEMO, ACTIVATE, *OURS = [line for line in COMMANDS if line not in [plan for plan, _ in PLANS]]
QUESTION = "Which flag names the drive?"
HELD = 4096, 36, 12288, 32, 8  # Qwen3-8B on the hub: hidden, layers, intermediate, heads, heads of keys and values


def losses(run: Path) -> list[float]:
    file = run / "metrics.jsonl"
    return [json.loads(line)["loss"] for line in file.read_text().splitlines()] if file.exists() else []


def interrupted(command: str, folder: Path, there: dict[str, str]) -> list[float]:
    """Start the tutorial's run, end it by Ctrl-C during its second step, and return the losses that it has saved."""
    output, end = folder / "runs/chat", time.monotonic() + 600
    with open(folder / "interrupted.log", "wb") as log:
        process = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=folder, env=there, stdout=log, stderr=log)
    while process.poll() is None and not losses(output) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 128 + signal.SIGINT, (folder / "interrupted.log").read_text()[-2000:]
    assert (output / f"checkpoints/step-{len(losses(output)):08d}/MANIFEST.json").exists()
    return losses(output)


@pytest.mark.slow(250)
def test_the_demo_and_each_command_of_the_tutorial(tmp_path: Path) -> None:
    """The tutorial's run has the demo's losses. It is ended early, and the demo's run takes its place."""
    there = environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", PYTHONPATH=str(ROOT))
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    assert (DEMO, ACTIVATE) == ("make demo", ". .venv/bin/activate")
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
    for command in OURS:
        if " --steps 20 " in command:
            begun = interrupted(command, tmp_path, there)
            assert 0 < len(begun) < 4
            assert begun == losses(demo)[: len(begun)]
            shutil.rmtree(tmp_path / "runs/chat")
            shutil.copytree(demo, tmp_path / "runs/chat")
            told["train"] = command
        else:
            told[command] = shell(command, there, tmp_path, typed=QUESTION)
    assert "--output runs/chat" in told["train"]
    assert "32 conversations" in next(text for command, text in told.items() if " prepare " in command)
    assert "--nvme" in told["offload-train chat runs/chat"]
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "ask.py").write_text(code)
    assert "--nvme names a directory on the drive" in shell("python ask.py", there, tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "chat-bf16", dtype=torch.bfloat16)
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "demo-run/SmolLM2-135M-Instruct", dtype=torch.bfloat16)
    assert any(
        not torch.equal(one, other) for one, other in zip(exported.parameters(), before.parameters(), strict=True)
    )


def test_plans_on_the_page_are_those_that_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """UPDATE_GOLDEN=1 writes them into the page. The README's picture (scripts/plan_picture.py) has the second one."""
    monkeypatch.chdir(tmp_path)
    hidden, layers, inner, heads, pairs = HELD
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=pairs,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(tmp_path / "Qwen/Qwen3-8B")
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
