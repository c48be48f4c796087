"""Tests of the native kernel: sums, norms, copies and checksums have the right bits, and threads survive forks."""

import os
import re
import signal
import subprocess
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch
from commands import HELPERS
from forked_child import in_a_fork
from torch.multiprocessing.reductions import StorageWeakRef

from offload_trainer.optim import norms
from offload_trainer.optim.kernel_api import PageUpdate, ParamRange, TorchKernel, zlib_sum
from offload_trainer.optim.kernels import adds_like_torch, choose_kernel, random_page
from offload_trainer.optim.native_kernel import ORDERS, UNKNOWN, NativeKernel
from offload_trainer.optim.norms import Pieces, norm_of
from offload_trainer.optim.rules import AdamW
from offload_trainer.plan.tiered.state_formats import state_format

WIDE, NARROW = torch.float32, (torch.bfloat16, torch.float16)


@pytest.fixture(params=[1, 5], ids="{} threads".format)
def native(request: pytest.FixtureRequest) -> NativeKernel:
    torch.set_num_threads(request.param)
    found, _ = choose_kernel("native")
    assert isinstance(found, NativeKernel)
    if found.lanes == UNKNOWN:
        pytest.skip("no order of addition has the bits of torch's norm on this CPU, so torch's operations are used")
    return found


def numbers(size: int, seed: int, *, spread: float = 8.0) -> torch.Tensor:
    """Return numbers of many magnitudes, with zeros and subnormal numbers."""
    random = torch.Generator().manual_seed(seed)
    found = torch.randn(size, generator=random) * torch.empty(size).uniform_(-spread, spread, generator=random).exp_()
    found[::37] = 0.0
    found[5::1001] *= 1e-38
    return found


@pytest.mark.parametrize("size", [0, 1, 31, 600_001])
@pytest.mark.parametrize("offset", [0, 5])
def test_a_copy_has_all_bytes_and_no_more(native: NativeKernel, size: int, offset: int) -> None:
    given, into = (torch.arange(size + 9, dtype=torch.int32).to(torch.uint8) for _ in range(2))
    wanted = into.add_(1).clone()
    wanted[offset:][:size] = given[3:][:size]
    native.copy(given[3:][:size], into[offset:][:size])
    assert torch.equal(into, wanted)


@pytest.mark.parametrize("size", [1, 255, 1025, 131_073, 400_001])  # up to several pieces
def test_sums_and_norms_have_torchs_bits(native: NativeKernel, size: int) -> None:
    dtypes = [(WIDE, WIDE), *((WIDE, narrow) for narrow in NARROW), *((narrow, narrow) for narrow in NARROW)]
    before, more = numbers(size + 3, seed=1), numbers(size + 3, seed=2)
    for (stored, given), ordered, first in product(dtypes, (False, True), (False, True)):
        pieces = Pieces.of(size, ordered=ordered)
        for offset in (0, 3) if size > 3 else (0,):
            sums, values = (one[offset:][:size] for one in (before.to(stored, copy=True), more.to(given)))
            right = values.to(stored, copy=True) if first else sums.clone().add_(values)
            results = native.add(sums, values, first=first, pieces=pieces)
            case = stored, given, ordered, first, offset
            assert torch.equal(sums, right), case
            alone = norm_of(right, ordered=ordered)
            assert torch.equal(pieces.norm(results), alone), case
            assert torch.equal(pieces.norm(native.add(sums, None, pieces=pieces)), alone), case
            assert torch.equal(native.add(sums, None, pieces=pieces), results), case
            assert not native.add(sums, values).numel(), case
            assert torch.equal(sums, right.add_(values)), case


def test_results_of_parts_are_those_of_the_whole(native: NativeKernel) -> None:
    """A gradient may arrive in parts that consist of whole pieces."""
    sums, more = numbers(700_001, seed=3), numbers(700_001, seed=4).bfloat16()
    for pieces in (Pieces.of(len(sums), ordered=ordered) for ordered in (False, True)):
        whole = native.add(sums.clone(), more, pieces=pieces)
        parts = sums.clone().split(pieces.width), more.split(pieces.width)
        found = [native.add(part, values, pieces=pieces) for part, values in zip(*parts, strict=True)]
        assert torch.equal(torch.cat(found), whole)


def test_overflow_and_nan_reach_the_norm(native: NativeKernel) -> None:
    for value, right in ((float("inf"), torch.isinf), (float("nan"), torch.isnan)):
        for at, ordered in product((0, 131_070, 299_999), (False, True)):
            sums = torch.ones(300_000, dtype=torch.float16)
            sums[at] = value
            pieces = Pieces.of(len(sums), ordered=ordered)
            assert right(pieces.norm(native.add(sums, torch.ones(300_000).half(), pieces=pieces)))
    assert torch.isinf(torch.tensor([6e4]).half().add_(torch.tensor([6e4]).half()))
    sums = torch.tensor([6e4]).half()
    native.add(sums, sums.clone())
    assert torch.isinf(sums).all()


def test_a_wrong_order_of_addition_is_found() -> None:
    """Orders with torch's bits differ at most in what cannot matter: groups that are as large as a vector."""
    kernel, right = NativeKernel(), []
    for kernel.lanes in ORDERS:
        if adds_like_torch(kernel):
            right.append(kernel.lanes)
    assert len({(order.number, min(order.group, order.number)) for order in right}) <= 1


