"""NUMA topology: assign CPUs to ranks so that each works on memory of the node it runs on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def nodes(root: Path = Path("/sys/devices/system/node")) -> list[frozenset[int]]:
    """Return the CPUs that this thread may run on, one set per NUMA node; nodes without any are left out."""
    allowed = os.sched_getaffinity(0)
    lists = sorted(root.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node")))
    found = [frozenset(_cpus(path.read_text()) & allowed) for path in lists]
    return [node for node in found if node]


def _cpus(words: str) -> set[int]:
    """Return the CPU numbers in a list such as "0-3,8"."""
    ends = [[int(end) for end in part.split("-")] for part in words.strip().split(",") if part]
    return {cpu for pair in ends for cpu in range(pair[0], pair[-1] + 1)}


def of_rank(rank: int, *, ranks: int, nodes: Sequence[frozenset[int]]) -> frozenset[int]:
    """Return the CPUs of all nodes that a rank's share of the CPUs touches; shares follow the order of nodes."""
    cpus = [node for node in nodes for _ in node]
    first, end = rank * len(cpus) // ranks, (rank + 1) * len(cpus) // ranks
    return frozenset().union(*cpus[first : max(end, first + 1)])
