"""Benchmarks of transfers between ranks on this machine, and to each from host memory, with all ranks active.

    bench_links ──starts──> one process per rank: python -m offload_trainer.machine.link_rates
                <──reads──  rank 0's output, as JSON

With GPUs each rank uses one; copies are from pinned memory and the all-gather is NCCL's. Without GPUs, host memory
replaces device memory and Unix sockets replace NCCL. A rate is the slowest rank's, since all ranks wait for it.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from statistics import median
from typing import IO

import torch

from offload_trainer import ranks as all_ranks
from offload_trainer.errors import TrainerError
from offload_trainer.mesh import RUN
from offload_trainer.plan.machine import Links, Rate
from offload_trainer.safe_files import parsed
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.units import format_bytes

_ON_GPU, _ON_CPU = 256 << 20, 32 << 20  # bytes per rank
_TIMES = 8
_PATIENCE = 300.0  # seconds for the whole benchmark: starting processes that import torch, and moving a few GB


def bench_links(known: Links, *, ranks: int, say: Callable[[str], None]) -> Links:
    """Return `known` with the rates that `ranks` processes on this machine measure together."""
    say(f"bench: links between {ranks} ranks")
    run = secrets.token_hex(16)
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2 * ranks)]
        outputs, wrong = files[:ranks], files[ranks:]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                words = [sys.executable, "-m", "offload_trainer.machine.link_rates"]
                place = {RUN: run, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
                place |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCH_CPP_LOG_LEVEL": "FATAL"}
                started.append(
                    subprocess.Popen(words, env={**os.environ, **place}, stdout=outputs[rank], stderr=wrong[rank])
                )
            _wait_for(started, wrong)
        finally:
            for process in started:
                process.kill()
                process.wait()
        outputs[0].seek(0)
        found = parsed(outputs[0].read(), Links)
    return replace(found, between_gpus=known.between_gpus, network=known.network, message=known.message)


def _wait_for(started: Sequence[subprocess.Popen[bytes]], wrong: Sequence[IO[bytes]]) -> None:
    """Wait until all processes have ended.

    Raises TrainerError, with the last line of its error output, if one fails or is not finished in time.
    """
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


def main() -> None:
    """Run the benchmark as one rank together with the others; rank 0 prints the result."""
    gpu = torch.cuda.is_available()
    all_ranks.join()
    rank, ranks = all_ranks.place_here()
    if gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    found = _measured(rank, ranks, size=_ON_GPU if gpu else _ON_CPU, gpu=gpu)
    if rank == 0:
        print(json.dumps(asdict(found)), flush=True)
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


if __name__ == "__main__":
    main()
