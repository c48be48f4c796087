"""An emulated GPU in host memory: tensors with `device=cuda` are tagged, and what CUDA would refuse fails here too.

Copies with `non_blocking` inside `torch.cuda.stream(...)` go to that stream's queue; an event is a position in a queue.
The compute stream has no queue, and whatever it waits for runs at that point. All other work runs at random times, in
the order of its queue, and never before what it waits for: a missing wait shows as a wrong number.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from offload_trainer.offloading.device import CudaDevice

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
_GPU, _EITHER = "gpu", "either"  # tags; a tensor without one is the host's

_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._to_copy.default}
_COPIES |= {_aten.set_.source_Tensor, _aten.set_.source_Storage_storage_offset}
_INDEXED = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default}
_READ_BY_HOST = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default}
_T, _device = torch.Tensor, torch.Tensor.device.__get__


@dataclass
class Work:
    """Work in a queue of a stream."""

    kind: str
    run: Any  # a function, or for a wait or a record the event
    tensors: Sequence[torch.Tensor] = ()  # aliases of what it reads and writes


class EmulatedGpu:
    """All emulated streams, the tags of all tensors, and what was done wrong."""

    bytes = 24 << 30

    def __init__(self, *, seed: int, haste: float, seconds: float, device: torch.device) -> None:
        """Create the streams. `haste`: the probability that a queue advances at each call."""
        self.seconds = seconds  # minimum wait of other threads, in which the training thread frees its tensors
        self.torch_device, self.methods = device, _methods(self)
        self.log: list[str] = []  # work that has run
        self.lock = threading.RLock()
        self.current = threading.local()
        self.streams: list[Stream] = []
        self.compute = Stream(self, "compute")
        self.bare: list[str] = []  # queued copies behind no event of the compute stream, which may still read there
        self.freed: list[str] = []  # work whose memory CUDA's allocator would have handed to the next tensor
        self.elsewhere: set[str] = set()  # threads, except this one, that called CUDA without setting a device
        self.host_waits = 0  # number of waits of the training thread
        self.thread = threading.current_thread()
        self._recorded: set[tuple[int, str]] = set()  # storages and names of streams passed to `record_stream`
        self._queued: Counter[int] = Counter()  # storages that queued work refers to
        self._random, self._haste = random.Random(seed), haste
        self.allocations = 0
        self.fails: Callable[[int], bool] = lambda number: False  # True: allocation `number` finds the GPU full

    def tag_of(self, tensor: torch.Tensor) -> str | None:
        # The Python object of a storage stays as long as the storage.
        gpu, tag = vars(tensor.untyped_storage()).get("emulated", (None, None))
        return tag if gpu is self else None

    def tag(self, tensor: torch.Tensor, tag: str | None) -> None:
        vars(tensor.untyped_storage())["emulated"] = self, tag

    def allocate(self, tensor: torch.Tensor) -> None:
        """Tag a new tensor of the GPU, or raise torch's error if the GPU is said to be full."""
        self.allocations += 1
        if self.fails(self.allocations):
            full = f"GPU 0 has a total capacity of {self.bytes / 2**30:.2f} GiB of which 0 bytes is free."
            asked = f"Tried to allocate {tensor.nbytes / 2**20:.2f} MiB."
            raise torch.OutOfMemoryError(f"CUDA out of memory. {asked} {full}")
        self.tag(tensor, _GPU)

    def device(self, *, staging_bytes: int = 0, stagings: int = 0) -> CudaDevice:
        return CudaDevice(self.torch_device, staging_bytes=staging_bytes, stagings=stagings)

    def stream_now(self) -> Stream:
        return getattr(self.current, "stream", None) or self.compute

    @contextmanager
    def setting(self, name: str, value: Any) -> Iterator[None]:
        """Set this thread's current stream or device inside the block."""
        before = getattr(self.current, name, None)
        setattr(self.current, name, value)
        try:
            yield
        finally:
            setattr(self.current, name, before)

    def note_device(self) -> None:
        """Record a calling thread that has not set a device, since CUDA would use device 0 for it."""
        thread = threading.current_thread()
        if thread is not self.thread and getattr(self.current, "device", None) is None:
            self.elsewhere.add(thread.name)

    def note_host_wait(self) -> None:
        """Count a wait of the training thread for the device."""
        self.host_waits += threading.current_thread() is self.thread

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        self._recorded.add((tensor.untyped_storage()._cdata, stream.name))

    def recorded(self, tensor: torch.Tensor) -> bool:
        return any(address == tensor.untyped_storage()._cdata for address, _ in self._recorded)

    def queue(self, kind: str, run: Callable[..., object], *tensors: torch.Tensor) -> None:
        """Queue a call of `run` with aliases of these tensors in the current stream."""
        with torch._C.DisableTorchFunction():
            self.put(self.stream_now(), Work(kind, run, [tensor.detach() for tensor in tensors]))

    def put(self, stream: Stream, work: Work) -> None:
        self.note_device()
        with self.lock:
            if stream is self.compute:
                self.carry_out(stream, work)
                self.current.behind_compute = None
                return
            stream.queue.append(work)
            self._queued.update(tensor.untyped_storage()._cdata for tensor in work.tensors)
            # The mark is per thread: work that another thread queues between a wait and its copy does not undo the
            # wait.
            if work.kind == "copy" and getattr(self.current, "behind_compute", None) is not stream:
                self.bare.append(stream.name)
            if work.kind != "copy":  # several copies may follow one wait
                waits = work.kind == "wait" and work.run.stream is self.compute
                self.current.behind_compute = stream if waits else None
            for one in self.streams:
                while one.queue and self._random.random() < self._haste:
                    if one.queue[0].kind == "wait" and not one.queue[0].run.done:
                        break
                    self._next(one)

    def _next(self, stream: Stream) -> None:
        work = stream.queue.popleft()
        for tensor in work.tensors:
            address = tensor.untyped_storage()._cdata
            # Besides tensors, Python's object for a storage counts once it exists.
            alone = torch._C._storage_Use_Count(address) <= self._queued[address] + 1
            if alone and (address, stream.name) not in self._recorded:
                where = "GPU" if self.tag_of(tensor) else "host"
                self.freed.append(f"{stream.name} {work.kind}: {where} memory, {list(tensor.shape)} {tensor.dtype}")
        self.carry_out(stream, work)
        self._queued.subtract(tensor.untyped_storage()._cdata for tensor in work.tensors)

    def carry_out(self, stream: Stream, work: Work) -> None:
        if work.kind == "wait":
            self.run_until(work.run)
        elif work.kind == "record":
            work.run.done = True
        else:
            self.log.append(f"{stream.name} {work.kind}")
            # The modes below do not see it, and its own copies run now.
            with torch._C.DisableTorchFunction(), _disable_current_modes(), self.setting("stream", self.compute):
                work.run(*work.tensors)

    def run_until(self, event: Event) -> None:
        """Run the queued work that precedes the event, and nothing more."""
        with self.lock:
            while event.stream is not None and not event.done:
                self._next(event.stream)


