"""NUMA nodes: which CPUs are near each other, and near the memory that they write first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def nodes(root: Path = Path("/sys/devices/system/node")) -> list[frozenset[int]]:
    """The CPUs that this thread may run on, by their NUMA node; nodes without any are left out."""
    allowed = os.sched_getaffinity(0)
    lists = sorted(root.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node")))
    found = [frozenset(_cpus(path.read_text()) & allowed) for path in lists]
    return [node for node in found if node]


def _cpus(words: str) -> set[int]:
    """The numbers in "0-3,8"."""
    ends = [[int(end) for end in part.split("-")] for part in words.strip().split(",") if part]
    return {cpu for pair in ends for cpu in range(pair[0], pair[-1] + 1)}


def spread_threads(threads: int, nodes: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """The node of each of `threads`, in proportion to the nodes' CPUs."""
    cpus = [node for node in nodes for _ in node]
    return [cpus[thread * len(cpus) // threads] for thread in range(threads)]


def of_rank(rank: int, *, ranks: int, nodes: Sequence[frozenset[int]]) -> frozenset[int]:
    """The CPUs of the nodes on which a rank has its share of all CPUs, the first rank on the first node."""
    cpus = [node for node in nodes for _ in node]
    first, end = rank * len(cpus) // ranks, (rank + 1) * len(cpus) // ranks
    return frozenset().union(*cpus[first : max(end, first + 1)])
