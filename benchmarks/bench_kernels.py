"""Compare AdamW kernels on the CPU, this package's, torch's and DeepSpeed's: speed, memory traffic, and bits.

    bench_kernels.py [--parameters 50e6] [--rounds 15] [--threads 1,2]

Two tasks. "update": fp32 gradients and masters, as `torch.optim.AdamW` has them. "with casts": bf16 gradients come in
and bf16 weights go out, as in mixed-precision training; a kernel without these casts gets torch's before and behind it.

Each contender is a process, so that neither its OpenMP runtime nor its compiler flags (-Ofast turns subnormal numbers
off) affect another's. They take turns, one call each, in random order. Each is timed with every number of threads that
the flag names, and its fastest is reported.

Bits: 20 steps from equal masters and gradients, with weight decay and bias correction, compared with
`torch.optim.AdamW(fused=True)`, which is what plain torch trains with on a CPU. `offload-train bench` times this
package's kernels with each format of moments.
"""

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import count, product
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
# The bits of so many elements are compared after so many steps. torch rounds the last numel % 16 elements differently.
STEPS, COMPARED = 20, 100_000
_UPDATE = 8 + 16 + 4  # bytes an element: master and moments are read and written, the gradient is read
_CASTS = 2 + 4 + 4 + 2  # a bf16 gradient becomes fp32, and a master becomes a bf16 weight
OURS = "ours (native)"  # casts in the same pass


@dataclass
class State:
    """The tensors of one update."""

    master: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    grad: torch.Tensor  # fp32
    half: torch.Tensor  # the same gradient in bf16
    weight: torch.Tensor  # bf16


def state_of(n: int) -> State:
    """Return a state of `n` elements; every process draws the same numbers."""
    generator = torch.Generator().manual_seed(0)
    master = torch.empty(n).normal_(0, 0.02, generator=generator)
    half = torch.empty(n).normal_(0, 1e-3, generator=generator).bfloat16()
    return State(master, torch.zeros(n), torch.zeros(n), half.float(), half, master.bfloat16())


Step = Callable[[int], None]  # takes the number of the step, counted from 1
Make = Callable[[State, bool], Step]  # returns a step for a state, with or without the casts


# -- contenders ------------------------------------------------------------------------------------------------------


def ours(state: State, casts: bool) -> Step:
    from offload_trainer.optim.kernel_api import PageUpdate, ParamRange
    from offload_trainer.optim.kernels import choose_kernel
    from offload_trainer.optim.rules import adamw_of
    from offload_trainer.plan.tiered.state_formats import state_format

    kernel, _ = choose_kernel("native")
    form, hyper = state_format("adamw", "fp32"), adamw_of(HYPER)
    fields = {"master": state.master, "exp_avg": state.first, "exp_avg_sq": state.second}
    grad, out = (state.half, state.weight) if casts else (state.grad, None)

    def step(number: int) -> None:
        parts = [ParamRange(0, state.master.numel(), hyper, number)]
        kernel.update_page(PageUpdate(fields, grad, out, parts, form, scale=1.0, noise=None))

    return step


def of_torch(**how: bool) -> Make:
    return lambda state, casts: optimizer_step(state, casts, lambda ones: torch.optim.AdamW(ones, **HYPER, **how))


def deepspeed(state: State, casts: bool) -> Step:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from offload_trainer.engine.deepspeed import load_kernel

    load_kernel("cpu_adam")
    return optimizer_step(state, casts, lambda ones: DeepSpeedCPUAdam(ones, **HYPER))


def optimizer_step(state: State, casts: bool, make: Callable[[list[Any]], torch.optim.Optimizer]) -> Step:
    """Return a step of an optimizer of torch's kind, with the state's master as its parameter, and torch's casts."""
    parameter = torch.nn.Parameter(state.master)  # shares the master's memory
    optimizer = make([parameter])
    parameter.grad = state.grad

    def step(number: int) -> None:
        if casts:
            state.grad.copy_(state.half)
        optimizer.step()
        if casts:
            state.weight.copy_(state.master)

    return step


CONTENDERS: dict[str, Make] = {
    OURS: ours,
    "torch fused": of_torch(fused=True),
    "torch foreach": of_torch(foreach=True),
    "DeepSpeedCPUAdam": deepspeed,
}