def test_while_the_order_of_torchs_norm_is_unknown_torch_measures() -> None:
    for kernel in (NativeKernel(), TorchKernel()):
        for pieces, right in (
            (Pieces(1 << 16, halving=True), [4.0 * 65_536, 4.0 * 4_464]),
            (Pieces(1 << 16, halving=False), [512.0, (4.0 * 4_464) ** 0.5]),
        ):
            sums = torch.ones(70_000)
            results = kernel.add(sums, torch.ones(70_000).bfloat16(), pieces=pieces)
            assert torch.equal(results, torch.tensor(right))
            assert torch.equal(kernel.add(sums, None, pieces=pieces), results)
            assert torch.equal(sums, torch.full((70_000,), 2.0))


def test_a_norm_holds_the_squares_of_one_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, halves = list[StorageWeakRef](), norms._sum_by_halves

    def counted(rows: torch.Tensor) -> torch.Tensor:
        assert sum(not one.expired() for one in seen) <= 1  # the last part's, until this one's replace them
        seen.append(StorageWeakRef(rows.untyped_storage()))
        return halves(rows)

    monkeypatch.setattr(norms, "_sum_by_halves", counted)
    Pieces(256, halving=True).measure(torch.ones(2560))
    assert len(seen) == 10


def test_checksums_are_crc_32_with_0_for_zeros_and_the_compiled_one_is_zlibs() -> None:
    """Without zlib's inversions a CRC is linear: it differs from zlib's by the CRC of as many zeros."""
    kernel, random = NativeKernel(), torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=random)
    for size in (1, 77, 4096):
        assert zlib_sum(data[:size]) == zlib.crc32(data[:size].numpy().tobytes()) ^ zlib.crc32(bytes(size))
        assert zlib_sum(torch.zeros(size, dtype=torch.uint8)) == 0
    pieces = [data[-size:] for size in (*range(1, 400), 4095, 4096, 4097, 70_001, 1 << 20)] + [data[3:4003]]
    computed = [kernel.page_sum(piece) for piece in pieces]
    if set(computed) == {-1}:
        assert kernel.checksum is zlib_sum
        pytest.skip("this CPU has no carry-less multiplication")
    assert kernel.checksum == kernel.page_sum
    assert computed == list(map(zlib_sum, pieces))


N = 1 << 18  # many pieces


class Page:
    """A page that is updated in fp32. It returns bytes without torch, whose threads a fork has lost."""

    format = state_format("adamw", "fp32")

    def __init__(self) -> None:
        self.fields, grad = random_page(N, self.format)
        self.grad, self.out = grad.bfloat16(), torch.zeros(N, dtype=torch.bfloat16)

    def update(self, kernel: NativeKernel, *, times: int = 1) -> bytes:
        self.step(kernel, times=times)
        return self.bytes()

    def bytes(self) -> bytes:
        return b"".join(bytes(tensor.numpy().data) for tensor in self.fields.values())

    def step(self, kernel: NativeKernel, *, times: int = 1) -> None:
        decayed, other = (AdamW(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, decay=decay) for decay in (0.1, 0.0))
        parts = [ParamRange(0, N // 2, decayed, 7), ParamRange(N // 2, N, other, 7)]
        for _ in range(times):
            kernel.update_page(PageUpdate(self.fields, self.grad, self.out, parts, self.format, 0.5, noise=None))


def expected(*, times: int = 1) -> bytes:
    torch.set_num_threads(1)
    found = Page().update(NativeKernel(), times=times)
    torch.set_num_threads(3)
    return found


def test_a_forked_child_starts_its_own_threads_while_another_thread_updates() -> None:
    wanted, kernel, end = expected(), NativeKernel(), threading.Event()
    busy, mine = Page(), Page()

    def go_on() -> None:
        while not end.is_set():
            busy.update(kernel)

    other = threading.Thread(target=go_on)
    other.start()
    try:
        for _ in range(5):
            assert in_a_fork(lambda: 0 if mine.update(kernel) == wanted else 1) == 0
    finally:
        end.set()
        other.join()
    assert mine.update(kernel) == wanted


def test_callers_take_turns() -> None:
    wanted, kernel = expected(times=20), NativeKernel()
    with ThreadPoolExecutor(4) as callers:
        assert [*callers.map(lambda _: Page().update(kernel, times=20), range(4))] == [wanted] * 4


def tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_threads_persist_and_block_signals() -> None:
    """A fork has its caller's thread alone at first."""
    kernel, page = NativeKernel(), Page()

    def child() -> None:
        torch.set_num_threads(3)
        before = tasks()
        page.update(kernel)
        first = tasks() - before
        assert len(first) == 2, first
        page.update(kernel, times=50)
        assert tasks() - before == first
        for task in first:
            (blocked,) = re.findall(r"SigBlk:\s+(\w+)", Path(f"/proc/self/task/{task}/status").read_text())
            assert int(blocked, 16) & 1 << signal.SIGTERM - 1
        torch.set_num_threads(5)
        page.update(kernel)
        assert len(tasks() - before) == 4

    assert in_a_fork(child) == 0


def test_no_more_threads_can_be_created_and_the_process_ends_while_they_work() -> None:
    """A fork would reuse the stacks of threads that its parent had, so this is a new process."""
    code = f"""
import os, resource, sys, threading
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(HELPERS)!r}]
from test_native_kernel import NativeKernel, Page, tasks, torch
torch.set_num_threads(1)  # if MKL's threads begin a process's first exponential together, some are off by 1e-4
kernel, page, other, before = NativeKernel(), Page(), Page(), tasks()
torch.set_num_threads(3)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 19), resource.RLIM_INFINITY))  # no room for a stack
page.step(kernel)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert tasks() == before
right = other.update(kernel)
assert len(tasks() - before) == 2
assert page.bytes() == right
threading.Thread(target=lambda: page.update(kernel, times=10**9), daemon=True).start()
other.update(kernel, times=20)
print("done")
"""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
