"""Ranks of a run: joining them, and collectives (barrier, broadcast, all_gather) of tensors and values.

With a single process most of these functions return immediately. A rank that fails prints its error and exits; the
others see its connections close and exit silently with `LOST`. Tensors in host memory travel by gloo, those on GPUs by
NCCL, and values as JSON, never as pickled objects. gloo takes a message that is shorter than expected without an error,
so each message is tagged with its size, and one of another size is not received.
"""

import atexit
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from pydantic_core import to_json
from torch.distributed.rendezvous import rendezvous

from offload_trainer.common.errors import LOST, RERUN_HINT, STORE, PeerFailed, TrainerError, UserError
from offload_trainer.common.safe_files import parsed, quoted

T = TypeVar("T")
Addressed = Sequence[tuple[int, torch.Tensor]]  # (rank, 1-D and contiguous, on the CPU)

STALLED = 300  # timeout in seconds of a collective within a step
UNANSWERED = 50  # seconds until a rank that does not answer, in a step or not, counts as lost
_SETTING_UP = 86_400.0  # timeout in seconds outside steps: rank 0 may initialize a model or write a checkpoint
_JOINING, _AGAIN = 600.0, 0.1  # timeout until all ranks have started, and polling interval, in seconds
_ENDING = 5.0  # seconds that a process waits at its end for threads inside gloo
_LATER = 30  # extra seconds before other ranks time out, so that rank 0 does first and names the missing ranks
_BEAT = 5.0  # seconds between two exchanges of the threads that watch the other ranks
_GONE = 30.0  # seconds after which a wait counts as endless once a rank has ended
_INTERFACE = "GLOO_SOCKET_IFNAME"  # environment variable: network interface between the nodes, as for gloo
_ABSENT = torch.iinfo(torch.int64).min  # stands for a number that has not arrived
_MOST_BYTES = 1 << 30  # largest message whose size the sender chooses
_TAGS = 1 << 31  # gloo takes smaller tags
_NO_LAUNCHER = "the launcher has ended before all ranks have come; its node says why"


class PeerGone(PeerFailed):
    """Another rank has ended, or sends something else than this one expects."""

    def __init__(self, message: str) -> None:
        super().__init__(f"another rank has ended: {message}", code=LOST)


class PeerTimeout(PeerFailed):
    """Ranks, listed in `missing`, have not reached the operation in time."""

    def __init__(self, missing: Sequence[int]) -> None:
        self.missing = tuple(missing)
        super().__init__(f"{', '.join(f'Rank {rank}' for rank in missing)} failed to come", code=LOST)


# -- groups of ranks ---------------------------------------------------------------------------------------------------


@contextmanager
def _as_peer_failure() -> Iterator[None]:
    """Convert an error of torch.distributed, but not of this rank's GPU, into PeerFailed."""
    try:
        yield
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        raise PeerGone(str(error).splitlines()[0]) from error


@contextmanager
def _inside_gloo() -> Iterator[float]:
    """Note that this thread is inside gloo, since the time that is returned, and convert errors into PeerFailed."""
    _inside[threading.get_ident()] = begun = time.monotonic()
    try:
        if _closed.is_set():
            raise PeerGone("this rank ends")
        with _as_peer_failure():
            yield begun
    finally:
        del _inside[threading.get_ident()]


