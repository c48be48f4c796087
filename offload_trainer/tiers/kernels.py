"""AdamW on host memory: one call takes a stretch of a weight from its gradient to its new 16-bit value.

    grad (16 bit) -> x scale -> exp_avg, exp_avg_sq, master (fp32, in place) -> out (16 bit)

Three kernels do the same on 1-D contiguous CPU tensors of one length. `torch` calls torch's own, `native` is adam.cpp
and has torch's bits at the speed of memory, `deepspeed` is DeepSpeedCPUAdam's op, for comparison. Each element depends
on itself alone, to the last bit: a weight may be updated whole or in pieces, by any number of threads.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from offload_trainer.errors import TrainerError, UserError
from offload_trainer.tiers.kernel_cache import built

# Elements that `torch` and `deepspeed` convert, update and copy out at a time: their 28 bytes each stay in the last
# cache, and each of the three calls on them outlasts its own start. Of 2^13 to 2^21 the fastest (EPYC, 32 MB L3).
CHUNK = 2**19
# Whole cache lines of fp32: torch's vectorised loop takes multiples of 8 or 16 elements, by the CPU.
_LINE = 16


@dataclass(frozen=True)
class Adam:
    """Settings that hold for a whole run."""

    betas: tuple[float, float]
    eps: float


class Kernel(Protocol):
    """One AdamW step with decoupled decay, as torch.optim.AdamW defines it."""

    name: str
    adam: Adam

    def update(
        self,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad: torch.Tensor,
        out: torch.Tensor | None,
        *,
        scale: float,
        lr: float,
        decay: float,
        step: int,
    ) -> None:
        """Update `master`, `exp_avg` and `exp_avg_sq` (fp32[n]) in place with `grad` (bf16, fp16 or fp32[n]) x `scale`.

        `out` (bf16, fp16 or fp32[n], or None) receives the new master, rounded to nearest even. `grad` is only read.
        `step` counts from 1. One call at a time.
        """
        ...


def choose_kernel(name: str, adam: Adam, *, load_op: Callable[[], Any] | None = None) -> tuple[Kernel, str]:
    """The kernel called `name` ("auto", "torch", "deepspeed" or "native"), and a sentence for the log on which and why.

    `load_op` gives DeepSpeedCPUAdam's op, for "deepspeed".

    "auto" is the native one where it can be built and gives torch's bits, else torch's. UserError where another name's
    kernel cannot be had.
    """
    assert name in ("auto", "torch", "deepspeed", "native"), name
    if name == "torch":
        return TorchKernel(adam), "AdamW on the CPU: torch's kernel, as asked."
    try:
        if name == "deepspeed":
            assert load_op is not None
            return DeepSpeedKernel(adam, load_op()), "AdamW on the CPU: DeepSpeed's kernel, as asked."
        native = NativeKernel(adam)
        if not matches_torch(native):
            raise TrainerError("on this machine its results differ from torch's in their last bits")
    except TrainerError as error:
        if name == "auto":
            reason = " ".join(str(error).split())
            words = f"AdamW on the CPU: torch's kernel; the faster native one is not used: {reason}"
            return TorchKernel(adam), words
        raise UserError(f"AdamW's {name} kernel cannot be had: {error}") from error
    return native, "AdamW on the CPU: the native kernel, built for this machine and checked to give torch's bits."


def matches_torch(kernel: Kernel) -> bool:
    """Whether `kernel` gives the bits of `TorchKernel`, tried on some thousands of random numbers of all magnitudes."""
    random = torch.Generator().manual_seed(1)
    reference = TorchKernel(kernel.adam)
    for n, dtype, decay in ((1, torch.float32, 0.0), (1003, torch.float16, 0.1), (70_001, torch.bfloat16, 0.1)):
        size = torch.empty(4, n).uniform_(-30, 5, generator=random).exp_()
        master, grad, exp_avg, exp_avg_sq = torch.randn(4, n, generator=random) * size
        for numbers in (grad, exp_avg):
            numbers[torch.rand(n, generator=random) < 0.01] = 0.0
        results = []
        for candidate in (kernel, reference):
            weights, average, square = master.clone(), exp_avg.clone(), exp_avg_sq.square()
            out = torch.empty(n, dtype=dtype)
            given = grad.to(dtype)
            candidate.update(weights, average, square, given, out, scale=0.37, lr=3e-4, decay=decay, step=7)
            results.append([tensor.view(torch.uint8) for tensor in (weights, average, square, out)])
        if not all(map(torch.equal, *results)):
            return False
    return True


# -- torch -----------------------------------------------------------------------------------------------------------


class TorchKernel:
    """torch's fused kernel, chunk by chunk: the bits of torch.optim.AdamW(fused=True).

    But for this: of a tensor whose length does not divide by 8 (16 with AVX-512), torch computes the last few elements
    by a loop that rounds exp_avg_sq differently. They are padded here, so that an element's result does not depend on
    where a weight is cut.
    """

    name = "torch"

    def __init__(self, adam: Adam) -> None:
        self.adam = adam
        self._scratch = torch.empty(CHUNK)

    @torch.no_grad()
    def update(
        self,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad: torch.Tensor,
        out: torch.Tensor | None,
        *,
        scale: float,
        lr: float,
        decay: float,
        step: int,
    ) -> None:
        def adamw(weights: torch.Tensor, gradient: torch.Tensor, average: torch.Tensor, square: torch.Tensor) -> None:
            torch._fused_adamw_(
                [weights],
                [gradient],
                [average],
                [square],
                [],
                [steps],
                lr=lr,
                beta1=self.adam.betas[0],
                beta2=self.adam.betas[1],
                weight_decay=decay,
                eps=self.adam.eps,
                amsgrad=False,
                maximize=False,
            )

        steps = torch.tensor(float(step))
        for piece, scaled in _scaled_chunks(grad, scale, self._scratch):
            tensors = [master[piece], scaled, exp_avg[piece], exp_avg_sq[piece]]
            left = scaled.numel() % _LINE
            whole = scaled.numel() - left
            adamw(*(tensor[:whole] for tensor in tensors))
            if left:
                padded = [torch.nn.functional.pad(tensor[whole:], (0, _LINE - left)) for tensor in tensors]
                adamw(*padded)
                for tensor, result in zip(tensors, padded, strict=True):
                    tensor[whole:] = result[:left]
            if out is not None:
                out[piece].copy_(master[piece])


def _scaled_chunks(grad: torch.Tensor, scale: float, scratch: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Pieces of `grad`, each with its values in fp32 x `scale`, which lie in `scratch` until the next piece."""
    for start in range(0, grad.numel(), scratch.numel()):
        piece = slice(start, min(start + scratch.numel(), grad.numel()))
        scaled = scratch[: piece.stop - start].copy_(grad[piece])
        yield piece, scaled.mul_(scale) if scale != 1.0 else scaled


