"""Report plans for several numbers of identical nodes: bytes stored and moved per node, and the scaling of tokens/s.

This is weak scaling: the rows per rank are constant, so the tokens of a step grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.parallel.comm_cost import NETWORK
from offload_trainer.plan.plan import Plan
from offload_trainer.units import format_bytes, format_count, format_seconds

_COLUMNS = (
    "nodes",
    "ranks",
    "tokens",
    "RAM a node",
    "GPUs",
    "drives",
    "network in",
    "out",
    "step",
    "tokens/s",
    "scaling",
)


def to_json(plans: Sequence[Plan], machine: MachineProfile) -> dict[str, Any]:
    """Return the output of `plan --json --nodes`: the plan's keys for one number of nodes, `scaling` for several."""
    found = plans[-1].to_json() if len(plans) == 1 else {"scaling": scaling(plans)}
    return found | {"assumptions": assumptions(plans[-1], machine)}


def describe(plans: Sequence[Plan], machine: MachineProfile) -> str:
    """Return the output of `plan --nodes` as text."""
    told = [plans[-1].describe(), describe_links(plans[-1])] if len(plans) == 1 else [table(plans)]
    return "\n".join([*filter(None, told), *(f"  assumed: {line}" for line in assumptions(plans[-1], machine))])


def scaling(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Return one row per plan, in bytes and seconds per node; None where a rate is unknown.

    `scaling` is a node's tokens/s divided by those of the first plan's node.
    """
    rows = []
    for plan in plans:
        step = plan.forecast.step
        moved = [one for one in plan.links if one.place == NETWORK]
        drives = [room["need"] for tier, room in plan.tiers.items() if tier not in ("gpu", "ram")]
        rows.append(
            {
                "nodes": plan.nodes,
                "ranks": plan.world,
                "fits": plan.fits,
                "tokens_per_step": plan.tokens_per_step,
                "ram_bytes": plan.tiers["ram"]["need"],
                "gpu_bytes": plan.tiers["gpu"]["need"],
                "drive_bytes": sum(drives),
                "network_in_bytes": sum(one.read for one in moved),
                "network_out_bytes": sum(one.written for one in moved),
                "seconds": step,
                "tokens_per_second": None if step is None else plan.tokens_per_step / step,
                "homes": plan.homes,
            }
        )
    first = _speed_of_a_node(plans[0])
    for row, plan in zip(rows, plans, strict=True):
        speed = _speed_of_a_node(plan)
        row["scaling"] = speed / first if speed and first else None
    return rows


def _speed_of_a_node(plan: Plan) -> float | None:
    """Return a node's tokens per second, or None if a rate is unknown."""
    return None if plan.forecast.step is None else plan.tokens_per_step / plan.forecast.step / plan.nodes


def table(plans: Sequence[Plan]) -> str:
    """Return `scaling` as a text table, followed by each plan's placement and whether it fits."""
    cells = [list(_COLUMNS)]
    told = []
    for row, plan in zip(scaling(plans), plans, strict=True):
        known = row["seconds"] is not None
        cells.append(
            [
                str(row["nodes"]),
                str(row["ranks"]),
                format_count(row["tokens_per_step"]),
                *(format_bytes(row[f"{tier}_bytes"]) for tier in ("ram", "gpu", "drive", "network_in", "network_out")),
                format_seconds(row["seconds"]) if known else "unknown",
                format_count(row["tokens_per_second"]) if known else "",
                f"{row['scaling']:.2f}" if row["scaling"] is not None else "",
            ]
        )
        verdict = "" if plan.fits else f"; DOES NOT FIT: {'; '.join(plan.shortfalls())}"
        told.append(f"{row['nodes']} nodes: {plan.title}; {plan.homes}{verdict}")
    widths = [max(len(row[column]) for row in cells) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([*lines, *told])


def assumptions(plan: Plan, machine: MachineProfile) -> list[str]:
    """Return the assumptions behind the numbers of several ranks, one sentence each."""
    links = machine.links
    found = [
        "all machines are equal, each rank has its own GPU and its own rows; tiers and bytes are those of one machine",
        "unless it was timed, each GPU has its own link to host memory, limited by what memory can feed together; "
        "memory, drives, cores and network belong to the machine and are shared by its ranks",
        "checkpoints are counted in full, on one filesystem that all machines share",
    ]
    if plan.engine == "tiered":
        found += [
            "each machine stores all weights, and a shard of state and gradient sums; each rank sends its gradients "
            "unreduced to the owner, which adds them in rank order: a network carries (ranks of a machine) times the "
            "bytes of a reduction",
            "adding gradients in RAM and barriers are added to the time of a phase; transfers of gradients and updated "
            "weights, and all else within a phase, overlap with its slowest part",
        ]
        if links.message is None:
            found.append("barriers of all ranks take no time: links.message is not in the machine's file")
        else:
            found.append(
                f"a barrier takes 2 x {plan.world - 1} messages of {links.message.seconds:.2g} s, since rank 0 serves "
                "the other ranks one after the other"
            )
    else:
        found += [
            "ZeRO's collectives are rings that overlap with computation: (N - 1) / N of the gathered and scattered "
            "bytes pass each GPU, and each network once; computed, not measured",
        ]
    if (links.between_gpus or links.all_to_all) is None:
        found.append("GPUs have no direct links: transfers between them go through host memory")
    for name in ("between_gpus", "network", "to_device_at_once", "from_device_at_once", "all_gather", "all_to_all"):
        rate, way = getattr(links, name), " each way" if name in ("between_gpus", "network") else ""
        if rate is not None:
            found.append(f"{name.replace('_', ' ')}: {format_bytes(rate.value)}/s{way}; {rate.origin}: {rate.source}")
    if links.message is not None:
        found.append(f"a message: {links.message.origin}: {links.message.source}")
    return found


def describe_links(plan: Plan) -> str:
    """Return the bytes between ranks as text, one line per link and phase."""
    names = {
        "outboxes": "gradients in RAM",
        NETWORK: "network",
        "gpus": "between GPUs, for each",
        "norms": "partial gradient norms in RAM",
    }
    return "\n".join(
        f"  {names[one.place]}, {one.phase}: {format_bytes(one.read)} {'read' if one.place == 'outboxes' else 'in'}, "
        f"{format_bytes(one.written)} {'written' if one.place == 'outboxes' else 'out'}"
        for one in plan.links
    )