@dataclass(frozen=True)
class Group:
    """Ranks that work together over connections of gloo, for one thread of each; by default this process alone.

    A group is of no more use once an operation has failed. It only sends and receives: gloo's collectives run on
    threads that its end would wait for.
    """

    rank: int = 0
    members: tuple[int, ...] = (0,)
    gloo: Any = None  # a ProcessGroupGloo
    patience: float = 0.0  # timeout in seconds of an operation

    @property
    def number(self) -> int:
        """Return the position of this rank among the members."""
        return self.members.index(self.rank)

    def begin(self, out: Addressed, into: Addressed) -> Callable[..., None]:
        """Start sending each of `out` to its rank and filling each of `into` from its rank.

        Return a function that waits for all of it, for at most `patience` seconds. Between two ranks tensors arrive in
        the order in which they are sent. Empty tensors are not sent.
        """
        moves = [
            (move, self.members.index(peer), values.detach().view(torch.uint8))
            for move, way in ((self.gloo.send, out), (self.gloo.recv, into))
            for peer, values in way
        ]
        with _inside_gloo():
            works = [move([part], peer, part.numel() % _TAGS) for move, peer, part in moves if part.numel()]

        def wait(patience: float | None = None) -> None:
            with _inside_gloo() as begun:
                until = begun + (patience or self.patience)
                for work in works:
                    work.wait(timedelta(seconds=max(0.001, until - time.monotonic())))

        return wait

    def exchange(
        self, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor], *, patience: float | None = None
    ) -> None:
        """Send `out[i]` to member i and fill `into[i]` from it; both are 1-D. This rank's own are left alone."""
        others = [(number, peer) for number, peer in enumerate(self.members) if peer != self.rank]
        self.begin([(peer, out[n]) for n, peer in others], [(peer, into[n]) for n, peer in others])(patience)

    def all_gather_numbers(self, number: int, *, patience: float | None = None) -> list[int]:
        """Return every member's number. Raises PeerTimeout with the ranks that have not given theirs in time."""
        if len(self.members) == 1:
            return [number]
        late = time.monotonic() + (patience or self.patience) - 0.1  # gloo may stop waiting a little early
        numbers = torch.full((len(self.members),), _ABSENT)
        numbers[self.number] = number
        parts = numbers.split(1)
        try:
            self.exchange([parts[self.number]] * len(parts), parts, patience=patience)
        except PeerGone as error:
            missing = [rank for rank, given in zip(self.members, numbers.tolist(), strict=True) if given == _ABSENT]
            if time.monotonic() < late or not missing:
                raise
            raise PeerTimeout(missing) from error
        return numbers.tolist()

    def some(self, work: Callable[[], object], *, mine: bool) -> None:
        """Do `work` on the ranks where `mine` is true. If it fails on one of them, all ranks raise."""
        self.each(lambda: mine and work() is None)  # a bool, since results travel as JSON

    def first(self, work: Callable[[], object]) -> None:
        """Do `work` on rank 0 only. If it fails, all ranks raise."""
        self.some(work, mine=self.rank == 0)

    def each(self, work: Callable[[], T], kind: Any = Any) -> list[T]:
        """Do `work` on every rank; return all results, of type `kind`, in their order. If one fails, all raise."""
        failed: Exception | None = None
        mine: list[T] = []
        try:
            mine.append(work())
        except Exception as error:
            failed = error
        code = getattr(failed, "exit_code", LOST)
        results = self.all_gather_json([code, quoted(str(failed or "")), mine], tuple[int, str, list[kind]])
        if failed is not None:
            raise failed
        for code, message, values in results:
            if not values:
                raise PeerFailed(message, code=code)
        return [value for _, _, (value,) in results]

    def all_gather_json(self, value: Any, kind: Any = Any) -> list[Any]:
        """Return every member's value, of plain types, paths and dataclasses, as JSON validated against `kind`."""
        if len(self.members) == 1:
            return [value]
        data = to_json(value)
        sizes = self.all_gather_numbers(len(data))
        if max(sizes) > _MOST_BYTES or min(sizes) < 0:
            raise PeerGone(f"messages of {sizes} bytes, and at most {_MOST_BYTES} are taken")
        found = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        found[self.number].numpy().data[:] = data
        self.exchange([found[self.number]] * len(found), found)
        return [_decode(values.numpy().tobytes(), kind) for values in found]


_groups = WeakSet[Group]()  # groups that this process has created
_names = count()  # names of groups; all ranks create theirs in the same order
_inside: dict[int, float] = {}  # the threads that are inside gloo, and when they have entered it
_closed = threading.Event()  # set once no thread may enter gloo
_watching: list[threading.Thread] = []  # the thread of `end_if_rank_vanishes`, if any