class Stream:
    """A stand-in for torch.cuda.Stream."""

    def __init__(self, gpu: EmulatedGpu, name: str = "") -> None:
        self.gpu, self.queue = gpu, deque[Work]()
        self.name = name or f"stream {len(gpu.streams)}"
        gpu.streams.append(self)

    def wait_event(self, event: Event) -> None:
        self.gpu.put(self, Work("wait", event))

    def synchronize(self) -> None:
        self.gpu.note_host_wait()
        event = Event(self.gpu)
        event.record(self)
        self.gpu.run_until(event)


class Event:
    """A stand-in for torch.cuda.Event."""

    def __init__(self, gpu: EmulatedGpu, **_: Any) -> None:
        self.gpu, self.done = gpu, False
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream, self.done = stream or self.gpu.stream_now(), False
        self.gpu.put(self.stream, Work("record", self))

    def query(self) -> bool:
        self.gpu.note_device()
        return self.done or self.stream is None

    def synchronize(self) -> None:
        self.gpu.note_device()
        if self.stream is not None and not self.done:
            self.gpu.note_host_wait()
            if self.gpu.seconds and threading.current_thread() is not self.gpu.thread:
                time.sleep(self.gpu.seconds)
        self.gpu.run_until(self)

    def elapsed_time(self, end: Event) -> float:
        assert self.done or self.stream is None
        assert end.done or end.stream is None
        return 0.0


