"""Apply the heap settings of `plan/memory/malloc_threshold.py` before an engine is built, and return freed memory
afterwards.

keep_heap ── an engine is built ── built ── steps (the tiered engine's blocks: offloading/device/heap_trim.py)
"""

from __future__ import annotations

import torch

from offload_trainer.plan.memory.malloc_threshold import LONG, mapped_from
from offload_trainer.storage.host_memory import return_now, return_what_is_freed


def keep_heap(engine: str, *, row: int = 0) -> None:
    """Set the mmap threshold for the whole process, before anything is built; `row` is in tokens, 0 if unknown.

    The tiered engine always uses it. Other engines keep glibc's default, because short rows would take longer
    otherwise, except for long rows on a CPU.
    """
    if engine == "tiered" or (row >= LONG and not torch.cuda.is_available()):
        return_what_is_freed(above=mapped_from(row))


def built() -> None:
    """Return memory that building has freed; DeepSpeed's flat weights leave holes as large as the model."""
    return_now()
