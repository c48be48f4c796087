"""Tests of connections between ranks, here threads: delivery, refused peers, and missing or late ranks."""

from __future__ import annotations

import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import torch

from offload_trainer import mesh, ranks
from offload_trainer.errors import TrainerError
from offload_trainer.mesh import HandshakeRefused, Listener, Mesh, PeerGone, PeerTimeout, _name

COUNT = 3


@contextmanager
def listeners(count: int = COUNT, *, apart: bool = False) -> Iterator[list[Listener]]:
    """Yield a listener for each rank. `apart`: each rank is on a separate node."""
    run = secrets.token_hex(8)
    with ExitStack() as stack:
        made = []
        for rank in range(count):
            here, host = ([rank], "127.0.0.1") if apart else (range(count), None)
            made.append(Listener(run, rank, here=here, secret=b"what all nodes know", host=host))
            stack.callback(made[-1].close)
        if apart:
            for one in made:
                one.addresses |= {rank: other.address for rank, other in enumerate(made)}
        yield made


def together(work: Callable[[int], Any], *, count: int = COUNT) -> list[Any]:
    """Run `work` for all ranks at the same time, each in a thread; return the results."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(work, range(count)))


def meshes(made: list[Listener], *, patience: float = 300.0) -> list[Mesh]:
    everybody = range(len(made))
    return together(lambda rank: made[rank].mesh(everybody, patience=patience, within=300.0), count=len(made))


@pytest.mark.parametrize("apart", [False, True])
def test_messages_arrive_whole_and_in_order(apart: bool, seed: int) -> None:
    """Messages of every size arrive in order, in all directions, whether a thread sends them or the caller."""
    dice = random.Random(seed)
    sizes = [[[dice.choice([0, 1, 7, 4096, 3_000_001]) for _ in range(4)] for _ in range(COUNT)] for _ in range(COUNT)]

    def part(source: int, target: int, number: int) -> bytes:
        return random.Random(f"{source} {target} {number}").randbytes(sizes[source][target][number])

    with listeners(apart=apart) as made:
        every = meshes(made)

        def trade(rank: int, *, begun: bool) -> None:
            others = [other for other in range(COUNT) if other != rank]
            out = [(to, memoryview(part(rank, to, number))) for number in range(4) for to in others]
            room = {(of, number): bytearray(sizes[of][rank][number]) for number in range(4) for of in others}
            into = [(of, memoryview(buffer)) for (of, _), buffer in room.items()]
            every[rank].begin(out, into).result() if begun else every[rank].exchange(out, into)
            for (of, number), buffer in room.items():
                assert buffer == part(of, rank, number)

        for begun in (False, True, False):
            together(lambda rank: trade(rank, begun=begun))  # noqa: B023 - done when it returns
        told = [b"", b"one", b"x" * 100_000]
        assert together(lambda rank: every[rank].all_gather(told[rank])) == [told] * COUNT
        some = together(lambda rank: made[rank].mesh([0, 2] if rank != 1 else [1], patience=300.0, within=300.0))
        assert [mesh.members for mesh in some] == [(0, 2), (1,), (0, 2)]


def test_ranks_exchange_tensors_as_torch_does() -> None:
    with listeners() as made:
        every = meshes(made)
        given = torch.arange(COUNT * COUNT * 5, dtype=torch.bfloat16).view(COUNT, COUNT, 5)
        come = together(lambda rank: ranks.all_to_all(given[rank].clone(), group=every[rank]))
        assert torch.equal(torch.stack(come), given.transpose(0, 1))
        whole = [torch.zeros(5 * COUNT) for _ in range(COUNT)]
        for rank in range(COUNT):
            whole[rank][5 * rank : 5 * rank + 5] = rank + 1
        sums = [values.clone() for values in whole]
        together(lambda rank: ranks.all_gather_parts(whole[rank], rank, group=every[rank]))
        together(lambda rank: ranks.all_reduce(sums[rank], group=every[rank]))
        wanted = torch.arange(1.0, COUNT + 1).repeat_interleave(5)
        assert all(torch.equal(values, wanted) for values in (*whole, *sums))


def test_values_between_ranks_are_json() -> None:
    """A value without a JSON form is an error for its sender; a malformed message is an error for its receiver."""
    told = ranks._encode({"nan": float("nan"), "inf": float("-inf"), "tuple": (1, 2)})
    assert str(ranks._decode(told, dict)) == "{'nan': nan, 'inf': -inf, 'tuple': [1, 2]}"
    with pytest.raises(TypeError):
        ranks._encode(object())
    for wrong in (b"cos\nsystem\n(S'true'\ntR.", b"[1, 2", b"\xff", b"[" * 100_000):
        with pytest.raises(TrainerError, match="cannot read"):
            ranks._decode(wrong, list)


def test_a_closed_and_a_late_rank() -> None:
    with listeners() as made:
        every = meshes(made, patience=0.2)
        with pytest.raises(PeerTimeout, match="Rank 1, Rank 2 failed to come") as late:
            every[0].all_gather(b"0", equal=True)
        assert late.value.missing == (1, 2)
        with pytest.raises(PeerGone, match="rank 0"):
            every[1].all_gather(b"0", equal=True)  # rank 0 has given up
        with pytest.raises(PeerGone):
            every[2].check()


def test_half_a_message_never_becomes_the_head_of_another() -> None:
    """A partial message ends the mesh, and so do ranks whose operations do not match."""
    with listeners(2) as made:
        first, second = meshes(made)

        def disagree(rank: int) -> None:
            if rank == 0:
                with suppress(PeerGone):  # rank 1 may close the connection between the length and the message
                    first.exchange([(1, memoryview(b"abc"))], [])
            else:
                second.exchange([], [(0, memoryview(bytearray(4)))])

        with pytest.raises(PeerGone, match="rank 0 sends 3 bytes where 4 are expected"):
            together(disagree, count=2)
        with pytest.raises(PeerGone):
            first.exchange([], [(1, memoryview(bytearray(4)))])


def test_a_slow_handshake_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, accept = [True], mesh._accept_handshake

    def accept_late(connection: socket.socket, secret: bytes) -> bytes:
        if slow:
            slow.clear()
            time.sleep(1)
        return accept(connection, secret)

    monkeypatch.setattr(mesh, "_PATIENCE", 0.3)
    monkeypatch.setattr(mesh, "_accept_handshake", accept_late)
    with listeners(2, apart=True) as made:
        every = meshes(made)
        assert together(lambda rank: every[rank].all_gather(bytes([rank])), count=2) == [[b"\0", b"\1"]] * 2
        assert not slow


@pytest.mark.parametrize("head", [b"", bytes(72), b"garbage" * 600], ids=range(3))
def test_strangers_of_the_network_are_refused(head: bytes) -> None:
    """Unauthenticated connections are refused, whatever they send, before and during the ranks' handshake."""
    with listeners(2, apart=True) as made, ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(made[0].address)) for _ in range(8)]
        for stranger in strangers:
            with suppress(OSError):
                stranger.sendall(head)
        every = meshes(made)
        together(lambda rank: every[rank].all_gather(b"0", equal=True), count=2)
        for stranger in strangers:
            stranger.settimeout(0.05)
            with suppress(OSError):
                assert len(stranger.recv(1 << 16)) in (0, 32)  # at most a nonce
                assert stranger.recv(1 << 16) == b""


