"""Ranks of a run: joining them, and collectives (barrier, broadcast, all_gather, all_to_all) of tensors and values.

With a single process most of these functions return immediately. A rank that fails prints its error and exits; the
others see its connections close and exit silently with `LOST`. Values travel as JSON over the connections of `mesh.py`,
never as pickled objects. torch.distributed is set up only for NCCL between GPUs and for DeepSpeed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import PurePath
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from offload_trainer.errors import LOST, RERUN_HINT, PeerFailed, TrainerError, UserError
from offload_trainer.mesh import RUN, UNANSWERED, HandshakeRefused, Listener, Mesh, PeerGone, PeerTimeout
from offload_trainer.safe_files import parsed, shown

T = TypeVar("T")

STALLED = 300  # timeout in seconds of a collective within a step
SECRET = "OFFLOAD_TRAINER_SECRET"  # environment variable: the secret shared by the ranks of all nodes
_SETTING_UP = 86_400.0  # timeout in seconds outside steps: rank 0 may initialize a model or write a checkpoint
_JOINING, _AGAIN = 600.0, 0.1  # timeout until all ranks have started, and polling interval, in seconds
_TELLING, _NOT_COMING = 5.0, "not coming"  # timeout in seconds of the launcher's store, and the key of the note in it
_LATER = 30  # extra seconds before other ranks time out, so that rank 0 does first and names the missing ranks
_LEAST_SECRET = 16  # characters
_INTERFACE = "GLOO_SOCKET_IFNAME"  # environment variable: network interface between the nodes, as for gloo
_NUMBER = struct.Struct("!q")


@dataclass(frozen=True)
class _Joined:
    """This process's rank and its connections to the others."""

    rank: int
    world: int
    listener: Listener
    everybody: Mesh
    store: dist.Store | None  # the launcher's store, if there are several nodes; rank 0 may host it


_joined: _Joined | None = None


# -- joining -----------------------------------------------------------------------------------------------------------


def join() -> None:
    """Connect this process to the other ranks, using the launcher's environment variables.

    On one machine they connect over Unix sockets, which open no network port. SIGTERM has its default action until all
    ranks are connected: torch's store blocks in C++, where a Python handler would not run, and there is nothing to save
    yet. Raises TrainerError if not all ranks connect in time or one has ended, and UserError if the secrets differ.
    """
    global _joined
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    each, until = int(os.environ.get("LOCAL_WORLD_SIZE", world)), time.monotonic() + _JOINING
    several = each < world
    first = rank - int(os.environ["LOCAL_RANK"]) if several else 0
    here = range(first, first + each)
    secret = _secret() if several else b""
    store = _launchers_store() if several else None
    listener = Listener(_run(), rank, here=here, secret=secret, host=_address() if several else None)
    try:
        if store is not None:
            _exchange_addresses(listener, store, rank, world, here=here, until=until)
        everybody = listener.mesh(
            range(world),
            patience=_SETTING_UP,
            within=max(1.0, until - time.monotonic()),
            while_waiting=lambda: _raise_failed_joins(store) if store is not None else None,
        )
        _joined = _Joined(rank, world, listener, everybody, store)
    except PeerTimeout as error:
        at = {rank: ":".join(map(str, listener.addresses.get(rank, ("this node",)))) for rank in error.missing}
        raise TrainerError(f"{_late()}: {error}; {at}") from error
    except HandshakeRefused as error:
        raise UserError(f"{error}: give every node the same {SECRET}") from error
    except RuntimeError as error:  # of the store
        raise TrainerError("the launcher has ended before all ranks have come; its node says why") from error
    finally:
        if _joined is None:
            listener.close()
    signal.signal(signal.SIGTERM, handler)


def _late() -> str:
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    unreached = f", or does not reach {place} ({_INTERFACE} names the network)" if "MASTER_ADDR" in os.environ else ""
    return (
        f"after {_JOINING:g} s not all ranks of the run have come: a rank or node has not been started, has ended with "
        f"a message of its own{unreached}"
    )


