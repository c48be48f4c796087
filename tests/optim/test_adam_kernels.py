"""Tests that torch's, C++'s and Triton's AdamW kernels have torch.optim.AdamW's bits, or a reason not to be used.

Without a GPU, Triton's interpreter runs its function on the CPU; with one, the same tests run on it.
"""

import ctypes
import math
import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial, partialmethod
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from emulated_gpu import queued
from engine_bench import assert_same as assert_same_masters
from engine_bench import batches, engine, masters, model_directory, train

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.offloading.pages.store import PageSnapshot, PageTable
from offload_trainer.optim import cuda_adam, kernel_api, kernels, native_kernel
from offload_trainer.optim.cuda_adam import CudaKernel, choose_cuda_kernel
from offload_trainer.optim.kernel_api import Kernel, PageUpdate, ParamRange, TorchKernel
from offload_trainer.optim.kernel_cache import built
from offload_trainer.optim.kernels import random_page
from offload_trainer.optim.moments import Noise, stored_field
from offload_trainer.optim.native_kernel import NativeKernel
from offload_trainer.optim.norms import norm_of
from offload_trainer.optim.rules import AdamW, Hyper
from offload_trainer.plan.tiered import layout
from offload_trainer.plan.tiered.layout import DEVICE
from offload_trainer.plan.tiered.state_formats import ADAMW_FORMATS, KINDS
from offload_trainer.plan.tiers import RAM

ADAMW = AdamW(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, decay=0.1)
MARK = 61440.0  # larger than any weight, and exact in 16 bits
NOISE, UNIT, FIRST = Noise(1, 2), 3, 4096  # the page begins at element 4096 of its unit
FORMATS = {format.name: format for format in ADAMW_FORMATS}  # by name: with fp32 masters a value of optim.moment_dtype
form = FORMATS.__getitem__


def part(start: int, end: int, decay: float, step: int, *, hyper: Hyper = ADAMW) -> ParamRange:
    """Return a range of elements [start, end) that uses `hyper` with another decay."""
    return ParamRange(start, end, replace(hyper, decay=decay), step)


N = 20_000  # not a multiple of 256; more than one piece of adam.cpp's
PARTS = [part(256, 4096, 0.1, 7), part(4096, 4352, 0.0, 7), part(16_384, N, 0.1, 300)]
TYPES = [torch.bfloat16, torch.float16, torch.float32]
# Factors of decay may be close to zero, and lerps may start from the gradient.
RULES = [replace(ADAMW, lr=lr, decay=decay) for lr, decay in ((1e-3, 0.1), (10.0, 0.1), (3.0, 1 / 3), (0.3, 0.7))]
RULES += [replace(ADAMW, betas=betas, eps=1e-6) for betas in ((0.3, 0.5), (0.0, 0.0))]
STILL = AdamW(0.0, (0.0, 0.0), 1e-8, 0.0)  # weights stay, and moments are the gradient and its square
ROOT = Path(__file__).resolve().parents[2]

Page = tuple[dict[str, torch.Tensor], torch.Tensor]

