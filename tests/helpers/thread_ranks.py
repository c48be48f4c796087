"""Simulate ranks with threads, which exchange data in place of gloo."""

from __future__ import annotations

import threading

import torch


class Threads:
    """Collectives among `world` threads, with a separate barrier for numbers, for tensors and for plain barriers."""

    def __init__(self, world: int) -> None:
        self.barriers = [threading.Barrier(world, timeout=300) for _ in range(3)]
        self.told = [0] * world
        self.parts: dict[int, torch.Tensor] = {}

    def exchange(self, rank: int, mine: int) -> list[int]:
        """Return every rank's number, in order of rank."""
        self.told[rank] = mine
        self.barriers[0].wait()
        told = list(self.told)
        self.barriers[0].wait()
        return told

    def join(self, values: torch.Tensor, rank: int) -> None:
        """All-gather in place: each rank contributes its equal part of `values`."""
        world = len(self.told)
        self.parts[rank] = values.chunk(world)[rank].clone()
        self.barriers[1].wait()
        values.copy_(torch.cat([self.parts[other] for other in range(world)]))
        self.barriers[1].wait()

    def barrier(self) -> None:
        self.barriers[2].wait()

    def abort(self) -> None:
        """Break all barriers, as a closed connection would."""
        for barrier in self.barriers:
            barrier.abort()
