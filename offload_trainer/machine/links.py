"""How fast ranks of this machine get bytes, while all of them do: from host memory, and from each other.

    bench_links ──starts──> one process a rank: python -m offload_trainer.machine.links RANK RANKS PORT
                <──reads──  what rank 0 prints, as JSON

With GPUs each rank has one, copies are from pinned memory and the all-gather is NCCL's; without, memory stands for the
devices' and gloo for NCCL. A rate is of the slowest rank, since all wait for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import timedelta
from statistics import median
from typing import IO

import torch
import torch.distributed as dist

from offload_trainer.errors import TrainerError
from offload_trainer.plan.machine import Links, Rate
from offload_trainer.readback import parsed
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.units import format_bytes

_ON_GPU, _ON_CPU = 256 << 20, 32 << 20  # bytes that each rank has of what is moved
_TIMES = 8
_PATIENCE = 300.0  # seconds for all of it: processes that import torch, and a few GB


def bench_links(known: Links, *, ranks: int, say: Callable[[str], None]) -> Links:
    """`known` with what `ranks` processes of this machine measure together. TrainerError where one of them fails."""
    say(f"bench: links between {ranks} ranks")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2 * ranks)]
        told, wrong = files[:ranks], files[ranks:]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                words = [sys.executable, "-m", "offload_trainer.machine.links", str(rank), str(ranks), str(store.port)]
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
                started.append(subprocess.Popen(words, env=environment, stdout=told[rank], stderr=wrong[rank]))
            _wait_for(started, wrong)
        finally:
            for process in started:
                process.kill()
                process.wait()
        told[0].seek(0)
        found = parsed(told[0].read(), Links)
    return replace(found, between_gpus=known.between_gpus, network=known.network, message=known.message)


def _wait_for(started: Sequence[subprocess.Popen[bytes]], wrong: Sequence[IO[bytes]]) -> None:
    """Until all have ended. TrainerError, with its last words, where one fails, or is not through in time."""
    until = time.monotonic() + _PATIENCE
    codes: list[int | None] = [None]
    while None in codes and not any(codes) and time.monotonic() < until:
        time.sleep(0.05)
        codes = [process.poll() for process in started]
    blamed = [rank for rank, code in enumerate(codes) if code] or [r for r, code in enumerate(codes) if code is None]
    if blamed:
        wrong[blamed[0]].seek(0)
        lines = wrong[blamed[0]].read().decode(errors="replace").splitlines() or ["it said nothing"]
        raise TrainerError(
            f"links between {len(started)} ranks could not be timed: rank {blamed[0]} (exit code {codes[blamed[0]]}): "
            f"{lines[-1]}"
        )


def main(rank: int, ranks: int, port: int) -> None:
    """One rank: measure with the others; the first prints what was found."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    patience = timedelta(seconds=_PATIENCE)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=patience)
    found = _measured(rank, ranks, size=_ON_GPU if gpu else _ON_CPU, gpu=gpu)
    if rank == 0:
        print(json.dumps(asdict(found)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _measured(rank: int, ranks: int, *, size: int, gpu: bool) -> Links:
    between = dist.new_group(backend="nccl") if gpu else None
    host = host_buffer(size, pinned=gpu)
    place = torch.device("cuda", rank) if gpu else torch.device("cpu")
    device, other = (torch.zeros(size, dtype=torch.uint8, device=place) for _ in range(2))
    whole = size // ranks * ranks
    part = size // ranks

    def seconds(work: Callable[[], object], *, alone: bool = False) -> float:
        """Of the slowest rank, or of the first alone; all ranks call."""
        taken = []
        for _ in range(_TIMES + 1):  # the first is not counted
            dist.barrier()
            start = time.perf_counter()
            if rank == 0 or not alone:
                work()
            if gpu:
                torch.cuda.synchronize()
            slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            taken.append(float(slowest))
        return median(taken[1:])

    def copied(work: Callable[[], object]) -> Rate:
        once, alone = seconds(work), seconds(work, alone=True)
        how = f"{format_bytes(size)} by each of {ranks} ranks at once, the slowest, median of {_TIMES}"
        return Rate(size / once, "measured", f"{how}; one alone: {size / alone / 1e9:.3g} GB/s")

    def joined(work: Callable[[], object], what: str) -> Rate:
        moved = whole - part
        how = f"{format_bytes(moved)} to each of {ranks} ranks, {'NCCL' if gpu else 'gloo'}, median of {_TIMES}"
        return Rate(moved / seconds(work), "measured", f"{what}, {how}")

    mine = device[part * rank : part * (rank + 1)]
    return Links(
        ranks=ranks,
        to_device_at_once=copied(lambda: device.copy_(host, non_blocking=True)),
        from_device_at_once=copied(lambda: host.copy_(device, non_blocking=True)),
        all_gather=joined(lambda: dist.all_gather_into_tensor(device[:whole], mine, group=between), "all-gather"),
        all_to_all=joined(lambda: dist.all_to_all_single(other[:whole], device[:whole], group=between), "all-to-all"),
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
