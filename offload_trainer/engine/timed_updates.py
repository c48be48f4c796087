"""The updates that `machine/bench.py` times: AdamW of this package's kernels on CPU and GPU.

An update goes from 16-bit gradients to 16-bit weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from offload_trainer.errors import UserError
from offload_trainer.offloading.pages.store import PageTable
from offload_trainer.optim.cuda_adam import choose_cuda_kernel
from offload_trainer.optim.kernel_api import Kernel, PageUpdate, ParamRange
from offload_trainer.optim.kernels import choose_kernel
from offload_trainer.optim.moments import Noise, stored_field
from offload_trainer.optim.rules import AdamW
from offload_trainer.plan.machine import update_key
from offload_trainer.plan.tiered.layout import Page
from offload_trainer.plan.tiered.state_formats import ADAMW_FORMATS, MOMENTS, StateFormat
from offload_trainer.plan.tiers import RAM
from offload_trainer.storage.host_memory import host_buffer

_ADAMW = AdamW(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, decay=0.1)
_SCALE = 0.7
_GPU = torch.device("cuda")  # the current one
_PATTERN = 1 << 18  # elements of typical values, which are repeated

Step = Callable[[int], None]  # called with the step's number, from 1


@dataclass(frozen=True)
class TimedUpdate:
    """AdamW with a kernel and a format of its state."""

    kernel: Kernel
    format: StateFormat = ADAMW_FORMATS[0]

    @property
    def name(self) -> str:
        """Return the key of its rate in `Rates.update`."""
        return update_key(self.kernel.name, self.format.name)

    def begin(self, elements: int, page: int) -> Step:
        """Allocate `elements` parameters in pages of at most `page`; return a function that runs one step on them."""
        kernel, format, on_gpu = self.kernel, self.format, self.kernel.name == "cuda"
        pages = make_pages(elements, page=page, format=format, place="cuda" if on_gpu else "cpu")

        def update(step: int) -> None:
            noise = Noise(0, step) if format.stochastic else None
            for one in pages:
                parts = [ParamRange(0, len(one.grad), _ADAMW, step)]
                kernel.update_page(replace(one, parts=parts, noise=noise))
            if on_gpu:
                torch.cuda.synchronize()

        return update


def make_pages(elements: int, *, page: int, format: StateFormat, place: str = "cpu") -> list[PageUpdate]:
    """Return updates of `elements` parameters in pages of at most `page`, without their ranges.

    Masters and gradients have typical values. Moments are zero; the first step, which is not timed, fills them.
    """
    table = PageTable([Page(0, at, min(page, elements - at), RAM) for at in range(0, elements, page)], format)
    memory, sizes = host_buffer(sum(table.sizes)).split(table.sizes), [one.elements for one in table.pages]
    narrow = [host_buffer(2 * elements).view(torch.bfloat16).split(sizes) for _ in range(2)]
    master, gradient = 0.02 * torch.randn(2, _PATTERN, generator=torch.Generator().manual_seed(0))
    pages = []
    for number, (data, grad, out) in enumerate(zip(memory, *narrow, strict=True)):
        fields = table.fields(number, data)
        for values, field in ((master, fields["master"]), (gradient, grad)):
            for part in field.split(_PATTERN):
                part.copy_(values[: part.numel()])
        for moment in MOMENTS:
            stored_field(moment, fields).start_at_zero()
        there = {name: field.to(place) for name, field in fields.items()}
        start = table.pages[number].start
        pages.append(PageUpdate(there, grad.to(place), out.to(place), [], format, _SCALE, None, first=start))
    return pages


def available_updates(*, say: Callable[[str], None]) -> list[TimedUpdate]:
    """Return the updates that can run here. `say` receives the reason for each one left out.

    These are this package's kernels, the fastest of them with each format of state, and the one for state on the GPU.
    """
    found: list[TimedUpdate] = []
    for name in ("native", "torch"):
        try:
            kernel, _ = choose_kernel(name)
        except UserError as error:
            say(f"bench: {name} kernel left out: {error}")
            continue
        found += [TimedUpdate(kernel, format) for format in ADAMW_FORMATS[: 1 if found else None]]
    if torch.cuda.is_available():
        there, words = choose_cuda_kernel(_GPU)
        if there is None:
            say(f"bench: the update on the GPU is left out: {words}")
        else:
            found += [TimedUpdate(there, format) for format in ADAMW_FORMATS]
    return found


def updates_of_run(kernel: str, format: StateFormat) -> list[TimedUpdate]:
    """Return the updates that a run with `optim.kernel` and AdamW's state in `format` uses."""
    chosen, _ = choose_kernel(kernel)
    there = choose_cuda_kernel(_GPU)[0] if torch.cuda.is_available() else None
    found = [TimedUpdate(chosen, format)]
    return found if there is None else [*found, TimedUpdate(there, format)]
