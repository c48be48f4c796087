"""Tiny configurations and image inputs of single architectures, Aria to Gemma4Unified: see `special_image_models.py`."""

from __future__ import annotations

from tiny_image_models import Special

SPECIAL: dict[str, Special] = {}
