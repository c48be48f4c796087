"""Measure this machine and its drives as a run would use them, and cache the rates for plans.

`bench_here` is the `bench` command. `rates_at_start` takes seconds: a run that starts without rates measures what its
choices depend on, and plans again. Ranks share processor and drives, so one process measures with the threads of all.
"""

import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.common.units import format_bytes, format_count
from offload_trainer.config import TrainConfig
from offload_trainer.engine.cpu_matmul import use_fp32_products
from offload_trainer.machine import bench
from offload_trainer.machine.bench import Budget
from offload_trainer.machine.probe import probe_machine
from offload_trainer.machine.rate_cache import keep_rates, refuse_unwritable, threads_of_all_ranks
from offload_trainer.optim import cpu_units
from offload_trainer.optim.kernels import choose_kernel
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.tiered.state_formats import ADAMW, ADAMW_FORMATS
from offload_trainer.ranks import all_gather_json, from_rank_zero, place_here
from offload_trainer.run.planning import Planned
from offload_trainer.storage.owned_dirs import reason
from offload_trainer.storage.tensorfile import DTYPES

_WORTH_BYTES = 64 * 10**9  # bytes that a run moves between tiers from which on measuring pays: about a minute of I/O
_WORTH_FLOPS = 2e16  # a GPU's products of weights in a run from which on measuring pays: about a minute of an H100
_SESSION_STEPS = 10  # steps that a session is assumed to make


def bench_here(config: TrainConfig, *, drive_bytes: int | None, say: Callable[[str], None]) -> MachineProfile:
    """Measure this machine and each drive of `placement.nvme`, store the rates for later plans, and return the profile.

    Products are in `model.dtype`, an update in pages of `tiered.page_size`, and links between `placement.gpus` ranks,
    one per GPU; 1: all GPUs. `drive_bytes` are to be written in one direction, without a time limit; None: as many as
    fit in a few seconds. CPU measurements use the threads of this process.
    """
    dtype, ranks = config.model.dtype, config.placement.gpus
    refuse_unwritable()
    machine = probe_machine(config.placement, output=config.save.output)
    if machine.gpu is not None:
        if ranks > (there := torch.cuda.device_count()):
            raise UserError(f"--gpus {ranks}: there are {there} here")
        ranks = there if ranks == 1 else ranks
    else:
        use_fp32_products(DTYPES[dtype])  # measure what a run would compute with
    elements = max(Budget.update_elements, bench.beyond_caches(machine))
    budget = Budget(update_page=config.tiered.page_size, update_elements=elements)
    if drive_bytes is not None:
        budget = replace(budget, drive_bytes=drive_bytes, drive_seconds=float("inf"))
    if machine.drives:
        # written when a file is filled, and twice while it is read: alone, and while the cores compute
        most = format_bytes(3 * budget.drive_bytes * len(machine.drives))
        say(f"bench: takes minutes, writes at most {most} to {len(machine.drives)} drive(s), and removes it afterwards")
    timed = bench.bench_machine(
        machine,
        bench.timed_updates(("native", "torch"), ADAMW_FORMATS, say=say),
        dtypes=bench.dtypes_to_time(machine, dtype),
        matrices=True,
        budget=budget,
        say=say,
    )
    if ranks > 1:
        timed = replace(timed, links=bench.bench_links(timed.links, ranks=ranks, say=say))
    _keep(timed, say=say)
    return timed


def _keep(timed: MachineProfile, *, say: Callable[[str], None]) -> None:
    """Store the rates for later plans, or say why that failed: they are those of this plan in any case."""
    try:
        keep_rates(timed)
    except (OSError, ValueError) as error:
        say(f"note: these rates could not be saved for later plans: {reason(error)}")


def is_due(planned: Planned, *, steps: int | None = None) -> bool:
    """Return whether a run of `steps` (None: those of its configuration) should measure rates before it starts.

    It should if the plan fits, could not predict its step, and has choices that rates decide. Short runs start without.
    So do runs on several machines; of stock ZeRO's ranks the plan does not know the machines.
    """
    plan, on_gpu, steps = planned.plan, planned.machine.gpu is not None, steps or planned.config.train.steps
    work = plan.work
    here = work.world == 1 or (work.nodes == 1 and plan.engine == "tiered")
    moves = sum(one.read + one.written for one in plan.traffic) * steps >= _WORTH_BYTES
    chooses = on_gpu and plan.engine == "tiered" and work.shape.trainable and work.checkpointed  # how many blocks
    recomputes = chooses and 6 * work.shape.parameters * work.tokens * steps >= _WORTH_FLOPS
    due = bool(recomputes) or (moves and (plan.uses_drives or on_gpu))
    return here and due and plan.fits and plan.forecast.step is None


