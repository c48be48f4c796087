"""Benchmark the CPU's AdamW kernels against memory bandwidth.

    bench_update.py [--parameters 100e6] [--rounds 7] [--threads N] [--json]
    bench_update.py --page 4194304 [--states fp32,bf16,8bit] [...]

One update turns bf16 gradients into bf16 weights: convert, scale, AdamW on fp32 masters and moments, round. It moves at
least 28 bytes a parameter. The candidates are our kernels and DeepSpeed's sequence of operations as in its ZeRO
optimizers. The bound is an in-place scaling of the master weights (8 bytes a parameter). Candidates take turns, so that
other load affects all equally; figures are medians with minimum and maximum.

With --page, only the native kernel is timed, with each moment format: all parameters in one call, then in pages of this
size, as in training. A call on a page without any gradient is timed too.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

from offload_trainer.engine.op_builder import is_built, load_cpu_adam
from offload_trainer.engine.timed_updates import ADAMW_FP32, kernel_update, make_buffers, stock_update, update_bytes
from offload_trainer.errors import UserError
from offload_trainer.optim.kernel_api import Kernel, RoundingNoise
from offload_trainer.optim.kernels import choose_kernel
from offload_trainer.optim.moments import Noise
from offload_trainer.plan.tiered.state_formats import state_format

SCALE_BYTES = 4 + 4
STATES = ("fp32", "bf16", "8bit")


class Work(NamedTuple):
    bytes: float  # bytes of memory traffic a parameter
    step: Callable[[int], None]


def candidates(n: int) -> dict[str, Work]:
    """Return the candidates by name; those unavailable on this machine are left out with a message."""
    buffers = make_buffers(n)[0]
    found = {"in-place scale": Work(SCALE_BYTES, lambda step: buffers.fields["master"].mul_(0.999999))}
    for name in ("native", "torch"):
        try:
            kernel, _ = choose_kernel(name)
        except UserError as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
            continue
        found[f"{name} kernel"] = Work(update_bytes(ADAMW_FP32), kernel_update(kernel, [buffers]))
    if is_built("cpu_adam"):
        load_cpu_adam()
        found["DeepSpeed's sequence"] = Work(update_bytes(ADAMW_FP32), stock_update(buffers))
    return found


def in_pages(kernel: Kernel, n: int, *, page: int, forms: Sequence[str]) -> dict[str, Work]:
    """Return one call and many page calls for each moment format."""
    found = {}
    for states in forms:
        form = state_format("adamw", states)
        for name, size in (("one call", n), ("pages", page)):
            update = kernel_update(kernel, make_buffers(n, page=size, format=form), format=form)
            found[f"{states}, {name}"] = Work(update_bytes(form), update)
    return found


def measure(work: dict[str, Work], *, rounds: int) -> dict[str, list[float]]:
    """Return each candidate's seconds in each round, after an uncounted first round."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    names, order = list(work), random.Random(0)
    for number in range(rounds + 1):
        order.shuffle(names)  # OpenMP's threads keep spinning for a while, which slows down the next candidate.
        for name in names:
            start = time.perf_counter()
            work[name].step(number + 1)
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def empty_call(kernel: Kernel, *, states: str, calls: int = 2000) -> float:
    """Return the median seconds of a call that has nothing to update."""
    form = state_format("adamw", states)
    page = make_buffers(1 << 16, format=form)[0]
    noise = RoundingNoise(Noise(0, 1), 0, 0) if form.moments.stochastic else None
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        kernel.update_page(page.fields, page.grad, page.out, [], format=form, scale=1.0, noise=noise)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def summary(work: dict[str, Work], seconds: dict[str, list[float]], n: int) -> dict[str, dict[str, float]]:
    """Return GB/s (10^9) and parameters per second by the median, and ratios of medians."""
    rates = {name: [work[name].bytes * n / second / 1e9 for second in seconds[name]] for name in work}
    medians = {name: statistics.median(rate) for name, rate in rates.items()}
    speeds = {name: medians[name] * 1e9 / work[name].bytes for name in work}
    rows = {
        name: {
            "gb_per_second": medians[name],
            "least": min(rates[name]),
            "greatest": max(rates[name]),
            "parameters_per_second": speeds[name],
        }
        for name in work
    }
    for name, row in rows.items():
        if "in-place scale" in work:
            row["of_memory"] = medians[name] / medians["in-place scale"]
        if "DeepSpeed's sequence" in work and work[name].bytes == update_bytes(ADAMW_FP32):
            row["of_deepspeed"] = medians[name] / medians["DeepSpeed's sequence"]
        if name.endswith(", pages"):
            row["of_one_call"] = speeds[name] / speeds[name.replace("pages", "one call")]
        if "fp32, pages" in work and name.endswith(", pages"):
            row["of_fp32"] = speeds[name] / speeds["fp32, pages"]
    return rows


def as_table(rows: dict[str, dict[str, float]]) -> str:
    extra = list(dict.fromkeys(key for row in rows.values() for key in row if key.startswith("of_")))
    titles = ["", "GB/s", "least to greatest", "M parameters/s", *(key.replace("_", " ") for key in extra)]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for name, row in rows.items():
        ratios = [f"{row[key]:.2f}" if key in row else "" for key in extra]
        spread = f"{row['least']:.1f} to {row['greatest']:.1f}"
        speed = f"{row['parameters_per_second'] / 1e6:.0f}"
        lines.append("| " + " | ".join([name, f"{row['gb_per_second']:.1f}", spread, speed, *ratios]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--page", type=int, help="elements; the native kernel in pages of so many")
    parser.add_argument("--states", default=",".join(STATES), help="with --page: forms of moments")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    n, empty = int(arguments.parameters), {}
    if arguments.page:
        kernel, _ = choose_kernel("native")
        forms = arguments.states.split(",")
        work = in_pages(kernel, n, page=arguments.page, forms=forms)
        empty = {states: empty_call(kernel, states=states) for states in forms}
    else:
        work = candidates(n)
    rows = summary(work, measure(work, rounds=arguments.rounds), n)
    facts = {"parameters": n, "threads": arguments.threads, "rounds": arguments.rounds, "page": arguments.page}
    if arguments.json:
        print(json.dumps(facts | {"rows": rows, "empty_call_seconds": empty}))
        return
    print(f"{n / 1e6:.0f} M parameters, {arguments.threads} threads, medians of {arguments.rounds}\n{as_table(rows)}")
    for states, seconds in empty.items():
        print(f"a call without elements, {states}: {seconds * 1e6:.1f} us")


if __name__ == "__main__":
    main()
