"""Compare the CPU's AdamW kernels of several projects: speed, memory traffic, and bits.

    bench_kernels.py [--parameters 50e6] [--rounds 15] [--threads 1,2] [--tensors 1,16]
                     [--peer roundpipe=CHECKOUT] [--peer prime-rl=CHECKOUT]

Two tasks. "update": fp32 gradients and masters, as `torch.optim.AdamW` has them. "with casts": bf16 gradients come in
and bf16 weights go out, as in mixed-precision training; a kernel without these casts gets torch's before and behind it.

Each contender is a process, so that neither its OpenMP runtime nor its compiler flags (-Ofast turns subnormal numbers
off) affect another's. They take turns, one call each, in random order. Each is timed with every number of threads and
of tensors that the flags name, and its fastest setting is reported. Peers are built by their own loaders, with their
own flags.

Bits: 20 steps from equal masters and gradients, with weight decay and bias correction, compared with
`torch.optim.AdamW(fused=True)`, which is what plain torch trains with on a CPU. `offload-train bench` times this
package's kernels with each format of moments.
"""

import argparse
import importlib.util
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
# The bits of so many elements are compared after so many steps. torch rounds the last numel % 16 elements differently.
STEPS, COMPARED = 20, 100_000
_UPDATE = 8 + 16 + 4  # bytes an element: master and moments are read and written, the gradient is read
_CASTS = 2 + 4 + 4 + 2  # a bf16 gradient becomes fp32, and a master becomes a bf16 weight
_FUSED_CASTS = 8 + 16 + 2 + 2  # all in one pass


@dataclass
class State:
    """The tensors of one update: as many of each kind as there are tensors."""

    masters: list[torch.Tensor]
    firsts: list[torch.Tensor]
    seconds: list[torch.Tensor]
    grads: list[torch.Tensor]  # fp32
    halves: list[torch.Tensor]  # the same gradients in bf16
    weights: list[torch.Tensor]  # bf16


