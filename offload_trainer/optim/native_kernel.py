"""The CPU kernel in C++ (native/): one call reads gradients, updates the state and writes new 16-bit weights.

All results equal those of torch's operations bit for bit.
"""

import ctypes
from typing import NamedTuple

import torch

from offload_trainer.common.errors import TrainerError
from offload_trainer.optim.kernel_api import PageUpdate, Sum, zlib_sum
from offload_trainer.optim.kernel_cache import FLAGS, SOURCE, built
from offload_trainer.optim.moments import Bits
from offload_trainer.optim.norms import Pieces
from offload_trainer.optim.rules import TYPES, AdamStep, Muon, fields_of, step_constants
from offload_trainer.plan.tiered.state_formats import EXP_AVG, MASTER

_POINTER, _SIZE, _NUMBER, _CHOICE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int32


class Lanes(NamedTuple):
    """The order in which torch's norm may add squares (gradients.h)."""

    number: int
    group: int  # group size: whole groups of the elements that fill no vector are not fused; 0: all are fused


UNKNOWN = Lanes(0, 0)
# The orders of torch's norm on CPUs with AVX2, AVX-512, and neither.
ORDERS = [Lanes(number, group) for number in (8, 16, 4) for group in (4, 8, 16, 1, 0)]


class NativeKernel:
    """The compiled functions of native/, as `TorchKernel` and `TorchMuon` have them, on a persistent thread pool."""

    name = "native"

    def __init__(self) -> None:
        """Load the library, which is compiled if the cache does not have it. Raises TrainerError if that fails."""
        path = built(SOURCE, flags=FLAGS)
        try:
            self._functions = ctypes.CDLL(str(path))  # ctypes releases the GIL during calls
        except OSError as error:
            raise TrainerError(
                f"{path}: cannot be loaded: {error}. Where the cache's filesystem is mounted noexec, name another "
                "directory with OFFLOAD_TRAINER_CACHE"
            ) from error
        self.lanes = UNKNOWN  # order of torch's norm; while it is unknown, torch measures what is not ordered
        self._functions.page_sum.restype = _SIZE
        self._functions.add_gradient.restype = _CHOICE
        lerp = _NUMBER, _CHOICE
        state = _POINTER, _CHOICE, _POINTER, _POINTER, _SIZE
        self._functions.muon_direction.argtypes = (*state, _NUMBER, *lerp, *lerp, _CHOICE)
        self._functions.muon_step.argtypes = (_POINTER, _POINTER, _POINTER, _CHOICE, _SIZE, _NUMBER, _NUMBER, _CHOICE)
        tried = torch.arange(1000, dtype=torch.int16).view(torch.uint8)
        agrees = all(self.page_sum(tried[:size]) == zlib_sum(tried[:size]) for size in (1, 128, 2000))
        self.checksum: Sum = self.page_sum if agrees else zlib_sum

    def update_page(self, page: PageUpdate) -> None:
        fields, grad, out, n = page.fields, page.grad, page.out, page.grad.numel()
        sizes = {name: field.entries(n) for name, field in page.format.fields.items()}
        for name, tensor in (*fields.items(), ("grad", grad), *([] if out is None else [("out", out)])):
            assert tensor.is_contiguous(), name
            assert tensor.numel() == sizes.get(name, n), name
        given = _Page(
            **{name: tensor.data_ptr() for name, tensor in fields.items()},
            grad=grad.data_ptr(),
            out=None if out is None else out.data_ptr(),
            masters=TYPES[fields["master"].dtype],
            moments=TYPES[fields["exp_avg"].dtype],
            grad_type=TYPES[grad.dtype],
            out_type=TYPES[None if out is None else out.dtype],
            shadow=0 if page.shadow is None else page.shadow.data_ptr() - fields["master"].data_ptr(),
            noise=page.bits(MASTER) or Bits(),  # second moments take the upper halves
            exp_avg_noise=page.bits(EXP_AVG) or Bits(),
        )
        found = [
            _Part(part.start, part.end, step_constants(part.hyper, scale=page.scale, step=part.step))
            for part in page.parts
            if part.end > part.start
        ]
        parts = (_Part * len(found))(*found)
        self._functions.update_page(ctypes.byref(given), parts, _SIZE(len(found)), _CHOICE(torch.get_num_threads()))

    def copy(self, values: torch.Tensor, into: torch.Tensor) -> None:
        assert values.is_contiguous()
        assert into.is_contiguous()
        assert values.nbytes == into.nbytes
        given = _POINTER(into.data_ptr()), _POINTER(values.data_ptr()), _SIZE(values.nbytes)
        self._functions.copy(*given, _CHOICE(torch.get_num_threads()))

    def page_sum(self, data: torch.Tensor) -> int:
        """Return the same as `zlib_sum`, or -1 if this CPU has no carry-less multiplication."""
        return int(self._functions.page_sum(_POINTER(data.data_ptr()), _SIZE(data.numel() * data.itemsize)))

    def add(
        self,
        sums: torch.Tensor,
        values: torch.Tensor | None,
        *,
        first: bool = False,
        pieces: Pieces | None = None,
    ) -> torch.Tensor:
        count, results = sums.numel(), torch.empty(0)
        assert sums.is_contiguous()
        assert values is None or (values.is_contiguous() and values.numel() == count)
        if not count:
            return results
        if pieces is not None and (pieces.halving or self.lanes.number):
            results = pieces.results(count)
        addition = _Addition(
            sums=sums.data_ptr(),
            values=None if values is None else values.data_ptr(),
            count=count,
            width=1 if pieces is None else pieces.width,
            results=results.data_ptr(),
            sums_type=TYPES[sums.dtype],
            values_type=TYPES[None if values is None else values.dtype],
            first=first,
            lanes=0 if pieces is None or pieces.halving else self.lanes.number,
            group=self.lanes.group,
        )
        if self._functions.add_gradient(ctypes.byref(addition), _CHOICE(torch.get_num_threads())):
            raise TrainerError(f"no memory to measure a gradient of {count} elements")
        return pieces.measure(sums) if pieces is not None and not len(results) else results

    def muon_direction(self, hyper: Muon, grad: torch.Tensor, exp_avg: torch.Tensor, *, scale: float) -> torch.Tensor:
        out = torch.empty(grad.numel(), dtype=torch.bfloat16)
        tensors = grad.data_ptr(), TYPES[grad.dtype], exp_avg.data_ptr(), out.data_ptr(), grad.numel()
        lerps = (value for lerp in hyper.lerps for value in (lerp.factor, lerp.from_end))
        self._functions.muon_direction(*tensors, scale, *lerps, torch.get_num_threads())
        return out

    def muon_step(self, hyper: Muon, master: torch.Tensor, orthogonal: torch.Tensor, out: torch.Tensor | None) -> None:
        to = (None, TYPES[None]) if out is None else (out.data_ptr(), TYPES[out.dtype])
        tensors = master.data_ptr(), orthogonal.data_ptr(), *to, master.numel()
        self._functions.muon_step(*tensors, hyper.keep, -hyper.adjusted_lr, torch.get_num_threads())


class _Part(ctypes.Structure):  # adam.cpp
    _fields_ = (("start", _SIZE), ("end", _SIZE), ("step", AdamStep))


class _Page(ctypes.Structure):  # adam.cpp
    _fields_ = (
        *fields_of(_POINTER, "master", "exp_avg", "exp_avg_sq", "exp_avg_scales", "exp_avg_sq_scales", "grad", "out"),
        *fields_of(Bits, "noise", "exp_avg_noise"),
        *fields_of(_CHOICE, "masters", "moments", "grad_type", "out_type"),
        ("shadow", _SIZE),
    )


class _Addition(ctypes.Structure):  # gradients.h
    _fields_ = (
        *fields_of(_POINTER, "sums", "values"),
        *fields_of(_SIZE, "count", "width"),
        ("results", _POINTER),
        *fields_of(_CHOICE, "sums_type", "values_type", "first", "lanes", "group"),
    )
