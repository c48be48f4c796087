"""What the same command would go on from, as the files of a run that has ended say: who has the last word asks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload_trainer.checkpoint import configuration_of, find_resume
from offload_trainer.config import SaveSection
from offload_trainer.errors import AGAIN, UserError
from offload_trainer.offloading.pages.index import files_of
from offload_trainer.offloading.pages.manifest import read_description, read_newest
from offload_trainer.retention import step_of
from offload_trainer.settings import load_config
from offload_trainer.storage.scratch_dir import PAGES, folders_in

ANEW = "nothing was saved yet: the same command starts from step 0"


def saying_where(told: str, words: Sequence[str]) -> str:
    """What is told of the end of a command of these words, with from where it goes on, if told that it does."""
    return re.sub(f"{AGAIN}(?! from)", lambda _: goes_on(words), told)


def goes_on(words: Sequence[str]) -> str:
    """How a command of these words would go on; from where is left out where that cannot be looked at."""
    try:
        save = load_config([word for number, word in enumerate(words) if number or word != "train"]).save
        saved, kept = _left(save)
    except (OSError, ValueError, UserError):
        return AGAIN
    if kept:
        return f"{AGAIN} from its page files, step {kept}"
    if saved:
        return f"{AGAIN} from the checkpoint {saved.name}"
    return ANEW


def made_with(save: SaveSection) -> Mapping[str, Mapping[str, Any]]:
    """The configuration, with nothing left open, of the run that such a one goes on from; empty where there is none.

    Empty too where it cannot be read, which is said once what was left is looked at as a whole.
    """
    try:
        saved, kept = _left(save)
        left = folders_in(Path(save.output) / PAGES)[0] if kept else saved
        return configuration_of(left) if left else {}
    except (OSError, ValueError, UserError):
        return {}


def _left(save: SaveSection) -> tuple[Path | None, int]:
    """The checkpoint, if any, and the step that newer page files hold; 0 where there are none."""
    saved = find_resume(save.resume, output=Path(save.output))
    kept = _step_of_pages(Path(save.output) / PAGES) if save.resume == "auto" else 0
    return saved, kept if kept > (step_of(saved) if saved else 0) else 0


def _step_of_pages(listed: Path) -> int:
    """Return the step that a run's page files hold whole, or 0. ValueError, UserError where a start refuses them."""
    folders = folders_in(listed)
    told = read_description(folders[0]) if folders else None
    if told is None or told.places == 1:
        return 0
    files_of(told)
    newest = read_newest(told)
    return 0 if newest is None or newest.train is None or newest.engine is None else newest.train["step"]
