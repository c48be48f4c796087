"""Tiny configurations and image inputs of architectures that the rules of `tiny_image_models.py` do not cover."""

from __future__ import annotations

import special_images_a_to_g
import special_images_g_to_m
import special_images_m_to_v
from tiny_image_models import Special

SPECIAL: dict[str, Special] = (
    special_images_a_to_g.SPECIAL | special_images_g_to_m.SPECIAL | special_images_m_to_v.SPECIAL
)