def test_a_relay_is_refused() -> None:
    """A relay between two ranks is refused, since each proof covers the dialled address."""
    with listeners(2, apart=True) as made, socket.create_server(("127.0.0.1", 0)) as relay:

        def pass_on(source: socket.socket, target: socket.socket) -> None:
            with suppress(OSError):
                while data := source.recv(4096):
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

        def serve() -> None:
            near, _ = relay.accept()
            far = socket.create_connection(made[0].address)
            for way in ((near, far), (far, near)):
                threading.Thread(target=pass_on, args=way, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        made[1].addresses[0] = relay.getsockname()
        with pytest.raises(HandshakeRefused):
            made[1].mesh([0, 1], patience=300.0, within=300.0)


def test_ranks_of_one_node_open_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", mesh.RUN: secrets.token_hex(8)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "_joined", None)
    ranks.join()
    assert ranks._joined is not None
    assert [one.family for one in ranks._joined.listener._listening] == [socket.AF_UNIX]
    ranks._joined.listener.close()


OTHER_USER = """
import os, socket, sys
os.setuid(65534)
unix = socket.socket(socket.AF_UNIX)
unix.bind("\\0" + sys.argv[1])
unix.listen()
print("listens", flush=True)
connection, _ = unix.accept()
print(connection.recv(100), flush=True)
with socket.socket(socket.AF_UNIX) as dials:
    dials.settimeout(60)
    dials.connect("\\0" + sys.argv[2])
    try:
        dials.sendall(bytes(8))
        print(dials.recv(100), flush=True)
    except ConnectionError:
        print(b"", flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which root alone can")
def test_another_user_gets_nothing_in_the_place_of_a_rank_or_as_one_that_dials() -> None:
    run = secrets.token_hex(8)
    words = [sys.executable, "-c", OTHER_USER, *(_name(run, rank)[1:] for rank in (0, 1))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "listens\n"
        with pytest.raises(TrainerError, match="another process listens in the place of rank 0"):
            Listener(run, 0, here=[0, 1])
        second = Listener(run, 1, here=[0, 1])
        with pytest.raises(TrainerError, match="user 65534 listens in the place of rank 0"):
            second.mesh([0, 1], patience=300.0, within=300.0)
        assert other.stdout.readline() == "b''\n"
        assert other.stdout.readline() == "b''\n"
        assert not second._arrived
        second.close()


def test_each_end_must_prove_that_it_knows_the_secret() -> None:
    hello = bytes(mesh._HELLO.size)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:
        with socket.create_connection(server.getsockname(), 60) as dials, server.accept()[0] as answers:
            refused = thread.submit(mesh._begin_handshake, dials, hello, b"other", "rank 0")
            with pytest.raises(ValueError, match="no proof"):
                mesh._accept_handshake(answers, b"one")
            answers.close()
            with pytest.raises(HandshakeRefused, match="does not accept"):
                refused.result(60)
        with socket.create_connection(server.getsockname(), 60) as dials, server.accept()[0] as answers:
            refused = thread.submit(mesh._begin_handshake, dials, hello, b"one", "rank 0")
            answers.sendall(bytes(mesh._NONCE))
            mesh._received(answers, mesh._NONCE + mesh._PROOF + len(hello))
            answers.sendall(bytes(mesh._PROOF))
            with pytest.raises(HandshakeRefused, match="does not prove"):
                refused.result(60)