# -- DeepSpeed -------------------------------------------------------------------------------------------------------


class DeepSpeedKernel:
    """`op`, DeepSpeedCPUAdam's compiled one, chunk by chunk."""

    name = "deepspeed"

    def __init__(self, adam: Adam, op: Any) -> None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        self.adam, self._op = adam, op
        self._id = DeepSpeedCPUAdam.optimizer_id  # the op's table of optimizers is shared with DeepSpeed's own
        DeepSpeedCPUAdam.optimizer_id += 1
        self._op.create_adam(self._id, 1e-3, *adam.betas, adam.eps, 0.0, True, False)
        self._step = 0
        self._scratch = torch.empty(CHUNK)

    @torch.no_grad()
    def update(
        self,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad: torch.Tensor,
        out: torch.Tensor | None,
        *,
        scale: float,
        lr: float,
        decay: float,
        step: int,
    ) -> None:
        self._count_to(step)
        for piece, scaled in _scaled_chunks(grad, scale, self._scratch):
            tensors = [master[piece], scaled, exp_avg[piece], exp_avg_sq[piece]]
            self._op.adam_update(self._id, step, lr, *self.adam.betas, self.adam.eps, decay, True, *tensors)
            if out is not None:
                out[piece].copy_(master[piece])

    def _count_to(self, step: int) -> None:
        """Bring the op's powers of beta to `step` as an uninterrupted run has them.

        It multiplies them up in fp32 when the step grows by one, and after a jump takes pow() instead, which differs
        in the last bits: so after a jump the steps are counted again, on one element.
        """
        if step not in (self._step, self._step + 1):
            element = [torch.zeros(1) for _ in range(4)]
            for number in range(1, step + 1):
                self._op.adam_update(self._id, number, 0.0, *self.adam.betas, self.adam.eps, 0.0, True, *element)
        self._step = step

    def __del__(self) -> None:
        if hasattr(self, "_id"):
            self._op.destroy_adam(self._id)


