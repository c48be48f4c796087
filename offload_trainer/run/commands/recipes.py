"""The `ls` and `cp` commands: list the recipes of the package, and copy one.

A recipe is a configuration file, a script, or a file for a scheduler. It begins with comments: a description of one or
more sentences, `run:` with a command that has configs/FILE, and if it needs a large machine `plan:` with a command and
`memory:` with that plan's figures.
"""

import difflib
import re
from dataclasses import dataclass
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from shlex import quote
from textwrap import wrap

from offload_trainer.common.errors import UserError
from offload_trainer.common.units import screen_columns, shown

_HEAD = re.compile(r"^# (run|plan|memory): +(.*)$")


@dataclass(frozen=True)
class Recipe:
    """A recipe file, with the parsed comments at its start."""

    name: str
    file: str  # NAME.yaml, NAME.py (a training loop) or NAME.sbatch (a batch file)
    told: str  # description
    run: str  # command, which refers to the recipe as configs/FILE
    memory: str | None  # memory needed on the machine of its `plan` line
    text: str  # complete content


def recipes() -> list[Recipe]:
    folder = files("offload_trainer") / "recipes"
    found = {item.name: item.read_text(encoding="utf-8") for item in folder.iterdir() if item.is_file()}
    return [_recipe(file, text) for file, text in sorted(found.items())]


def _recipe(file: str, text: str) -> Recipe:
    comments = list(takewhile(lambda line: line.startswith("#"), text.removeprefix("#!/bin/bash\n").splitlines()))
    heads = {head[1]: head[2] for line in comments if (head := _HEAD.match(line))}
    told = " ".join(line.removeprefix("#").strip() for line in comments if not _HEAD.match(line))
    return Recipe(Path(file).stem, file, told, heads["run"], heads.get("memory"), text)


def listing(found: list[Recipe]) -> str:
    """Format the recipes as text for the terminal's width: of each the first sentence, and the memory it needs."""
    width, columns = max(len(recipe.name) for recipe in found), screen_columns()
    lines = []
    for recipe in found:
        first = f"{recipe.told.partition('. ')[0].removesuffix('.')}."
        for name, told in ((recipe.name, first), ("", f"needs {recipe.memory}" if recipe.memory else "")):
            lines += wrap(told, columns, initial_indent=f"{name:<{width}}  ", subsequent_indent=" " * (width + 2))
    return "\n".join([*lines, "", "`offload-train cp NAME` copies one here, to edit and train with."])


def copy_recipe(name: str, destination: Path | None) -> tuple[Path, str]:
    """Copy a recipe to `destination`, a file or directory, by default the current one; return (path, command).

    The commands in the copy refer to its new path. Raises UserError for an unknown recipe or an existing file.
    """
    known = {recipe.name: recipe for recipe in recipes()}
    name = re.sub(r"\.(yaml|py|sbatch)$", "", name)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{shown(name)}: no such recipe ({', '.join(known)}){hint}")
    file = known[name].file
    path = destination or Path(file)
    path = path / file if path.is_dir() else path
    if path.suffix != (ending := Path(file).suffix):
        raise UserError(f"{shown(str(path))}: {name}'s name ends in {ending}, and there is no such directory")
    write_new(path, known[name].text.replace(f"configs/{file}", quote(str(path))))
    return path, known[name].run.replace(f"configs/{file}", quote(str(path)))


def refuse_taken(path: Path) -> None:
    if path.is_symlink() or path.exists():
        raise UserError(f"{shown(str(path))}: already exists; name another file, or move it away")


def write_new(path: Path, text: str) -> None:
    """Write `text` to a new file. Raises UserError if it exists, or if its directory is missing or not writable."""
    refuse_taken(path)
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{shown(str(path))}: {error.strerror}; name another file") from error
