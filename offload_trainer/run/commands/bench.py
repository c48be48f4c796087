"""This machine and its drives timed as a run would use them, and what was found kept for later plans."""

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
    """Time this machine and each of `drives`, and keep the rates for later plans.

    `dtype`: of a run's products; `page`: parameters updated at a time; `drive_bytes`: written in one direction, however
    long it takes; None: as much as goes in some seconds; `ranks`: between how many links are timed, one a GPU; 1:
    as many as there are GPUs. CPU threads are the process's.
    """
    import torch

    from offload_trainer.engine.cpu_matmul import use_fp32_products
    from offload_trainer.engine.op_builder import is_built
    from offload_trainer.engine.timed_updates import available_updates
    from offload_trainer.machine.bench import Budget, bench_machine, dtypes_to_time
    from offload_trainer.machine.link_rates import bench_links
    from offload_trainer.machine.probe import probe_machine
    from offload_trainer.machine.rate_cache import keep_rates, refuse_unwritable
    from offload_trainer.model.loader import DTYPES

    refuse_unwritable()
    machine = probe_machine(drives=drives, output=output)
    count = _ranks_to_time(ranks, gpus=torch.cuda.device_count() if machine.gpu is not None else None)
    if machine.gpu is None:
        use_fp32_products(DTYPES[dtype])  # what is timed is what a run does
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
    except OSError as error:  # it could be written when the bench began; what was measured is shown all the same
        say(f"note: these rates could not be saved for later plans: {reason(error)}")
    return timed


def _ranks_to_time(wish: int, *, gpus: int | None) -> int:
    """As many as asked for, or one a GPU; without GPUs each is on the CPU."""
    if gpus is not None and wish > gpus:
        raise UserError(f"--gpus {wish}: there are {gpus} here")
    return gpus if gpus is not None and wish == 1 else wish


def _ways_to_drives(*, kernel: bool) -> dict[str, Callable[[], Any]]:
    """What moves bytes, by the words of the configuration that ask for it, the default first; DeepSpeed's `kernel` too.

    Each makes Transfers.
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
