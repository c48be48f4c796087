"""Planning of sequence parallelism in the tiered engine: its restrictions, communication and extra memory.

Queries, keys, values and results of attention pass through all-to-alls (`model/ulysses.py`; bytes: `modes.py`). Blocks
keep attention's result twice: for whole rows and a rank's heads, and for all heads and the rank's tokens
(`activations.in_pieces`). Buffers during the all-to-alls are smaller than what an MLP needs
(tests/plan/test_gpu_bytes.py).
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


def sequence_parallel_mistake(work: Workload) -> list[str]:
    """Return why the rows of this step cannot be divided over ranks, at most one sentence."""
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
    """Return the all-to-alls of a step on each rank; empty without sequence parallelism."""
    return [one for one in flows(_mode(work), work, held=0, trained=0.0) if one.kind == "all-to-all"]


def sequence_items(work: Workload, *, device: str) -> list[Item]:
    """Return the device memory of a node's ranks in addition to `activation_items`."""
    if work.sequence == 1 or device != "gpu":
        return []
    return [Item(device, "NCCL", work.here * NCCL_BYTES, "NCCL's buffers for the all-to-alls; assumed")]


def sequence_links(work: Workload) -> Iterator[Traffic]:
    """Yield the bytes into and out of each GPU, and those of a node over the network."""
    for one in all_to_alls(work):
        yield Traffic(GPUS, one.phase, round(one.bytes), round(one.bytes))
        if through := round(one.network(work.here)):
            yield Traffic(NETWORK, one.phase, through, through)


def sequence_waits(work: Workload, machine: MachineProfile) -> Iterator[Bound]:
    """Yield the waits for all-to-alls, which no computation overlaps; none on a CPU, where no rate is known."""
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
