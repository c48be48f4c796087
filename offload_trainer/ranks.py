"""The other processes of a run: agreeing on values, waiting for each other. With one process all of it is free.

A rank that fails tells why and ends; the others find its connections closed, and end with `LOST` and without a word.
What ranks tell each other is JSON over connections of their own (`offload_trainer/mesh.py`), never pickled objects.
torch.distributed is set up only for what needs it: NCCL between GPUs, and DeepSpeed.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from hmac import compare_digest, digest
from pathlib import PurePath
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from offload_trainer.errors import AGAIN, LOST, PeerFailed, TrainerError, UserError
from offload_trainer.mesh import RUN, HandshakeRefused, Listener, Mesh, PeerTimeout
from offload_trainer.safe_files import parsed, shown

T = TypeVar("T")

STALLED = 300  # seconds that ranks wait for each other within a step
SECRET = "OFFLOAD_TRAINER_SECRET"  # in the environment: what the ranks of all nodes know, and nobody else
_SETTING_UP = 86_400.0  # seconds, while rank 0 draws a model or writes a checkpoint; a death is noticed within seconds
_JOINING, _AGAIN = 600.0, 0.1  # seconds until all have imported what they need and come; between two looks
_TELLING, _NOT_COMING = 5.0, "not coming"  # seconds to reach the launcher's store; a key there
_LATER = 30  # seconds: rank 0 can name who is missing, and is the first to give up
_LEAST_SECRET = 16  # characters
_INTERFACE = "GLOO_SOCKET_IFNAME"  # in the environment: which network the nodes use, as gloo's users name it
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True)
class _Joined:
    """This process among the ranks of its run."""

    rank: int
    world: int
    here: range  # the ranks of this node
    listener: Listener
    everybody: Mesh
    store: dist.Store | None  # the launcher's, of several nodes; rank 0 may be the one that keeps it


_joined: _Joined | None = None


# -- joining -----------------------------------------------------------------------------------------------------------


def join() -> None:
    """Become one of the ranks that the launcher has started, as its environment says.

    SIGTERM ends the process until all have come: Python would not get to run in torch's store, and there is nothing to
    save.
    """
    global _joined
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    each = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    first = 0 if each == world else rank - int(os.environ["LOCAL_RANK"])
    here = range(first, first + each)
    barrier = _meet_on_one_node if each == world else _meet_on_several
    _joined = _Joined(rank, world, here, *barrier(rank, world, here))
    signal.signal(signal.SIGTERM, handler)


def leave() -> None:
    """Be a process alone again."""
    global _joined
    if _joined is not None:
        _joined.everybody.close()
        _joined.listener.close()
    _joined = None


def _run() -> str:
    """Return a name that this run alone has on this machine."""
    names = (RUN, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return os.environ.get(RUN) or " ".join(os.environ.get(name, "") for name in names)


@contextmanager
def _listening(rank: int, here: range, *, secret: bytes = b"", host: str | None = None) -> Iterator[Listener]:
    """A listener that is closed where something goes wrong inside."""
    listener = Listener(_run(), rank, here=here, secret=secret, host=host)
    try:
        yield listener
    except BaseException:
        listener.close()
        raise


def _meet_on_one_node(rank: int, world: int, here: range) -> tuple[Listener, Mesh, None]:
    """Connect the ranks of this machine, with nothing that others can open."""
    with _listening(rank, here) as listener:
        try:
            return listener, listener.mesh(range(world), patience=_SETTING_UP, within=_JOINING), None
        except PeerTimeout as error:
            told = f"after {_JOINING:g} s not all ranks of the run have come: {error}"
            raise TrainerError(f"{told}; the launcher, or that rank, says why") from error


def _meet_on_several(rank: int, world: int, here: range) -> tuple[Listener, Mesh, dist.Store]:
    """Connect the ranks of all nodes, which find each other's addresses in the launcher's store.

    Anybody can write there, so nothing of it is trusted: whoever is at an address has to prove that it knows the
    secret. TrainerError where not all have come in time, where one has ended, or where secrets differ.
    """
    secret, until = _secret(), time.monotonic() + _JOINING
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    why = (
        f"after {_JOINING:g} s not all ranks of the run have come to {place}: a node has not been started, has ended "
        f"with a message of its own, or does not reach that address ({_INTERFACE} names the network)"
    )
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=_JOINING)))
    except RuntimeError as error:
        raise TrainerError(f"{why}: {str(error).splitlines()[0]}") from error

    def look() -> None:
        _look_for_notes(store, secret)

    with _listening(rank, here, secret=secret, host=_address()) as listener:
        try:
            store.set(_key(rank), " ".join(map(str, listener.address)))
            while (come := sum(store.check([_key(other)]) for other in range(world))) < world:
                look()
                if time.monotonic() > until:
                    raise TrainerError(f"{why}: {come} of {world} are here")
                time.sleep(_AGAIN)
            for other in set(range(world)) - set(here):
                listener.addresses[other] = _parsed_address(store.get(_key(other)), of=other)
            left = max(1.0, until - time.monotonic())
            return listener, listener.mesh(range(world), patience=_SETTING_UP, within=left, look=look), store
        except PeerTimeout as error:
            at = {rank: ":".join(map(str, listener.addresses.get(rank, ("this node",)))) for rank in error.missing}
            raise TrainerError(f"{why}: {error}; {at}") from error
        except HandshakeRefused as error:
            raise UserError(f"{error}: give every node the same {SECRET}") from error
        except RuntimeError as error:
            ended = f"the launcher at {place} has ended before all ranks have come; its node says why"
            raise TrainerError(ended) from error


def _secret() -> bytes:
    """Return what this run's nodes prove to each other that they know. UserError where there is none."""
    secret = os.environ.get(SECRET, "")
    if len(secret) < _LEAST_SECRET:
        told = f"has {len(secret)} characters" if secret else "is not set"
        raise UserError(
            f"ranks of several nodes need a secret that they prove to each other: {SECRET} {told}, and at least "
            f"{_LEAST_SECRET} are needed. Set it to the same on every node: `openssl rand -hex 32` makes one"
        )
    return secret.encode()


