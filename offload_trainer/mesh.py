"""Authenticated socket connections between the ranks of a run, with CPU collectives over them.

    ranks of one node       Unix sockets: the kernel reports the user at the other end
    ranks of other nodes    TCP: each end proves by HMAC that it knows the run's secret, which is never sent

A connection from another user, or without a valid proof, is closed before its data is interpreted. The proof covers
the address that was dialled, so relaying it through another address fails. After the handshake the traffic is neither
encrypted nor signed: anyone who can read the network between nodes can read it.

`Listener` connects ranks; `Mesh` provides all_gather and point-to-point transfers of bytes.
`ranks.py` builds the collectives of tensors and JSON values on it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future

from offload_trainer.errors import LOST, PeerFailed, TrainerError

RUN = "OFFLOAD_TRAINER_RUN"  # environment variable: a name that the launcher has given to this run only

Parts = Sequence[tuple[int, memoryview]]  # (rank, bytes)

_HELLO = struct.Struct("!II")  # (number of the mesh, dialling rank)
_SIZE = struct.Struct("!Q")  # length in bytes, sent ahead of each part
_NONCE = _PROOF = 32  # bytes
_PATIENCE = 10.0  # seconds for one handshake
_AGAIN = 0.05  # seconds between two attempts to reach a rank that does not listen yet
UNANSWERED = 60  # seconds until a machine that does not answer counts as lost
_MOST_STRANGERS = 64  # concurrent handshakes
_MOST_BYTES = 1 << 30  # largest message whose size the sender chooses


class PeerGone(PeerFailed):
    """Another rank has closed its connection, or sends something else than this one expects."""

    def __init__(self, message: str) -> None:
        super().__init__(f"another rank has ended: {message}", code=LOST)


class PeerTimeout(PeerFailed):
    """Ranks, listed in `missing`, have not reached the operation in time."""

    def __init__(self, missing: Sequence[int]) -> None:
        self.missing = tuple(missing)
        super().__init__(f"{', '.join(f'Rank {rank}' for rank in missing)} failed to come", code=LOST)


class Mesh:
    """Group of ranks with one connection between every two of them.

    Operations are collective, and only one thread may use a mesh at a time. After a failed transfer the mesh is closed.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket], *, patience: float) -> None:
        """Take connected sockets by rank. `patience`: timeout in seconds of an operation."""
        self.rank, self.members = rank, tuple(sorted([rank, *peers]))
        self._peers, self._patience = dict(peers), patience
        self._number = {connection.fileno(): peer for peer, connection in peers.items()}
        self._jobs: queue.SimpleQueue[tuple[Future[None], Parts, Parts]] | None = None
        self._in_use = threading.Lock()
        for connection in peers.values():
            connection.setblocking(False)

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(self._peers)

    def all_gather(self, data: bytes, *, equal: bool = False, patience: float | None = None) -> list[bytes]:
        """Return every rank's `data` in the order of ranks. `equal`: it has the same size on all ranks.

        Raises PeerTimeout with the ranks that have not responded in time.
        """
        sizes = [len(data)] * len(self.members)
        if not equal:
            sizes = [_checked(*_SIZE.unpack(size)) for size in self.all_gather(_SIZE.pack(len(data)), equal=True)]
        found = {member: bytearray(size) for member, size in zip(self.members, sizes, strict=True)}
        found[self.rank][:] = data
        out = [(peer, memoryview(data)) for peer in self.others]
        self.exchange(out, [(peer, memoryview(found[peer])) for peer in self.others], patience=patience)
        return [bytes(one) for one in found.values()]

    def exchange(self, out: Parts, into: Parts, *, patience: float | None = None) -> None:
        """Send each part of `out` to its rank and fill each part of `into` from its rank.

        Between two ranks parts arrive in the order in which they are sent. Empty parts are not sent.
        """
        if self._jobs is not None:  # keep the order with operations that `begin` has queued
            self.begin(out, into).result()
        else:
            self._move(out, into, seconds=self._patience if patience is None else patience)

    def begin(self, out: Parts, into: Parts) -> Future[None]:
        """Queue an `exchange` on a background thread, which runs them in the order of the calls."""
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=_carry_out, args=(self._jobs, self._move, self._patience), daemon=True).start()
        future: Future[None] = Future()
        self._jobs.put((future, out, into))
        return future

    def ends(self) -> Iterator[tuple[int, int]]:
        """Yield the rank and the error number of each connection as it ends; 0: the rank has closed it.

        Takes TCP connections that carry nothing else. A machine that has lost power or network closes none of its
        connections, so the kernels ask each other, and after `UNANSWERED` seconds the connection ends with an error.
        """
        poll = select.poll()
        for connection in self._peers.values():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, UNANSWERED // 3)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, UNANSWERED // 3)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
            poll.register(connection, select.POLLRDHUP)
        for _ in self._peers:
            descriptor = poll.poll()[0][0]
            poll.unregister(descriptor)
            peer = self._number[descriptor]
            yield peer, self._peers[peer].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)

    def check(self) -> None:
        """Raise PeerGone if another rank has closed its connection."""
        poll = select.poll()
        for connection in self._peers.values():
            poll.register(connection, select.POLLRDHUP)
        for descriptor, _ in poll.poll(0):
            raise PeerGone(f"rank {self._number[descriptor]} has closed its connection")

    def close(self) -> None:
        """Close all connections, which the other ranks see as this rank's end."""
        for connection in self._peers.values():
            connection.close()

    def _move(self, out: Parts, into: Parts, *, seconds: float) -> None:
        assert self._in_use.acquire(blocking=False), "two threads use one mesh"
        try:
            self._move_all(_queues(out, sends=True), _queues(into, sends=False), until=time.monotonic() + seconds)
        except BaseException:  # a message may be half sent; its rest must not be read as the start of the next
            self.close()
            raise
        finally:
            self._in_use.release()

    def _move_all(self, out: dict[int, _Queue], into: dict[int, _Queue], *, until: float) -> None:
        for peer in list(out):  # most messages fit into the socket buffer and need no poll
            self._transfer(peer, out, self._peers[peer].send)
        poll = select.poll()
        watched = {peer: self._peers[peer].fileno() for peer in {*out, *into}}
        for peer, descriptor in watched.items():
            if descriptor < 0:
                raise PeerGone(f"the connection to rank {peer} is closed")
            poll.register(descriptor, _events(peer, out, into))
        while out or into:
            ready = poll.poll(max(0.0, until - time.monotonic()) * 1000)
            if not ready and time.monotonic() >= until:
                raise PeerTimeout(sorted(into or out))
            for descriptor, event in ready:
                peer = self._number[descriptor]
                failed = event & (select.POLLHUP | select.POLLERR)
                if peer in into and (failed or event & select.POLLIN):
                    self._transfer(peer, into, self._peers[peer].recv_into)
                elif peer in out and failed:
                    raise PeerGone(f"the connection to rank {peer} is closed")
                if peer in out and event & select.POLLOUT:
                    self._transfer(peer, out, self._peers[peer].send)
                if events := _events(peer, out, into):
                    poll.modify(descriptor, events)
                else:
                    poll.unregister(descriptor)

    def _transfer(self, peer: int, queues: dict[int, _Queue], move: Callable[[memoryview], int]) -> None:
        """Send or receive until the socket would block; remove the peer's queue when that is done."""
        parts = queues[peer]
        try:
            while parts:
                moved = move(parts[0])
                if not moved:
                    raise PeerGone(f"rank {peer} has closed its connection")
                if moved < len(parts[0]):
                    parts[0] = parts[0][moved:]
                    continue
                whole = parts.popleft().obj
                if isinstance(whole, _Size) and bytes(whole) != whole.expected:
                    sent, wanted = _SIZE.unpack(whole)[0], _SIZE.unpack(whole.expected)[0]
                    raise PeerGone(f"rank {peer} sends {sent} bytes where {wanted} are expected")
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerGone(f"the connection to rank {peer} is closed: {error.strerror}") from error
        del queues[peer]


