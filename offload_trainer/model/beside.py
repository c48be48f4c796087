"""What lies beside a pretrained model's weights and belongs to it: how texts are generated with it, and ended.

A chat model ends its turns with other tokens than its text, samples with a temperature of its own, and says so only in
generation_config.json. Exports carry the file as it is.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from offload_trainer.readback import read_back

GENERATION = "generation_config.json"
_FILES = (GENERATION, "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def check_beside(directory: Path) -> None:
    """UserError where one of these files cannot be read."""
    for name in _FILES:
        if (directory / name).exists():
            read_back(directory / name, dict[str, Any], links=True, fix="Correct it, or move it away")


def copy_beside(directory: Path, destination: Path) -> None:
    """Copy those files that are there, byte for byte; over what is in `destination`."""
    for name in _FILES:
        if (directory / name).exists():
            shutil.copyfile(directory / name, destination / name)