def state_of(n: int, *, tensors: int) -> State:
    """Return a state of `n` elements in `tensors` tensors; every process draws the same numbers."""
    generator = torch.Generator().manual_seed(0)
    sizes = [n // tensors + (place < n % tensors) for place in range(tensors)]
    masters = [torch.empty(size).normal_(0, 0.02, generator=generator) for size in sizes]
    halves = [torch.empty(size).normal_(0, 1e-3, generator=generator).bfloat16() for size in sizes]
    zeros = [[torch.zeros(size) for size in sizes] for _ in range(2)]
    return State(masters, *zeros, [half.float() for half in halves], halves, [m.bfloat16() for m in masters])


Step = Callable[[int], None]  # takes the number of the step, counted from 1
Make = Callable[[State, bool], Step]  # returns a step for a state, with or without the casts
FUSED = ("ours (native)", "prime-rl")  # kernels that cast in the same pass


def bytes_each(name: str, *, casts: bool) -> int:
    """Return the bytes of memory traffic an element."""
    return (_FUSED_CASTS if name in FUSED else _UPDATE + _CASTS) if casts else _UPDATE


def with_casts(state: State, update: Step, *, casts: bool) -> Step:
    """Return the step with torch's casts around it."""
    if not casts:
        return update

    def step(number: int) -> None:
        torch._foreach_copy_(state.grads, state.halves)
        update(number)
        torch._foreach_copy_(state.weights, state.masters)

    return step


# -- contenders ------------------------------------------------------------------------------------------------------


def ours(state: State, casts: bool) -> Step:
    from offload_trainer.optim.kernel_api import PageUpdate, ParamRange
    from offload_trainer.optim.kernels import choose_kernel
    from offload_trainer.optim.rules import AdamW
    from offload_trainer.plan.tiered.state_formats import state_format

    kernel, _ = choose_kernel("native")
    hyper = AdamW(lr=LR, betas=BETAS, eps=EPS, decay=DECAY)
    form = state_format("adamw", "fp32")

    def step(number: int) -> None:
        for place, master in enumerate(state.masters):
            fields = {"master": master, "exp_avg": state.firsts[place], "exp_avg_sq": state.seconds[place]}
            grad, out = (state.halves if casts else state.grads)[place], state.weights[place] if casts else None
            parts = [ParamRange(0, master.numel(), hyper, number)]
            kernel.update_page(PageUpdate(fields, grad, out, parts, form, scale=1.0, noise=None))

    return step


def of_torch(**how: bool) -> Make:
    def make(state: State, casts: bool) -> Step:
        return optimizer_step(state, casts, lambda ones: torch.optim.AdamW(ones, **_words(), **how))

    return make


def deepspeed(state: State, casts: bool) -> Step:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from offload_trainer.engine.op_builder import load_cpu_adam

    load_cpu_adam()
    return optimizer_step(state, casts, lambda ones: DeepSpeedCPUAdam(ones, **_words()))


def roundpipe(checkout: Path) -> Make:
    """Return the kernel of RoundPipe's `roundpipe.optim.Adam`, built by its optim_builder."""
    builder = load_file(checkout / "roundpipe/optim/optim_builder.py")

    def make(state: State, casts: bool) -> Step:
        kernel = builder.get_optim_function("adam")

        def update(number: int) -> None:
            steps = [number] * len(state.masters)
            # The flags are: amsgrad, and behind eps maximize and decoupled weight decay.
            kernel(
                state.masters, state.grads, state.firsts, state.seconds, [], steps,
                False, *BETAS, LR, DECAY, EPS, False, True,
            )  # fmt: skip

        return with_casts(state, update, casts=casts)

    return make


def prime_rl(checkout: Path) -> Make:
    """Return the kernel of prime-rl's full optimizer offload, which casts in the same pass."""
    library = load_file(checkout / "src/prime_rl/trainer/optim/cpu_adam/__init__.py")
    hyper = {"lr": LR, "beta1": BETAS[0], "beta2": BETAS[1], "weight_decay": DECAY, "eps": EPS, "gradient_scale": 1.0}

    def make(state: State, casts: bool) -> Step:
        library.load_cpu_adamw_kernel()
        counts = [torch.zeros(()) for _ in state.masters]
        grads, weights = (state.halves, state.weights) if casts else (state.grads, None)

        def step(number: int) -> None:
            library.adamw_step(state.masters, grads, state.firsts, state.seconds, counts, weights, **hyper)

        return step

    return make


def _words() -> dict[str, Any]:
    return {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}


def optimizer_step(state: State, casts: bool, make: Callable[[list[Any]], torch.optim.Optimizer]) -> Step:
    """Return a step of an optimizer of torch's kind, with the state's masters as its parameters."""
    parameters = [torch.nn.Parameter(master) for master in state.masters]  # share the masters' memory
    optimizer = make(parameters)
    for parameter, gradient in zip(parameters, state.grads, strict=True):
        parameter.grad = gradient
    return with_casts(state, lambda number: optimizer.step(), casts=casts)


def load_file(path: Path) -> Any:
    """Import one file of a checkout without its package, whose other imports may be missing here."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is not in that checkout")
    spec = importlib.util.spec_from_file_location(f"peer_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILT_IN: dict[str, Make] = {
    "ours (native)": ours,
    "torch fused": of_torch(fused=True),
    "torch foreach": of_torch(foreach=True),
    "DeepSpeedCPUAdam": deepspeed,
}
PEERS: dict[str, Callable[[Path], Make]] = {"roundpipe": roundpipe, "prime-rl": prime_rl}


# -- one process for each contender ----------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Setting:
    casts: bool
    threads: int
    tensors: int


def masters_after(make: Make) -> torch.Tensor:
    """Return the masters after `STEPS` steps on one thread, with other gradients in each."""
    torch.set_num_threads(1)
    state = state_of(COMPARED, tensors=1)
    step, generator = make(state, False), torch.Generator().manual_seed(1)
    for number in range(1, STEPS + 1):
        state.grads[0].copy_(torch.empty(COMPARED).normal_(0, 1e-3, generator=generator).bfloat16())
        step(number)
    return state.masters[0]


def work(pipe: Connection, name: str, checkout: str | None, n: int) -> None:
    """Answer the parent's requests: the masters of the comparison, then the seconds of one step of each setting."""
    made: dict[int, State] = {}
    steps: dict[Setting, tuple[Step, list[int]]] = {}
    try:
        make = PEERS[name](Path(checkout)) if checkout else BUILT_IN[name]
        pipe.send(masters_after(make).tolist())
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return
    while (setting := pipe.recv()) is not None:
        torch.set_num_threads(setting.threads)
        if setting not in steps:
            if setting.tensors not in made:
                made.clear()  # one state at a time, so that all processes fit in memory
                steps.clear()
                made[setting.tensors] = state_of(n, tensors=setting.tensors)
            steps[setting] = make(made[setting.tensors], setting.casts), [0]
            _run(*steps[setting])
        pipe.send(_run(*steps[setting]))


def _run(step: Step, count: list[int]) -> float:
    count[0] += 1
    start = time.perf_counter()
    step(count[0])
    return time.perf_counter() - start


def different(found: Sequence[float], expected: torch.Tensor) -> str:
    """Return "equal", or how many masters differ and by how many units in the last place at most."""
    masters = torch.tensor(found)
    bits, right = (one.view(torch.int32).long() for one in (masters, expected))
    apart = (bits - right).abs()
    if not apart.any():
        return "equal"
    return f"{int((apart > 0).sum())} of {len(masters)} differ, up to {int(apart.max())} ulp"


def times(
    pipes: dict[str, Connection], settings: Sequence[Setting], *, rounds: int
) -> dict[tuple[str, Setting], list[float]]:
    """Return the seconds of each contender's steps in each setting; they take turns in random order."""
    seconds: dict[tuple[str, Setting], list[float]] = {}
    order, names = random.Random(0), list(pipes)
    for setting in settings:
        for _ in range(rounds):
            order.shuffle(names)
            for name in names:
                pipes[name].send(setting)
                seconds.setdefault((name, setting), []).append(pipes[name].recv())
    return seconds


def table(masters: dict[str, list[float]], seconds: dict[tuple[str, Setting], list[float]], n: int) -> Iterator[str]:
    titles = ["task", "kernel", "M elements/s", "least to greatest", "B/element", "GB/s", "casts"]
    yield "| " + " | ".join([*titles, "threads", "tensors", "masters compared with torch's"]) + " |"
    yield "|" + " --- |" * 10
    expected = torch.tensor(masters["torch fused"])
    for casts in (False, True):
        for name in masters:
            mine = {
                setting: taken for (one, setting), taken in seconds.items() if (one, setting.casts) == (name, casts)
            }
            best = min(mine, key=lambda setting: statistics.median(mine[setting]))
            rates = sorted(n / each / 1e6 for each in mine[best])
            rate, size = statistics.median(rates), bytes_each(name, casts=casts)
            how = ("in the kernel" if name in FUSED else "by torch") if casts else "none"
            cells = ["with casts" if casts else "update", name, f"{rate:.0f}", f"{rates[0]:.0f} to {rates[-1]:.0f}"]
            cells += [str(size), f"{rate * size / 1e3:.1f}", how, str(best.threads), str(best.tensors)]
            yield "| " + " | ".join([*cells, different(masters[name], expected)]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=50e6)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", default=f"1,{torch.get_num_threads()}", help="numbers of threads to try")
    parser.add_argument("--tensors", default="1,16", help="numbers of tensors that the elements are divided over")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=CHECKOUT", help=", ".join(PEERS))
    arguments = parser.parse_args()
    n = int(arguments.parameters)
    threads, tensors = (sorted(map(int, text.split(","))) for text in (arguments.threads, arguments.tensors))
    wanted: dict[str, str | None] = dict.fromkeys(BUILT_IN)
    wanted |= dict(one.split("=", 1) for one in arguments.peer)
    if unknown := set(wanted) - set(BUILT_IN) - set(PEERS):
        parser.error(f"unknown peers: {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}")
    context, pipes, masters, processes = multiprocessing.get_context("spawn"), {}, {}, []
    for name, checkout in wanted.items():
        pipe, theirs = context.Pipe()
        processes.append(context.Process(target=work, args=(theirs, name, checkout, n), daemon=True))
        processes[-1].start()
        answer = pipe.recv()
        if isinstance(answer, str):
            print(f"{name}: left out: {answer}", file=sys.stderr)
        else:
            pipes[name], masters[name] = pipe, answer
    # Settings that share a state follow each other.
    settings = [Setting(casts, each, count) for count in tensors for casts in (False, True) for each in threads]
    seconds = times(pipes, settings, rounds=arguments.rounds)
    for pipe in pipes.values():
        pipe.send(None)
    for process in processes:
        process.join()
    print(f"{n / 1e6:.0f} M elements, medians of {arguments.rounds}; tried threads {threads}, tensors {tensors}\n")
    print("\n".join(table(masters, seconds, n)))


if __name__ == "__main__":
    main()
