"""Tables of several plans: numbers of nodes (`plan --nodes`), and ways to divide a step (`plan --parallel`).

Each row is an ordinary plan. Numbers of nodes keep the rows of each rank, so a step's tokens grow with the ranks (weak
scaling). Ways to divide a step are compared at the same tokens per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.parallel.comm_cost import GPUS, NETWORK
from offload_trainer.plan.plan import Plan
from offload_trainer.plan.tiers import GPU_NAME, RAM_NAME
from offload_trainer.units import format_bytes, format_count, format_seconds

_COLUMNS = ("plan", "micro-batch", "weights/state", "GPU", "RAM", "between GPUs", "network", "step", "tokens/s")


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


Row = dict[str, Any]  # one plan in a table, a stable format of `plan --json`


def row_of(plan: Plan, name: str, *, words: str = "") -> Row:
    """Return the row of a plan. `words`: command-line settings that run it; "": those of the command."""
    step = plan.forecast.step

    def moved(place: str) -> int:
        """Return the bytes that a step moves, in the direction that has more."""
        found = [one for one in plan.links if one.place == place]
        return max(sum(one.read for one in found), sum(one.written for one in found))

    return {
        "name": name,
        "words": words,
        "nodes": plan.nodes,
        "ranks": plan.world,
        "tokens_per_step": plan.tokens_per_step,
        "micro_batch": plan.micro_batch,
        "params": plan.placement.params,
        "state": plan.placement.optimizer,
        "gpu_bytes": plan.tiers[GPU_NAME]["need"] * plan.nodes // plan.world,  # per GPU
        "ram_bytes": plan.tiers[RAM_NAME]["need"],  # per node
        "link_bytes": moved(GPUS),  # between GPUs, for each
        "network_bytes": moved(NETWORK),  # per node
        "seconds": step,  # per step; None: a rate is missing
        "tokens_per_second": None if step is None else plan.tokens_per_step / step,
        "lacks": "; ".join(plan.shortfalls()),  # a sentence about what does not fit, or ""
    }


def _cells(row: Row) -> tuple[str, ...]:
    sizes = (row[f"{place}_bytes"] for place in ("gpu", "ram", "link", "network"))
    return (
        row["name"],
        str(row["micro_batch"]),
        f"{row['params']}/{row['state']}",
        *(format_bytes(size) if size else "-" for size in sizes),
        "unknown" if row["seconds"] is None else format_seconds(row["seconds"]),
        "" if row["tokens_per_second"] is None else format_count(row["tokens_per_second"]),
    )


def scaling(rows: Sequence[Row]) -> list[float | None]:
    """Return each row's tokens/s of a node over those of the first row's node; None where a rate is missing."""
    speeds = [row["tokens_per_second"] and row["tokens_per_second"] / row["nodes"] for row in rows]
    return [speed and speeds[0] and speed / speeds[0] for speed in speeds]


def table(rows: Sequence[Row], *, last: str, ends: Sequence[str]) -> list[str]:
    """Return the lines of a text table, with `ends` in a column named `last`. Rows that do not fit follow it."""
    fitting = [(*_cells(row), end) for row, end in zip(rows, ends, strict=True) if not row["lacks"]]
    cells = [(*_COLUMNS, last), *fitting]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for name, *numbers, end in cells:
        aligned = (number.rjust(width) for number, width in zip(numbers, widths[1:-1], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *aligned, end]).rstrip())
    return lines + [f"  does not fit: {row['name']}: {row['lacks']}" for row in rows if row["lacks"]]


def assumptions(machine: MachineProfile) -> list[str]:
    """Return the assumptions behind the numbers of several ranks, one sentence each."""
    links = machine.links
    found = [
        "all nodes are equal, and each rank has its own GPU and its own rows; bytes are those of one GPU or one node",
        "transfers overlap with computation, except those of tensor and sequence parallelism, the tiered engine's "
        "additions of gradients in RAM, and its barriers",
        "DeepSpeed's collectives and all-to-alls run at the full rate of their link, without latency; many small ones "
        "are slower, so tensor and sequence parallelism gain less with few tokens than shown here",
        "tensor parallelism is DeepSpeed's AutoTP: each rank has the whole embeddings and head, the input gradient of "
        "each matrix product is all-reduced, and a block's activations are shared, except two hidden states",
    ]
    if (links.between_gpus or links.all_to_all) is None:
        found.append("GPUs have no direct links: transfers between them go over PCIe, through host memory")
    for name in ("between_gpus", "network", "to_device_at_once", "from_device_at_once", "all_gather", "all_to_all"):
        if (rate := getattr(links, name)) is not None:
            found.append(f"{name.replace('_', ' ')}: {format_bytes(rate.value)}/s; {rate.origin}: {rate.source}")
    if (message := links.message) is None:
        found.append("barriers of all ranks take no time: links.message is not in the machine's file")
    else:
        found.append(f"a message: {message.seconds:.2g} s; {message.origin}: {message.source}")
    return found
