"""Tests of heartbeats between nodes, through a torch store in this process."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from offload_trainer import ranks
from offload_trainer.errors import PeerFailed, TrainerError, UserError
from offload_trainer.run import heartbeat as module
from offload_trainer.run.heartbeat import _exchange_heartbeats, _Heartbeats

pytestmark = pytest.mark.slow

NODES = [range(2), range(2, 4), range(4, 6)]


class Lost(Exception):
    """Raised in place of ending the process."""


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=300))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    def leave(code: int) -> None:
        raise Lost(code)

    monkeypatch.setattr(module.os, "_exit", leave)
    monkeypatch.setattr(module, "_EVERY", 0.01)
    monkeypatch.setattr(module, "_LOST", 0.3)
    return []


def test_a_node_without_heartbeats_ends_the_others(
    store: dist.TCPStore, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node without heartbeats ends the others; one that reported its end does not."""
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    first, second, third = (_Heartbeats(store, NODES, number=number) for number in range(3))
    for one in (first, second, third):
        one.beat()
    for now[0] in (0.1, 0.2, 0.3):
        assert first.find_lost_node() is None
        second.beat()
    now[0] = 0.4
    assert first.find_lost_node() == "node 2 (ranks 4 to 5) has sent no heartbeat for 0.3 s"
    second.beat()
    third.send_end()
    assert first.find_lost_node() is None  # a node that has ended is not monitored
    now[0] = 0.8
    with pytest.raises(Lost):
        _exchange_heartbeats(first, said.append)
    (line,) = said
    assert line.startswith("node 1 (ranks 2 to 3) has sent no heartbeat for 0.3 s, and the run ends. The same command")


def test_a_vanished_store_ends_the_nodes(store: dist.TCPStore, said: list[str]) -> None:
    store.set_timeout(timedelta(seconds=1))
    beats = _Heartbeats(
        store, NODES, number=0
    )  # no heartbeat was sent, which raises the same error as an unreachable store
    with pytest.raises(Lost):
        _exchange_heartbeats(beats, said.append)
    assert said[0].startswith("the launcher of the first node cannot be reached (")


def test_a_store_that_does_not_answer_ends_the_nodes(store: dist.TCPStore, said: list[str]) -> None:
    with pytest.raises(Lost):
        module._guard(_Heartbeats(store, NODES, number=0), said.append)
    assert said[0].startswith("the launcher of the first node has not answered for 0.6 s, and the run ends.")


def test_a_node_that_has_ended_says_so(store: dist.TCPStore, said: list[str]) -> None:
    beats = _Heartbeats(store, NODES, number=0)
    beats.over.set()
    _exchange_heartbeats(beats, said.append)
    assert (said, store.get("beat/0")) == ([], b"ended")


def test_a_rank_that_cannot_join_informs_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's failure to start reaches other nodes through the launcher's store, signed."""
    _server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=300))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_server.port), "RANK": "1", "LOCAL_RANK": "1"}
    place |= {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", ranks.SECRET: "what both nodes know"}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    ranks.announce_failed_join("--lrr: unknown flag")
    with pytest.raises(PeerFailed):
        ranks.join()
    monkeypatch.setenv("GROUP_RANK", "0")
    with pytest.raises(TrainerError, match=r"^node 1 does not come: --lrr: unknown flag$"):
        ranks.join()
    monkeypatch.setenv(ranks.SECRET, "what another node knows")
    with pytest.raises(UserError, match="its note is not signed"):
        ranks.join()
