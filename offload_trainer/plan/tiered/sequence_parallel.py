"""Sequence parallel in the tiered engine: what ranks that share rows send each other, hold for it, and cannot do.

Queries, keys, values and results of attention go through all-to-alls (`model/ulysses.py`; bytes: `modes.py`).
Blocks keep attention's result of whole rows, of a rank's heads, and once more of all heads, of its own tokens
(`activations.in_pieces`). What else is there while it is sent is less than an MLP holds (tests/plan/test_gpu_bytes.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.memory.common import Item
from offload_trainer.plan.parallel.comm_cost import GPUS, NETWORK
from offload_trainer.plan.parallel.modes import Collective, Mode, flows, link_seconds, refusal
from offload_trainer.plan.tiered.weight_transfer import NCCL_BYTES
from offload_trainer.plan.time.step_time import Bound
from offload_trainer.plan.time.traffic import Traffic
from offload_trainer.plan.workload import Workload
from offload_trainer.units import format_bytes


def not_in_pieces(work: Workload) -> list[str]:
    """Why rows of such a step cannot be shared; one sentence at most."""
    if work.sequence == 1:
        return []
    wish, shape = f"parallel.sequence={work.sequence}", work.shape
    if work.world % work.sequence:
        return [f"{wish} with {work.world} rank(s): a multiple of {work.sequence} is needed (--gpus)"]
    if shape.packed:
        return [f"{wish} with data.packing=on: attention masks between documents need whole rows; leave one out"]
    if not shape.heads:
        return [f"{wish}: the model's number of attention heads is not known; leave it out"]
    why = refusal(_mode(work), shape, rows=work.data, seq_len=work.seq_len)
    return [f"{wish}: {why}"] if why else []


def all_to_alls(work: Workload) -> list[Collective]:
    """Of a step, through each rank; none where no rows are shared."""
    return [one for one in flows(_mode(work), work, held=0, trained=0.0) if one.kind == "all-to-all"]


def sequence_items(work: Workload, *, device: str) -> list[Item]:
    """On the device of each of a node's ranks, beside what `activation_items` has."""
    if work.sequence == 1 or device != "gpu":
        return []
    return [Item(device, "NCCL", work.here * NCCL_BYTES, "NCCL's buffers for the all-to-alls; assumed")]


def sequence_links(work: Workload) -> Iterator[Traffic]:
    """Bytes into each GPU and out of it, and those of a node over the network."""
    for one in all_to_alls(work):
        yield Traffic(GPUS, one.phase, round(one.bytes), round(one.bytes))
        if through := round(one.network(work.here)):
            yield Traffic(NETWORK, one.phase, through, through)


def sequence_waits(work: Workload, machine: MachineProfile) -> Iterator[Bound]:
    """Nothing is computed meanwhile. On a CPU nothing is claimed of them."""
    for one in all_to_alls(work) if machine.gpu is not None else ():
        what = f"{one.count} all-to-alls, {format_bytes(one.bytes)} in total for each GPU"
        yield Bound(one.phase, link_seconds(one, machine, here=work.here), what, "gpus")


def sequence_note(work: Workload) -> str:
    return (
        f"parallel.sequence={work.sequence}: each GPU processes {work.length} of the {work.seq_len} tokens of a row; "
        f"{work.data} data-parallel group(s) of {work.sequence} ranks"
    )


def _mode(work: Workload) -> Mode:
    return Mode(data=work.data, sequence=work.sequence)
