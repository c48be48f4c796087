"""Find the checkpoint or page files that rerunning the same command would resume from.

The command line and the launcher add this to the last message of a run that ended early.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload_trainer.checkpoint import configuration_of
from offload_trainer.config import SaveSection
from offload_trainer.errors import RERUN_HINT, UserError
from offload_trainer.export import final_export
from offload_trainer.offloading.pages.manifest import files_of, read_description, read_newest
from offload_trainer.retention import complete_checkpoints, find_resume, step_of
from offload_trainer.settings import load_config
from offload_trainer.storage.scratch_dir import PAGES, folders_in

_WITHOUT = "the same command without --resume resumes"
STARTS_OVER = "nothing was saved yet: the same command starts from step 0"


def with_resume_hint(message: str, words: Sequence[str]) -> str:
    """Complete the phrase `errors.RERUN_HINT` in a message with the point that the command `words` resumes from."""
    hint = resume_hint(words)
    message = re.sub(f"{RERUN_HINT}(?! from)", lambda _: hint, message)
    return message.replace(RERUN_HINT, _WITHOUT) if hint.startswith(_WITHOUT) else message


def resume_hint(words: Sequence[str]) -> str:
    """Return a sentence on where the command `words` would resume from, without the step if it cannot be read.

    A run that has saved newer checkpoints than its --resume names goes on from these only without it.
    """
    again = RERUN_HINT
    try:
        save = load_config([word for number, word in enumerate(words) if number or word != "train"]).save
        begins = find_resume(save.resume, output=Path(save.output))
        newest = max(map(step_of, complete_checkpoints(Path(save.output) / "checkpoints")), default=-1)
        if save.resume != "auto" and newest > (step_of(begins) if begins else -1):
            save, again = save.model_copy(update={"resume": "auto"}), _WITHOUT
        saved, kept = newest_state(save)
    except (OSError, ValueError, UserError):
        return again
    if kept:
        return f"{again} from its page files, step {kept}"
    if saved:
        return f"{again} from the checkpoint {saved.name}"
    return STARTS_OVER


def earlier_run(save: SaveSection) -> tuple[Mapping[str, Mapping[str, Any]], bool]:
    """Return the resolved configuration of the run that this one would resume from or has ended; empty for a new run.

    Return also whether it would resume from page files. The configuration is empty, too, if it cannot be read; the
    later check of the checkpoint or page files reports that error.
    """
    kept = 0
    try:
        saved, kept = newest_state(save)
        left = folders_in(Path(save.output) / PAGES)[0] if kept else saved
        if left:
            return configuration_of(left), bool(kept)
        ended = final_export(Path(save.output)) if save.resume == "auto" else None
        return ended.run.config if ended else {}, False
    except (OSError, ValueError, UserError):
        return {}, bool(kept)


def newest_state(save: SaveSection) -> tuple[Path | None, int]:
    """Return (checkpoint or None, step of the page files); the step is 0 unless it is newer than the checkpoint.

    Raises ValueError or UserError if a run could not start from the page files.
    """
    saved = find_resume(save.resume, output=Path(save.output))
    folders = folders_in(Path(save.output) / PAGES) if save.resume == "auto" else []
    manifest = read_description(folders[0]) if folders else None
    if manifest is None:
        return saved, 0
    files_of(manifest)
    newest = read_newest(manifest)
    kept = 0 if newest is None or newest.train is None or newest.engine is None else newest.train["step"]
    return saved, kept if kept > (step_of(saved) if saved else 0) else 0
