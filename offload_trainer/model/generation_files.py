"""Copy a pretrained model's generation and processor configuration files into exports.

A chat model's end-of-turn tokens and sampling temperature are only in generation_config.json, so exports carry it along
unchanged.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from offload_trainer.safe_files import read_back

GENERATION = "generation_config.json"
_FILES = (GENERATION, "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def check_beside(directory: Path) -> None:
    """Raise UserError if one of these files cannot be read."""
    for name in _FILES:
        if (directory / name).exists():
            read_back(directory / name, dict[str, Any], links=True, fix="Correct it, or move it away")


def copy_beside(directory: Path, destination: Path) -> None:
    """Copy the files that exist, byte for byte, replacing those in `destination`."""
    for name in _FILES:
        if (directory / name).exists():
            shutil.copyfile(directory / name, destination / name)
