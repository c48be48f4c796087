"""A node that is not heard of any more: one that has lost its power or its network, or whose ranks are all stopped.

    a thread of each node's first rank, each 5 s ── counts in the launcher's store ── looks at others' counts

Connections to a machine that has vanished stay open, and nobody waits at them for less than a step's, a start's or a
save's time. What is wrong within one node its own ranks see (`run/ranks/watchdog.py`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from offload_trainer.ranks import launchers_store
from offload_trainer.run.ranks.watchdog import ON_AGAIN

_EVERY, _LOST = 5.0, 60.0  # seconds from one beat to the next; without one
_ENDED = b"ended"


class Store(Protocol):
    """What of torch's is used."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


@contextmanager
def beating(nodes: Sequence[range], *, rank: int, say: Callable[[str], None]) -> Iterator[None]:
    """Within it nodes hear of each other. One that hears nothing of another for 60 s says so, in a thread, and ends."""
    if len(nodes) == 1 or rank not in [its.start for its in nodes]:
        yield
        return
    store = launchers_store(timeout=_LOST)
    beats = _Heartbeats(store, nodes, number=next(number for number, its in enumerate(nodes) if rank in its))
    beats.tell()
    threads = [threading.Thread(target=work, args=(beats, say), daemon=True) for work in (_exchange_heartbeats, _guard)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        beats.over.set()
        threads[0].join(_LOST)


class _Heartbeats:
    """One node's, and what it hears of the others."""

    def __init__(self, store: Store, nodes: Sequence[range], *, number: int) -> None:
        self._store, self._nodes, self._number = store, nodes, number
        self._count = 0
        self._heard = {other: (b"", time.monotonic()) for other in range(len(nodes)) if other != number}
        self.answered = time.monotonic()  # when the store did last
        self.over = threading.Event()

    def tell(self) -> None:
        self._count += 1
        self._store.set(f"beat/{self._number}", str(self._count))

    def tell_the_end(self) -> None:
        self._store.set(f"beat/{self._number}", _ENDED.decode())

    def listen(self) -> str | None:
        """Which node is lost, in words."""
        for other, (last, since) in self._heard.items():
            told = self._store.get(f"beat/{other}")  # compared, and never interpreted: others can write there
            if told not in (last, _ENDED):
                self._heard[other] = told, time.monotonic()
            elif told != _ENDED and time.monotonic() - since >= _LOST:
                its = self._nodes[other]
                return f"node {other} (ranks {its.start} to {its.stop - 1}) has sent no heartbeat for {_LOST:g} s"
        self.answered = time.monotonic()
        return None


def _exchange_heartbeats(beats: _Heartbeats, say: Callable[[str], None]) -> None:
    try:
        while not beats.over.wait(_EVERY):
            beats.tell()
            if lost := beats.listen():
                _end(lost, say)
        beats.tell_the_end()
    except RuntimeError as error:
        if not beats.over.is_set():
            _end(f"the launcher of the first node cannot be reached ({str(error).splitlines()[0]})", say)


def _guard(beats: _Heartbeats, say: Callable[[str], None]) -> None:
    """Where the store's node has vanished, whoever asks it waits for as long as the kernel sends again: minutes."""
    while not beats.over.wait(_EVERY):
        if time.monotonic() - beats.answered >= 2 * _LOST:  # a first beat may be waited for
            _end(f"the launcher of the first node has not answered for {2 * _LOST:g} s", say)


def _end(why: str, say: Callable[[str], None]) -> None:
    """At once: who trains waits for a rank that does not answer. The launcher then ends this node's other ranks."""
    say(f"{why}, and the run ends. {ON_AGAIN}")
    os._exit(1)
