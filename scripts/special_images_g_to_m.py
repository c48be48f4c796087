"""Tiny configurations and image inputs of architectures whose names are in SPECIAL: see `special_image_models.py`."""

from __future__ import annotations

from tiny_image_models import Special

SPECIAL: dict[str, Special] = {}