@atexit.register
def _close_all() -> None:
    """Get side threads out of gloo: one that leaves C++ while the interpreter ends would abort the process."""
    _closed.set()  # a thread notes that it is inside before it looks here
    for group in list(_groups):  # gloo closes all its connections after a wait that was too long
        peer = (group.number + 1) % len(group.members)
        with suppress(RuntimeError):
            if peer != group.number:
                group.gloo.recv([torch.empty(1)], peer, _TAGS - 1).wait(timedelta(milliseconds=1))
    for thread in _watching:
        thread.join(_ENDING)
    until = time.monotonic() + _ENDING
    while _inside and time.monotonic() < until:
        time.sleep(0.001)


ALONE = Group()
_everybody = ALONE  # the group of all ranks after `join`, for the training thread
_store: dist.Store | None = None  # after `join`: the store through which ranks find each other


# -- joining -----------------------------------------------------------------------------------------------------------


def join() -> None:
    """Connect this process to the other ranks, using the launcher's environment variables.

    On one machine they connect over the loopback interface. SIGTERM has its default action until all ranks are
    connected: torch's store blocks in C++, where a Python handler would not run, and there is nothing to save yet.
    Raises TrainerError if not all ranks connect in time or one has ended.
    """
    global _everybody, _store
    handler, begun = signal.signal(signal.SIGTERM, signal.SIG_DFL), time.monotonic()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if int(os.environ.get("LOCAL_WORLD_SIZE", world)) >= world:
        _stay_on_loopback()
    try:  # the file of our launcher, else torchrun's store
        if path := os.environ.get(STORE):
            # Held open: torch would wait 300 s for a file that is gone, and let no other thread run.
            _store = dist.FileStore(f"/proc/self/fd/{os.open(path, os.O_RDWR | os.O_CREAT, 0o600)}", world)
        else:
            given, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=_JOINING)))
            # torchrun keeps its store when it restarts the ranks, so what earlier ranks have written is still in it.
            _store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", given)
    except ValueError as error:  # an environment variable is missing
        raise UserError(f"{error}: start the ranks with --gpus N, torchrun or accelerate launch") from error
    except OSError as error:
        raise TrainerError(_NO_LAUNCHER) from error
    except RuntimeError as error:
        at_once = time.monotonic() - begun < _JOINING / 2
        why = "the store in which the ranks find each other does not open" if at_once else _late()
        raise TrainerError(f"{why}: {str(error).splitlines()[0]}") from error
    until = time.monotonic() + _JOINING
    try:
        _store.set(f"rank {rank}", "here")
        while (arrived := sum(_store.check([f"rank {other}"]) for other in range(world))) < world:
            if time.monotonic() > until:
                raise TrainerError(f"{_late()}: {arrived} of {world} are here")
            time.sleep(_AGAIN)
        _everybody = _connect("everybody", range(world), patience=_SETTING_UP, rank=rank, store=_store)
    except RuntimeError as error:  # raised by the store
        raise TrainerError(_NO_LAUNCHER) from error
    except PeerGone as error:
        hint = f"{_INTERFACE} names the network between them"
        raise TrainerError(f"the ranks have found each other but do not connect; {hint}: {error}") from error
    signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)  # None: C code has set it


def _late() -> str:
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    unreached = f", or does not reach {place} ({_INTERFACE} names the network)" if "MASTER_ADDR" in os.environ else ""
    return f"after {_JOINING:g} s not all ranks of the run have come: one has not been started, has ended{unreached}"


def _stay_on_loopback() -> None:
    """Keep the sockets of gloo, which ask for no proof, and of NCCL on the loopback interface."""
    os.environ[_INTERFACE] = "lo"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _connect(name: str, members: Sequence[int], *, patience: float, rank: int, store: dist.Store) -> Group:
    """Connect this rank to the other `members`, which call this at the same time, for the group `name`."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._threads = timedelta(seconds=STALLED), 1
    number = list(members).index(rank)
    with _as_peer_failure():
        options._devices = [_device()]
        gloo = dist.ProcessGroupGloo(dist.PrefixStore(name, store), number, len(members), options)
    group = Group(rank, tuple(members), gloo, patience)
    _groups.add(group)
    return group


def _device() -> Any:
    """Return gloo's device on the named network interface, else on the route to the first node."""
    if name := os.environ.get(_INTERFACE):
        try:
            return dist.ProcessGroupGloo.create_device(interface=name)
        except RuntimeError as error:
            raise UserError(f"{_INTERFACE}={name}: {str(error).splitlines()[0]}") from error
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        family, kind, _, _, first_node = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sent:
            sent.connect(first_node)  # a UDP connect chooses the route and sends nothing
            return dist.ProcessGroupGloo.create_device(hostname=sent.getsockname()[0])
    except OSError as error:
        raise TrainerError(f"the address of the first node, {host}, is not to be reached: {error.strerror}") from error


