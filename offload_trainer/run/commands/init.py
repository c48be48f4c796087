"""The `init` command: ask for model, data and drive, and write a configuration with its plan as a comment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import IO

from offload_trainer.data.sources import find_sources
from offload_trainer.errors import UserError
from offload_trainer.model.presets import PRESETS
from offload_trainer.settings import dump_config, load_config
from offload_trainer.units import shown


def _refuse_model(answer: str) -> None:
    if answer in PRESETS or "/" in answer or Path(answer).expanduser().is_dir():
        return
    raise UserError(f"{answer}: neither a preset ({', '.join(PRESETS)}) nor a directory nor a hub id such as me/mine")


def _refuse_data(answer: str) -> None:
    find_sources([answer])


def _refuse_drive(answer: str) -> None:
    if not Path(answer).expanduser().is_dir():
        raise UserError(f"{answer}: no such directory; create a writable one on the drive")


@dataclass(frozen=True)
class _Question:
    flag: str
    asked: str  # the question, one line
    otherwise: str  # used for an empty answer; "" leaves the key at its default
    refuse: Callable[[str], None]  # raises UserError for an invalid answer


_QUESTIONS = (
    _Question("--model", "Which model? A preset, a directory, or a hub id", "gpt2-mini", _refuse_model),
    _Question("--data", "Which text? A file, a directory, or builtin", "builtin", _refuse_data),
    _Question("--nvme", "A directory on an SSD, for what does not fit in memory? Empty: none", "", _refuse_drive),
)
_KEYS = {"--model": ("model", "name"), "--data": ("data", "path"), "--nvme": ("placement", "nvme")}


def ask_for(words: list[str], answers: IO[str], *, say: Callable[[str], None]) -> list[str]:
    """Return `words` with a flag added for each of model, data and drive that they leave open.

    Each question is repeated until the answer is valid. Raises UserError if `answers` ends first.
    """
    config = load_config(words)
    found = list(words)
    for question in _QUESTIONS:
        section, name = _KEYS[question.flag]
        if name in getattr(config, section).model_fields_set:
            continue
        if answer := _answer(question, answers, say=say):
            found += [question.flag, answer]
    return found


def _answer(question: _Question, answers: IO[str], *, say: Callable[[str], None]) -> str:
    while True:
        say(f"{question.asked}{f' [{question.otherwise}]' if question.otherwise else ''}")
        line = answers.readline()
        if not line:
            raise UserError(f"init: the input ended before an answer; it can also be given with {question.flag}")
        answer = line.strip() or question.otherwise
        try:
            if answer:
                question.refuse(answer)
            return answer
        except UserError as error:
            say(str(error))


def configured(words: list[str], plan: str, path: Path) -> str:
    """Return the text of a configuration file: command and plan as comments, then the keys set by `words`."""
    return "".join(f"{line}\n" for line in _head(plan, path)) + dump_config(load_config(words), given_only=True)


def _head(plan: str, path: Path) -> Iterator[str]:
    yield "# Your answers, and the plan for them on the machine where this was written. All other keys: docs/config.md."
    yield f"# run:    offload-train {quote(shown(str(path)))}"
    yield from (f"# {line}".rstrip() for line in shown(plan).splitlines())
