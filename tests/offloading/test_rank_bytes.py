"""What ranks move for each other and on drives, counted where it is moved, against the plan: to the byte."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import ranked_bytes
from bench_of_engines import model_directory
from ranked import Case, run_ranks

import offload_trainer.plan.layout as layout
from offload_trainer.machine.probe import probe_machine
from offload_trainer.model.source import resolve_model
from offload_trainer.plan.choose import make_plan, workload
from offload_trainer.plan.exchange import NETWORK, OUTBOX, exchange_of
from offload_trainer.plan.layout import Unit, units_of
from offload_trainer.plan.sizes import TierSizes, homes_in
from offload_trainer.plan.tiered_traffic import tiered_traffic
from offload_trainer.plan.workload import Workload
from offload_trainer.settings import load_config

MICRO, STEPS = 4, 3


@pytest.mark.parametrize(("world", "nodes"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_bytes_are_the_plans(world: int, nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outboxes written and read, sums, the network, and drives: half of the state there, weights in RAM."""
    monkeypatch.setattr(layout, "SMALL", 0)
    model = model_directory(tmp_path / "model", "gpt2")
    (drive := tmp_path / "drive").mkdir()
    words = ["--params", "cpu", "--optimizer", "nvme", "--ram-fraction", "0.5", "--dtype", "bf16"]
    words += ["--accumulate", str(MICRO // world)]
    case = Case(str(model), tuple(words), str(tmp_path / "out"), steps=STEPS, micro=MICRO, drives=(str(drive),))
    run_ranks([case], count=world, nodes=nodes, folder=tmp_path / "ranks", script=ranked_bytes.__file__)
    found = [json.loads(path.read_text())[0] for path in (tmp_path / "ranks").glob("counts-*.json")]
    assert len(found) == world

    config = load_config(["--model", str(model), "--scratch", "--engine", "tiered", "--nvme", str(drive), *words])
    shape = resolve_model(config.model, seed=0).shape
    machine, work = probe_machine(drives=(str(drive),)), workload(config, shape, world=world, nodes=nodes)
    plan = make_plan(config, shape, machine, world=world, nodes=nodes)
    sizes, units = plan.sizes, units_of(shape)
    assert isinstance(sizes, TierSizes)
    homes = [homes_in(units, plan.placement, sizes, node=node) for node in range(nodes)]
    moved = [exchange_of(work, units, of_node, node=node) for node, of_node in enumerate(homes)]
    assert moved[0].links == plan.links
    traffic = [tiered_traffic(work, units, of_node, sizes, drives=[str(drive)]) for of_node in homes]
    assert tuple(traffic[0]) == plan.traffic
    drives = [one for of_node in traffic for one in of_node if one.place == str(drive)]
    assert case.moved == [STEPS * sum(one.read for one in drives), STEPS * sum(one.written for one in drives)]

    def counted(name: str) -> int:
        return sum(counts.get(name, 0) for counts in found)

    ways = [
        ("added", "laid_out", OUTBOX, "backward"),
        ("gradients_in", "gradients_out", NETWORK, "backward"),
        ("weights_in", "weights_out", NETWORK, "update"),
    ]
    for read, written, link, phase in ways:
        planned = [sum(way) for way in zip(*(one.bytes(link, phase) for one in moved), strict=True)]
        if read == "added":  # from inboxes too, but for the marks there, and what no weight fills
            planned[0] += sum(one.bytes(NETWORK, "backward")[0] for one in moved) - _not_added(work, units)
        assert [counted(read), counted(written)] == [STEPS * size for size in planned], link
    assert counted("sums") == STEPS * sum(one.sums for one in moved)
    assert (counted("laid_out") > 0) == (world > 1)
    assert (counted("gradients_in") > 0) == (counted("weights_in") > 0) == (nodes > 1)
    assert {counts.get("meets", 0) for counts in found} == {found[0].get("meets", 0)}
    assert found[0].get("meets", 0) / STEPS == pytest.approx(moved[0].meets, abs=3)  # of which some are no unit's
    assert {counts.get("agreements", 0) for counts in found} == {STEPS * nodes * moved[0].agreements}  # twice of two


def _not_added(work: Workload, units: Sequence[Unit]) -> int:
    """Bytes of a step that come to inboxes beside gradients: marks, and what lies between weights in a stretch."""
    away, e = work.world - work.here, work.item_bytes
    weights = [place.weight for unit in units for place in unit.places]
    between = sum(unit.trained for unit in units) - sum(weight.numel for weight in weights)
    return work.accumulate * away * (e * between + work.world * len(weights))