def _key(rank: int) -> str:
    return f"offload_trainer/rank {rank}"


def _address() -> str:
    """Return this node's address, as text, in the network that leads to the first node's or that is named."""
    if name := os.environ.get(_INTERFACE):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            try:
                told = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError as error:
                raise UserError(f"{_INTERFACE}={name}: no such network with an IPv4 address is here") from error
            return socket.inet_ntoa(told[20:24])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sent:
            sent.connect(address)  # nothing is sent
            return str(sent.getsockname()[0])
    except OSError as error:
        raise TrainerError(f"the address of the first node, {host}, is not to be reached: {error.strerror}") from error


def _parsed_address(told: bytes, *, of: int) -> tuple[str, int]:
    """Return (host, port) of what the store says, which anybody may have written there."""
    found = re.fullmatch(r"([0-9a-f.:]{2,45}) ([0-9]{1,5})", told[:64].decode(errors="replace"))
    if not found:
        raise TrainerError(f"the launcher's store gives no address of rank {of}: another program has written to it")
    return found[1], int(found[2])


def _look_for_notes(store: dist.Store, secret: bytes) -> None:
    """Raise what a rank that does not come has told of itself."""
    if not store.check([_NOT_COMING]):
        return
    proof, _, note = store.get(_NOT_COMING)[:10_000].partition(b" ")
    if not compare_digest(proof, _sign(note, secret)):
        raise UserError(
            "a rank does not come, and its note is not signed with this run's secret: give every node the same "
            f"{SECRET}"
        )
    node, _, told = note.decode().partition(" ")
    known = node == os.environ.get("GROUP_RANK")  # said on this node, by the rank itself
    raise PeerFailed(told, code=LOST) if known else TrainerError(f"node {node} does not come: {told}")


def _sign(note: bytes, secret: bytes) -> bytes:
    return digest(secret, b"note " + note, "sha256").hex().encode()


def tell_not_coming(why: str) -> None:
    """To ranks of other nodes, which wait for this one to `join`; where there is a launcher's store to tell it by."""
    several = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < int(os.environ.get("WORLD_SIZE", "1"))
    if _joined or not several or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    note = f"{os.environ.get('GROUP_RANK')} {why}".encode()
    with suppress(RuntimeError):  # their node has ended
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=_TELLING)))
        store.set(_NOT_COMING, _sign(note, os.environ.get(SECRET, "").encode()) + b" " + note)


# -- who is there ------------------------------------------------------------------------------------------------------


