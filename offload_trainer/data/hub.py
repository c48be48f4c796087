"""A data set of the hub by its name: `datasets` fetches it, and its Arrow files are read as any others.

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
    """The files in `datasets`' cache that hold the split, `train` where none is named; fetched if they are not there.

    Raises UserError for what is no such name, without `datasets`, and where the data set cannot be had.
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
    except Exception as error:  # of the hub, of the network, of what the data set holds: all the user's to mend
        raise UserError(
            f"{wish} could not be loaded: {one_line(error)}. Check the name, configuration, split and network, or "
            f"download it elsewhere with hf download --repo-type dataset {name} --local-dir data, then --data data"
        ) from error
    return tuple(Path(one["filename"]) for one in loaded.cache_files)
