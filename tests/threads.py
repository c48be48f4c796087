"""Ranks that are threads: what gloo does between processes."""

from __future__ import annotations

import threading

import torch


class Threads:
    """Of `world` ranks. A barrier for numbers, one for tensors, and one for whatever else they meet for."""

    def __init__(self, world: int) -> None:
        self.barriers = [threading.Barrier(world, timeout=100) for _ in range(3)]
        self.told = [0] * world
        self.parts: dict[int, torch.Tensor] = {}

    def exchange(self, rank: int, mine: int) -> list[int]:
        """What each rank has told, on every rank."""
        self.told[rank] = mine
        self.barriers[0].wait()
        told = list(self.told)
        self.barriers[0].wait()
        return told

    def join(self, values: torch.Tensor, rank: int) -> None:
        """Of even parts of `values` each rank has its own, and then all."""
        world = len(self.told)
        self.parts[rank] = values.chunk(world)[rank].clone()
        self.barriers[1].wait()
        values.copy_(torch.cat([self.parts[other] for other in range(world)]))
        self.barriers[1].wait()

    def barrier(self) -> None:
        self.barriers[2].wait()

    def abort(self) -> None:
        """All that they wait for breaks, as connections are closed."""
        for barrier in self.barriers:
            barrier.abort()
