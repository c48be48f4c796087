"""How the CPU's heap is kept, for every engine: the one place that asks for it. The rule is in `plan/heap.py`.

keep_heap ── an engine is built ── built ── steps (the tiered engine's blocks: offloading/heap.py)
"""

from __future__ import annotations

import torch

from offload_trainer.plan.heap import LONG, mapped_from
from offload_trainer.storage.host_memory import return_now, return_what_is_freed


def keep_heap(engine: str, *, row: int = 0) -> None:
    """From now on, for the whole process; before anything is built. `row`: tokens, 0 where they are not known.

    The tiered engine's always. That of others, which are measured beside it, as glibc keeps it, since a step of short
    rows takes longer otherwise (docs/log.md); of long rows where the CPU has the activations.
    """
    if engine == "tiered" or (row >= LONG and not torch.cuda.is_available()):
        return_what_is_freed(above=mapped_from(row))


def built() -> None:
    """What building has freed goes back: DeepSpeed's flat weights leave holes as large as the model."""
    return_now()
