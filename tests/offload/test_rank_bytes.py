"""Test that the bytes ranks exchange and move on drives match the plan exactly."""

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
from forked_ranks import Case, Result, count_calls, counts, run_ranks, train_cases
from torch.utils._python_dispatch import TorchDispatchMode

import offload_trainer.plan.tiered.layout as layout
from offload_trainer import ranks
from offload_trainer.machine.probe import probe_machine
from offload_trainer.model.loader import resolve_model
from offload_trainer.offloading import device
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.offloading.ranks.sharded_gradients import ShardedGradients
from offload_trainer.plan.communication import GPUS, NETWORK, OUTBOX, exchange_of
from offload_trainer.plan.planner import make_plan
from offload_trainer.plan.tiered.footprint import gathered_weights, tiered_traffic
from offload_trainer.plan.tiered.layout import Unit, units_of
from offload_trainer.plan.tiered.spec import TierSizes, layouts_of
from offload_trainer.plan.workload import Workload
from offload_trainer.ranks import Addressed
from offload_trainer.settings import load_config

pytestmark = pytest.mark.slow

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
    """Train the cases; count the bytes that this rank exchanges with the others, and how often they meet."""
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


@pytest.mark.parametrize(("world", "nodes", "pipeline"), [(1, 1, 1), (4, 1, 1), (4, 2, 1), (4, 1, 2), (4, 2, 2)])
def test_bytes_are_the_plans(
    world: int, nodes: int, pipeline: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert isinstance(sizes, TierSizes)
    homes = [layouts_of(work).homes(plan.placement, sizes, node=node) for node in range(nodes)]
    by_parts = gathered_weights(work, homes[0], sizes)
    moved = [exchange_of(work, of_node, by_parts=by_parts, node=node) for node, of_node in enumerate(homes)]
    assert moved[0].links == plan.links
    traffic = [tiered_traffic(work, of_node, sizes, machine) for of_node in homes]
    assert tuple(traffic[0]) == plan.traffic
    drives = [one for of_node in traffic for one in of_node if one.place == str(drive)]
    counted = sum(found, Counter[str]())
    # Gradients in inboxes are added too, except for marks and for padding between weights.
    inboxes = sum(one.bytes(NETWORK, "backward")[0] for one in moved) - _not_added(work, units)
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


def _not_added(work: Workload, units: Sequence[Unit]) -> int:
    """Return a step's bytes in inboxes that are not gradients: marks, and padding between weights."""
    groups, away, e = work.world // work.pipeline, (work.world - work.here) // work.pipeline, work.item_bytes
    weights = [place.weight for unit in units for place in unit.places]
    between = sum(unit.trained for unit in units) - sum(weight.numel for weight in weights)
    return work.accumulate * away * (e * between + groups * len(weights))
