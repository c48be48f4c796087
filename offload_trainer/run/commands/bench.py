"""The `bench` command: measure this machine and its drives as a run would use them, and cache the rates for plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from offload_trainer.errors import UserError, reason
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.units import format_bytes


def bench_here(
    drives: tuple[str, ...],
    *,
    output: str,
    dtype: str,
    page: int,
    ranks: int,
    drive_bytes: int | None,
    say: Callable[[str], None],
) -> MachineProfile:
    """Measure this machine and each of `drives`, store the rates for later plans, and return the profile.

    Args:
        drives: a directory on each drive to measure.
        output: the run directory of later plans.
        dtype: dtype of the matrix products.
        page: parameters updated at a time.
        ranks: number of ranks between which links are measured, one per GPU; 1: all GPUs.
        drive_bytes: bytes to write in one direction, without a time limit; None: as many as fit in a few seconds.
        say: prints progress.

    CPU measurements use the threads of this process.
    """
    import torch

    from offload_trainer.engine.cpu_matmul import use_fp32_products
    from offload_trainer.engine.op_builder import is_built
    from offload_trainer.engine.timed_updates import available_updates
    from offload_trainer.machine.bench import Budget, bench_machine, dtypes_to_time
    from offload_trainer.machine.link_rates import bench_links
    from offload_trainer.machine.probe import probe_machine
    from offload_trainer.machine.rate_cache import keep_rates, refuse_unwritable
    from offload_trainer.storage.tensorfile import DTYPES

    refuse_unwritable()
    machine = probe_machine(drives=drives, output=output)
    count = _ranks_to_time(ranks, gpus=torch.cuda.device_count() if machine.gpu is not None else None)
    if machine.gpu is None:
        use_fp32_products(DTYPES[dtype])  # measure what a run would compute with
    budget = Budget(update_page=page)
    if drive_bytes is not None:
        budget = replace(budget, drive_bytes=drive_bytes, drive_seconds=float("inf"))
    io = _ways_to_drives(kernel=bool(machine.drives) and is_built("async_io"))
    if machine.drives:
        most = format_bytes(budget.written(drives=len(machine.drives), ways=len(io)))
        say(f"bench: writes at most {most} to {len(machine.drives)} drive(s), and removes it afterwards")
    timed = bench_machine(
        machine,
        transfers=io,
        updates=available_updates(say=say),
        dtypes=dtypes_to_time(machine, dtype),
        budget=budget,
        say=say,
    )
    if count > 1:
        timed = replace(timed, links=bench_links(timed.links, ranks=count, say=say))
    try:
        keep_rates(timed)
    except OSError as error:  # the cache was writable at the start; still return the measured rates
        say(f"note: these rates could not be saved for later plans: {reason(error)}")
    return timed


def _ranks_to_time(wish: int, *, gpus: int | None) -> int:
    """Return the number of ranks to measure links between: as many as requested, or one per GPU if that is 1.

    `gpus`: None on a machine without GPUs. Raises UserError if more ranks than GPUs are requested.
    """
    if gpus is not None and wish > gpus:
        raise UserError(f"--gpus {wish}: there are {gpus} here")
    return gpus if gpus is not None and wish == 1 else wish


def _ways_to_drives(*, kernel: bool) -> dict[str, Callable[[], Any]]:
    """Return factories of the I/O backends to measure, by the configuration words that select each, default first.

    `kernel`: include DeepSpeed's async_io.
    """
    from offload_trainer.engine.op_builder import load_async_io
    from offload_trainer.storage.transfer import AioTransfers, ThreadedTransfers, async_io_handle

    ways: dict[str, Callable[[], Any]] = {
        f"tiered.io_threads={threads} tiered.io_block_bytes={block}": partial(
            ThreadedTransfers, threads=threads, block=block
        )
        for threads, block in ((4, 8 << 20), (8, 8 << 20), (2, 8 << 20), (4, 1 << 20))
    }
    if kernel:
        ways["tiered.io=async_io"] = partial(AioTransfers, async_io_handle(load_async_io(), block_bytes=1 << 20))
    return ways
