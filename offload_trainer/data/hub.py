"""Data sets on the Hugging Face hub: `datasets` downloads them, and their Arrow files are read like local ones.

hub:OWNER/NAME   hub:OWNER/NAME:SPLIT   hub:OWNER/NAME/CONFIGURATION:SPLIT
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from offload_trainer.errors import UserError
from offload_trainer.packages import is_installed, lacks
from offload_trainer.safe_files import one_line

HUB = "hub:"
_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:/([\w.-]+))?(?::([\w.\[\]%:+-]+))?")


@cache
def hub_files(wish: str) -> tuple[Path, ...]:
    """Return the files in `datasets`' cache that hold the split (`train` by default), downloading them if needed.

    Raises UserError for an invalid name, if `datasets` is not installed, and if the data set cannot be loaded.
    """
    found = _NAME.fullmatch(wish.removeprefix(HUB))
    if found is None:
        raise UserError(
            f"{wish}: a dataset of the hub is written hub:OWNER/NAME, with /CONFIGURATION and :SPLIT if it has several"
        )
    if not is_installed("datasets"):
        raise UserError(lacks(wish, "datasets"))
    name, configuration, split = found.groups()
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    import datasets

    try:
        loaded = datasets.load_dataset(name, configuration, split=split or "train")
    # the hub, the network and the data set's content fail in many ways, all of them for the user to fix
    except Exception as error:
        raise UserError(
            f"{wish} could not be loaded: {one_line(error)}. Check the name, configuration, split and network, or "
            f"download it elsewhere with hf download --repo-type dataset {name} --local-dir data, then --data data"
        ) from error
    return tuple(Path(one["filename"]) for one in loaded.cache_files)