def place_here() -> tuple[int, int]:
    """(rank, world); (0, 1) where no ranks have been joined."""
    return (_joined.rank, _joined.world) if _joined else (0, 1)


def nodes() -> tuple[range, ...]:
    """The ranks of each node, as the launcher has counted them there; one node where it does not say. All ranks call.

    UserError where they are not as many on each: each node holds the state of its ranks, and plans for as much.
    """
    rank, world = place_here()
    if world == 1:
        return (range(1),)
    told = all_gather_object(int(os.environ.get("LOCAL_RANK", rank)))
    each = world // max(1, told.count(0))
    if told != [number % each for number in range(world)]:
        raise UserError(
            f"ranks are not as many on every node: they are number {', '.join(map(str, told))} of theirs; start as "
            "many on each (torchrun --nproc-per-node)"
        )
    return tuple(range(first, first + each) for first in range(0, world, each))


def group_of(members: Sequence[Sequence[int]] = (), *, in_step: bool = True, gpus: bool = False) -> Any:
    """Return the one of several groups of ranks that this rank is in, or one of all. All ranks call, alike.

    `in_step`: what is sent there is sent within a step, and not waited for as long as a start. `gpus`: over NCCL, for
    what is on GPUs.
    """
    assert _joined is not None
    patience = STALLED + _LATER if in_step else _SETTING_UP
    if gpus:
        join_torch("nccl")
        every = [list(ranks) for ranks in members] or [list(range(_joined.world))]
        limit = timedelta(seconds=patience)
        return dist.new_subgroups_by_enumeration(every, backend="nccl", timeout=limit)[0]
    every = [list(ranks) for ranks in members] or [list(range(_joined.world))]
    return _mesh_of(next(ranks for ranks in every if _joined.rank in ranks), patience=patience)


def _mesh_of(members: Sequence[int], *, patience: float) -> Mesh:
    assert _joined is not None
    with _noticing():
        return _joined.listener.mesh(members, patience=patience, within=_SETTING_UP, look=_joined.everybody.check)


# -- torch.distributed -------------------------------------------------------------------------------------------------


def launchers_store(*, timeout: float) -> dist.Store:
    """Return the store of a run of several nodes, over a connection of its own. Anybody may read and write there."""
    assert _joined is not None
    assert _joined.store is not None
    store: dist.Store = _joined.store.clone()  # type: ignore[attr-defined]  # not in its stub
    store.set_timeout(timedelta(seconds=timeout))
    return store


def join_torch(backend: str) -> None:
    """Set up torch.distributed, once, for what moves tensors itself: NCCL, DeepSpeed. All ranks call it.

    On one node its store is memory that only these processes can open. Between nodes it is the launcher's, as it is to
    every program that torchrun starts.
    """
    if dist.is_initialized():
        return
    rank, world = place_here()
    store: dist.Store
    if _joined is not None and len(_joined.here) < world:
        store = launchers_store(timeout=_JOINING)
    else:
        store = dist.FileStore(_private_file(), world) if _joined else dist.HashStore()
        for name in (_INTERFACE, "NCCL_SOCKET_IFNAME"):  # what gloo and NCCL open is on the loopback
            os.environ.setdefault(name, "lo")
    limit = timedelta(seconds=_SETTING_UP)
    store.set_timeout(limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)


def _private_file() -> str:
    """Return the path, on every rank, of a file that has no name and that no other user can open."""
    own = os.memfd_create("offload-trainer") if place_here()[0] == 0 else -1  # open as long as rank 0 lives
    if own >= 0:
        os.fchmod(own, 0o600)
    process, descriptor = broadcast_object([os.getpid(), own])
    return f"/proc/{process}/fd/{descriptor}"


# -- together ----------------------------------------------------------------------------------------------------------


@contextmanager
def _noticing() -> Iterator[None]:
    """What is raised where another rank is gone becomes Elsewhere, since that one has told why."""
    try:
        yield
    except RuntimeError as error:
        raise PeerFailed(f"another rank has ended: {str(error).splitlines()[0]}", code=LOST) from error


def barrier(*, stalled: float = STALLED) -> None:
    """Return once all ranks are here. TrainerError on rank 0, which names the one that is not after so many seconds."""
    if _joined:
        with naming_the_late(stalled):
            _joined.everybody.barrier(patience=patience_in_step(stalled))


