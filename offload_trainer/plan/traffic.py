"""Bytes that a step moves between drives and host memory, or between that and a device, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step in one phase. `place` is a drive's directory, or "device" for the way to a GPU and back."""

    place: str
    phase: str
    read: int  # towards the accelerator
    written: int
