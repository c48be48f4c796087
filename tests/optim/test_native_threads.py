"""Tests of the native kernel's threads: a fixed number, which survives forks, several callers and process exit."""

import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from commands import HELPERS
from forked_child import in_a_fork
from update_ranges import form, part

from offload_trainer.optim.kernel_api import PageUpdate
from offload_trainer.optim.kernels import random_page
from offload_trainer.optim.native_kernel import NativeKernel

N = 1 << 18  # many pieces


@pytest.fixture(autouse=True)
def three_threads() -> None:
    torch.set_num_threads(3)


class Page:
    """A page that is updated in fp32. It returns bytes without torch, whose threads a fork has lost."""

    def __init__(self) -> None:
        self.fields, grad = random_page(N, form("fp32"))
        self.grad, self.out = grad.bfloat16(), torch.zeros(N, dtype=torch.bfloat16)

    def update(self, kernel: NativeKernel, *, times: int = 1) -> bytes:
        self.step(kernel, times=times)
        return self.bytes()

    def bytes(self) -> bytes:
        return b"".join(bytes(tensor.numpy().data) for tensor in self.fields.values())

    def step(self, kernel: NativeKernel, *, times: int = 1) -> None:
        parts = [part(0, N // 2, 0.1, 7), part(N // 2, N, 0.0, 7)]
        for _ in range(times):
            kernel.update_page(PageUpdate(self.fields, self.grad, self.out, parts, form("fp32"), 0.5, noise=None))


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


# -- one thread at first: a fork has that of its caller alone ----------------------------------------------------------


def tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_threads_persist_and_block_signals() -> None:
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
from test_native_threads import NativeKernel, Page, tasks, torch
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