# -- ranks, nodes and groups -------------------------------------------------------------------------------------------


def place_here() -> tuple[int, int]:
    """Return (rank, world size); (0, 1) before `join` and for a single process."""
    return _everybody.rank, len(_everybody.members)


def nodes() -> tuple[range, ...]:
    """Return the ranks of each node, by LOCAL_RANK. UserError if they differ in number. Collective."""
    rank, world = place_here()
    if world == 1:
        return (range(1),)
    numbers = all_gather_json(int(os.environ.get("LOCAL_RANK", rank)))
    each = world // max(1, numbers.count(0))
    if numbers != [number % each for number in range(world)]:
        local = ", ".join(map(str, numbers))
        raise UserError(f"ranks are not as many on every node: local ranks {local} (torchrun --nproc-per-node)")
    return tuple(range(first, first + each) for first in range(0, world, each))


def group_of(members: Sequence[Sequence[int]] = (), *, in_step: bool = True, gpus: bool = False) -> Any:
    """Create groups of ranks and return the one that contains this rank; without `members`, one group of all ranks.

    Each is for one thread of its ranks. Collective: all ranks call it with the same arguments in their training thread.
    `in_step`: use the short timeout of a training step. `gpus`: return a NCCL process group, for tensors on GPUs,
    instead of a Group.
    """
    if _store is None:
        return ALONE
    patience = STALLED + _LATER if in_step else _SETTING_UP
    every = [list(ranks) for ranks in members] or [list(_everybody.members)]
    if gpus:
        join_torch("nccl")
        return dist.new_subgroups_by_enumeration(every, backend="nccl", timeout=timedelta(seconds=patience))[0]
    ours = next(ranks for ranks in every if _everybody.rank in ranks)
    _everybody.all_gather_numbers(0)  # gloo would wait long for the address of a rank that has ended
    name = f"group {next(_names)} of rank {ours[0]}"
    return _connect(name, ours, patience=patience, rank=_everybody.rank, store=_store)


def end_if_rank_vanishes(*, say: Callable[[str], None]) -> None:
    """Start a thread that ends this process once another rank has not answered for `UNANSWERED` seconds. Collective.

    Such a rank is stopped, or its machine has lost power or network. The first rank that is left prints the reason with
    `say`. The process exits immediately, because the training thread is blocked on the lost rank. If a rank has ended,
    which says why itself, this one ends after a wait of `_GONE` seconds: gloo does not wake a thread whose message was
    half sent.
    """

    def watch(group: Group) -> None:
        try:
            while not _closed.wait(_BEAT):
                begun = time.monotonic()
                group.all_gather_numbers(0, patience=UNANSWERED + group.number)  # the first rank left says it
        except PeerTimeout as error:
            if time.monotonic() - begun > UNANSWERED + group.number + _BEAT:
                return  # this process was stopped itself
            if group.rank == min({*group.members} - {*error.missing}):
                lost = ", ".join(map(str, error.missing))
                say(f"no answer from rank {lost} for {UNANSWERED} s, and the run ends. The same command resumes")
                os._exit(1)
            os._exit(LOST)
        except PeerGone:
            while not _closed.wait(_GONE / 10):  # else this process ends by itself
                if any(time.monotonic() - begun >= _GONE for begun in list(_inside.values())):
                    os._exit(LOST)

    if _everybody is not ALONE:
        group = group_of(in_step=False)
        _watching.append(threading.Thread(target=watch, args=(group,), name="ranks", daemon=True))
        _watching[-1].start()