def is_due_in_session(planned: Planned) -> bool:
    """Return whether a session, which does not know its number of steps, should measure rates before it starts.

    A CPU that computes 16-bit products in fp32 is left out: a run replaces torch's products there
    (`engine/cpu_matmul.py`), which a session does not, and both would store one rate.
    """
    dtype = planned.config.model.dtype
    own = planned.machine.gpu is not None or dtype == "fp32" or cpu_units.has_native_16bit(DTYPES[dtype])
    return own and is_due(planned, steps=_SESSION_STEPS)


def rates_at_start(planned: Planned, *, say: Callable[[str], None]) -> MachineProfile:
    """Measure the rates that a run's plan lacks, cache them, and return the machine with them. Collective.

    All ranks are on one machine. Rank 0 measures while the others wait; an exception there is raised on all of them.
    """
    if place_here()[1] == 1:
        return _measured(planned, say=say)
    cpus = set[int]().union(*all_gather_json(sorted(os.sched_getaffinity(0)), list[int]))

    def measured() -> MachineProfile:
        with _threads_of_all_ranks(planned.machine, cpus):
            return _measured(planned, say=say)

    return from_rank_zero(measured, MachineProfile)


@contextmanager
def _threads_of_all_ranks(machine: MachineProfile, cpus: Collection[int]) -> Iterator[None]:
    """Within this context, compute with as many threads as all ranks of the machine have, on all of their `cpus`."""
    threads, own = torch.get_num_threads(), os.sched_getaffinity(0)

    def compute_with(threads: int, cpus: Collection[int]) -> None:
        torch.set_num_threads(threads)
        if os.sched_getaffinity(0) != set(cpus):
            for thread in os.listdir("/proc/self/task"):  # also those that torch has started before
                with suppress(ProcessLookupError):  # the thread has ended
                    os.sched_setaffinity(int(thread), cpus)

    try:
        compute_with(threads_of_all_ranks(machine), cpus)
        yield
    finally:
        compute_with(threads, own)


def _measured(planned: Planned, *, say: Callable[[str], None]) -> MachineProfile:
    """Measure what `rates_at_start` says on this rank; if that fails, say so and return the machine as it is.

    By the budget below this takes 4.9 s, and 3.3 s for each further drive; two slow cores and a drive of 400 MB/s took
    5 to 13 s.
    """
    config, machine = planned.config, planned.machine
    if machine.gpu is None:
        use_fp32_products(DTYPES[config.model.dtype])
    used = {one.place for one in planned.plan.traffic}
    budget = Budget(  # comments name the decisions that use each rate
        drive_bytes=1 << 30,
        drive_seconds=0.7,  # update schedule, placement, share of each drive
        contention_seconds=0.6,  # update schedule
        product_seconds=0.2,  # how much the forward and backward can hide; recomputation
        layer_seconds=0.1,  # the same; of an update rule on matrices, the schedule
        memory_elements=bench.beyond_caches(machine),
        update_seconds=0.15,  # update schedule, placement
        update_elements=max(2 * config.tiered.page_size, bench.beyond_caches(machine)),
        update_page=config.tiered.page_size,
        copy_seconds=0.05,  # placement, order of micro-batches
    )
    state = planned.plan.work.state
    choose_kernel(config.optim.kernel)  # UserError for one that was asked for and cannot be had
    updates = bench.timed_updates([config.optim.kernel], [replace(state, rule=ADAMW)], say=lambda _: None)
    start = time.perf_counter()
    try:
        # A caller's random numbers are those of a start that measures nothing, and equal on all ranks.
        with torch.random.fork_rng(devices=[] if machine.gpu is None else [torch.cuda.current_device()]):
            drives = tuple(drive for drive in machine.drives if drive.directory in used)
            timed = bench.bench_machine(
                replace(machine, drives=drives),
                updates,
                dtypes=[config.model.dtype],
                matrices=state.rule.matrices,
                budget=budget,
                say=lambda _: None,
            )
    except TrainerError as error:
        say(
            f"note: this machine's speed could not be measured, and choices that depend on it stay at defaults: {error}"
        )
        return machine
    found = {drive.directory: drive for drive in timed.drives}
    timed = replace(timed, drives=tuple(found.get(drive.directory, drive) for drive in machine.drives))
    told = [f"products {format_count(timed.rates.matmul[config.model.dtype].value)}FLOP/s"]
    told += [f"update {format_count(rate.value)} parameters/s" for rate in list(timed.rates.update.values())[:1]]
    for directory, rates in ((drive.directory, drive.rates) for drive in timed.drives if drive.rates is not None):
        read, written = format_bytes(rates.mixed_read.value), format_bytes(rates.mixed_write.value)
        told.append(f"{directory} {read}/s read with {written}/s written")
    say(f"measured this machine in {time.perf_counter() - start:.0f} s: {'; '.join(told)}")
    _keep(timed, say=say)
    return timed