def patience_in_step(stalled: float) -> float:
    """Return the seconds that this rank waits for the others: rank 0 is the first to give up, and says why."""
    return stalled + (0 if place_here()[0] == 0 else _LATER)


@contextmanager
def naming_the_late(stalled: float) -> Iterator[None]:
    """Raise TrainerError on rank 0, which names who has not come in time, and Elsewhere where another rank has gone."""
    try:
        with _noticing():
            yield
    except PeerFailed as error:
        if isinstance(error.__cause__, PeerTimeout) and place_here()[0] == 0:
            raise TrainerError(
                f"after {stalled:g} s another rank has not come to where all ranks meet in a step, and the run ends: "
                f"{error.__cause__}; {AGAIN}"
            ) from error
        raise


def _bytes_of(values: torch.Tensor) -> memoryview:
    """Return the memory of `values` (1-D, contiguous, on the CPU)."""
    return memoryview(values.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]


def broadcast(values: torch.Tensor, *, source: int, group: Any = None) -> None:
    """Fill `values` (1-D, contiguous) with what they are on rank `source`."""
    if not _joined or not values.numel():
        return
    group = _joined.everybody if group is None else group
    with _noticing():
        if not isinstance(group, Mesh):
            dist.broadcast(values.view(torch.uint8), src=source, group=group)
        elif group.rank == source:
            group.exchange([(peer, _bytes_of(values)) for peer in group.others], [])
        else:
            group.exchange([], [(source, _bytes_of(values))])


def join_parts(values: torch.Tensor, number: int, *, group: Any) -> None:
    """Fill `values` (1-D, contiguous) with equal parts, of which each rank of the group has its `number`'s in place.

    On a GPU it is queued on the current stream.
    """
    parts = values.view(torch.uint8)
    with _noticing():
        if not isinstance(group, Mesh):
            mine = parts.chunk(dist.get_world_size(group))[number]
            dist.all_gather_into_tensor(parts, mine, group=group)
            return
        pieces = dict(zip(group.members, parts.chunk(len(group.members)), strict=True))
        own = _bytes_of(pieces[group.rank])
        group.exchange([(peer, own) for peer in group.others], [(p, _bytes_of(pieces[p])) for p in group.others])


def all_to_all(parts: torch.Tensor, *, group: Any) -> torch.Tensor:
    """Send part i (contiguous, one for each rank of the group) to its rank i; returns what came of rank i as part i.

    On a GPU it is queued on the current stream.
    """
    come = torch.empty_like(parts)
    with _noticing():
        if not isinstance(group, Mesh):
            dist.all_to_all_single(come.view(-1).view(torch.uint8), parts.view(-1).view(torch.uint8), group=group)
            return come
        out = {member: parts[number].view(-1) for number, member in enumerate(group.members)}
        into = {member: come[number].view(-1) for number, member in enumerate(group.members)}
        into[group.rank].copy_(out[group.rank])
        group.exchange(
            [(peer, _bytes_of(out[peer])) for peer in group.others],
            [(peer, _bytes_of(into[peer])) for peer in group.others],
        )
    return come


def send_recv(
    out: Sequence[tuple[int, torch.Tensor]], into: Sequence[tuple[int, torch.Tensor]], *, group: Mesh
) -> Callable[[], None]:
    """Begin to send each of `out` to its rank, and to fill each of `into` from its; what is given waits for all of it.

    1-D, contiguous, on the CPU. Between two ranks they arrive in the order in which they are sent, those of no elements
    not at all.
    """
    parts = ([(rank, _bytes_of(values)) for rank, values in way if values.numel()] for way in (out, into))
    begun = group.begin(*parts)

    def wait() -> None:
        with _noticing():
            begun.result()

    return wait


def add_up(values: torch.Tensor, *, group: Mesh) -> None:
    """Set `values` (on the CPU) to the sum over all ranks: exact where at most one of them has another than 0."""
    told = torch.empty((len(group.members), values.numel()), dtype=values.dtype)
    mine = group.members.index(group.rank)
    told[mine] = values.reshape(-1)
    with _noticing():
        group.exchange(
            [(peer, _bytes_of(told[mine])) for peer in group.others],
            [(peer, _bytes_of(told[number])) for number, peer in enumerate(group.members) if peer != group.rank],
        )
    values.copy_(told.sum(0).reshape(values.shape))


