"""Tests of plans for several machines: hand-computed bytes on every link, memory, seconds, and the notes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from sample_plans import SHAPES, cluster, rate, wish

from offload_trainer.cli import main
from offload_trainer.plan.machine import Latency, MachineProfile, read_machine
from offload_trainer.plan.parallel.comm_cost import GPUS, NETWORK, OUTBOX, STEP_BARRIERS
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.planner import make_plan
from offload_trainer.plan.tiered.layout import units_of
from offload_trainer.run.commands.plan import plan_elsewhere
from offload_trainer.settings import load_config


def planned(here: MachineProfile, *words: str, nodes: int, gpus: int = 2, engine: str = "tiered") -> Plan:
    config = wish("--engine", engine, *words)
    return make_plan(config, SHAPES["gpt2-medium"], here, world=gpus * nodes, nodes=nodes)


def by_link(plan: Plan) -> dict[tuple[str, str], tuple[int, int]]:
    return {(one.place, one.phase): (one.read, one.written) for one in plan.links}


def test_one_rank_moves_nothing_for_others() -> None:
    assert planned(cluster(), "--params", "gpu", nodes=1, gpus=1).links == ()


def test_one_node_uses_no_network_and_each_gpu_gets_what_others_updated() -> None:
    found = by_link(planned(cluster(), "--params", "gpu", nodes=1, gpus=4))
    assert {place for place, _ in found} == {OUTBOX, GPUS}
    assert found[GPUS, "update"][0] == pytest.approx(3 / 4 * 2 * SHAPES["gpt2-medium"].trainable, rel=0.01)


def test_every_other_node_gets_the_new_weights() -> None:
    """Each of three nodes with two ranks owns a third, receives gradients of two nodes and sends it to both."""
    found = by_link(planned(cluster(network=rate(1e9)), "--params", "gpu", "--accumulate", "1", nodes=3))
    weights = 2 * SHAPES["gpt2-medium"].trainable
    assert found[NETWORK, "update"] == pytest.approx((2 / 3 * weights,) * 2, rel=0.01)
    assert found[NETWORK, "backward"] == pytest.approx((4 / 3 * weights,) * 2, rel=0.01)


def test_seconds_of_the_links() -> None:
    """Network transfers overlap with products, and new weights with the update; additions and barriers do
    not overlap.
    """
    plan = planned(cluster(network=rate(1e9)), "--params", "gpu", nodes=2)
    found = by_link(plan)
    seconds = plan.forecast.seconds
    assert seconds["backward"] == pytest.approx(max(found[NETWORK, "backward"]) / 1e9, rel=1e-3)
    assert seconds["update"] == pytest.approx(max(found[NETWORK, "update"]) / 1e9, rel=1e-3)
    slow = cluster(network=rate(1e9))
    slow = replace(slow, rates=replace(slow.rates, matmul={"bf16": rate(1e12)}))
    computing = planned(slow, "--params", "gpu", nodes=2).forecast
    assert computing.slowest("backward").kind == "compute"
    told = replace(slow, links=replace(slow.links, message=Latency(1e-3, "assumed", "for a test")))
    later = planned(told, "--params", "gpu", nodes=2).forecast
    units, each = len(units_of(SHAPES["gpt2-medium"])), 2 * 3 * 1e-3
    assert later.seconds["backward"] - computing.seconds["backward"] == pytest.approx(units * each)
    assert later.seconds["update"] == pytest.approx(max(found[NETWORK, "update"]) / 1e9 + STEP_BARRIERS * each)
    assert any("barriers" in note for note in planned(told, "--params", "gpu", nodes=2).notes)


def test_an_unknown_network_leaves_the_step_unknown() -> None:
    plan = planned(cluster(), "--params", "gpu", nodes=2)
    assert plan.forecast.seconds["backward"] is None
    assert "network" not in [one.place for one in planned(cluster(), "--params", "gpu", nodes=1).links]
    assert planned(cluster(), "--params", "gpu", nodes=1).forecast.step is not None


@pytest.mark.parametrize(("params", "times"), [("gpu", (0, 4, 1)), ("cpu", (4, 8, 0))])
def test_stock_zero_by_its_paper(params: str, times: tuple[int, int, int]) -> None:
    """ZeRO-2 reduces gradients in each micro-batch and gathers weights once; ZeRO-3 gathers weights twice a
    micro-batch.

    ZeRO-3 needs somewhat less than 12, since weights that are soon used again stay
    (tests/engine/test_deepspeed_engine.py).
    """
    words = ("--params", params, "--optimizer", "cpu", "--accumulate", "4")
    found = by_link(planned(cluster(network=rate(1e9)), *words, nodes=2, engine="deepspeed"))
    each = 3 / 4 * 2 * SHAPES["gpt2-medium"].parameters
    for place in (NETWORK, GPUS):
        for phase, count in zip(("forward", "backward", "update"), times, strict=True):
            near = found.get((place, phase), (0, 0))
            assert near == pytest.approx((count * each,) * 2, rel=1e-6 if params == "gpu" else 0.2, abs=0.01 * each)
        in_all = sum(size for (where, _), (size, _) in found.items() if where == place)
        assert in_all <= sum(times) * each * 1.01


def test_more_machines_share_the_state_and_use_the_network() -> None:
    """They keep the rows of each GPU."""
    config, machines = load_config(["--model", "gpt2-medium", "--engine", "tiered"]), read_machine("8xh100-80gb")
    plans = [plan_elsewhere(config, machines, nodes=nodes) for nodes in ("1", "2", "4")]
    assert [(plan.world, plan.tokens_per_step // plan.world) for plan in plans] == [
        (8 * nodes, plans[0].tokens_per_step // 8) for nodes in (1, 2, 4)
    ]
    sent = [sum(one.read for one in plan.links if one.place == NETWORK) for plan in plans]
    assert sent[0] == 0 < sent[1] < sent[2]
    assert plans[0].tiers["ram"]["need"] > plans[1].tiers["ram"]["need"] > plans[2].tiers["ram"]["need"]


def test_the_machines_of_a_file_or_of_the_command_line_are_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["plan", "--machine", "4xrtx4090-10gbe", "--model", "gpt2", "--engine", "tiered"]
    assert main([*words, "--nodes", "2", "--gpus", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["chosen"]["nodes"], found["chosen"]["ranks"]) == (2, 6)
    assert {one["place"] for one in found["links"]} >= {NETWORK, OUTBOX}
    (tmp_path / "two.json").write_text(json.dumps(read_machine("4xrtx4090-10gbe").to_json() | {"nodes": 2}))
    assert main(["plan", "--machine", str(tmp_path / "two.json"), *words[3:]]) == 0
    printed = capsys.readouterr().out
    assert "tiered engine" in printed
    assert "8 ranks on 2 nodes" in printed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        *(
            (["--machine", "8xh100-80gb", f"--nodes={one}"], "one whole number from 1 to 1024")
            for one in ("0", "1,2", "", "2000")
        ),
        (["--parallel", "--machine", "8xh100-80gb", "--nodes=0"], "one whole number from 1 to 1024"),
        (["--parallel", "--machine", "8xh100-80gb", "--gpus=1"], "there is only one rank: add --gpus N"),
        (["--nodes", "2"], "belongs to --machine"),
    ],
)
def test_invalid_numbers_of_nodes(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert told in capsys.readouterr().err