_Queue = deque[memoryview]


class _Size(bytearray):
    """Receive buffer of the size field ahead of a part, with the value that it must have."""

    def __init__(self, expected: bytes) -> None:
        super().__init__(len(expected))
        self.expected = expected


def _queues(parts: Parts, *, sends: bool) -> dict[int, _Queue]:
    """Return each rank's buffers to send or to fill, with the size field ahead of each part."""
    made: dict[int, _Queue] = {}
    for peer, part in parts:
        if len(part):
            size = _SIZE.pack(len(part))
            made.setdefault(peer, deque()).extend((memoryview(size if sends else _Size(size)), part))
    return made


def _events(peer: int, out: Mapping[int, _Queue], into: Mapping[int, _Queue]) -> int:
    return (select.POLLIN if peer in into else 0) | (select.POLLOUT if peer in out else 0)


def _checked(size: int) -> int:
    if size > _MOST_BYTES:
        raise PeerGone(f"a message of {size} bytes, and at most {_MOST_BYTES} are taken")
    return size


def _carry_out(
    jobs: queue.SimpleQueue[tuple[Future[None], Parts, Parts]], move: Callable[..., None], patience: float
) -> None:
    while True:
        future, out, into = jobs.get()
        try:
            move(out, into, seconds=patience)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)


