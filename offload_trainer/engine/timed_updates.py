"""Provide what `machine/bench.py` times of an update: each engine's AdamW, Muon's products, kernels that add gradients.

An update goes from a 16-bit gradient to a 16-bit weight. Each factory takes a number of parameters, or a matrix's
shape, allocates the buffers and returns a function that runs one step on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from offload_trainer.engine.op_builder import is_built, load_cpu_adam
from offload_trainer.errors import UserError
from offload_trainer.offloading.pages.store import PageTable
from offload_trainer.optim.cuda_adam import choose_cuda_kernel
from offload_trainer.optim.kernel_api import Kernel, PageUpdate, ParamRange, TorchKernel
from offload_trainer.optim.kernels import CpuKernel, choose_kernel
from offload_trainer.optim.moments import Noise, empty_fields, stored_moment
from offload_trainer.optim.muon import Products, orthogonalised
from offload_trainer.optim.rules import AdamW
from offload_trainer.plan.machine import update_key
from offload_trainer.plan.tiered.layout import Page
from offload_trainer.plan.tiered.state_formats import MOMENT_FORMATS, MOMENTS, StateFormat, state_format
from offload_trainer.plan.tiers import RAM
from offload_trainer.storage.host_memory import host_buffer

_ADAMW = AdamW(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, decay=0.1)
_SCALE = 0.7
_GPU = torch.device("cuda")  # the current one
_PATTERN = 1 << 18  # elements of typical values, which are repeated

Step = Callable[[int], None]  # called with the step's number, from 1


@dataclass(frozen=True)
class Buffers:
    """The buffers of one page in the tiered engine: state fields, bf16 gradient and new bf16 weights."""

    fields: dict[str, torch.Tensor]
    grad: torch.Tensor
    out: torch.Tensor


ADAMW_FP32 = state_format("adamw", "fp32")


def make_buffers(elements: int, *, page: int | None = None, format: StateFormat = ADAMW_FP32) -> list[Buffers]:
    """Return buffers with typical values for `elements` parameters, in pages of at most `page` (None: one page)."""
    sizes = [min(page or elements, elements - start) for start in range(0, elements, page or elements)]
    table = PageTable([Page(0, 0, size, RAM) for size in sizes], format)
    memory = host_buffer(sum(table.sizes)).split(table.sizes)
    narrow = [host_buffer(2 * elements).view(torch.bfloat16).split(sizes) for _ in range(2)]
    random = torch.Generator().manual_seed(0)
    master, first, gradient = 0.02 * torch.randn(3, _PATTERN, generator=random)
    values = empty_fields(format, _PATTERN)
    values["master"].copy_(master)
    for moment in MOMENTS.values():
        stored_moment(moment, values).write(first if moment.signed else first.square())
    pages = []
    for number, (data, grad, out) in enumerate(zip(memory, *narrow, strict=True)):
        fields = table.fields(number, data)
        for name, field in fields.items():
            _repeat(values[name], field)
        _repeat(gradient.bfloat16(), grad)
        pages.append(Buffers(fields, grad, out))
    return pages


def _repeat(values: torch.Tensor, out: torch.Tensor) -> None:
    for part in out.split(values.numel()):
        part.copy_(values[: part.numel()])


def kernel_update(kernel: Kernel, pages: Sequence[Buffers], *, format: StateFormat = ADAMW_FP32) -> Step:
    """Return a step of the tiered engine's update with `kernel`, page by page."""
    sizes = [page.grad.numel() for page in pages]

    def update(step: int) -> None:
        start = 0
        for page, size in zip(pages, sizes, strict=True):
            parts = [ParamRange(0, size, _ADAMW, step)]
            noise = Noise(0, step) if format.moments.stochastic else None
            kernel.update_page(PageUpdate(page.fields, page.grad, page.out, parts, format, _SCALE, noise, 0, start))
            start += size

    return update


