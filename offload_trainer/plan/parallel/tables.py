"""Tables over several plans: numbers of nodes (`plan --nodes`) and ways to divide a step (`plan --parallel`).

Numbers of nodes are compared by weak scaling: the rows per rank are constant, so a step's tokens grow with the ranks.
Ways to divide a step are compared at the same tokens per step, each as the plan of an engine that can run it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from offload_trainer.errors import UserError
from offload_trainer.plan.deepspeed.zero_buffers import ZeroGathers
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.parallel.collectives import all_to_alls, tensor_collectives, zero_collectives
from offload_trainer.plan.parallel.comm_cost import NETWORK
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.workload import Workload
from offload_trainer.units import format_bytes, format_count, format_seconds

_NODES = (
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
_MODES = ["mode", "rows", "state", "GPU", "RAM", "PCIe", "GPU links", "network", "collectives", "step", "runs with"]
_ONCE = ZeroGathers(1, 1, 1)  # counting collectives needs no sizes
_ROWS = (1, 8, 64, 512)  # rows per rank and step for which the fastest mode is determined


def _aligned(cells: Sequence[Sequence[str]], *, left: Sequence[int] = ()) -> list[str]:
    """Return the lines of a table with right-aligned columns, except for those in `left`."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]


# -- numbers of nodes -------------------------------------------------------------------------------------------------


def to_json(plans: Sequence[Plan], machine: MachineProfile) -> dict[str, Any]:
    """Return the output of `plan --json --nodes`: the plan's keys for one number of nodes, `scaling` for several."""
    found = plans[-1].to_json() if len(plans) == 1 else {"scaling": _scaling(plans)}
    return found | {"assumptions": _assumptions_of_nodes(plans[-1], machine)}


def describe(plans: Sequence[Plan], machine: MachineProfile) -> str:
    """Return the output of `plan --nodes` as text."""
    lines = [plans[-1].describe(), *_describe_links(plans[-1])] if len(plans) == 1 else _table_of_nodes(plans)
    return "\n".join([*lines, *(f"  assumed: {line}" for line in _assumptions_of_nodes(plans[-1], machine))])


