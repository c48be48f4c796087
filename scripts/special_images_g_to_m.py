"""Tiny configurations and image inputs of single architectures, Glm5Next to MiniCPMV4_7: see `special_image_models.py`."""

from __future__ import annotations

from tiny_image_models import Special

SPECIAL: dict[str, Special] = {}