# -- native ----------------------------------------------------------------------------------------------------------

_SOURCE = Path(__file__).with_name("adam.cpp")
# Without errno and traps a square root or a choice between two values can be vectorised; neither changes a result.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_PIECE = 2**16  # adam.cpp's PIECE
_TYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}  # adam.cpp's Type


class NativeLibrary:
    """adam.cpp, built on first use and loaded; each call runs on torch's number of threads.

    TrainerError with the compiler's words where it cannot be built.
    """

    def __init__(self) -> None:
        path = built(_SOURCE, flags=_FLAGS)
        try:
            self._functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise TrainerError(
                f"{path}: cannot be loaded: {error}. Where the cache's filesystem is mounted noexec, name another "
                "directory with OFFLOAD_TRAINER_CACHE"
            ) from error
        self._pool = ThreadPoolExecutor(max_workers=os.cpu_count())

    def call(self, name: str, *arguments: torch.Tensor | ctypes.Structure | int | None, n: int) -> None:
        """Run function `name` over `n` elements; tensors are passed by address. ctypes lets go of the GIL meanwhile."""
        function = getattr(self._functions, name)
        begun = ctypes.c_int64(0)  # the threads claim pieces by counting it up
        passed = [*map(_passed, arguments), ctypes.c_int64(n), ctypes.byref(begun)]
        threads = min(torch.get_num_threads(), -(-n // _PIECE))
        others = [self._pool.submit(function, *passed) for _ in range(threads - 1)]
        function(*passed)
        for other in others:
            other.result()


class NativeKernel:
    """adam.cpp: gradient to 16-bit weight in one pass, 28 bytes of memory traffic an element. Bits as `TorchKernel`.

    TrainerError where it cannot be built.
    """

    name = "native"

    def __init__(self, adam: Adam) -> None:
        self.adam = adam
        self.library = NativeLibrary()

    def update(
        self,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad: torch.Tensor,
        out: torch.Tensor | None,
        *,
        scale: float,
        lr: float,
        decay: float,
        step: int,
    ) -> None:
        out_type = 0 if out is None else _TYPES[out.dtype]
        constants = _step_constants(self.adam, scale=scale, lr=lr, decay=decay, step=step)
        given = (master, exp_avg, exp_avg_sq, grad) + (() if out is None else (out,))
        assert all(tensor.is_contiguous() and tensor.numel() == master.numel() for tensor in given)
        assert all(tensor.dtype is torch.float32 for tensor in given[:3])
        self.library.call(
            "adam_update",
            constants,
            master,
            exp_avg,
            exp_avg_sq,
            grad,
            _TYPES[grad.dtype],
            out,
            out_type,
            n=master.numel(),
        )


class _Step(ctypes.Structure):
    """adam.cpp's Step."""

    _fields_ = (
        ("scale", ctypes.c_float),
        ("keep", ctypes.c_float),
        ("lerp", ctypes.c_float),
        ("from_gradient", ctypes.c_int32),
        ("beta2", ctypes.c_float),
        ("rest2", ctypes.c_float),
        ("root_correction", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("minus_step_size", ctypes.c_float),
    )


def _step_constants(adam: Adam, *, scale: float, lr: float, decay: float, step: int) -> _Step:
    """torch's constants: computed in double, then rounded; ctypes rounds to nearest even."""
    beta1, beta2 = adam.betas
    rest1 = ctypes.c_float(1 - beta1).value
    from_gradient = abs(rest1) >= 0.5  # lerp starts from the end that is nearer
    return _Step(
        scale,
        1 - lr * decay,
        rest1 - 1 if from_gradient else rest1,
        from_gradient,
        beta2,
        1 - beta2,
        (1 - beta2**step) ** 0.5,
        adam.eps,
        -(lr / (1 - beta1**step)),
    )


def _passed(argument: torch.Tensor | ctypes.Structure | int | None) -> Any:
    """An argument as C wants it: an address, or a 32-bit number."""
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, ctypes.Structure):
        return ctypes.byref(argument)
    return ctypes.c_void_p(None) if argument is None else ctypes.c_int32(argument)
