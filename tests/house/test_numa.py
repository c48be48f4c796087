"""Tests of NUMA: the CPUs of each node, and the nodes of each rank."""

import os
from pathlib import Path

import pytest

from offload_trainer.run import process_setup
from offload_trainer.run.process_setup import numa_nodes


def test_nodes_have_the_cpus_that_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, cpus in (("node0", "0-3,8"), ("node1", "4-7"), ("node2", ""), ("node10", "9")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 5, 8, 9})
    nodes = numa_nodes(tmp_path)
    assert nodes == [{1, 2, 8}, {5}, {9}]
    assert numa_nodes(tmp_path / "none") == []


def test_ranks_stay_on_the_nodes_of_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    def bound(*nodes: set[int], ranks: int) -> list[frozenset[int]]:
        found: list[frozenset[int]] = []
        monkeypatch.setattr(process_setup, "numa_nodes", lambda: [frozenset(node) for node in nodes])
        monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: found.append(cpus))
        for rank in range(ranks):
            process_setup._stay_near(rank, ranks=ranks)
        return found

    two, four = [set(range(8)), set(range(8, 16))], [{0}, {1}, {2}, {3}]
    assert bound(*two, ranks=4) == [two[0], two[0], two[1], two[1]]
    assert bound(*two, ranks=3)[1] == two[0] | two[1]
    assert bound(*four, ranks=2) == [{0, 1}, {2, 3}]
    assert {*bound(*four, ranks=8)} == {*map(frozenset, four)}  # more ranks than CPUs
    assert bound(*two, ranks=1) == bound({0, 1, 2, 3}, ranks=2) == []
