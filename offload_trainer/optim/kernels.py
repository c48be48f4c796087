"""Choose the CPU update kernel, and check that compiled kernels give the same bits as torch's."""

import functools
from itertools import product

import torch

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.optim.kernel_api import Kernel, PageUpdate, ParamRange, TorchKernel
from offload_trainer.optim.moments import Noise, stored_field
from offload_trainer.optim.native_kernel import ORDERS, UNKNOWN, NativeKernel
from offload_trainer.optim.norms import Pieces
from offload_trainer.optim.rules import AdamW
from offload_trainer.plan.tiered.state_formats import ADAMW_FORMATS, MOMENTS, StateFormat, is_signed
from offload_trainer.storage.tensorfile import DTYPES

CpuKernel = TorchKernel | NativeKernel


def choose_kernel(name: str) -> tuple[CpuKernel, str]:
    """Return the kernel called `name` ("auto", "torch" or "native"), and a sentence for the log.

    "auto" selects the native kernel if it can be built and matches torch's bit for bit, otherwise torch's. Raises
    UserError if `name` is "native", and that kernel cannot be built or does not match.
    """
    assert name in ("auto", "torch", "native"), name
    if name == "torch":
        return TorchKernel(), "The update on the CPU: torch's kernel, as asked."
    try:
        native = _checked_native()
    except TrainerError as error:
        if name == "native":
            raise UserError(f"The update's native kernel cannot be had: {error}") from error
        reason = " ".join(str(error).split())
        return TorchKernel(), f"The update on the CPU: torch's kernel; the faster native one is not used: {reason}"
    return native, "The update on the CPU: the native kernel, built for this machine and checked to give torch's bits."


@functools.cache  # a run that measures its machine needs the kernel before the engine does
def _checked_native() -> NativeKernel:
    """Return the native kernel with the order of torch's norm.

    Raises TrainerError if it cannot be compiled, or does not update pages and add gradients with torch's bits.
    """
    kernel = NativeKernel()
    for kernel.lanes in (*ORDERS, UNKNOWN):
        if adds_like_torch(kernel):
            if matches_bitwise(kernel):
                return kernel
            break
    raise TrainerError("on this machine its results differ from torch's in their last bits")


def adds_like_torch(kernel: NativeKernel) -> bool:
    """Return whether a kernel adds gradients, and measures the sums in the order `kernel.lanes`, as `TorchKernel` does.

    A wrong order of addition changes the result of few pieces, so that many small pieces of all lengths are compared.
    """
    random, small = torch.Generator().manual_seed(3), Pieces(256, halving=False)
    both: tuple[CpuKernel, CpuKernel] = (kernel, TorchKernel())
    for length in (length for length in range(1, 32) for _ in range(30)):
        sums = torch.randn(length, generator=random)
        if not torch.equal(kernel.add(sums, None, pieces=small), small.measure(sums)):
            return False
    for count, given, stored in (
        (80 * 256 + 203, torch.bfloat16, torch.float32),
        (80 * 256, torch.float32, torch.float32),
        (777, torch.float16, torch.float16),
        (80 * 256 + 6, torch.bfloat16, torch.bfloat16),
    ):
        size = torch.empty(count).uniform_(-3, 3, generator=random).exp_()
        before, more = (torch.randn(2, count, generator=random) * size).unbind()
        for pieces in (small, Pieces(4096, halving=True), None):
            results = []
            for candidate in both:
                sums = before.to(stored, copy=True)
                measured = candidate.add(sums, more.to(given), pieces=pieces)
                again = candidate.add(sums, None, pieces=pieces)
                results.append((sums, measured, again))
            if not all(map(torch.equal, *results)):
                return False
    return True


# The second AdamW has beta1 < 1/2, so its lerp starts from the gradient, and its lr * decay is 1.
_TRIED = AdamW(3e-4, (0.9, 0.95), 1e-8, 0.1), AdamW(10.0, (0.3, 0.999), 1e-6, 0.1)
# Pages, elements, dtypes of gradients and of weights; accumulated gradients are fp32.
_SIZES = (
    (1, 1, torch.float32, torch.float32),
    (1, 1003, torch.float16, torch.float16),
    (1, 1003, torch.float32, torch.float16),
    (1, 1003, torch.float32, torch.bfloat16),
    (1, 70_001, torch.bfloat16, torch.bfloat16),
)
_SEVERAL = (  # the middle is inside a page
    (3, 3 * 2048, torch.float32, torch.float32),
    (7, 7 * 2048, torch.bfloat16, torch.bfloat16),
)


def matches_bitwise(kernel: Kernel, *, gpu: torch.device | None = None) -> bool:
    """Return whether `kernel` matches torch's on the CPU bit for bit, for numbers of all magnitudes.

    This tests each format of state, and parts with gaps between them and different hyperparameters; on a `gpu` also
    several pages in one call, with parts that reach over their ends. torch's kernel updates them as a single one.
    """
    hyper, other = _TRIED
    cases = product((*_SIZES, *(_SEVERAL if gpu else ())), ADAMW_FORMATS)
    for (count, n, of_gradients, of_weights), format in cases:
        if format.masters.stochastic and of_weights is not torch.bfloat16:  # a combination that no run has
            continue
        middle = n // 2 // 256 * 256
        parts = [ParamRange(0, n, hyper, 7)]
        if n > 2000:
            parts = [ParamRange(0, middle, hyper, 7), ParamRange(middle + 512, n, other, 300)]
        page, grad = random_page(n, format)
        results = []
        for candidate, place, pages in ((kernel, gpu or "cpu", count), (TorchKernel(), "cpu", 1)):
            fields = {name: tensor.to(place, copy=True) for name, tensor in page.items()}
            if pages > 1:  # equal ones, which follow each other in memory
                rows = [tensor.view(pages, -1).view(torch.uint8) for tensor in fields.values()]
                columns = torch.cat(rows, dim=1).split([row.shape[1] for row in rows], dim=1)
                fields = {name: part.view(page[name].dtype) for name, part in zip(fields, columns, strict=True)}
            out = torch.zeros(n, dtype=of_weights, device=place)
            given = grad.to(place, of_gradients, copy=True)
            candidate.update_page(PageUpdate(fields, given, out, parts, format, 0.37, Noise(1, 2), 3, 2**32 - 4096))
            results.append([tensor.cpu().flatten().view(torch.uint8) for tensor in (*fields.values(), out)])
        if not all(map(torch.equal, *results)):
            return False
    return True


def random_page(n: int, format: StateFormat) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return fields and a gradient (fp32[n]) of all magnitudes and zeros; moments fit each other, as in training."""
    random = torch.Generator().manual_seed(1)
    size = torch.empty(4, n).uniform_(-30, 5, generator=random).exp_()
    master, grad, average, square = torch.randn(4, n, generator=random) * size
    for numbers in (grad, average):
        numbers[torch.rand(n, generator=random) < 0.01] = 0.0
        numbers[torch.rand(n, generator=random) < 0.01] *= 1e-38
    fields = {name: torch.empty(field.entries(n), dtype=DTYPES[field.dtype]) for name, field in format.fields.items()}
    fields["master"].copy_(master)
    for moment in MOMENTS:
        stored_field(moment, fields).write(average if is_signed(moment) else square.square())
    return fields, grad