def _methods(gpu: EmulatedGpu) -> dict[str, Any]:
    """Return replacements of `torch.Tensor`'s methods that depend on the device."""

    def plainly(method: Any) -> Callable[..., Any]:
        def call(*args: Any, **words: Any) -> Any:
            with torch._C.DisableTorchFunction():  # a mode would look the replacement up by its name
                return method(*args, **words)

        return call

    copy, numpy, to, clone = map(plainly, (_T.copy_, _T.numpy, _T.to, _T.clone))

    def on_gpu(tensor: torch.Tensor) -> bool:
        return gpu.tag_of(tensor) == _GPU

    def copied(into: torch.Tensor, values: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if gpu.stream_now() is not gpu.compute and (non_blocking or (on_gpu(into) and on_gpu(values))):
            gpu.queue("copy", copy, into, values)
            return into
        if on_gpu(into) != on_gpu(values) and not non_blocking:
            gpu.note_host_wait()
        return copy(into, values)

    def as_numpy(tensor: torch.Tensor, **words: Any) -> Any:
        if on_gpu(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy.")
        return numpy(tensor, **words)

    def converted(tensor: torch.Tensor, *args: Any, **words: Any) -> torch.Tensor:
        other = args[0] if args and isinstance(args[0], torch.Tensor) else words.pop("other", None)
        if other is not None:
            args = (other.device, other.dtype, *args[1:])
        device = args[0] if args and isinstance(args[0], torch.device | str) else words.get("device")
        if device is None or torch.device(device).type not in ("cuda", "cpu"):
            return to(tensor, *args, **words)
        args = tuple(CPU if one is device else one for one in args)
        words |= {"device": CPU} if words.get("device") is not None else {}
        non_blocking = words.get("non_blocking", False) or any(one is True for one in args)
        return moved(to(tensor, *args, **words), torch.device(device), non_blocking, before=on_gpu(tensor))

    def moved(tensor: torch.Tensor, device: torch.device, non_blocking: bool, *, before: bool) -> torch.Tensor:
        """Return `tensor` on `device`: the same if it was there before, else a copy."""
        if before == (device.type == "cuda"):
            return tensor
        if not non_blocking:
            gpu.note_host_wait()
        result = clone(tensor)
        gpu.tag(result, None)
        if not before:
            gpu.allocate(result)
        return result

    return {
        "device": property(lambda tensor: GPU if on_gpu(tensor) else _device(tensor)),
        "is_cuda": property(on_gpu),
        "is_cpu": property(lambda tensor: not on_gpu(tensor) and _device(tensor).type == "cpu"),
        "get_device": lambda tensor: 0 if on_gpu(tensor) else -1,
        "record_stream": lambda tensor, stream: gpu.record_stream(tensor, stream),
        "copy_": copied,
        "numpy": as_numpy,
        "pin_memory": lambda tensor, *_: clone(tensor),
        "cuda": lambda tensor, *_, non_blocking=False: moved(tensor, GPU, non_blocking, before=on_gpu(tensor)),
        "cpu": lambda tensor, *_: moved(tensor, CPU, False, before=on_gpu(tensor)),
        "to": converted,
    }


class _Factories(TorchFunctionMode):
    """Create tensors with `device=cuda` in host memory, and tag them."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if on_gpu := device is not None and torch.device(device).type == "cuda":
            kwargs = kwargs | {"device": CPU}
        result = func(*args, **kwargs)
        from_others = device is None and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs)))
        if isinstance(result, torch.Tensor) and not from_others:
            self._gpu.allocate(result) if on_gpu else self._gpu.tag(result, None)
        return result


class _Operations(TorchDispatchMode):
    """Refuse operations on tensors of both devices, and tag what they return."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            tags = [self._gpu.tag_of(tensor) for tensor in given]
            tag = _GPU if _GPU in tags else _EITHER if not tags or _EITHER in tags else None
            if tag == _GPU and func not in _COPIES:
                self._check(func, given, tags)
            if tag == _GPU and func in _READ_BY_HOST:
                self._gpu.note_host_wait()
            result = func(*args, **kwargs)
            if func not in _COPIES or func is _aten._to_copy.default:
                theirs = {tensor.untyped_storage()._cdata for tensor in given}
                for tensor in tree_leaves(result):
                    if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in theirs:
                        self._gpu.allocate(tensor) if tag == _GPU else self._gpu.tag(tensor, tag)
            return result

    def _check(self, func: Any, given: list[torch.Tensor], tags: list[str | None]) -> None:
        """Raise if a tensor of the host takes part in an operation on the GPU."""
        for number, (tensor, tag) in enumerate(zip(given, tags, strict=True)):
            is_index = func in _INDEXED and number and tensor.dtype is torch.long
            if tag == _EITHER:
                self._gpu.tag(tensor, _GPU)
            elif tag is None and tensor.dim() and not is_index:
                shapes = [(list(one.shape), its or "host") for one, its in zip(given, tags, strict=True)]
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                    f"({func}: {shapes})"
                )


@contextmanager
def queued(
    patch: pytest.MonkeyPatch, *, seed: int = 0, haste: float = 0.1, seconds: float = 0.0, device: torch.device = CPU
) -> Iterator[EmulatedGpu]:
    """Replace CUDA's streams, events and copies inside the block; without tags norms are a CPU's, as plain torch's."""
    if torch.cuda.is_available():
        pytest.skip("the emulation's queues are for the CPU's memory")
    gpu = EmulatedGpu(seed=seed, haste=haste, seconds=seconds, device=device)
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    replaced = {
        "Stream": lambda *_, **__: Stream(gpu),
        "Event": lambda **words: Event(gpu, **words),
        "current_stream": lambda *_: gpu.stream_now(),
        "stream": lambda one: gpu.setting("stream", one),
        "device": lambda one: gpu.setting("device", one),
        "set_device": lambda one: setattr(gpu.current, "device", one),
        "cudart": lambda: runtime,
    }
    with patch.context() as inner:
        for name, value in replaced.items():
            inner.setattr(torch.cuda, name, value)
        for name in ("copy_", "record_stream"):
            inner.setattr(_T, name, gpu.methods[name])
        yield gpu


@contextmanager
def emulated_gpu(patch: pytest.MonkeyPatch, **how: Any) -> Iterator[EmulatedGpu]:
    """Replace torch's CUDA device with the emulation inside the block; `how` as for `queued`."""
    with queued(patch, device=GPU, **how) as gpu, patch.context() as inner:
        run, backward = threading.Thread.run, torch.autograd._engine_run_backward

        def run_in_modes(thread: threading.Thread) -> None:
            with _Factories(gpu), _Operations(gpu):
                run(thread)

        def backward_in_modes(*args: Any, **words: Any) -> Any:
            with _Factories(gpu):  # torch leaves a mode while the mode handles a call, and hooks run inside this one
                return backward(*args, **words)

        replaced = {
            "device_of": lambda _: gpu.setting("device", GPU),
            "current_device": lambda: 0,
            "device_count": lambda: 1,
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "set_rng_state": lambda state, *_: torch.set_rng_state(state),
            "is_available": lambda: True,
            "is_initialized": lambda: False,
            "synchronize": lambda *_: [one.synchronize() for one in gpu.streams] and None,
            "empty_cache": lambda: None,
            "mem_get_info": lambda *_: (gpu.bytes, gpu.bytes),
            "get_device_name": lambda *_: "Emulated GPU",
            "get_device_capability": lambda *_: (8, 9),
            "get_arch_list": lambda: ["sm_89"],
        }
        for name, value in replaced.items():
            inner.setattr(torch.cuda, name, value)
        for name, value in gpu.methods.items():
            inner.setattr(_T, name, value)
        inner.setitem(sys.modules, "triton", None)  # other tests interpret it: it would not wait for queued work
        inner.setattr(threading.Thread, "run", run_in_modes)
        inner.setattr(torch.autograd, "_engine_run_backward", backward_in_modes)
        with _Factories(gpu), _Operations(gpu):
            yield gpu