# -- connections -------------------------------------------------------------------------------------------------------


class Listener:
    """Listening sockets of this rank, and the dialling of other ranks, for the lifetime of the process."""

    def __init__(
        self, run: str, rank: int, *, here: Sequence[int], secret: bytes = b"", host: str | None = None
    ) -> None:
        """Bind the sockets and start the threads that accept connections.

        `run`: a name unique to this run on its machine. `here`: the ranks of this node. `secret`: the run's secret, the
        same on all nodes. `host`: the address at which ranks of other nodes reach this one; None: a single node.
        """
        self._run, self._rank, self._here, self._secret = run, rank, here, secret
        self._made = 0
        self._arrived: dict[tuple[int, int], socket.socket] = {}
        self._news = threading.Condition()
        self._handshakes = threading.BoundedSemaphore(_MOST_STRANGERS)
        self.addresses: dict[int, tuple[str, int]] = {}  # (host, port) of each rank of another node
        unix = socket.socket(socket.AF_UNIX)
        try:
            unix.bind(_name(run, rank))
        except OSError as error:
            raise TrainerError(f"another process listens in the place of rank {rank} of this run") from error
        self._listening = [unix]
        if host is not None:
            self._listening.append(socket.create_server((host, 0), family=_family(host)))
        for listening in self._listening:
            listening.listen(1024)
        self._accepting = [
            threading.Thread(target=self._accept, args=(listening,), daemon=True) for listening in self._listening
        ]
        for thread in self._accepting:
            thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) at which the ranks of other nodes reach this one."""
        name = self._listening[-1].getsockname()
        return name[0], name[1]

    def mesh(
        self,
        members: Sequence[int],
        *,
        patience: float,
        within: float,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> Mesh:
        """Connect `members`, which include this rank, to a mesh. All ranks must create meshes in the same order.

        Raises PeerTimeout if they are not connected within `within` seconds. Meanwhile `while_waiting` is called, and
        may raise to give up. `patience`: timeout in seconds of the mesh's operations.
        """
        number, self._made = self._made, self._made + 1
        until, peers = time.monotonic() + within, dict[int, socket.socket]()
        for peer in sorted(members):
            if peer < self._rank:
                peers[peer] = self._dial(peer, number, until=until, while_waiting=while_waiting)
        for peer in members:
            if peer > self._rank:
                peers[peer] = self._take(peer, number, until=until, while_waiting=while_waiting)
        return Mesh(self._rank, peers, patience=patience)

    def close(self) -> None:
        for listening in self._listening:
            listening.shutdown(socket.SHUT_RDWR)  # closing alone would not wake the thread that accepts
            listening.close()
        for thread in self._accepting:
            thread.join()  # the kernel keeps the name while a thread is still inside accept

    def _dial(self, peer: int, number: int, *, until: float, while_waiting: Callable[[], None]) -> socket.socket:
        near = peer in self._here
        while True:
            connection = socket.socket(socket.AF_UNIX if near else _family(self.addresses[peer][0]))
            connection.settimeout(_PATIENCE)
            try:
                connection.connect(_name(self._run, peer) if near else self.addresses[peer])
                self._begin(connection, peer, _HELLO.pack(number, self._rank))
                return connection
            except OSError as error:
                connection.close()
                while_waiting()
                if time.monotonic() > until:
                    raise PeerTimeout([peer]) from error
                time.sleep(_AGAIN)

    def _begin(self, connection: socket.socket, peer: int, hello: bytes) -> None:
        """Send `hello` to a rank that is who it says. A handshake that takes too long raises TimeoutError."""
        if peer not in self._here:
            who = f"rank {peer} at {':'.join(map(str, self.addresses[peer]))}"
            _begin_handshake(connection, hello, self._secret, who)
        elif (user := _user_of(connection)) != os.geteuid():
            raise TrainerError(f"user {user} listens in the place of rank {peer} of this run: nothing is sent there")
        else:
            connection.sendall(hello)

    def _take(self, peer: int, number: int, *, until: float, while_waiting: Callable[[], None]) -> socket.socket:
        while True:
            with self._news:
                if (number, peer) in self._arrived or self._news.wait_for(
                    lambda: (number, peer) in self._arrived, timeout=2 * _AGAIN
                ):
                    return self._arrived.pop((number, peer))
            while_waiting()
            if time.monotonic() > until:
                raise PeerTimeout([peer])

    def _accept(self, listening: socket.socket) -> None:
        near = listening.family == socket.AF_UNIX
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                if listening.fileno() < 0:
                    return
                time.sleep(_AGAIN)  # out of file descriptors: retry
                continue
            if near and _user_of(connection) != os.geteuid():
                connection.close()
            elif self._handshakes.acquire(blocking=False):
                threading.Thread(target=self._admit, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _admit(self, connection: socket.socket) -> None:
        """Do the handshake and keep the connection under its rank; close it if the handshake fails."""
        try:
            connection.settimeout(_PATIENCE)
            near = connection.family == socket.AF_UNIX
            hello = _received(connection, _HELLO.size) if near else _accept_handshake(connection, self._secret)
        except (OSError, ValueError):
            connection.close()
            return
        finally:
            self._handshakes.release()
        with self._news:
            if before := self._arrived.pop(_HELLO.unpack(hello), None):
                before.close()  # the rank gave up its first attempt
            self._arrived[_HELLO.unpack(hello)] = connection
            self._news.notify_all()


def _name(run: str, rank: int) -> str:
    """Return a rank's abstract socket name, which has no file and disappears with the process."""
    return f"\0offload-trainer/{hashlib.sha256(run.encode()).hexdigest()[:32]}/{rank}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _user_of(connection: socket.socket) -> int:
    """Return the user id at the other end of a Unix socket, as recorded by the kernel (SO_PEERCRED)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _received(connection: socket.socket, size: int) -> bytes:
    data, until = bytearray(), time.monotonic() + _PATIENCE
    while len(data) < size:
        connection.settimeout(max(0.001, until - time.monotonic()))
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("closed")
        data += more
    return bytes(data)


def _proof(secret: bytes, role: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, role + b"".join(parts), "sha256")


def _place(name: tuple[object, ...]) -> bytes:
    return f" {name[0]} {name[1]}".encode()


def _accept_handshake(connection: socket.socket, secret: bytes) -> bytes:
    """Accept side of the handshake: verify the dialler's proof, send this end's proof, return the hello.

    Raises ValueError if the dialler does not know the secret.
    """
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ours = secrets.token_bytes(_NONCE)
    connection.sendall(ours)
    theirs, proof, hello = (_received(connection, size) for size in (_NONCE, _PROOF, _HELLO.size))
    signed = ours, theirs, hello, _place(connection.getsockname())
    if not hmac.compare_digest(proof, _proof(secret, b"dials", *signed)):
        raise ValueError("no proof")
    connection.sendall(_proof(secret, b"answers", *signed))
    return hello


def _begin_handshake(connection: socket.socket, hello: bytes, secret: bytes, who: str) -> None:
    """Dial side of the handshake: send this end's proof and verify the other end's.

    Raises HandshakeRefused if the other end rejects the proof or does not know the secret, and TimeoutError if it does
    not answer in time.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        theirs, ours = _received(connection, _NONCE), secrets.token_bytes(_NONCE)
        signed = theirs, ours, hello, _place(connection.getpeername())
        connection.sendall(ours + _proof(secret, b"dials", *signed) + hello)
        proof = _received(connection, _PROOF)
    except TimeoutError:
        raise
    except OSError as error:
        raise HandshakeRefused(f"{who} does not accept this rank's proof that it knows the run's secret") from error
    if not hmac.compare_digest(proof, _proof(secret, b"answers", *signed)):
        raise HandshakeRefused(f"{who} does not prove that it knows the run's secret")


class HandshakeRefused(TrainerError):
    """The two ends of a connection do not have the same secret."""