PLACE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = [pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")]  # numpy warns of NaN and infinity
if PLACE.type == "cuda":
    pytestmark += [pytest.mark.gpu]
ON_CPU = pytest.mark.skipif(PLACE.type == "cuda", reason="needs no GPU, and a compiler, which such a machine may lack")


@pytest.fixture(autouse=True)
def interpreter_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton interpret its functions, with tensors where they are: it would copy their whole storage both ways."""
    cuda_adam._checked_kernel.cache_clear()  # no test takes the kernel that another one has compared
    if PLACE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # before its import
        monkeypatch.syspath_prepend(Path(sys.prefix) / "triton")  # see scripts/setup.sh
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "_init_args_hst", lambda _, args, kwargs: (args, kwargs))
        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)


def cuda_kernel() -> CudaKernel:
    """Return the kernel on the GPU, or in the interpreter, which needs fewer programs to be quick."""
    return CudaKernel(PLACE, rows=4 if PLACE.type == "cuda" else 64)


def compiled_kernels() -> list[Kernel]:
    """Return Triton's kernel and the C++ one; a machine with a GPU may have no compiler."""
    found: list[Kernel] = [cuda_kernel()]
    with suppress(TrainerError) if PLACE.type == "cuda" else nullcontext():
        found.append(NativeKernel())
    return found


def of_all_shapes(n: int, *, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Return blocks of 256 of five kinds in turn: random bits with special values, many magnitudes, and others."""
    random = torch.Generator().manual_seed(seed)
    integer = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[dtype.itemsize]
    values = torch.randint(0, 2 ** (8 * dtype.itemsize), (n,), generator=random).to(integer).view(dtype)
    if dtype is torch.uint8:
        return values
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 3.4e38, -3.4e38, float("inf"), -float("inf"), float("nan")])
    special = special[torch.randint(len(special), (n,), generator=random)]
    values = torch.where(torch.rand(n, generator=random) < 0.05, special, values.float())
    usual = torch.randn(n, generator=random)
    spread = usual * torch.empty(n).uniform_(-30, 5, generator=random).exp()
    kind = torch.arange(n) // 256 % 5
    for number, others in enumerate((spread, usual, usual * 1e-40, torch.zeros(n)), start=1):
        values = torch.where(kind == number, others, values)
    return values.to(dtype)


def pages_of(states: str) -> list[Page]:
    """Return a `random_page`, and one with values of all kinds; second moments and scales are not negative."""
    usual = random_page(N, form(states))
    fields = {}
    for seed, (name, field) in enumerate(usual[0].items()):
        values = of_all_shapes(field.numel(), seed=seed, dtype=field.dtype)
        fields[name] = values if name in ("master", "exp_avg") or field.dtype is torch.uint8 else values.abs()
        if "scales" in name:  # one for each block, of the block's kind
            fields[name] = of_all_shapes(N, seed=7, dtype=torch.float32)[::256].abs()
    return [usual, (fields, of_all_shapes(N, seed=9, dtype=torch.float32))]


def updated(
    kernel: Kernel,
    page: Page,
    parts: list[ParamRange],
    *,
    states: str,
    first: int = FIRST,
    given: torch.dtype = torch.bfloat16,
    wanted: torch.dtype | None = torch.bfloat16,
    scale: float = 0.37,
) -> list[torch.Tensor]:
    """Update copies of a page's fields with its gradient, which stays as it is; return them and the new weights."""
    (fields, grad), place = page, PLACE if isinstance(kernel, CudaKernel) else "cpu"
    here = {name: tensor.to(place, copy=True) for name, tensor in fields.items()}
    out = torch.full_like(grad, MARK, dtype=wanted or torch.bfloat16, device=place)
    noise, new = NOISE if form(states).stochastic else None, None if wanted is None else out
    there = grad.to(given, copy=True).to(place)
    before = there.clone()
    kernel.update_page(PageUpdate(here, there, new, parts, form(states), scale, noise, UNIT, first))
    assert torch.equal(there.view(torch.uint8), before.view(torch.uint8))
    return [tensor.cpu() for tensor in (*here.values(), out)]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Assert equal bits, except that any NaN equals any other."""
    for one, other in zip(ours, theirs, strict=True):
        if one.dtype is not torch.uint8:
            nan = other.isnan()
            assert torch.equal(one.isnan(), nan)
            one, other = (torch.where(nan, 0.0, tensor) for tensor in (one, other))
        assert same_bits(one, other)


@pytest.mark.parametrize("given", TYPES)
@pytest.mark.parametrize("number", range(len(RULES)))
def test_a_page_has_the_bits_of_torchs_adamw(number: int, given: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is one range has the bits of moments.py around torch.optim.AdamW(fused=True)."""
    monkeypatch.setattr(kernel_api, "CHUNK", 4096)
    hyper, all_kernels = RULES[number], [TorchKernel(), *compiled_kernels()]
    words = {"lr": hyper.lr, "betas": hyper.betas, "eps": hyper.eps, "weight_decay": hyper.decay}
    for states, (before, grad) in ((name, page) for name in FORMATS for page in pages_of(name)):
        wide = {kind: stored_field(kind, before).read().clone() for kind in KINDS}
        weight = torch.nn.Parameter(wide["master"])
        optimizer = torch.optim.AdamW([weight], **words, fused=True)
        moments = {name: values for name, values in wide.items() if name != "master"}
        optimizer.state[weight] = {"step": torch.tensor(float(number)), **moments}
        weight.grad = grad.to(given).float() * 0.37
        optimizer.step()
        expected = {name: torch.empty_like(field) for name, field in before.items()}
        for name, values in wide.items():
            stored_field(name, expected).write(values.detach(), noise=NOISE.bits(name, UNIT, FIRST))
        for kernel in all_kernels:
            ours = updated(kernel, (before, grad), [ParamRange(0, N, hyper, number + 1)], states=states, given=given)
            assert_same(ours, [*expected.values(), expected["master"].bfloat16()])


@pytest.mark.parametrize("given", TYPES)
@pytest.mark.parametrize("states", FORMATS)
def test_parts_have_the_bits_of_torchs_kernel_and_other_elements_keep_theirs(states: str, given: torch.dtype) -> None:
    """8-bit moments keep their bits too, although decoding and encoding would change them."""
    outside = torch.ones(N, dtype=torch.bool)
    for changed in PARTS:
        outside[changed.start : changed.end] = False
    pages = pages_of(states)
    for page, wanted, scale in zip([*pages, *pages], [*TYPES, None], (0.37, 1.0, 1e30, 1e-30), strict=True):
        words = {"states": states, "given": given, "wanted": wanted, "scale": scale}
        *fields, out = expected = updated(TorchKernel(), page, PARTS, **words)
        for (name, old), new in zip(page[0].items(), fields, strict=True):
            left = outside[::256] if "scales" in name else outside
            assert same_bits(new[left], old[left]), name
            assert page is pages[1] or (new[~left] != old[~left]).float().mean() > 0.1, name
        assert (out[outside] == MARK).all()
        assert page is pages[1] or (out[~outside] != MARK).all()
        for kernel in compiled_kernels():
            assert_same(updated(kernel, page, PARTS, **words), expected)
            assert_same(updated(kernel, page, [], **words), [*page[0].values(), torch.full_like(out, MARK)])


@pytest.mark.parametrize("states", FORMATS)
def test_bits_do_not_depend_on_where_a_unit_is_cut(states: str) -> None:
    (fields, grad), _ = pages_of(states)

    def cut(name: str, field: torch.Tensor, start: int, end: int) -> torch.Tensor:
        per = 256 if "scales" in name else 1
        return field[start // per : -(-end // per)]

    for kernel in (TorchKernel(), *compiled_kernels()):
        whole = updated(kernel, (fields, grad), [part(0, N, 0.1, 7)], states=states)
        for start, end in ((0, 256), (256, 19_712), (19_712, N)):
            page = {name: cut(name, field, start, end) for name, field in fields.items()}, grad[start:end]
            found = updated(kernel, page, [part(0, end - start, 0.1, 7)], states=states, first=FIRST + start)
            names = [*fields, "out"]
            assert_same(found, [cut(name, field, start, end) for name, field in zip(names, whole, strict=True)])


def test_every_16_bit_gradient_is_read_and_weights_are_rounded_to_nearest_even() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        grad = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        grad = grad[grad.isfinite()]
        zeros = torch.zeros_like(grad, dtype=torch.float32)
        page, parts = dict.fromkeys(KINDS, zeros), [ParamRange(0, grad.numel(), STILL, 1)]
        for kernel in compiled_kernels():
            read = updated(kernel, (page, grad), parts, states="fp32", given=dtype, scale=1.0)[1]
            assert torch.equal(read, grad.float())
        random = torch.Generator().manual_seed(0)
        n, places = 20_000, 16 if dtype is torch.bfloat16 else 13  # number of bits that are cut off
        anything = torch.randint(-(2**31), 2**31, (n,), generator=random).int().view(torch.float32)
        inside = torch.randn(n, generator=random) * torch.empty(n).uniform_(-18, 12, generator=random).exp()
        ties = (inside.to(dtype).float().view(torch.int32) + (1 << places - 1)).view(torch.float32)
        master = torch.cat(
            [anything, inside, ties, torch.tensor([3.4e38, -3.4e38, 65519.0, 65520.0, float("inf"), -0.0])]
        )
        expected, zeros = master.to(dtype), torch.zeros_like(master)
        page, parts = {"master": master, "exp_avg": zeros, "exp_avg_sq": zeros}, [ParamRange(0, len(master), STILL, 1)]
        assert (expected.isinf() & master.isfinite()).any()
        for kernel in compiled_kernels():
            assert_same(updated(kernel, (page, zeros), parts, states="fp32", wanted=dtype)[-1:], [expected])


@pytest.mark.parametrize("scale", [1.0, 0.7, 1e-15, 1e-25])
def test_8_bit_moments_are_the_references_around_every_bound_and_code(scale: float) -> None:
    """Codes change at bounds if they are rounded to nearest, and at codes if they are rounded stochastically."""
    cubes = (torch.arange(-127, 128) / 127) ** 3
    ends = torch.cat([(cubes[1:] + cubes[:-1]) / 2, (torch.arange(256) / 256) ** 1.5]) * scale
    near = (ends.view(torch.int32)[:, None] + torch.arange(-2, 3, dtype=torch.int32)).view(torch.float32)
    rows = near.clamp(-scale, scale).view(-1, 255)
    grad = torch.nn.functional.pad(rows, (1, 0), value=scale).view(-1)  # the greatest value of each block
    page, parts = (random_page(grad.numel(), form("8bit"))[0], grad), [ParamRange(0, grad.numel(), STILL, 1)]
    words = {"states": "8bit", "given": torch.float32, "scale": 1.0}
    expected = updated(TorchKernel(), page, parts, **words)
    assert len(expected[1].unique()) == 255
    for kernel in compiled_kernels():
        assert_same(updated(kernel, page, parts, **words), expected)


@pytest.mark.parametrize("states", FORMATS)
def test_old_state_is_copied_to_shadow_memory_in_the_same_pass(states: str) -> None:
    n = 40_003
    table, values = PageTable([layout.Page(0, 0, n, RAM)], form(states)), random_page(n, form(states))
    state, shadow = (torch.zeros(table.sizes[0], dtype=torch.uint8) for _ in range(2))
    fields, noise = table.fields(0, state), NOISE if form(states).stochastic else None
    parts, grad, out = [part(0, 9984, 0.1, 3), part(9984, n, 0.0, 3)], values[1].bfloat16(), torch.empty(n)
    results = []
    for kept in (None, shadow):
        for name, field in fields.items():
            field.copy_(values[0][name])
        old = state.clone()
        NativeKernel().update_page(PageUpdate(fields, grad, out, parts, form(states), 0.5, noise, shadow=kept))
        results.append(state.clone())
    assert torch.equal(*results)
    assert torch.equal(shadow, old)
    assert not torch.equal(state, old)


@pytest.mark.slow
@pytest.mark.parametrize("states", FORMATS)
def test_pages_of_any_size_anywhere_in_a_unit(states: str) -> None:
    """The last case has so many elements that some are within a 2^17th of a rounding boundary."""
    sizes = (1, 3, 255, 256, 257, 2048, 2048 + 130)
    cases = [*product(sizes, (0, 2**32 - 4096, 2**32 + 4096, 2**40)), (N, 2**32 - 1001), (2**20, 4096)]
    for n, first in cases:
        page, parts = random_page(n, form(states)), [part(0, n, 0.1, 3)]
        expected = updated(TorchKernel(), page, parts, states=states, first=first)
        for kernel in compiled_kernels():
            assert_same(updated(kernel, page, parts, states=states, first=first), expected)


@pytest.mark.slow
@pytest.mark.parametrize("states", FORMATS)
def test_more_parts_than_a_launch_takes(states: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 150 * 256
    hypers = [replace(ADAMW, lr=0.01 / (i + 1), betas=(0.2 * i, 0.99 - 0.1 * i), eps=10.0**-i) for i in range(1, 5)]
    parts = [part(256 * i, 256 * (i + 1), 0.1 * (i % 3), i + 1, hyper=hypers[i % 4]) for i in range(150) if i % 5]
    page = random_page(n, form(states))
    launches, launch = [], CudaKernel._launch
    monkeypatch.setattr(CudaKernel, "_launch", lambda *given, **also: (launches.append(also), launch(*given, **also)))
    expected = updated(TorchKernel(), page, parts, states=states)
    for kernel in compiled_kernels():
        assert_same(updated(kernel, page, parts, states=states), expected)
    assert len(launches) == 2


@pytest.mark.parametrize("given", [*TYPES, None])
@pytest.mark.parametrize("count", [1, 2, 33, 777, 9000, pytest.param((1 << 20) + 777, marks=pytest.mark.slow)])
def test_gradients_are_added_and_measured_as_in_host_memory(count: int, given: torch.dtype | None) -> None:
    """Subnormals, infinities and NaN included. The largest consists of two pieces."""
    random = torch.Generator().manual_seed(count)
    for special in (False, True):
        expected, values = torch.randn(2, count, generator=random)
        values *= torch.empty(count).uniform_(-30, 5, generator=random).exp()
        if special:
            expected, values = (of_all_shapes(count, seed=seed, dtype=torch.float32) for seed in (1, 2))
        sums, more = expected.to(PLACE, copy=True), None if given is None else values.to(given)
        TorchKernel().add(expected, more)
        found = cuda_kernel().add_gradient(sums, None if more is None else more.to(PLACE))
        assert_same([sums.cpu(), found.cpu()[None]], [expected, norm_of(expected, ordered=True)[None]])


def test_the_root_of_a_norm_is_rounded_to_nearest_on_every_device() -> None:
    """These roots, of two squares, are the closest of a million to the middle between two numbers in fp32."""
    pairs, kernel = torch.randn(1 << 20, 2, generator=torch.Generator().manual_seed(0)), cuda_kernel()
    totals = torch.add(*pairs.square().unbind(1))
    beyond = totals.double().sqrt().view(torch.int64) % 2**29  # the bits that fp32 does not have
    hardest = (beyond - 2**28).abs().argsort()[:50]
    for pair, total in zip(pairs[hardest], totals[hardest].tolist(), strict=True):
        there, expected = pair.to(PLACE), torch.tensor(math.sqrt(total))
        found = [norm_of(pair, ordered=True), norm_of(there, ordered=True), kernel.add_gradient(there)]
        assert_same([norm.cpu()[None] for norm in found], [expected[None]] * 3)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.parametrize("words", [["1"], ["0.3", "--ram-fraction", "0.7", "optim.moment_dtype=8bit"]])
def test_few_launches_that_await_snapshots(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit takes at most three: its last page, and the one where the device's share ends, may be smaller."""
    model, data, may_change = model_directory(tmp_path / "gpt2", "gpt2"), batches(4), PageSnapshot._may_change
    in_ram = [*words[1:], "--gpu-fraction", "0", "--ram-fraction", "1"]
    with engine(model, *in_ram) as reference:
        expected, weights = train(reference, data), masters(reference)
    (tmp_path / "half").mkdir()
    kernel, launches = cuda_kernel(), []
    launch = kernel._launch
    monkeypatch.setattr("offload_trainer.engine.tiered._device_kernel", lambda *_, **__: kernel)
    with ExitStack() as stack:
        cuda = stack.enter_context(queued(monkeypatch, haste=0.2)) if PLACE.type == "cpu" else None

        def late(table: Any, given: Any, **size: int) -> None:
            launches.append(size)
            copied = type(table).from_buffer_copy(table)
            cuda.queue("update", partial(launch, copied, given, **size)) if cuda else launch(table, given, **size)

        monkeypatch.setattr(kernel, "_launch", late)
        device = cuda and cuda.device(staging_bytes=1 << 20, stagings=2)
        more = ["--gpu-fraction", *words, "tiered.page_size=4096"]
        ours = stack.enter_context(engine(model, *more, device=device))
        monkeypatch.setattr(PageSnapshot, "_may_change", lambda *given: (time.sleep(0.01), may_change(*given)))
        assert train(ours, data[:2]) == expected[:2]
        writing = threading.Thread(target=ours.snapshot().write, args=[tmp_path / "half"])
        writing.start()
        assert train(ours, data[2:]) == expected[2:]
        writing.join()
        assert_same_masters(masters(ours), weights)
        pages = [page for page in ours.offloaded.store.pages if page.home == DEVICE]
    units = len({page.unit for page in pages})
    assert len(pages) > 6 * units
    assert len(launches) <= 4 * 3 * units
    with engine(model, *in_ram, load_weights=False) as other:
        other.load(tmp_path / "half")
        assert train(other, data[2:]) == expected[2:]


@pytest.mark.slow
def test_it_is_used_if_it_gives_the_bits_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan compares it, also in launches of several pages, and the run takes the same kernel."""
    monkeypatch.setattr(cuda_adam, "CudaKernel", lambda _: cuda_kernel())
    first, _ = choose_cuda_kernel(PLACE)
    monkeypatch.setattr(cuda_adam, "CudaKernel", None)
    kernel, words = choose_cuda_kernel(PLACE)
    assert isinstance(kernel, CudaKernel)
    assert kernel is first
    assert kernel.adds_gradients
    assert words.endswith("checked to give the CPU's bits.")


def flushing(update: Callable[..., None], kernel: CudaKernel, page: PageUpdate) -> None:
    """Update as a GPU that flushes subnormals would."""
    update(kernel, page)
    for tensor in page.fields.values():
        if tensor.dtype is torch.float32:
            tensor[tensor.abs() < 2.0**-126] *= 0.0


def misplaced(launch: Callable[..., None], kernel: CudaKernel, table: Any, *others: object, **words: Any) -> None:
    """Launch with later pages elsewhere: with one page, the distance changes nothing."""
    table.apart -= min(table.apart, 4)
    launch(kernel, table, *others, **words)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault"), [("update_page", flushing), ("_launch", misplaced)])
def test_a_gpu_of_other_bits_is_refused(name: str, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaKernel, name, partialmethod(partial(fault, getattr(CudaKernel, name))))
    monkeypatch.setattr(cuda_adam, "CudaKernel", lambda _: cuda_kernel())
    kernel, words = choose_cuda_kernel(PLACE)
    assert kernel is None
    assert "torch kernel in their last bits" in words


def test_every_error_becomes_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, words in (
        (torch.OutOfMemoryError("out of\nmemory"), "OutOfMemoryError: out of memory"),
        (TrainerError("no Triton"), "no Triton"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(cuda_adam, "CudaKernel", Mock(side_effect=error))
            assert choose_cuda_kernel(PLACE) == (None, words)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "Triton, which comes with torch's wheels for CUDA" in choose_cuda_kernel(PLACE)[1]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "built for ROCm" in choose_cuda_kernel(PLACE)[1]


SCRIPT = ROOT / "scripts" / "check_cuda_kernel.py"


@pytest.mark.slow(75)
@ON_CPU
def test_compiled_code_fuses_and_flushes_nothing_for_any_card(tmp_path: Path) -> None:
    """The script runs in a separate process, because Triton interprets functions in this one."""
    variables = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": tmp_path, "PYTHONPATH": f"{ROOT}:{sys.prefix}/triton"}
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert {line.split()[2] for line in lines} == {f"sm_{card}" for card in (70, 75, 80, 86, 89, 90, 100, 120)}
    assert len(lines) == 8 * (1 + len(FORMATS))


@pytest.mark.slow
def test_the_check_of_the_code_finds_mistakes() -> None:
    faults_of = runpy.run_path(str(SCRIPT))["faults_of"]
    fused = "\tfma.rn.f32 \t%f3, %f1, %f2, %f4;\n" * 2
    right = f"\tsqrt.rn.f32 \t%f9, %f8;\n{fused}\t@%p1 ld.global.v4.f32 {{%f1}}, [%rd1];\n\tmul.rn.f32 %f3, %f1, %f2;\n"
    assert (faults_of(right, fuses=True), faults_of(right, fuses=False)) == ([], ["2 FMA for 1 elements"])
    for line, fault in {
        "fma.rn.f32 %f3, %f1, %f2, %f4;": "3 FMA for 1 elements",
        "mul.f32 %f3, %f1, %f2;": "mul.f32",
        "@%p1 add.rn.ftz.f32 %f3, %f1, %f2;": "add.rn.ftz.f32",
        "div.approx.f32 %f3, %f1, %f2;": "div.approx.f32",
        "mad.rn.f32 %f3, %f1, %f2, %f4;": "mad.rn.f32",
        ".local .align 4 .b8 depot[16];": "registers spilled to memory",
        "sqrt.rn.f32 %f9, %f8;": "2 FMA for 2 elements",
    }.items():
        assert faults_of(f"{right}\t{line}\n", fuses=True) == [fault]


@ON_CPU
def test_auto_names_the_chosen_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, words = kernels.choose_kernel("auto")
    assert kernel.name == "native"
    assert "native" in words
    assert kernels.choose_kernel("native")[0] is kernel  # checked once in a process
    kernels._checked_native.cache_clear()
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    kernel, words = kernels.choose_kernel("auto")
    assert kernel.name == "torch"
    assert "no-such-compiler" in words
    with pytest.raises(UserError, match="no-such-compiler"):
        kernels.choose_kernel("native")
    monkeypatch.delenv("CXX")
    (tmp_path / "adam.cpp").write_text('#error "not today"\n')
    monkeypatch.setattr(native_kernel, "SOURCE", tmp_path / "adam.cpp")
    with pytest.raises(UserError, match="not today"):  # the compiler's message
        kernels.choose_kernel("native")


@ON_CPU
def test_a_changed_header_builds_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_TRAINER_CACHE", str(tmp_path / "cache"))
    source, header = tmp_path / "adam.cpp", tmp_path / "formats.h"
    source.write_text('#include "formats.h"\nextern "C" int answer() { return ANSWER; }\n')
    for answer in (42, 43):
        header.write_text(f"#define ANSWER {answer}\n")
        assert ctypes.CDLL(str(built(source, flags=("-shared", "-fPIC")))).answer() == answer


@ON_CPU
@pytest.mark.slow
def test_two_processes_may_build_concurrently(tmp_path: Path) -> None:
    code = "from offload_trainer.optim.native_kernel import NativeKernel; NativeKernel()"
    env = os.environ | {"OFFLOAD_TRAINER_CACHE": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(2)]
    assert [process.wait(300) for process in both] == [0, 0]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["adam.so", "adam.so.sha256", "turn"]


@ON_CPU
@pytest.mark.parametrize("states", FORMATS)
def test_a_kernel_that_is_off_by_one_bit_is_not_used(states: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Off(NativeKernel):
        def update_page(self, page: PageUpdate) -> None:
            super().update_page(page)
            if page.format == form(states):
                page.fields["exp_avg_sq"].view(torch.uint8)[-1] ^= 1

    monkeypatch.setattr(kernels, "NativeKernel", Off)
    kernel, words = kernels.choose_kernel("auto")
    assert kernel.name == "torch"
    assert "last bits" in words
