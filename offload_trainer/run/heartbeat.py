"""Detect nodes that stop sending heartbeats: lost power or network, or all ranks of the node stopped.

    a thread in each node's first rank, every 5 s ── increments its counter in the launcher's store ── reads the others

TCP connections to a machine that has vanished stay open, and collectives wait on them for as long as a step, a start
or a save may take. Without heartbeats the failure would be noticed only then. Failures within a node are detected by
its own ranks and their launcher.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from offload_trainer.ranks import launchers_store

_EVERY, _LOST = 5.0, 60.0  # seconds between heartbeats, and without one until a node counts as lost
_ENDED = b"ended"


@contextmanager
def beating(nodes: Sequence[range], *, rank: int, say: Callable[[str], None]) -> Iterator[None]:
    """Exchange heartbeats with the other nodes within this context.

    If a node sends none for 60 s, print that and end this process. `say` is called in a thread. Does nothing on a
    single node and on ranks other than each node's first.
    """
    if len(nodes) == 1 or rank not in [its.start for its in nodes]:
        yield
        return
    store = launchers_store(timeout=_LOST)
    beats = _Heartbeats(store, nodes, number=next(number for number, its in enumerate(nodes) if rank in its))
    beats.beat()
    threads = [threading.Thread(target=work, args=(beats, say), daemon=True) for work in (_exchange_heartbeats, _guard)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        beats.over.set()
        threads[0].join(_LOST)


class _Heartbeats:
    """Heartbeat counter of this node, and the last ones seen of the others."""

    def __init__(self, store: dist.Store, nodes: Sequence[range], *, number: int) -> None:
        self._store, self._nodes, self._number = store, nodes, number
        self._count = 0
        self._heard = {other: (b"", time.monotonic()) for other in range(len(nodes)) if other != number}
        self.answered = time.monotonic()  # last time the store answered
        self.over = threading.Event()

    def beat(self) -> None:
        self._count += 1
        self._store.set(f"beat/{self._number}", str(self._count))

    def send_end(self) -> None:
        self._store.set(f"beat/{self._number}", _ENDED.decode())

    def find_lost_node(self) -> str | None:
        """Read the other nodes' counters; return a message if a node is lost, else None."""
        for other, (last, since) in self._heard.items():
            counter = self._store.get(f"beat/{other}")  # untrusted: compared only, never parsed
            if counter not in (last, _ENDED):
                self._heard[other] = counter, time.monotonic()
            elif counter != _ENDED and time.monotonic() - since >= _LOST:
                its = self._nodes[other]
                return f"node {other} (ranks {its.start} to {its.stop - 1}) has sent no heartbeat for {_LOST:g} s"
        self.answered = time.monotonic()
        return None


def _exchange_heartbeats(beats: _Heartbeats, say: Callable[[str], None]) -> None:
    try:
        while not beats.over.wait(_EVERY):
            beats.beat()
            if lost := beats.find_lost_node():
                _end(lost, say)
        beats.send_end()
    except RuntimeError as error:
        if not beats.over.is_set():
            _end(f"the launcher of the first node cannot be reached ({str(error).splitlines()[0]})", say)


def _guard(beats: _Heartbeats, say: Callable[[str], None]) -> None:
    """End the process if the store's node has vanished.

    A request to it would block for as long as TCP retransmits, which is minutes, so a second thread keeps the time.
    """
    while not beats.over.wait(_EVERY):
        if time.monotonic() - beats.answered >= 2 * _LOST:  # `get` may block for _LOST on a first heartbeat
            _end(f"the launcher of the first node has not answered for {2 * _LOST:g} s", say)


def _end(why: str, say: Callable[[str], None]) -> None:
    """Print the reason and exit immediately, because the training thread is blocked on the lost node.

    The launcher then ends the other ranks of this node.
    """
    say(f"{why}, and the run ends. The same command resumes")
    os._exit(1)
