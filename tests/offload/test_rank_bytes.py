"""Tests that ranks exchange and move the planned bytes, and get the right bits of what they fetch together."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_bench import model_directory
from forked_ranks import count_calls, counts, in_ranks, start_ranks
from rank_cases import Case, Result, run_ranks, train_cases
from torch.utils._python_dispatch import TorchDispatchMode

import offload_trainer.plan.tiered.layout as layout
from offload_trainer import ranks
from offload_trainer.common.errors import TrainerError
from offload_trainer.machine.probe import probe_machine
from offload_trainer.model.loader import resolve_model
from offload_trainer.offloading import device
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.ranks.collective_fetch import WeightFetches
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.offloading.ranks.sharded_gradients import ShardedGradients
from offload_trainer.plan.communication import GPUS, NETWORK, OUTBOX, exchange_of
from offload_trainer.plan.planner import make_plan
from offload_trainer.plan.tiered.footprint import gathered_weights, tiered_traffic
from offload_trainer.plan.tiered.layout import ALIGN, RAM, units_of
from offload_trainer.plan.tiered.spec import layouts_of
from offload_trainer.ranks import Addressed
from offload_trainer.settings import load_config
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import DriveFile, Future, Transfers

MICRO, STEPS = 4, 3


class Adding(TorchDispatchMode):
    """Count the operands of torch's operations: `added` bytes of gradients, `sums` bytes read and written for them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("add_", "copy_"):
            counts["added"] += args[1].nbytes
            counts["sums"] += args[0].nbytes * (2 if name == "add_" else 1)
        return func(*args, **(kwargs or {}))


