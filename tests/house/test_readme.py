"""Tests of the README and docs/: commands parse, plans run, named files exist, tables and quoted messages are right.

Commands that need a model, a run or minutes of a drive are only parsed here. tests/tools/test_newcomer.py runs the
quickstart and the tutorial, tests/library the pages' Python.
"""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from offload_trainer.cli import COMMANDS as OURS
from offload_trainer.cli import main, parse, take_command
from offload_trainer.plan.machine import read_machine
from offload_trainer.run.commands.recipes import recipes
from offload_trainer.settings import load_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
COMMAND = re.compile(r"^ {4}(?:\.venv/bin/)?(offload-train (?:.*\\\n)*.*)$|`(offload-train [^`]+)`", re.MULTILINE)
COMMANDS = {(one or other).replace("\\\n", "") for text in TEXTS.values() for one, other in COMMAND.findall(text)}
# The text only names these.
COMMANDS -= {f"offload-train {name}" for name in ("plan", "tune", "bench", "export", "import", "plan ... --explain")}
SCRIPT = re.compile(r"((?:scripts|soak|benchmarks|tests)/[\w/]+\.(?:py|sh))")


def verb(command: str) -> str:
    first = shlex.split(command)[1]
    return first if first in {*OURS, "--help"} else "train"


def is_run(command: str) -> bool:
    # tests/plan/test_recipes.py plans the recipes.
    runs = verb(command) in ("plan", "ls", "cp", "--help", "runs")
    return runs and not any(name in command for name in ("configs/", "demo-run/", "Qwen/"))


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(filter(is_run, COMMANDS)))
def test_commands_without_training_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(command)[1:]
    if words[0] == "plan":
        if "--nvme" in words:
            words[words.index("--nvme") + 1] = str(tmp_path)
            words += ["--machine", "a100-40gb"]
        if "path/to/llama" in words:
            words[words.index("path/to/llama")] = "gpt2-xl"
            words.append("model.overrides.n_positions=4096")
        if "--data" in words:
            del words[words.index("--data") : words.index("--data") + 2]
    monkeypatch.chdir(tmp_path)
    if words == ["runs"]:
        (tmp_path / "runs/one").mkdir(parents=True)
        (tmp_path / "runs/one/config.yaml").write_text("train:\n  steps: 3\n")
        (tmp_path / "runs/one/metrics.jsonl").touch()
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed or words[0] == "cp"
    assert "DOES NOT FIT" not in printed


def test_each_command_is_on_a_page_and_what_pages_name_exists() -> None:
    assert {verb(command) for command in COMMANDS} == {*OURS, "--help"}
    assert not [name for text in TEXTS.values() for name in SCRIPT.findall(text) if not (ROOT / name).is_file()]
    links = [(page, link) for page, text in TEXTS.items() for link in re.findall(r"\]\((?!https?:)([^)#]+)", text)]
    assert not [(page, link) for page, link in links if not (ROOT / page).parent.joinpath(link).exists()]
    targets = {name for text in TEXTS.values() for name in re.findall(r"(?:^ {4}|`)make ([\w-]+)", text, re.MULTILINE)}
    assert targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`([a-z]+/test_\w+\.py)`", (ROOT / "tests/README.md").read_text()))
    assert named == {path.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize("command", sorted(command for command in COMMANDS if verb(command) not in ("ls", "runs")))
def test_commands(command: str) -> None:
    words = shlex.split(command)[1:]
    if words == ["--help"]:
        return
    if words[0] == "tiny.yaml":  # `cp tiny` writes this file
        words[0] = str(ROOT / "configs/tiny.yaml")
    name = take_command(words) or "train"
    given, rest = parse(name, words)
    if name == "cp":
        assert given.name in [recipe.name for recipe in recipes()]
    if getattr(given, "machine", None):
        read_machine(given.machine)
    load_config(rest[2:] if name == "import" else rest)


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md", "tests/README.md"])
def test_tables_are_tables(page: str) -> None:
    """Each row begins and ends with a bar, and has as many cells as the header, behind which is a separator."""
    table: list[int] = []  # cells of each row; a bar in code or behind a backslash is text
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for line in [*re.sub(r"`[^`\n]*`|\\\|", "", text).splitlines(), ""]:
        row = line.strip()
        if row.startswith("|"):
            assert row.endswith("|"), row
            table.append(row.count("|"))
            assert len(table) != 2 or re.fullmatch(r"\|( *:?-{3,}:? *\|)+", row), f"no separator: {row}"
            assert table[0] == table[-1], row
            continue
        assert not re.search(r"-{3,} *\| *:?-{3,}|\| [^|]* \| ", row), f"a row that does not begin with a bar: {row}"
        assert len(table) != 1, f"a table without rows before: {row}"
        table = []


def test_quoted_messages_are_printed() -> None:
    """They are in the first column of tables of messages or symptoms, and behind "says". `...` stands for any text."""
    messages: list[str] = []
    for page in TEXTS.values():
        in_table = False
        messages += [" ".join(message.split()) for message in re.findall(r"\bsays?\s`([^`]+)`", page)]
        for line in page.splitlines():
            in_table = line.startswith(("| message", "| symptom")) or (in_table and line.startswith("|"))
            messages += re.findall(r"^\| `(.+?)`", line) if in_table else []
    text = []
    for node in (
        node for path in (ROOT / "offload_trainer").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
    ):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text.append("".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in parts))
    assert len(messages) > 20
    for message in messages:
        pattern = re.compile(".*".join(map(re.escape, re.split(r"\s*\.\.\.\s*", message))))
        assert any(pattern.search(literal.replace("\n", " ")) for literal in text), message


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_has_each_page(tmp_path: Path) -> None:
    words = ["-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert "Choosing a placement" in (tmp_path / "site" / "tuning" / "index.html").read_text()
    listed = re.findall(r"[\w/]+\.md", str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == sorted(page.removeprefix("docs/") for page in PAGES if page != "README.md")