# -- in the process of a contender -----------------------------------------------------------------------------------

Setting = tuple[bool, int]  # casts included, number of threads
_ready: dict[Setting, tuple[Step, Iterator[int]]] = {}  # the last setting's step, and its next numbers


def masters_after(name: str) -> list[float]:
    """Return the masters after `STEPS` steps on one thread, with other gradients in each."""
    torch.set_num_threads(1)
    state = state_of(COMPARED)
    step, generator = CONTENDERS[name](state, False), torch.Generator().manual_seed(1)
    for number in range(1, STEPS + 1):
        state.grad.copy_(torch.empty(COMPARED).normal_(0, 1e-3, generator=generator).bfloat16())
        step(number)
    return state.master.tolist()


def seconds_of_step(name: str, n: int, setting: Setting) -> float:
    torch.set_num_threads(setting[1])
    if setting not in _ready:
        _ready.clear()
        _ready[setting] = CONTENDERS[name](state_of(n), setting[0]), count(1)
        seconds_of_step(name, n, setting)  # warms up
    step, numbers = _ready[setting]
    start = time.perf_counter()
    step(next(numbers))
    return time.perf_counter() - start


# -- results ---------------------------------------------------------------------------------------------------------


def different(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Return "equal", or how many masters differ and by how many units in the last place at most."""
    bits, right = (one.view(torch.int32).long() for one in (found, expected))
    apart = (bits - right).abs()
    if not apart.any():
        return "equal"
    return f"{int((apart > 0).sum())} of {len(found)} differ, up to {int(apart.max())} ulp"


def table(masters: dict[str, list[float]], seconds: dict[tuple[str, Setting], list[float]], n: int) -> Iterator[str]:
    titles = ["task", "kernel", "M elements/s", "least to greatest", "B/element", "GB/s", "casts", "threads"]
    yield "| " + " | ".join([*titles, "masters compared with torch's"]) + " |"
    yield "|" + " --- |" * 9
    expected = torch.tensor(masters["torch fused"])
    for casts in (False, True):
        for name, found in masters.items():
            mine = {setting: taken for (one, setting), taken in seconds.items() if (one, setting[0]) == (name, casts)}
            best = min(mine, key=lambda setting: statistics.median(mine[setting]))
            rates = sorted(n / each / 1e6 for each in mine[best])
            # In one pass a bf16 gradient is read and a bf16 weight is written, as many bytes as an fp32 gradient.
            rate, size = statistics.median(rates), _UPDATE + (_CASTS if casts and name != OURS else 0)
            how = ("in the kernel" if name == OURS else "by torch") if casts else "none"
            cells = ["with casts" if casts else "update", name, f"{rate:.0f}", f"{rates[0]:.0f} to {rates[-1]:.0f}"]
            cells += [str(size), f"{rate * size / 1e3:.1f}", how, str(best[1])]
            yield "| " + " | ".join([*cells, different(torch.tensor(found), expected)]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=50e6)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", default=f"1,{torch.get_num_threads()}", help="numbers of threads to try")
    arguments = parser.parse_args()
    n, threads = int(arguments.parameters), sorted(map(int, arguments.threads.split(",")))
    spawn, pools, masters = multiprocessing.get_context("spawn"), dict[str, ProcessPoolExecutor](), {}
    for name in CONTENDERS:
        pools[name] = ProcessPoolExecutor(1, mp_context=spawn)
        try:
            masters[name] = pools[name].submit(masters_after, name).result()
        except Exception as error:
            print(f"{name}: left out: {type(error).__name__}: {' '.join(str(error).split())[:300]}", file=sys.stderr)
    seconds: dict[tuple[str, Setting], list[float]] = {}
    order, names = random.Random(0), list(masters)
    for setting in product((False, True), threads):
        for _ in range(arguments.rounds):
            order.shuffle(names)
            for name in names:
                taken = pools[name].submit(seconds_of_step, name, n, setting).result()
                seconds.setdefault((name, setting), []).append(taken)
    print(f"{n / 1e6:.0f} M elements, medians of {arguments.rounds}; tried threads {threads}\n")
    print("\n".join(table(masters, seconds, n)))


if __name__ == "__main__":
    main()