def within(name: str, context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Run a method of `ShardedGradients` inside a context."""
    call = getattr(ShardedGradients, name)

    def inside(*args: Any, **words: Any) -> Any:
        with context():
            return call(*args, **words)

    setattr(ShardedGradients, name, inside)


def count_exchanges(cases: Sequence[Case]) -> list[Result]:
    """Train the cases; count the bytes that this rank exchanges with the others, its barriers and its gathers."""
    sending = []  # not empty while the exchanged bytes are gradients rather than parts of norms

    @contextmanager
    def of_gradients() -> Iterator[None]:
        sending.append(True)
        yield
        sending.clear()

    def on_thread(name: str) -> bool:
        return threading.current_thread().name.startswith(name)

    def sent(_: Node, out: Addressed, into: Addressed) -> dict[str, int]:
        ways = {"gradients_out": out, "gradients_in": into} if sending else {}
        return {name: sum(values.nbytes for _, values in way) for name, way in ways.items()}

    def crossed(node: Node, values: torch.Tensor, *, source: int, **_: Any) -> dict[str, int]:
        if source == node.rank:
            return {"weights_out": values.nbytes * (len(node.nodes) - 1)}
        return {"weights_in": values.nbytes}

    def copied(values: torch.Tensor, into: torch.Tensor) -> dict[str, int]:
        return {} if on_thread("copy") else {"from_ram": values.nbytes}  # a rank that gathers nothing has that thread

    def gathered(values: torch.Tensor, _: int, *, group: ranks.Group) -> dict[str, int]:
        each = len(group.members)  # sums of norms are gathered too, on the training thread
        return {"from_others": values.nbytes // each * (each - 1)} if on_thread("fetches") else {}

    within("_add_up", Adding)
    within("_sent_and_received", of_gradients)
    for owner, name, counted in (
        (ShardedGradients, "_lay_out", lambda _, name, flat: {"laid_out": flat.nbytes}),
        (Node, "send_recv", sent),
        (Node, "broadcast_across", crossed),
        (Node, "barrier", lambda _: {"barriers": 1}),
        (ranks, "exchange_numbers", lambda *_, **__: {"gathers": int(on_thread("update_progress"))}),
        (ranks, "all_gather_parts", gathered),
        (device, "copy_alone", copied),
        (device.CpuDevice, "keep", lambda _, values, into: {"between_blocks": values.nbytes}),
        (device.CpuDevice, "copy_back", lambda _, source, into, **__: {"between_blocks": into.nbytes}),
    ):
        count_calls(owner, name, counted)
    return train_cases(cases)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "nodes", "pipeline"), [(1, 1, 1), (4, 1, 1), (4, 2, 1), (4, 1, 2), (4, 2, 2)])
def test_planned_bytes(world: int, nodes: int, pipeline: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of outboxes, sums, norms, network, gathered weights and drives are those counted in two runs."""
    monkeypatch.setattr(layout, "SMALL", 0)
    model = model_directory(tmp_path / "model", "gpt2")
    drive = tmp_path / "drive"
    words = ["--params", "cpu", "--optimizer", "nvme", "--ram-fraction", "0.5", "--dtype", "bf16"]
    words += ["--accumulate", str(MICRO * pipeline // world), "tiered.weight_transfer=all_gather"]
    words += [f"parallel.pipeline={pipeline}", "--seq-len", "24", "--micro-batch", "2"]
    case = Case(model, tuple(words), tmp_path / "out", steps=STEPS, micro=MICRO, drives=(drive,))
    longer = replace(case, steps=STEPS + 1, out=tmp_path / "longer")
    both = run_ranks([case, longer], count=world, nodes=nodes, folder=tmp_path / "ranks", work=count_exchanges)
    found, more = ([Counter(result.counts) for result in of_case] for of_case in both)
    assert len(found) == world

    config = load_config(["--model", str(model), "--scratch", "--engine", "tiered", "--nvme", str(drive), *words])
    shape = resolve_model(config.model, seed=0).shape
    machine = probe_machine(config.placement)
    plan = make_plan(config, shape, machine, world=world, nodes=nodes)
    work, sizes, units = plan.work, plan.sizes, units_of(shape)
    homes = [layouts_of(work).homes(plan.placement, sizes, node=node) for node in range(nodes)]
    by_parts = gathered_weights(work, homes[0], sizes)
    moved = [exchange_of(work, of_node, by_parts=by_parts, node=node) for node, of_node in enumerate(homes)]
    assert moved[0].links == plan.links
    traffic = [tiered_traffic(work, of_node, sizes, machine) for of_node in homes]
    assert tuple(traffic[0]) == plan.traffic
    drives = [one for of_node in traffic for one in of_node if one.place == str(drive)]
    counted = sum(found, Counter[str]())
    # Gradients in inboxes are added too, except for marks and for padding between weights.
    groups, away, e = work.world // pipeline, (work.world - work.here) // pipeline, work.item_bytes
    weights = [place.weight for unit in units for place in unit.places]
    between = sum(unit.trained for unit in units) - sum(weight.numel for weight in weights)
    others = work.accumulate * away * (e * between + groups * len(weights))
    inboxes = sum(one.bytes(NETWORK, "backward")[0] for one in moved) - others
    (passed_on,) = (one.written for one in plan.traffic if (one.place, one.phase) == ("device", "forward"))
    planned = {
        # outputs and their gradients, each copied out and in
        "between_blocks": 4 * world * passed_on,
        "read": sum(one.read for one in drives),
        "written": sum(one.written for one in drives),
        "added": sum(one.bytes(OUTBOX, "backward")[0] for one in moved) + inboxes,
        "laid_out": sum(one.bytes(OUTBOX, "backward")[1] for one in moved),
        "gradients_in": sum(one.bytes(NETWORK, "backward")[0] for one in moved),
        "gradients_out": sum(one.bytes(NETWORK, "backward")[1] for one in moved),
        "weights_in": sum(one.bytes(NETWORK, "update")[0] for one in moved),
        "weights_out": sum(one.bytes(NETWORK, "update")[1] for one in moved),
        "sums": sum(one.sums for one in moved),
    }
    assert {name: counted[name] for name in planned} == {name: STEPS * size for name, size in planned.items()}
    assert (counted["laid_out"] > 0) == (world > 1)
    assert (passed_on > 0) == (pipeline > 1)
    assert (counted["gradients_in"] > 0) == (counted["weights_in"] > 0) == (nodes > 1)
    ways = ("from_ram", "from_others")  # A run ends with the fetches that its next step would begin with.
    in_a_step = [[after[way] - of_rank[way] for way in ways] for of_rank, after in zip(found, more, strict=True)]
    from_ram, from_others = map(sum, zip((0, 0), *by_parts.values(), strict=True))
    assert in_a_step == [[from_ram, from_others]] * world
    device = [one for one in plan.traffic if one.place == "device" and one.phase in ("forward", "backward")]
    gathering = world > 1 and pipeline == 1
    assert not gathering or sum(one.read for one in device) == from_ram
    assert sum(moved[0].bytes(GPUS, phase)[0] for phase in ("forward", "backward")) == from_others
    assert (from_others > 0) == gathering
    assert pipeline > 1 or {of_rank["barriers"] for of_rank in found} == {found[0]["barriers"]}
    assert counted["barriers"] / world / STEPS == pytest.approx(moved[0].barriers, abs=3)  # a few belong to no unit
    # each of the two takes two
    assert {of_rank["gathers"] for of_rank in found} == {STEPS * nodes * moved[0].gathers}


WORLD, MEET = 3, -1
SIZES = [ALIGN, 2 * ALIGN, 3 * ALIGN, 7 * ALIGN, 11 * ALIGN]  # fewer pieces than ranks, and numbers that do not divide
UNITS = [torch.randn(size, generator=torch.Generator().manual_seed(size)).bfloat16() for size in SIZES]
KINDS = {"reads": 0, "gathers": RAM}  # way to get a unit: home of its weights
BOTH = pytest.mark.parametrize("kind", KINDS)


def store_of(kind: str, path: Path, *, node: Node) -> UnitStore:
    """Return the units in the file `path`, or in memory."""
    path.write_bytes(torch.cat(UNITS).view(torch.uint8).numpy().tobytes())
    files, homes = [DriveFile(path, 2 * sum(SIZES))], [KINDS[kind]] * len(SIZES)
    sizes, transfers = [2 * size for size in SIZES], Transfers()
    store = UnitStore(sizes, homes, dtype=torch.bfloat16, files=files, transfers=transfers, pinned=False, node=node)
    for unit, values in enumerate(UNITS if kind == "gathers" else ()):
        store.put(unit, 0, values)
    return store


def fetch(kind: str, folder: Path, programs: Sequence[Sequence[int]], fails: bool = False) -> tuple[list[bool], int]:
    """Fetch the units of this rank's program; return which were right, and the elements that it read or copied."""
    node = Node(together=True, by_parts=kind == "gathers")
    if fails and node.rank == 1:
        break_transfers()
    count_calls(Transfers, "read", lambda _, file, offset, buffer: {"reads": buffer.numel()})
    count_calls(device, "copy_alone", lambda values, into: {"gathers": values.numel()})
    fetches = WeightFetches(store_of(kind, folder / f"{node.rank}", node=node), node=node, gpus=False)
    ranks.wait_for_all()  # all have filled the memory
    counts.clear()
    try:
        found = []
        for what in programs[node.rank]:
            if what == MEET:
                node.barrier()
                continue
            into = host_buffer(2 * SIZES[what]).view(torch.bfloat16)
            source = fetches.source(what)
            assert not isinstance(source, torch.Tensor)
            source(into).wait()
            found.append(torch.equal(into, UNITS[what]))
        ranks.wait_for_all()
        return found, counts[kind]
    finally:
        fetches.close()


def break_transfers() -> None:
    def read(*_: Any) -> Future:
        future = Future()
        future.finish_part(TrainerError("the drive is gone"))
        return future

    def gather(*_: Any, **__: Any) -> None:
        raise TrainerError("the link is gone")

    Transfers.read, ranks.all_gather_parts = read, gather  # type: ignore[method-assign]


@BOTH
def test_units_that_all_ranks_need_are_fetched_once(kind: str, tmp_path: Path) -> None:
    """Each is read once by all ranks, or each rank copies its part and the remainder, all of a small unit."""
    programs = [[0, 1, 2, MEET, 3, 4]] * WORLD
    found, moved = zip(*in_ranks(fetch, kind, tmp_path, programs, count=WORLD, folder=tmp_path), strict=True)
    assert [*found] == [[True] * 5] * WORLD
    if kind == "reads":
        assert sum(moved) == sum(SIZES)
    else:
        assert [*moved] == [(1 + 2 + 1 + (2 + 1) + (3 + 2)) * ALIGN] * WORLD


@BOTH
def test_ranks_that_need_different_units_do_not_deadlock(kind: str, tmp_path: Path) -> None:
    """One rank reaches a barrier late, after fetches that the others do later; one skips a unit."""
    late, others = [4, 3, 2, MEET, 4, MEET, 3], [4, MEET, 3, 2, 4, MEET, 3]
    programs = [others, late, [4, MEET, 3, 4, MEET, 3]]
    found, moved = zip(*in_ranks(fetch, kind, tmp_path, programs, count=WORLD, folder=tmp_path), strict=True)
    assert [*found] == [[True] * 5, [True] * 5, [True] * 4]
    once = sum(SIZES[unit] for unit in others if unit != MEET)
    assert once < sum(moved) <= WORLD * once


@BOTH
def test_a_failure_ends_every_rank(kind: str, tmp_path: Path) -> None:
    forks = start_ranks(fetch, kind, tmp_path, [[2, MEET, 3]] * WORLD, True, count=WORLD, folder=tmp_path)
    assert [fork.wait(300) for fork in forks] == [1] * WORLD
    told = [(tmp_path / f"told-{rank}").read_text() for rank in range(WORLD)]
    assert "TrainerError: the drive is gone" in told[1] or "TrainerError: the link is gone" in told[1], told
    assert all("another rank has ended" in told[rank] for rank in (0, 2)), told


@BOTH
def test_closing_does_not_wait_for_other_ranks(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cancel` ends a fetch that only one rank has requested, and one whose destination never comes."""
    ends = threading.Event()

    def never(mine: int) -> list[int]:
        ends.wait(300)
        raise TrainerError("the others are gone")

    node: Any = Node()
    monkeypatch.setattr(ranks, "group_of", lambda *_, **__: object())  # it is never used
    store = store_of(kind, tmp_path / "weights", node=node)
    node.world, node.by_parts, node.exchange = 2, kind == "gathers", lambda: never
    fetches = WeightFetches(store, node=node, gpus=False)
    asked: list[Any] = [fetches.source(unit) for unit in (0, 1)]
    buffers = [host_buffer(2 * SIZES[unit]).view(torch.bfloat16) for unit in (0, 1)]
    filled = asked[0](buffers[0])
    assert not filled.done
    fetches.cancel()
    assert filled.done
    for future in (filled, asked[1](buffers[1])):
        with pytest.raises(RuntimeError, match="closed before"):
            future.wait()
    ends.set()
    fetches.close()
