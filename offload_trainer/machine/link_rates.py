"""Benchmarks of transfers between ranks on this machine, and to each from host memory, with all ranks active.

With GPUs each rank uses one; copies are from pinned memory and the all-gather is NCCL's. Without GPUs, host memory
replaces device memory and Unix sockets replace NCCL. A rate is the slowest rank's, since all ranks wait for it.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import torch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

from offload_trainer import ranks as all_ranks
from offload_trainer.errors import TrainerError
from offload_trainer.mesh import RUN
from offload_trainer.plan.machine import Links, Rate
from offload_trainer.safe_files import parsed
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.owned_dirs import scratch
from offload_trainer.units import format_bytes

_ON_GPU, _ON_CPU = 256 << 20, 32 << 20  # bytes per rank
_TIMES = 8
_PATIENCE = 300.0  # seconds for the whole benchmark: starting processes that import torch, and moving a few GB


def bench_links(known: Links, *, ranks: int, say: Callable[[str], None]) -> Links:
    """Return `known` with the rates that `ranks` processes on this machine measure together.

    Raises TrainerError, with the last line of its traceback, if one of them fails or is not finished in time.
    """
    say(f"bench: links between {ranks} ranks")
    with scratch("offload-trainer-links-") as folder:
        answer = folder / "links.json"
        started = start_processes(run_rank, (ranks, secrets.token_hex(16), answer), nprocs=ranks, join=False)
        until = time.monotonic() + _PATIENCE
        try:
            while not started.join(max(0.0, until - time.monotonic())):
                if time.monotonic() > until:
                    raise TrainerError(f"links between {ranks} ranks could not be timed in {_PATIENCE:.0f} s")
        except (ProcessExitedException, ProcessRaisedException) as error:
            why = str(error).strip().splitlines()[-1]
            raise TrainerError(
                f"links between {ranks} ranks could not be timed: rank {error.error_index}: {why}"
            ) from error
        finally:
            for process in started.processes:
                process.kill()
        found = parsed(answer.read_bytes(), Links)
    return replace(found, between_gpus=known.between_gpus, network=known.network, message=known.message)


def run_rank(rank: int, ranks: int, run: str, answer: Path) -> None:
    """Run the benchmark as one rank together with the others; rank 0 writes the result."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {RUN: run, **{name: str(value) for name, value in place.items()}}
    torch.set_num_threads(1)
    all_ranks.join()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(rank)
    found = _measured(rank, ranks, size=_ON_GPU if gpu else _ON_CPU, gpu=gpu)
    if rank == 0:
        answer.write_text(json.dumps(asdict(found)))
    all_ranks.wait_for_all()


def _measured(rank: int, ranks: int, *, size: int, gpu: bool) -> Links:
    between = all_ranks.group_of(gpus=gpu)
    host = host_buffer(size, pinned=gpu)
    place = torch.device("cuda", rank) if gpu else torch.device("cpu")
    device = torch.zeros(size, dtype=torch.uint8, device=place)
    whole = size // ranks * ranks
    part = size // ranks

    def seconds(work: Callable[[], object], *, alone: bool = False) -> float:
        """Return the median time of the slowest rank, or with `alone` of rank 0 working alone; all ranks must call."""
        taken = []
        for _ in range(_TIMES + 1):  # the first is not counted
            all_ranks.wait_for_all()
            start = time.perf_counter()
            if rank == 0 or not alone:
                work()
            if gpu:
                torch.cuda.synchronize()
            taken.append(max(all_ranks.all_gather_json(time.perf_counter() - start)))
        return median(taken[1:])

    def copied(work: Callable[[], object]) -> Rate:
        once, alone = seconds(work), seconds(work, alone=True)
        how = f"{format_bytes(size)} by each of {ranks} ranks at once, the slowest, median of {_TIMES}"
        return Rate(size / once, "measured", f"{how}; one alone: {size / alone / 1e9:.3g} GB/s")

    def joined(work: Callable[[], object], what: str) -> Rate:
        moved = whole - part
        how = f"{format_bytes(moved)} to each of {ranks} ranks, {'NCCL' if gpu else 'sockets'}, median of {_TIMES}"
        return Rate(moved / seconds(work), "measured", f"{what}, {how}")

    parts = device[:whole].view(ranks, part)
    return Links(
        ranks=ranks,
        to_device_at_once=copied(lambda: device.copy_(host, non_blocking=True)),
        from_device_at_once=copied(lambda: host.copy_(device, non_blocking=True)),
        all_gather=joined(lambda: all_ranks.all_gather_parts(device[:whole], rank, group=between), "all-gather"),
        all_to_all=joined(lambda: all_ranks.all_to_all(parts, group=between), "all-to-all"),
    )