def join_torch(backend: str) -> None:
    """Initialize torch.distributed once, for NCCL or DeepSpeed, in the store of `join`. Collective."""
    if dist.is_initialized():
        return
    rank, world = place_here()
    if _store is None:
        _stay_on_loopback()
    store = dist.HashStore() if _store is None else dist.PrefixStore("torch", _store)
    limit = timedelta(seconds=_SETTING_UP)
    store.set_timeout(limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)


# -- collectives -------------------------------------------------------------------------------------------------------


def exchange_numbers(number: int, *, group: Group) -> list[int]:
    """Return the number of each rank of `group` once all have given theirs.

    After `STALLED` seconds, rank 0, or the first rank that is not missing, raises TrainerError that names the missing
    ranks; the others, which wait longer than rank 0 so that it reports first, raise PeerFailed.
    """
    try:
        return group.all_gather_numbers(number, patience=STALLED + (_LATER if group.rank else 0))
    except PeerTimeout as error:
        if group.rank != min({*group.members} - {*error.missing}):
            raise
        late = f"after {STALLED:g} s another rank has not come to where all ranks meet in a step"
        raise TrainerError(f"{late}, and the run ends: {error}; {RERUN_HINT}") from error


def broadcast(values: torch.Tensor, *, source: int, group: Any) -> None:
    """Copy `values` (1-D, contiguous) from rank `source` to all ranks of the group, in place."""
    if not values.numel():
        return
    if not isinstance(group, Group):
        with _as_peer_failure():
            dist.broadcast(values.view(torch.uint8), src=source, group=group)
    elif group.rank == source:
        group.begin([(peer, values) for peer in group.members if peer != source], [])()
    else:
        group.begin([], [(source, values)])()


def all_gather_parts(values: torch.Tensor, number: int, *, group: Any) -> None:
    """All-gather in place: `values` (1-D, contiguous) has one equal part per rank, and part `number` is this rank's.

    On a GPU the operation is queued on the current stream.
    """
    parts = values.view(torch.uint8)
    if isinstance(group, Group):
        pieces = parts.chunk(len(group.members))
        group.exchange([pieces[number]] * len(pieces), pieces)
        return
    with _as_peer_failure():
        dist.all_gather_into_tensor(parts, parts.chunk(dist.get_world_size(group))[number], group=group)


def all_reduce(values: torch.Tensor, *, group: Group) -> None:
    """All-reduce `values` (on the CPU) in place by summation; exact if at most one rank has a nonzero per element."""
    gathered = torch.empty((len(group.members), values.numel()), dtype=values.dtype)
    gathered[group.number] = values.reshape(-1)
    all_gather_parts(gathered.view(-1), group.number, group=group)
    values.copy_(gathered.sum(0).reshape(values.shape))


def _decode(data: bytes, kind: Any) -> Any:
    try:
        return parsed(data, kind)
    except ValueError as error:
        raise TrainerError(f"another rank has told what this one cannot read: {quoted(str(error))}") from error


def everybody() -> Group:
    """Return the group of all ranks for use in the training thread."""
    return _everybody


def from_rank_zero(work: Callable[[], T], kind: Any = Any) -> T:
    """Do `work` on rank 0 only and return its result, of type `kind`, on every rank. If it fails, all ranks raise."""
    return _everybody.each(lambda: [work()] if _everybody.rank == 0 else [], list[kind])[0][0]


def rank_zero_first(work: Callable[[], T]) -> T:
    """Do `work` on rank 0, then on each node's first rank, then elsewhere, where it finds their files."""
    once = cache(work)
    _everybody.first(once)
    rank, each = place_here()[0], len(nodes()[0])
    _everybody.some(once, mine=rank > 0 and rank % each == 0)
    return once()


def all_gather_json(value: Any, kind: Any = Any) -> list[Any]:
    """Return every rank's value in the order of ranks, as JSON validated against the type `kind`."""
    return _everybody.all_gather_json(value, kind)


def wait_for_all() -> None:
    """Block until all ranks have called this."""
    _everybody.all_gather_numbers(0)