def _run() -> str:
    """Return a name that is unique to this run on this machine."""
    names = (RUN, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return os.environ.get(RUN) or " ".join(os.environ.get(name, "") for name in names)


def _launchers_store() -> dist.Store:
    try:
        return _store_of_attempt(timeout=_JOINING)
    except RuntimeError as error:
        raise TrainerError(f"{_late()}: {str(error).splitlines()[0]}") from error


def _exchange_addresses(
    listener: Listener, store: dist.Store, rank: int, world: int, *, here: range, until: float
) -> None:
    """Tell the ranks of other nodes this one's address through the launcher's store, and read theirs.

    The store accepts writes from any process, so its content is not trusted: the peer at each address must prove that
    it knows the secret.
    """
    store.set(_key(rank), " ".join(map(str, listener.address)))
    while (arrived := sum(store.check([_key(other)]) for other in range(world))) < world:
        _raise_failed_joins(store)
        if time.monotonic() > until:
            raise TrainerError(f"{_late()}: {arrived} of {world} are here")
        time.sleep(_AGAIN)
    for other in set(range(world)) - set(here):
        listener.addresses[other] = _parsed_address(store.get(_key(other)), of=other)


def _store_of_attempt(*, timeout: float) -> dist.Store:
    """Connect to the launcher's store, on several nodes; return what belongs to the ranks started together.

    torchrun keeps its store when it restarts the ranks, so the addresses and notes of earlier ranks are still in it.
    """
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _secret() -> bytes:
    """Return the run's secret from the environment. Raises UserError if it is missing or too short."""
    secret = os.environ.get(SECRET, "")
    if len(secret) < _LEAST_SECRET:
        problem = f"has {len(secret)} characters" if secret else "is not set"
        raise UserError(
            f"ranks of several nodes need a secret that they prove to each other: {SECRET} {problem}, and at least "
            f"{_LEAST_SECRET} are needed. Set it to the same on every node: `openssl rand -hex 32` makes one"
        )
    return secret.encode()


def _key(rank: int) -> str:
    return f"offload_trainer/rank {rank}"


def _address() -> str:
    """Return this node's address, as text, on the named interface, else on the route to the first node."""
    if name := os.environ.get(_INTERFACE):
        for address in psutil.net_if_addrs().get(name, ()):
            if address.family == socket.AF_INET:
                return str(address.address)
        raise UserError(f"{_INTERFACE}={name}: no such network with an IPv4 address is here")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        family, kind, _, _, first_node = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sent:
            sent.connect(first_node)  # a UDP connect chooses the route and sends nothing
            return str(sent.getsockname()[0])
    except OSError as error:
        raise TrainerError(f"the address of the first node, {host}, is not to be reached: {error.strerror}") from error


def _parsed_address(address: bytes, *, of: int) -> tuple[str, int]:
    """Parse an address from the store into (host, port). Raises TrainerError for anything else."""
    found = re.fullmatch(r"([0-9a-f.:]{2,45}) ([0-9]{1,5})", address[:64].decode(errors="replace"))
    if not found:
        raise TrainerError(f"the launcher's store gives no address of rank {of}: another program has written to it")
    return found[1], int(found[2])


def _raise_failed_joins(store: dist.Store) -> None:
    """Raise the error that a rank has left in the store because it cannot join, if any."""
    if store.check([_NOT_COMING]):
        node, _, message = store.get(_NOT_COMING)[:10_000].decode(errors="replace").partition(" ")
        known = node == os.environ.get("GROUP_RANK")  # the rank has already printed it on this node
        raise PeerFailed(message, code=LOST) if known else TrainerError(f"node {node} does not come: {message}")


def announce_failed_join(why: str) -> None:
    """Leave a note in the launcher's store that this rank cannot `join`, so that other nodes stop waiting.

    Anyone who can write to the store can leave one and so end the run, and no more: the note is printed only. Does
    nothing after `join`, on a single node, or without a launcher's store.
    """
    several = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < int(os.environ.get("WORLD_SIZE", "1"))
    if _joined or not several or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    with suppress(RuntimeError):  # the node that hosts the store has ended
        _store_of_attempt(timeout=_TELLING).set(_NOT_COMING, f"{os.environ.get('GROUP_RANK')} {why}")


# -- ranks, nodes and groups -------------------------------------------------------------------------------------------


def place_here() -> tuple[int, int]:
    """Return (rank, world size); (0, 1) before `join` and for a single process."""
    return (_joined.rank, _joined.world) if _joined else (0, 1)


def nodes() -> tuple[range, ...]:
    """Return the ranks of each node, from the launcher's LOCAL_RANK; a single node if that is not set. Collective.

    Raises UserError if the nodes have different numbers of ranks: the plan assumes the same state on every node.
    """
    rank, world = place_here()
    if world == 1:
        return (range(1),)
    numbers = all_gather_json(int(os.environ.get("LOCAL_RANK", rank)))
    each = world // max(1, numbers.count(0))
    if numbers != [number % each for number in range(world)]:
        raise UserError(
            f"ranks are not as many on every node: they are number {', '.join(map(str, numbers))} of theirs; start as "
            "many on each (torchrun --nproc-per-node)"
        )
    return tuple(range(first, first + each) for first in range(0, world, each))


def group_of(members: Sequence[Sequence[int]] = (), *, in_step: bool = True, gpus: bool = False) -> Any:
    """Create groups of ranks and return the one that contains this rank; without `members`, one group of all ranks.

    Collective: all ranks call it with the same arguments. `in_step`: use the short timeout of a training step.
    `gpus`: return a NCCL process group, for tensors on GPUs, instead of a Mesh.
    """
    assert _joined is not None
    patience = STALLED + _LATER if in_step else _SETTING_UP
    every = [list(ranks) for ranks in members] or [list(range(_joined.world))]
    if gpus:
        join_torch("nccl")
        return dist.new_subgroups_by_enumeration(every, backend="nccl", timeout=timedelta(seconds=patience))[0]
    ours = next(ranks for ranks in every if _joined.rank in ranks)
    return _joined.listener.mesh(ours, patience=patience, within=_SETTING_UP, while_waiting=_joined.everybody.check)


def end_if_node_vanishes(nodes: Sequence[range], *, say: Callable[[str], None]) -> None:
    """Start a thread that ends this process once another node has not answered for a minute. Collective.

    Without it collectives would wait for a machine that has lost power or network for as long as a step, a start or a
    save may take. The thread runs in each node's first rank. It prints the reason with `say` and exits immediately,
    because the training thread is blocked on the lost node. The launcher then ends the other ranks of this node.
    """

    def watch() -> None:
        for peer, code in mesh.ends():
            if code:
                number, its = next((number, its) for number, its in enumerate(nodes) if peer in its)
                say(
                    f"node {number} (ranks {its.start} to {its.stop - 1}) "
                    + ("has been reset" if code == errno.ECONNRESET else f"has not answered for {UNANSWERED} s")
                    + ", and the run ends. The same command resumes"
                )
                os._exit(1)

    if len(nodes) > 1:
        mesh = group_of([[its[number] for its in nodes] for number in range(len(nodes[0]))], in_step=False)
        if mesh.rank in [its.start for its in nodes]:
            threading.Thread(target=watch, name="nodes", daemon=True).start()


# -- torch.distributed -------------------------------------------------------------------------------------------------


def join_torch(backend: str) -> None:
    """Initialize torch.distributed once, for NCCL or DeepSpeed. Collective.

    On one node the store is a memory file that other users cannot open. With several nodes it is the launcher's
    store, as in any program started by torchrun.
    """
    if dist.is_initialized():
        return
    rank, world = place_here()
    store: dist.Store
    if _joined and _joined.store is not None:
        store = _joined.store
    else:
        store = dist.FileStore(_private_file(), world) if _joined else dist.HashStore()
        for name in (_INTERFACE, "NCCL_SOCKET_IFNAME"):  # keep the sockets of gloo and NCCL on the loopback interface
            os.environ.setdefault(name, "lo")
    limit = timedelta(seconds=_SETTING_UP)
    store.set_timeout(limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)


def _private_file() -> str:
    """Return a path under /proc, valid on every rank, of an unnamed memory file that other users cannot open."""
    own = os.memfd_create("offload-trainer") if place_here()[0] == 0 else -1  # stays open until rank 0 exits
    if own >= 0:
        os.fchmod(own, 0o600)
    process, descriptor = broadcast_json([os.getpid(), own])
    return f"/proc/{process}/fd/{descriptor}"


# -- collectives -------------------------------------------------------------------------------------------------------


@contextmanager
def _as_peer_failure() -> Iterator[None]:
    """Convert an error of torch.distributed into PeerFailed: the rank that ended reports the reason."""
    try:
        yield
    except RuntimeError as error:
        raise PeerGone(str(error).splitlines()[0]) from error


def barrier(*, stalled: float = STALLED) -> None:
    """Block until all ranks have reached the barrier; see `exchange_numbers` for one that does not."""
    if _joined:
        exchange_numbers(0, stalled=stalled, group=_joined.everybody)


def exchange_numbers(number: int, *, stalled: float, group: Mesh) -> list[int]:
    """Return the number of each rank of `group`, which has all ranks, once all have given theirs.

    After `stalled` seconds, rank 0 raises TrainerError that names the missing ranks; the others, which wait longer so
    that rank 0 reports first, raise PeerFailed.
    """
    first = group.rank == 0
    try:
        found = group.all_gather(_NUMBER.pack(number), equal=True, patience=stalled + (0 if first else _LATER))
    except PeerTimeout as error:
        if not first:
            raise
        raise TrainerError(
            f"after {stalled:g} s another rank has not come to where all ranks meet in a step, and the run ends: "
            f"{error}; {RERUN_HINT}"
        ) from error
    return [int(_NUMBER.unpack(one)[0]) for one in found]


def _bytes_of(values: torch.Tensor) -> memoryview:
    """Return the memory of `values` (1-D, contiguous, on the CPU) without copying it."""
    return memoryview(values.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]


def broadcast(values: torch.Tensor, *, source: int, group: Any = None) -> None:
    """Copy `values` (1-D, contiguous) from rank `source` to all ranks of the group, in place."""
    if not _joined or not values.numel():
        return
    group = _joined.everybody if group is None else group
    if not isinstance(group, Mesh):
        with _as_peer_failure():
            dist.broadcast(values.view(torch.uint8), src=source, group=group)
    elif group.rank == source:
        group.exchange([(peer, _bytes_of(values)) for peer in group.others], [])
    else:
        group.exchange([], [(source, _bytes_of(values))])


def all_gather_parts(values: torch.Tensor, number: int, *, group: Any) -> None:
    """All-gather in place: `values` (1-D, contiguous) has one equal part per rank, and part `number` is this rank's.

    On a GPU the operation is queued on the current stream.
    """
    parts = values.view(torch.uint8)
    if isinstance(group, Mesh):
        pieces = parts.chunk(len(group.members))
        _exchange([pieces[number]] * len(pieces), pieces, group=group)
        return
    with _as_peer_failure():
        dist.all_gather_into_tensor(parts, parts.chunk(dist.get_world_size(group))[number], group=group)


def _exchange(out: Sequence[torch.Tensor], into: Sequence[torch.Tensor], *, group: Mesh) -> None:
    """Send `out[i]` to rank i of the group and fill `into[i]` from it; both are 1-D. This rank's own are left alone."""
    others = [(number, peer) for number, peer in enumerate(group.members) if peer != group.rank]
    group.exchange(
        [(peer, _bytes_of(out[number])) for number, peer in others],
        [(peer, _bytes_of(into[number])) for number, peer in others],
    )


def all_to_all(parts: torch.Tensor, *, group: Any) -> torch.Tensor:
    """Send `parts[i]` to rank i of the group; return a tensor of the same shape whose part i came from rank i.

    `parts` must be contiguous. On a GPU the operation is queued on the current stream.
    """
    received = torch.empty_like(parts)
    if isinstance(group, Mesh):
        mine = group.members.index(group.rank)
        received[mine] = parts[mine]
        _exchange(list(parts.flatten(1)), list(received.flatten(1)), group=group)
        return received
    with _as_peer_failure():
        dist.all_to_all_single(received.view(-1).view(torch.uint8), parts.view(-1).view(torch.uint8), group=group)
    return received


def send_recv(
    out: Sequence[tuple[int, torch.Tensor]], into: Sequence[tuple[int, torch.Tensor]], *, group: Mesh
) -> Callable[[], None]:
    """Start sending the tensors of `out` and receiving into those of `into`; return a function that waits for all.

    Each entry is (rank, tensor), the tensor 1-D, contiguous and on the CPU. Between two ranks tensors arrive in the
    order in which they are sent. Empty tensors are skipped.
    """
    parts = ([(rank, _bytes_of(values)) for rank, values in way if values.numel()] for way in (out, into))
    return group.begin(*parts).result


def all_reduce(values: torch.Tensor, *, group: Mesh) -> None:
    """All-reduce `values` (on the CPU) in place by summation; exact if at most one rank has a nonzero per element."""
    gathered = torch.empty((len(group.members), values.numel()), dtype=values.dtype)
    mine = group.members.index(group.rank)
    gathered[mine] = values.reshape(-1)
    all_gather_parts(gathered.view(-1), mine, group=group)
    values.copy_(gathered.sum(0).reshape(values.shape))


def _encode(value: Any) -> bytes:
    """Encode a value of plain types, paths and dataclasses of those as JSON."""
    return json.dumps(value, default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    return {one.name: getattr(value, one.name) for one in fields(value)}


def _decode(data: bytes, kind: Any) -> Any:
    try:
        return parsed(data, kind)
    except ValueError as error:
        raise TrainerError(f"another rank has told what this one cannot read: {shown(str(error))}") from error


@dataclass(frozen=True)
class Group:
    """Ranks that perform work together and share its errors: all ranks over one mesh, or this process alone.

    Only one thread may use a group at a time, since the mesh allows no more.
    """

    rank: int = 0
    mesh: Mesh | None = None  # None: this process alone

    def some(self, work: Callable[[], object], *, mine: bool) -> None:
        """Do `work` on the ranks where `mine` is true. If it fails on one of them, all ranks raise."""

        def maybe() -> None:
            if mine:
                work()

        self.each(maybe)

    def first(self, work: Callable[[], object]) -> None:
        """Do `work` on rank 0 only. If it fails, all ranks raise."""
        self.some(work, mine=self.rank == 0)

    def each(self, work: Callable[[], T], kind: Any = Any) -> list[T]:
        """Do `work` on every rank; return all results, of type `kind`, in the order of ranks.

        If it fails on one rank, all ranks raise.
        """
        failed: Exception | None = None
        mine: list[T] = []
        try:
            mine.append(work())
        except Exception as error:
            failed = error
        code = getattr(failed, "exit_code", LOST)
        results = _gathered([code, shown(str(failed or "")), mine], self.mesh, tuple[int, str, list[kind]])
        if failed is not None:
            raise failed
        for code, message, values in results:
            if not values:
                raise PeerFailed(message, code=code)
        return [value for _, _, (value,) in results]


ALONE = Group()


def everybody() -> Group:
    """Return the group of all ranks for use in the training thread."""
    return Group(_joined.rank, _joined.everybody) if _joined else ALONE


def new_group() -> Group:
    """Return a new group of all ranks for use in one background thread. Collective, called in the training thread."""
    return Group(_joined.rank, group_of(in_step=False)) if _joined else ALONE


def on_rank_zero(work: Callable[[], object]) -> None:
    """Do `work` on rank 0 only. If it fails, all ranks raise."""
    everybody().first(work)


def from_rank_zero(work: Callable[[], T], kind: Any = Any) -> T:
    """Do `work` on rank 0 only and return its result, of type `kind`, on every rank. If it fails, all ranks raise."""
    group = everybody()
    return group.each(lambda: [work()] if group.rank == 0 else [], list[kind])[0][0]


def on_some(work: Callable[[], object], *, mine: bool) -> None:
    """Do `work` on the ranks where `mine` is true. If it fails on one of them, all ranks raise."""
    everybody().some(work, mine=mine)


def rank_zero_first(work: Callable[[], T]) -> T:
    """Do `work` on rank 0, then on the first rank of every other node, then on every rank; return this rank's result.

    `work` must be idempotent: later ranks find the files of earlier ones, if they share the directory.
    """
    if _joined:
        on_rank_zero(work)
        rank, each = place_here()[0], len(nodes()[0])
        on_some(work, mine=rank > 0 and rank % each == 0)
    return work()


def broadcast_json(value: Any, kind: Any = Any, *, source: int = 0, group: Mesh | None = None) -> Any:
    """Broadcast the value of rank `source` to a group (None: all ranks), as JSON validated against the type `kind`."""
    group = group or everybody().mesh
    if group is None:
        return value
    found = group.all_gather(_encode(value) if group.rank == source else b"")
    return _decode(found[group.members.index(source)], kind)


def all_gather_json(value: Any, kind: Any = Any) -> list[Any]:
    """Return every rank's value in the order of ranks, as JSON validated against the type `kind`."""
    return _gathered(value, everybody().mesh, kind)


def _gathered(value: Any, mesh: Mesh | None, kind: Any) -> list[Any]:
    return [_decode(data, kind) for data in mesh.all_gather(_encode(value))] if mesh else [value]


def wait_for_all(*, group: Mesh | None = None) -> None:
    """Block until all ranks of the group (None: all ranks) have called this."""
    if mesh := group or everybody().mesh:
        mesh.all_gather(b"\0", equal=True)