def available_updates(*, say: Callable[[str], None]) -> list[tuple[str, Callable[[int, int], Step]]]:
    """Return the updates that can run here: names (`update_key`) and factories (parameters, page elements) -> step.

    These are this package's kernels, the fastest of them with each format of moments; DeepSpeed's step, if its kernel
    is built; and "cuda", the kernel for state on the GPU. `say` receives the reason for each one left out.
    """
    found: list[tuple[str, Callable[[int, int], Step]]] = []
    for name in ("native", "torch"):
        try:
            kernel, _ = choose_kernel(name)
        except UserError as error:
            say(f"bench: {name} kernel left out: {error}")
            continue
        for moments in MOMENT_FORMATS if not found else ["fp32"]:
            found.append(_update(kernel, name, moments))
    if is_built("cpu_adam"):
        load_cpu_adam()
        found.append(("deepspeed", lambda elements, page: stock_update(make_buffers(elements)[0])))
    if torch.cuda.is_available():
        there, words = choose_cuda_kernel(_GPU, choose_kernel("auto")[0])
        if there is None:
            say(f"bench: {words}")
        else:
            found += [_update(there, "cuda", moments) for moments in MOMENT_FORMATS]
    return found


def cpu_kernels(*names: str) -> list[CpuKernel]:
    """Return the kernels that choose_kernel has for these names, each once."""
    found = {kernel.name: kernel for kernel, _ in map(choose_kernel, names)}
    return list(found.values())


def updates_of_run(kernel: str, moments: str) -> list[tuple[str, Callable[[int, int], Step]]]:
    """Return the updates that a run with `optim.kernel` and `optim.moment_dtype` uses, as in `available_updates`."""
    chosen, _ = choose_kernel(kernel)
    found = [_update(chosen, "torch" if isinstance(chosen, TorchKernel) else "native", moments)]
    there = choose_cuda_kernel(_GPU, chosen)[0] if torch.cuda.is_available() else None
    return found if there is None else [*found, _update(there, "cuda", moments)]


def orthogonalisation(width: int) -> Callable[[], object]:
    """Return a function that orthogonalises a square matrix of `width` on the GPU, or on the CPU if there is none."""
    gpu = _GPU if torch.cuda.is_available() else None
    products = Products(torch.get_num_threads() if gpu is None else None)
    matrix = torch.randn(width, width, device=gpu).bfloat16()
    return lambda: orthogonalised(matrix.clone(), products)


def _update(kernel: Kernel, name: str, moments: str) -> tuple[str, Callable[[int, int], Step]]:
    """Return the name and the factory of an update with `kernel`, which is that of the GPU if its name is "cuda"."""
    format = state_format("adamw", moments)
    return update_key(name, moments), partial(_with_buffers, kernel, format=format, cuda=name == "cuda")


def _with_buffers(kernel: Kernel, elements: int, page: int, *, format: StateFormat, cuda: bool = False) -> Step:
    """Return a step of `kernel` on new buffers; with `cuda`, on buffers of the GPU, and it waits for the GPU."""
    pages = make_buffers(elements, page=page, format=format)
    if not cuda:
        return kernel_update(kernel, pages, format=format)
    there = [
        Buffers({name: field.cuda() for name, field in one.fields.items()}, one.grad.cuda(), one.out.cuda())
        for one in pages
    ]
    update = kernel_update(kernel, there, format=format)

    def and_wait(step: int) -> None:
        update(step)
        torch.cuda.synchronize()

    return and_wait


def stock_update(b: Buffers) -> Step:
    """Return a step with the operations of DeepSpeed's ZeRO-Offload from an fp32 gradient to a 16-bit weight.

    DeepSpeed's hooks convert the gradient earlier. The step includes the norm and clipping.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(b.fields["master"])
    given = {"lr": _ADAMW.lr, "betas": _ADAMW.betas, "eps": _ADAMW.eps, "weight_decay": _ADAMW.decay}
    optimizer = DeepSpeedCPUAdam([parameter], **given)
    optimizer.state[parameter] = {"step": 0, "exp_avg": b.fields["exp_avg"], "exp_avg_sq": b.fields["exp_avg_sq"]}
    gradient = b.grad.float()

    def update(step: int) -> None:
        parameter.grad = gradient
        torch.linalg.vector_norm(gradient)
        gradient.mul_(1.0)  # clipping; the same values each time
        optimizer.step()
        b.out.copy_(parameter.data)
        parameter.grad = None

    return update
