"""Tests of NUMA: the CPUs of each node, and the nodes of each rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload_trainer import numa
from offload_trainer.run import process_setup


def test_nodes_have_the_cpus_that_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, cpus in (("node0", "0-3,8"), ("node1", "4-7"), ("node2", ""), ("node10", "9")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 5, 8, 9})
    nodes = numa.nodes(tmp_path)
    assert nodes == [{1, 2, 8}, {5}, {9}]
    assert numa.nodes(tmp_path / "none") == []


def test_a_rank_is_on_the_nodes_of_its_share() -> None:
    two = [frozenset(range(8)), frozenset(range(8, 16))]
    assert [numa.of_rank(rank, ranks=4, nodes=two) for rank in range(4)] == [two[0], two[0], two[1], two[1]]
    assert numa.of_rank(1, ranks=3, nodes=two) == two[0] | two[1]
    four = [frozenset({cpu}) for cpu in range(4)]
    assert [numa.of_rank(rank, ranks=2, nodes=four) for rank in range(2)] == [{0, 1}, {2, 3}]
    assert {numa.of_rank(rank, ranks=8, nodes=four) for rank in range(8)} == set(four)  # more ranks than CPUs


def test_ranks_stay_on_their_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[frozenset[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: messages.append(cpus))
    monkeypatch.setattr(numa, "nodes", lambda: [frozenset({0, 1}), frozenset({2, 3})])
    process_setup._stay_near(0, ranks=1)
    for rank in range(2):
        process_setup._stay_near(rank, ranks=2)
    assert messages == [{0, 1}, {2, 3}]
    monkeypatch.setattr(numa, "nodes", lambda: [frozenset({0, 1, 2, 3})])
    process_setup._stay_near(1, ranks=2)
    assert len(messages) == 2
