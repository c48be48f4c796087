"""Count the bytes that a phase of a step moves between a drive and host memory, or between host memory and a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes moved in one phase of one step. `place` is a drive's directory, or "device" for a GPU's copies."""

    place: str
    phase: str
    read: int  # towards the device
    written: int