def share(value: Any, *, source: int, group: Mesh | None, kind: Any = Any) -> Any:
    """Return the value of rank `source`, on every rank of a group (None: of all): JSON, read back as a `kind`."""
    group = _joined.everybody if _joined and group is None else group
    if group is None:
        return value
    with _noticing():
        return _read(group.broadcast(_told(value) if group.rank == source else b"", source=source), kind)


def _told(value: Any) -> bytes:
    """Return a value as JSON: of plain kinds, paths, and dataclasses of those."""
    return json.dumps(value, default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    return {one.name: getattr(value, one.name) for one in fields(value)}


def _read(told: bytes, kind: Any) -> Any:
    try:
        return parsed(told, kind, finite=False)
    except ValueError as error:
        raise TrainerError(f"another rank has told what this one cannot read: {shown(str(error))}") from error


@dataclass(frozen=True)
class Group:
    """Who does something together: all ranks, over connections that only one thread uses; or this process alone."""

    rank: int = 0
    mesh: Mesh | None = None  # None: alone

    def first(self, work: Callable[[], object]) -> None:
        """Do `work` on rank 0 only. A failure there is every rank's failure."""
        failed: Exception | None = None
        if self.rank == 0:
            try:
                work()
            except Exception as error:
                failed = error
        told = share(_failure(failed), source=0, group=self.mesh) if self.mesh else None
        if failed is not None:
            raise failed
        _raise_elsewhere([told])

    def each(self, work: Callable[[], T], kind: Any = Any) -> list[T]:
        """Do `work` on every rank; return what each made of it, a `kind`, in their order.

        A failure of one is every rank's.
        """
        failed: Exception | None = None
        mine: list[T] = []
        try:
            mine.append(work())
        except Exception as error:
            failed = error
        told = _gathered([_failure(failed), mine], self.mesh, tuple[Any, list[kind]])
        if failed is not None:
            raise failed
        _raise_elsewhere([wrong for wrong, _ in told])
        return [value for _, values in told for value in values]


def _failure(failed: Exception | None) -> list[Any] | None:
    """Return what other ranks are told of a failure: its exit code and its words."""
    return None if failed is None else [getattr(failed, "exit_code", LOST), str(failed)]


def _raise_elsewhere(told: Sequence[Sequence[Any] | None]) -> None:
    for wrong in told:
        if wrong is not None:
            raise PeerFailed(wrong[1], code=wrong[0])


ALONE = Group()


def everybody() -> Group:
    """All ranks, in the thread that trains."""
    return Group(_joined.rank, _joined.everybody) if _joined else ALONE


def new_group() -> Group:
    """All ranks, for one thread beside the one that trains. All ranks call it, in the thread that trains."""
    return Group(_joined.rank, group_of(in_step=False)) if _joined else ALONE


def on_rank_zero(work: Callable[[], object]) -> None:
    """Do `work` on rank 0 only. A failure there is every rank's failure."""
    everybody().first(work)


def on_some(work: Callable[[], object], *, mine: bool) -> None:
    """Do `work` on the ranks of which it is `mine`. A failure on one is every rank's failure."""

    def maybe() -> None:
        if mine:
            work()

    everybody().each(maybe)


def rank_zero_first(work: Callable[[], T]) -> T:
    """Do `work` on rank 0, then on the first of each other node, then on the rest: they find done what it leaves.

    Or half done, where nodes have no such directory in common.
    """
    if _joined:
        on_rank_zero(work)
        rank, each = place_here()[0], len(nodes()[0])
        on_some(work, mine=rank > 0 and rank % each == 0)
    return work()


def broadcast_object(value: Any, kind: Any = Any) -> Any:
    """Return rank 0's value, on every rank: JSON, read back as a `kind`."""
    return share(value, source=0, group=None, kind=kind)


def all_gather_object(value: Any, kind: Any = Any) -> list[Any]:
    """Return every rank's value, in the order of ranks, on every rank: JSON, read back as a `kind`."""
    return _gathered(value, everybody().mesh, kind)


def _gathered(value: Any, mesh: Mesh | None, kind: Any) -> list[Any]:
    if mesh is None:
        return [value]
    with _noticing():
        return [_read(told, kind) for told in mesh.all_gather(_told(value))]


def wait_for_all(*, group: Mesh | None = None) -> None:
    if _joined:
        with _noticing():
            (group or _joined.everybody).barrier()
