"""Compare all parallelism modes for a number of ranks, as the table or JSON of `plan --parallel`.

The comparison has each mode's memory, bytes per link and seconds, and the tokens per step from which on each is the
fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from offload_trainer.errors import UserError
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.parallel.cost import ModeCost, StepRates, priced, stock_rates
from offload_trainer.plan.parallel.modes import modes, refusal
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.tiered.engine import all_to_alls
from offload_trainer.plan.workload import Workload
from offload_trainer.units import format_bytes, format_count, format_seconds

_ROWS = (1, 8, 64, 512)  # rows per rank and step for which the fastest mode is determined
_COLUMNS = ("mode", "rows", "state", "GPU", "RAM", "PCIe", "GPU links", "network", "collectives", "step", "runs with")


@dataclass(frozen=True)
class Row:
    """One mode in the table. Bytes moved are per step and direction."""

    name: str
    words: str  # command-line settings that run the mode; "": this package cannot run it
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
        cells = [list(_COLUMNS), *(_cells(row) for row in self.rows if not row.lacks)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(_COLUMNS))]
        told = [f"{format_count(self.tokens)} tokens a step, {self.world} ranks on {self.nodes} node(s)"]
        for row in cells:
            ends = [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
            told.append("  ".join([row[0].ljust(widths[0]), *ends, row[-1]]).rstrip())
        told += [f"  rejected: {row.name}: {row.lacks}" for row in self.rows if row.lacks]
        told += [f"  rejected: {name}: {reason}" for name, reason in self.refused]
        told += [f"  fastest from {format_count(tokens)} tokens a step: {name}" for tokens, name in self.wins]
        told += [f"  assumed: {line}" for line in self.assumptions]
        return "\n".join(told)


def _cells(row: Row) -> list[str]:
    sizes = (row.gpu_bytes, row.ram_bytes, row.pcie_bytes, row.link_bytes, row.network_bytes)
    return [
        row.name,
        f"{row.accumulate} x {row.micro_batch}",
        row.state,
        *(format_bytes(size) if size else "-" for size in sizes),
        "" if row.collectives is None else format_count(row.collectives),
        "unknown" if row.seconds is None else format_seconds(row.seconds),
        row.words or "no engine",
    ]


Ours = Callable[[int, int], Plan | str]  # (tokens, sequence-parallel ranks) -> the tiered engine's plan, or a reason


def compare(work: Workload, machine: MachineProfile, *, ours: Ours) -> Comparison:
    """Compare all modes for the tokens of `work`.

    `ours` returns the tiered engine's plan, the reason why it has no plan, or "" if the rows cannot be divided.
    """
    rows, refused = _rows(work, machine, stock=stock_rates(work, machine), ours=ours)
    wins = list[tuple[int, str]]()
    for rows_a_rank in _ROWS:
        step = replace(work, micro_batch=1, accumulate=rows_a_rank)
        found, _ = _rows(step, machine, stock=stock_rates(step, machine), ours=ours)
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
        assumptions=tuple(_assumptions(work, machine)),
    )


def _rows(
    work: Workload, machine: MachineProfile, *, stock: StepRates, ours: Ours
) -> tuple[list[Row], list[tuple[str, str]]]:
    """Return the rows, fastest first and those that do not fit last, and (mode, reason) of the impossible modes."""
    rows, refused = list[Row](), list[tuple[str, str]]()
    for count in (count for count in range(1, work.world + 1) if work.world % count == 0):
        step = replace(work, sequence=count)
        plan = ours(work.tokens, count)
        if isinstance(plan, Plan):
            rows.append(_of_plan(plan, step, machine))
        elif plan:
            refused.append((_tiered(step), plan))
    for mode in modes(work.world):
        reason = refusal(mode, work.shape, rows=work.tokens // work.seq_len, seq_len=work.seq_len)
        if reason:
            refused.append((mode.name, reason))
        else:
            rows.append(_of_mode(priced(mode, work, machine, stock), work))
    rows.sort(key=lambda row: (bool(row.lacks), row.seconds is None, row.seconds or 0.0))
    return rows, refused


def _of_mode(one: ModeCost, work: Workload) -> Row:
    has_rule = one.mode.tensor == 1 or any(weight.split for weight in work.shape.weights)
    parts = " parallel.partition_activations=true" if one.mode.tensor > 1 and work.partition else ""
    return Row(
        name=one.mode.name,
        words=one.mode.words and one.mode.words + parts if has_rule else "",
        micro_batch=one.micro_batch,
        accumulate=one.accumulate,
        state=one.home,
        gpu_bytes=one.gpu,
        ram_bytes=one.ram,
        pcie_bytes=round(one.pcie),
        link_bytes=round(one.between),
        network_bytes=round(one.network),
        collectives=one.collectives,
        seconds=one.step,
        lacks=one.lacks,
    )


def _tiered(work: Workload) -> str:
    return f"tiered, {work.world} ranks" + (f", sequence {work.sequence}" if work.sequence > 1 else "")


def _of_plan(plan: Plan, work: Workload, machine: MachineProfile) -> Row:
    """Return the row of the tiered engine's plan."""
    step = replace(work, micro_batch=plan.micro_batch, accumulate=1)
    step = replace(step, accumulate=plan.tokens_per_step // step.tokens)

    def moved(place: str) -> int:
        found = [one for one in (*plan.traffic, *plan.links) if one.place == place]
        return max(sum(one.read for one in found), sum(one.written for one in found))

    own = machine.links.between_gpus is not None
    return Row(
        name=_tiered(work),
        words="--engine tiered" + (f" parallel.sequence={work.sequence}" if work.sequence > 1 else ""),
        micro_batch=plan.micro_batch,
        accumulate=step.accumulate,
        state=plan.placement.optimizer,
        gpu_bytes=plan.tiers["gpu"]["need"] * plan.nodes // plan.world,
        ram_bytes=plan.tiers["ram"]["need"],
        pcie_bytes=moved("device") + (0 if own else moved("gpus")),
        link_bytes=moved("gpus") if own else 0,
        network_bytes=moved("network"),
        collectives=sum(one.count for one in all_to_alls(step)) or None,
        seconds=plan.forecast.step,
        lacks="; ".join(plan.shortfalls()),
    )


def _assumptions(work: Workload, machine: MachineProfile) -> Sequence[str]:
    links = machine.links
    found = [
        "each mode with its fastest micro-batch that fits (rows: micro-batches x rows of each)",
        "ring collectives and all-to-alls run at the full rate of their link, without latency; many small collectives "
        "are slower than that, so tensor and sequence parallelism gain less at few tokens than shown here",
        "tensor parallelism as in DeepSpeed's AutoTP: each rank has the whole embeddings and head, and the input "
        "gradient of each matrix product is all-reduced",
        "tensor-parallel ranks share a block's activations, except two hidden states; assumed, not measured",
    ]
    if links.between_gpus is None:
        found.append("GPUs have no direct links: transfers between them go over PCIe, through host memory")
    for name, rate in (("between GPUs", links.between_gpus), ("network of a node", links.network)):
        if rate is not None:
            found.append(f"{name}: {format_bytes(rate.value)}/s each way; {rate.origin}: {rate.source}")
    if not (work.shape.heads and work.shape.key_heads):
        found.append("this model's number of heads is unknown: whether tensor and sequence divide it was not checked")
    return found
