"""How fast the CPU's AdamW is, next to how fast the memory is.

    bench_update.py [--parameters 100e6] [--rounds 7] [--threads N] [--json]

One update goes from a bf16 gradient to a bf16 weight: convert, scale, AdamW on fp32 master and moments, round. It moves
28 bytes a parameter at least. Each kernel does it in turn, DeepSpeed does it as its ZeRO optimizers do, operation by
operation, and the bound is an in-place scaling of the master weights (8 bytes a parameter). Everything takes turns, so
that a busy machine hurts all alike; figures are medians with their least and greatest.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

from offload_trainer.engine.kernels import load_cpu_adam
from offload_trainer.engine.updates import ADAM, UPDATE_BYTES, Buffers, kernel_update, make_buffers, stock_update
from offload_trainer.errors import UserError
from offload_trainer.tiers.kernels import choose_kernel

SCALE_BYTES = 4 + 4


def candidates(buffers: Buffers) -> dict[str, tuple[int, Callable[[int], None]]]:
    """Bytes a parameter and the work, by name; what this machine cannot have is left out, with a word."""
    found: dict[str, tuple[int, Callable[[int], None]]] = {
        "in-place scale": (SCALE_BYTES, lambda step: buffers.master.mul_(0.999999))
    }
    for name in ("native", "torch", "deepspeed"):
        try:
            kernel, _ = choose_kernel(name, ADAM, load_op=load_cpu_adam)
        except UserError as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
            continue
        found[f"{name} kernel"] = (UPDATE_BYTES, kernel_update(kernel, buffers))
    if "deepspeed kernel" in found:
        found["DeepSpeed's sequence"] = (UPDATE_BYTES, stock_update(buffers))
    return found


def measure(work: dict[str, tuple[int, Callable[[int], None]]], *, rounds: int) -> dict[str, list[float]]:
    """Seconds of each candidate in each round, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    names, order = list(work), random.Random(0)
    for number in range(rounds + 1):
        order.shuffle(names)  # OpenMP's threads spin on for a while, to the harm of whoever comes next
        for name in names:
            start = time.perf_counter()
            work[name][1](number + 1)
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def summary(
    work: dict[str, tuple[int, Callable[[int], None]]], seconds: dict[str, list[float]], n: int
) -> dict[str, dict[str, float]]:
    """GB/s (10^9) and parameters a second, by the median; the ratios are of medians."""
    rates = {name: [work[name][0] * n / second / 1e9 for second in seconds[name]] for name in work}
    medians = {name: statistics.median(rate) for name, rate in rates.items()}
    own = medians.get("DeepSpeed's sequence")
    return {
        name: {
            "gb_per_second": medians[name],
            "least": min(rates[name]),
            "greatest": max(rates[name]),
            "parameters_per_second": medians[name] * 1e9 / work[name][0],
            "of_memory": medians[name] / medians["in-place scale"],
        }
        | ({"of_deepspeed": medians[name] / own} if own and work[name][0] == UPDATE_BYTES else {})
        for name in work
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    n = int(arguments.parameters)
    work = candidates(make_buffers(n))
    rows = summary(work, measure(work, rounds=arguments.rounds), n)
    if arguments.json:
        print(json.dumps({"parameters": n, "threads": arguments.threads, "rounds": arguments.rounds, "rows": rows}))
        return
    print(f"{n / 1e6:.0f} M parameters, {arguments.threads} threads, medians of {arguments.rounds}")
    print("| | GB/s | least to greatest | of memory | M parameters/s | x DeepSpeed |\n|---|---|---|---|---|---|")
    for name, row in rows.items():
        times = f"{row['of_deepspeed']:.2f}" if "of_deepspeed" in row else ""
        print(
            f"| {name} | {row['gb_per_second']:.1f} | {row['least']:.1f} to {row['greatest']:.1f} | "
            f"{row['of_memory']:.2f} | {row['parameters_per_second'] / 1e6:.0f} | {times} |"
        )


if __name__ == "__main__":
    main()
