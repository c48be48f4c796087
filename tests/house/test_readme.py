"""Every command of the README and the pages for users is understood, and every file that they name is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from offload_trainer.cli import export_wish
from offload_trainer.plan.machine import read_machine
from offload_trainer.run.draw import draw_of
from offload_trainer.run.recipes import recipes
from offload_trainer.settings import load_config

ROOT = Path(__file__).resolve().parents[2]
_DOCS = "choosing finetune index integrations nvme oom packing slow watching"  # scaling's: test_scaling_docs.py
PAGES = ["README.md", *(f"docs/{name}.md" for name in _DOCS.split())]
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
COMMAND = re.compile(r"^ {4}(?:\.venv/bin/)?(offload-train .*)$|`(offload-train [^`]+)`", re.MULTILINE)
COMMANDS = {one or other for text in TEXTS.values() for one, other in COMMAND.findall(text)}
TARGETS = {
    one or other
    for text in TEXTS.values()
    for one, other in re.findall(r"^ {4}make (\w+)|`make (\w+)`", text, re.MULTILINE)
}
LINKS = [(page, link) for page, text in TEXTS.items() for link in re.findall(r"\]\(([^)]+)\)", text)]


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_commands(command: str) -> None:
    words = shlex.split(command)[1:]
    if words[0] == "export":
        assert export_wish(words[1:])["dtype"] in words
        return
    if words[0] in ("sample", "chat"):
        given = {flag: words.pop(words.index(f"--{flag}") + 1) for flag in ("prompt", "tokens") if f"--{flag}" in words}
        assert draw_of([word for word in words[1:] if not word.startswith("--")], words[0], **given).tokens
        return
    if words[0] in ("plan", "bench", "tune", "doctor", "prepare", "init"):
        words = [word for word in words[1:] if word != "--json"]
        for flag in ("--machine", "--nodes", "--write", "--drive-gigabytes"):
            if flag in words:
                value = words.pop(words.index(flag) + 1)
                words.remove(flag)
                assert flag != "--machine" or read_machine(value)
    if words[:1] == ["cp"]:
        assert words[1] in [recipe.name for recipe in recipes()]
        return
    if words[:1] == ["report"]:
        assert all(word in ("--json", "--html") or "/" in word or word.endswith(".html") for word in words[1:])
        return
    if words in (["--help"], ["runs"], ["ls"]):
        return
    if words[:1] == ["tiny.yaml"]:  # which `cp tiny` has written
        words[0] = str(ROOT / "configs/tiny.yaml")
    load_config(words)


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_make_targets(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_links(page: str, link: str) -> None:
    assert (ROOT / page).parent.joinpath(link).exists()