def _scaling(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Return one row per plan, in bytes and seconds per node; None where a rate is unknown.

    `scaling` is a node's tokens/s divided by those of the first plan's node.
    """
    rows = list[dict[str, Any]]()
    for plan in plans:
        step = plan.forecast.step
        speed = None if step is None else plan.tokens_per_step / step
        moved = [one for one in plan.links if one.place == NETWORK]
        first = rows[0]["tokens_per_second"] if rows else speed
        scaling = speed / plan.nodes / (first / plans[0].nodes) if speed and first else None
        rows.append(
            {
                "nodes": plan.nodes,
                "ranks": plan.world,
                "fits": plan.fits,
                "tokens_per_step": plan.tokens_per_step,
                "ram_bytes": plan.tiers["ram"]["need"],
                "gpu_bytes": plan.tiers["gpu"]["need"],
                "drive_bytes": sum(room["need"] for tier, room in plan.tiers.items() if tier not in ("gpu", "ram")),
                "network_in_bytes": sum(one.read for one in moved),
                "network_out_bytes": sum(one.written for one in moved),
                "seconds": step,
                "tokens_per_second": speed,
                "homes": plan.homes,
                "scaling": scaling,
            }
        )
    return rows


def _table_of_nodes(plans: Sequence[Plan]) -> list[str]:
    """Return `_scaling` as a text table, followed by each plan's placement and whether it fits."""
    cells, ends = list[Sequence[str]]([_NODES]), []
    for row, plan in zip(_scaling(plans), plans, strict=True):
        known = row["seconds"] is not None
        cells.append(
            (
                str(row["nodes"]),
                str(row["ranks"]),
                format_count(row["tokens_per_step"]),
                *(format_bytes(row[f"{tier}_bytes"]) for tier in ("ram", "gpu", "drive", "network_in", "network_out")),
                format_seconds(row["seconds"]) if known else "unknown",
                format_count(row["tokens_per_second"]) if known else "",
                f"{row['scaling']:.2f}" if row["scaling"] is not None else "",
            )
        )
        verdict = "" if plan.fits else f"; DOES NOT FIT: {'; '.join(plan.shortfalls())}"
        ends.append(f"{row['nodes']} nodes: {plan.title}; {plan.homes}{verdict}")
    return [*_aligned(cells), *ends]


def _describe_links(plan: Plan) -> Iterator[str]:
    """Yield the bytes between ranks as text, one line per link and phase."""
    names = {
        "outboxes": "gradients in RAM",
        NETWORK: "network",
        "gpus": "between GPUs, for each",
        "norms": "partial gradient norms in RAM",
    }
    for one in plan.links:
        into, out = ("read", "written") if one.place == "outboxes" else ("in", "out")
        sizes = f"{format_bytes(one.read)} {into}, {format_bytes(one.written)} {out}"
        yield f"  {names[one.place]}, {one.phase}: {sizes}"


def _assumptions_of_nodes(plan: Plan, machine: MachineProfile) -> list[str]:
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


# -- ways to divide a step --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    """A way to divide a step over `ranks` ranks, that an engine can run."""

    ranks: int
    stage: int | None = None  # ZeRO stage; None: the tiered engine
    tensor: int = 1
    sequence: int = 1

    @property
    def name(self) -> str:
        if self.stage is None:
            return f"tiered, {self.ranks} ranks" + (f", sequence {self.sequence}" if self.sequence > 1 else "")
        tensor = [f"tensor {self.tensor}"] if self.tensor > 1 else []
        zero = [f"ZeRO-{self.stage} over {self.ranks // self.tensor}"] if self.ranks > self.tensor else []
        return " x ".join([*tensor, *zero])

    @property
    def setting(self) -> str:
        """Return the setting that asks for this mode within its engine, or ""."""
        if self.tensor > 1:
            return f"parallel.tensor={self.tensor}"
        if self.stage is not None:
            return f"deepspeed.zero_stage={self.stage}"
        return f"parallel.sequence={self.sequence}" if self.sequence > 1 else ""


def modes(world: int) -> Iterator[Mode]:
    """Yield the modes of `world` ranks: the tiered engine with and without sequence parallelism, ZeRO, tensor x ZeRO-1.

    No engine runs a pipeline.
    """
    counts = [count for count in range(1, world + 1) if world % count == 0]
    yield from (Mode(world, sequence=count) for count in counts)
    yield from (Mode(world, stage=stage) for stage in (1, 2, 3))
    yield from (Mode(world, stage=1, tensor=count) for count in counts[1:])


@dataclass(frozen=True)
class Row:
    """One mode in the table. Bytes moved are per step and direction."""

    name: str
    words: str  # command-line settings that run the mode
    micro_batch: int
    accumulate: int
    state: str  # placement of the optimizer state: "gpu", "cpu" or "nvme"
    gpu_bytes: int  # per GPU
    ram_bytes: int  # per node
    pcie_bytes: int  # per GPU
    link_bytes: int  # per GPU
    network_bytes: int  # per node
    collectives: int | None  # None: not counted
    seconds: float | None  # seconds per step; None: a rate is missing
    lacks: str  # a sentence about what does not fit, or ""

    def cells(self) -> tuple[str, ...]:
        sizes = (self.gpu_bytes, self.ram_bytes, self.pcie_bytes, self.link_bytes, self.network_bytes)
        return (
            self.name,
            f"{self.accumulate} x {self.micro_batch}",
            self.state,
            *(format_bytes(size) if size else "-" for size in sizes),
            "" if self.collectives is None else format_count(self.collectives),
            "unknown" if self.seconds is None else format_seconds(self.seconds),
            self.words,
        )


def _row(mode: Mode, plan: Plan, work: Workload, machine: MachineProfile) -> Row:
    """Return the row of a mode's plan."""
    work = replace(work, tensor=mode.tensor, sequence=mode.sequence, micro_batch=plan.micro_batch, accumulate=1)
    work = replace(work, accumulate=plan.tokens_per_step // work.tokens)
    collectives = [*all_to_alls(work), *tensor_collectives(work)]
    if mode.stage is not None:
        collectives += zero_collectives(work, stage=mode.stage, trained=1, gathered=_ONCE if mode.stage == 3 else None)
    count = sum(one.count for one in collectives)
    partition = " parallel.partition_activations=true" if mode.tensor > 1 and work.partition else ""

    def moved(place: str) -> int:
        found = [one for one in (*plan.traffic, *plan.links) if one.place == place]
        return max(sum(one.read for one in found), sum(one.written for one in found))

    own_links = machine.links.between_gpus is not None
    return Row(
        name=mode.name,
        words=f"--engine {plan.engine} {mode.setting}{partition}".rstrip(),
        micro_batch=plan.micro_batch,
        accumulate=work.accumulate,
        state=plan.placement.optimizer,
        gpu_bytes=plan.tiers["gpu"]["need"] * plan.nodes // plan.world,
        ram_bytes=plan.tiers["ram"]["need"],
        pcie_bytes=moved("device") + (0 if own_links else moved("gpus")),
        link_bytes=moved("gpus") if own_links else 0,
        network_bytes=moved("network"),
        collectives=count or None,
        seconds=plan.forecast.step,
        lacks="; ".join(plan.shortfalls()),
    )


@dataclass(frozen=True)
class Comparison:
    """All modes for one number of tokens per step, the fastest first."""

    rows: tuple[Row, ...]
    refused: tuple[tuple[str, str], ...]  # (mode, reason) of modes that cannot divide the model or the rows
    wins: tuple[tuple[int, str], ...]  # (tokens per step, the mode that is fastest from there on)
    tokens: int
    world: int
    nodes: int
    assumptions: tuple[str, ...]

    def refuse(self) -> None:
        """Raise UserError if no mode fits."""
        if all(row.lacks for row in self.rows):
            raise UserError(
                "no way to divide this step fits: " + "; ".join(f"{r.name} {r.lacks}" for r in self.rows[:1])
            )

    def to_json(self) -> dict[str, Any]:
        """Return the output of `plan --parallel --json`, a stable format. Seconds are null if a rate is missing."""
        fit = [row for row in self.rows if not row.lacks]
        return {
            "tokens_per_step": self.tokens,
            "ranks": self.world,
            "nodes": self.nodes,
            "fastest": fit[0].name if fit and fit[0].seconds is not None else None,
            "modes": [asdict(row) for row in self.rows],
            "refused": [{"mode": name, "reason": reason} for name, reason in self.refused],
            "wins": [{"tokens_per_step": tokens, "mode": name} for tokens, name in self.wins],
            "assumptions": list(self.assumptions),
        }

    def describe(self) -> str:
        """Return the comparison as a text table."""
        cells = [_MODES, *(row.cells() for row in self.rows if not row.lacks)]
        lines = [f"{format_count(self.tokens)} tokens a step, {self.world} ranks on {self.nodes} node(s)"]
        lines += [line.rstrip() for line in _aligned(cells, left=(0, len(_MODES) - 1))]
        lines += [f"  rejected: {row.name}: {row.lacks}" for row in self.rows if row.lacks]
        names: dict[str, list[str]] = {}
        for name, reason in self.refused:
            names.setdefault(reason, []).append(name)
        lines += [f"  rejected: {', '.join(alike)}: {reason}" for reason, alike in names.items()]
        lines += [f"  fastest from {format_count(tokens)} tokens a step: {name}" for tokens, name in self.wins]
        lines += [f"  assumed: {line}" for line in self.assumptions]
        return "\n".join(lines)


Planner = Callable[[Mode, int], Plan | str]  # (mode, tokens) -> its plan, or the reason why it cannot be planned


def compare(work: Workload, machine: MachineProfile, *, plan: Planner) -> Comparison:
    """Compare all modes for the tokens of `work`."""
    rows, refused = _rows(work, machine, plan=plan)
    wins = list[tuple[int, str]]()
    for rows_a_rank in _ROWS:
        step = replace(work, micro_batch=1, accumulate=rows_a_rank)
        found = rows if step.tokens == work.tokens else _rows(step, machine, plan=plan)[0]
        fit = [row for row in found if not row.lacks]
        if fit and fit[0].seconds is not None and (not wins or wins[-1][1] != fit[0].name):
            wins.append((step.tokens, fit[0].name))
    return Comparison(
        tuple(rows),
        tuple(refused),
        tuple(wins),
        tokens=work.tokens,
        world=work.world,
        nodes=work.nodes,
        assumptions=tuple(_assumptions_of_modes(work, machine)),
    )


def _rows(work: Workload, machine: MachineProfile, *, plan: Planner) -> tuple[list[Row], list[tuple[str, str]]]:
    """Return the rows, fastest first and those that do not fit last, and (mode, reason) of the impossible modes."""
    rows, refused = list[Row](), list[tuple[str, str]]()
    for mode in modes(work.world):
        found = plan(mode, work.tokens)
        if isinstance(found, Plan):
            rows.append(_row(mode, found, work, machine))
        else:
            refused.append((mode.name, found.removeprefix(f"{mode.setting}: ")))
    rows.sort(key=lambda row: (bool(row.lacks), row.seconds is None, row.seconds or 0.0))
    return rows, refused


def _assumptions_of_modes(work: Workload, machine: MachineProfile) -> Iterator[str]:
    links = machine.links
    yield (
        "each mode with its largest micro-batch that fits, or a smaller one that is more than 5 % faster (rows: "
        "micro-batches x rows of each)"
    )
    yield (
        "ring collectives and all-to-alls run at the full rate of their link, without latency; many small collectives "
        "are slower than that, so tensor and sequence parallelism gain less at few tokens than shown here"
    )
    yield (
        "tensor parallelism as in DeepSpeed's AutoTP: each rank has the whole embeddings and head, and the input "
        "gradient of each matrix product is all-reduced"
    )
    yield "tensor-parallel ranks share a block's activations, except two hidden states; assumed, not measured"
    if links.between_gpus is None:
        yield "GPUs have no direct links: transfers between them go over PCIe, through host memory"
    for name, rate in (("between GPUs", links.between_gpus), ("network of a node", links.network)):
        if rate is not None:
            yield f"{name}: {format_bytes(rate.value)}/s each way; {rate.origin}: {rate.source}"
    if not (work.shape.heads and work.shape.key_heads):
        yield "this model's number of heads is unknown: whether tensor and sequence divide it was not checked"
