"""Tests of gradients in transit: which threads wait, memory bounds, and norms. test_tiered.py tests the results."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_bench import batches, model_directory, train
from forked_ranks import in_ranks
from late_transfers import late, late_engine
from placements import ALL_ON_DRIVES, digest
from seen_calls import calls_of, until

from offload_trainer.common.errors import TrainerError
from offload_trainer.offloading import allocation
from offload_trainer.offloading.device import Copies, CpuDevice
from offload_trainer.offloading.gradients import collector as module
from offload_trainer.offloading.gradients.collector import Gradients, StagedSums
from offload_trainer.offloading.pages.store import UnitStore
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.offloading.ranks.sharded_gradients import ShardedGradients
from offload_trainer.offloading.update.progress import UpdateProgress
from offload_trainer.optim.kernel_api import TorchKernel
from offload_trainer.optim.norms import Pieces, norm_of
from offload_trainer.plan import communication
from offload_trainer.plan.shape import ModelShape, Weight
from offload_trainer.plan.tiered.layout import RAM, Page, Place, Unit, range_of_rank, units_of
from offload_trainer.plan.tiered.spec import TierSizes
from offload_trainer.plan.tiers import TierKind
from offload_trainer.storage.transfer import DriveFile, Future, Transfers, done, together


class NotingDevice(CpuDevice):
    """A device that notes its downloads, which are late; with `holds` they finish only when `let_go` is called."""

    in_host_memory = False

    def __init__(self, *, holds: bool) -> None:
        super().__init__()
        self.holds, self.held = holds, list[tuple[torch.Tensor, torch.Tensor, Future]]()
        self.sizes: list[int] = []  # bytes of each copy
        self.groups: list[int] = []  # copies that are queued together

    def download(self, copies: Copies, **words: Any) -> Future:
        self.groups.append(len(copies))
        self.sizes += [values.nbytes for values, _ in copies]
        if not self.holds:
            return late(lambda: [into.copy_(values) for values, into in copies])
        self.held += [(values, into, Future()) for values, into in copies]
        return together([future for _, _, future in self.held[-len(copies) :]])

    def let_go(self, count: int | None = None) -> None:
        """Finish the oldest `count` copies, or all."""
        count = len(self.held) if count is None else count
        for values, into, future in self.held[:count]:
            into.copy_(values)
            future.finish_part()
        del self.held[:count]


def model(*, tied: bool = False) -> tuple[Unit, ...]:
    """Return the units of a model with an embedding, which may be tied, and three blocks of two weights."""
    weights = [Weight("wte", (50, 100), unit="wte", uses=2 if tied else 1)]
    for number in range(3):
        name = f"h.{number}"
        weights += [Weight(f"{name}.w", (60, 100), unit=name, block=True)]
        weights += [Weight(f"{name}.b", (60,), unit=name, block=True)]
    return units_of(ModelShape(tuple(weights), layers=3, hidden=100, vocabulary=50, context=16))


@contextmanager
def sums(units: tuple[Unit, ...], home: int, *, device_sums: int = 0, **changes: Any) -> Iterator[Gradients]:
    """Yield the gradient sums of `units`; the device adds those of units with at most `device_sums` elements."""
    transfers, patch = Transfers(), pytest.MonkeyPatch()
    patch.setattr(module, "GRADIENTS_IN_FLIGHT", changes.pop("in_flight_bytes", module.GRADIENTS_IN_FLIGHT))
    dtype = changes.pop("dtype", torch.float32)
    homes, sizes = [home] * len(units), [dtype.itemsize * unit.trained for unit in units]
    node = changes.pop("node", Node())
    store = UnitStore(sizes, homes, dtype=dtype, files=[], transfers=transfers, pinned=False, node=node)
    tiers = TierSizes(0, 1, TierKind.RAM, 0, 0, 0, False, False, (), device_sums=device_sums)
    parts: dict[str, Any] = {"kernels": (TorchKernel(), TorchKernel()), "ring_bytes": 1 << 20, "sizes": tiers}
    given: Any = SimpleNamespace(units=units, node=node, **parts | changes)
    made = Gradients(given, store, order=[place.weight.name for _, place in places(units)])
    try:
        yield made
    finally:
        patch.undo()
        made.close()
        transfers.close()


def places(units: tuple[Unit, ...]) -> list[tuple[Unit, Place]]:
    return [(unit, place) for unit in units for place in unit.places]


def hand_over(to: Gradients, units: tuple[Unit, ...], *, last: bool, seed: int) -> dict[str, torch.Tensor]:
    """Add a backward's bf16 gradients, from the last weight to the first; return them by name."""
    generator = torch.Generator().manual_seed(seed)
    given = {}
    for _, place in reversed(places(units)):
        for _ in range(place.weight.uses):
            gradient = torch.randn(place.weight.shape, generator=generator).bfloat16()
            name = place.weight.name
            given[name] = given[name] + gradient if name in given else gradient
            to.add(name, gradient.clone(), last=last)
    to.end_of_backward(last=last)
    return given


def on_a_thread(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def stands_at(sent: int, device: NotingDevice, thread: threading.Thread) -> bool:
    """Return True if the copies reach `sent` bytes, and then stay there while `thread` is still waiting."""
    until(lambda: sum(device.sizes) >= sent)
    thread.join(0.3)
    return thread.is_alive() and sum(device.sizes) == sent


def test_beyond_the_bound_the_oldest_copy_is_waited_for() -> None:
    """13,000 bytes may be in flight in addition to the largest, so the third block's matrix (12,000) waits."""
    units, device = model(), NotingDevice(holds=True)
    with sums(units, RAM, device=device, dtype=torch.bfloat16, in_flight_bytes=13_000) as gradients:
        thread = on_a_thread(lambda: hand_over(gradients, units, last=True, seed=0))
        assert stands_at(3 * 12_120, device, thread)  # The copy has started, and autograd is blocked.
        device.let_go(2)
        assert stands_at(3 * 12_120 + 10_000, device, thread)  # Now the embedding's gradient waits.
        device.let_go(2)
        thread.join(300)
        assert not thread.is_alive()
        device.held.pop()[2].finish_part(TrainerError("the copy failed"))
        device.let_go()
        with pytest.raises(TrainerError, match="the copy failed"):
            gradients.finish()


@pytest.mark.parametrize(
    ("together", "changes", "groups"),
    [
        (10**9, {"dtype": torch.bfloat16}, [2, 2, 2, 1]),
        (10**9, {}, [2, 2, 2, 1]),  # sums in fp32, through the ring
        (12_000, {}, [2, 2, 2, 1]),
        (100, {}, [1] * 7),
        (10**9, {"dtype": torch.bfloat16, "in_flight_bytes": 100}, [2, 2, 2, 1]),
        (10**9, {"ring_bytes": 8192}, None),  # has room for a third of a matrix
    ],
)
def test_a_units_gradients_leave_together(
    together: int, changes: dict[str, Any], groups: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large gradients do not wait for further ones, and nothing waits for a copy that is not queued."""
    monkeypatch.setattr(module, "_TOGETHER", together)
    units, device, given = model(), NotingDevice(holds=False), dict[str, torch.Tensor]()
    with sums(units, RAM, device=device, **changes) as gradients:
        thread = on_a_thread(lambda: given.update(hand_over(gradients, units, last=True, seed=0)))
        thread.join(300)
        assert not thread.is_alive()
        assert groups is None or device.groups == groups
        gradients.finish()
        for name, values in given.items():
            assert torch.equal(gradients.sums(name), values.reshape(-1).to(gradients.dtype)), name
        gradients.clear()
        gradients.add("h.1.b", torch.ones(60, dtype=torch.bfloat16), last=False)


def added_breadth_first(to: Gradients, units: tuple[Unit, ...]) -> None:
    """Add gradients of three micro-batches, block by block. Some weights have one in some of them only."""
    generator = torch.Generator().manual_seed(4)
    for block in ((3,), (2,), (1, 0)):
        for number in range(3):
            to.turn_to(number)
            for unit, place in reversed(places(units)):
                name, missing = place.weight.name, {"h.2.b": (2,), "h.1.w": (0, 1), "h.0.b": (0,), "wte": (2,)}
                gradient = torch.randn(place.weight.shape, generator=generator).bfloat16()
                if unit.index in block and number not in missing.get(name, ()):
                    to.add(name, gradient, last=number == 2)
    to.end_of_backward(last=True)


def test_sums_of_a_block_leave_the_device_once_and_before_the_next_block_but_one_begins() -> None:
    """They have the bits of sums of gradients that leave the device one by one."""
    units, device, added = model(), NotingDevice(holds=True), NotingDevice(holds=False)
    with sums(units, RAM, device=added) as expected, sums(units, RAM, device=device, device_sums=10**9) as gradients:
        added_breadth_first(expected, units)
        expected.finish()
        assert sum(added.sizes) == 2 * (3 * (5000 + 3 * 6060) - 60 - 2 * 6000 - 60 - 5000)
        thread = on_a_thread(partial(added_breadth_first, gradients, units))
        assert stands_at(2 * 4 * 6060, device, thread)  # the first block's have not left
        device.let_go(2)
        thread.join(300)
        assert not thread.is_alive()
        assert sum(device.sizes) == 4 * (5000 + 3 * 6060)
        device.let_go()
        gradients.finish()
        assert gradients.arrived == expected.arrived == {place.weight.name for _, place in places(units)}
        norms = gradients.norms()
        for name, norm in expected.norms().items():
            assert torch.equal(norms[name], norm), name
            assert torch.equal(gradients.sums(name), expected.sums(name)), name


def test_gradients_of_a_tied_weight_are_added_on_the_device() -> None:
    """One copy of both uses leaves the device. The gradient of one use alone is copied at the end of the backward."""
    units, device = model(tied=True), NotingDevice(holds=True)
    with sums(units, RAM, device=device, dtype=torch.bfloat16) as gradients:
        given = hand_over(gradients, units, last=True, seed=1)
        assert sorted(device.sizes) == sorted(2 * place.weight.numel for _, place in places(units))
        device.let_go()
        gradients.finish()
        gradients.clear()
        gradients.add("wte", -given["wte"], last=True)
        assert not device.held
        gradients.end_of_backward(last=True)
        device.let_go()
        gradients.finish()
        assert gradients.sums("wte").equal(-given["wte"].reshape(-1))


@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.parametrize("words", [["--params", "gpu"], ALL_ON_DRIVES], ids=["RAM", "drive"])
def test_autograd_does_not_wait(words: list[str], drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`add` never waits in three micro-batches, and only the summing thread takes norms of sums."""
    inside = threading.local()
    add = Gradients.add

    def seen_add(*args: Any, **named: Any) -> None:
        inside.adding = True
        add(*args, **named)
        inside.adding = False

    monkeypatch.setattr(module, "norm_of", None)  # not called
    monkeypatch.setattr(Gradients, "add", seen_add)
    norms = calls_of(monkeypatch.setattr, Pieces, "norm", lambda *_: threading.current_thread().name)
    waits = calls_of(
        monkeypatch.setattr, Future, "wait", lambda future: getattr(inside, "adding", False) and not future.done
    )
    # large enough for all gradients
    monkeypatch.setattr("offload_trainer.engine.tiered.gradient_ring", lambda *_, **__: 1 << 23)
    where = model_directory(tmp_path / "gpt2", "gpt2")
    with late_engine(monkeypatch, where, "--accumulate", "3", *words, drives=[drive]) as ours:
        train(ours, batches(3), accumulate=3)
        assert norms == ["sums-0"] * len(ours.offloaded.trained)
    assert not any(waits)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-5)])
def test_norms_of_large_gradients_are_right(dtype: torch.dtype, bound: float, seed: int) -> None:
    """Norms match fp64 and torch's fp32 norm of parts, more closely than torch's norm of a whole tensor would."""
    count = 20_000_000 if seed == 1 else 3_000_001
    gradient = (torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 1e-3).to(dtype)
    for size in (count, 1_000_003, 300_000, 131_073, 131_072, 100):
        exact = float(gradient[:size].double().norm())
        assert float(norm_of(gradient[:size])) == pytest.approx(exact, rel=bound), size
        assert float(norm_of(gradient[:size], ordered=True)) == pytest.approx(exact, rel=3e-7), size
        parts = [torch.nn.Parameter(part.float()) for part in gradient[:size].split(1 << 17)]
        for part in parts:
            part.grad = part.detach().clone()
        own = float(torch.nn.utils.clip_grad_norm_(parts, 1.0, foreach=False))
        assert float(norm_of(gradient[:size])) == pytest.approx(own, rel=1e-6), size


def test_ordered_norms_do_not_depend_on_the_chunk_size() -> None:
    """The norm does not depend on the chunk count (a GPU takes eight, a CPU one), the dtype or the alignment."""

    def ordered_norm(values: torch.Tensor, *, chunks: int | None = None) -> torch.Tensor:
        pieces = Pieces.of(len(values), ordered=True)
        return pieces.norm(pieces.measure(values, chunks=chunks))

    values = torch.randn(9_500_001, generator=torch.Generator().manual_seed(2)) * torch.logspace(-30, 10, 9_500_001)
    for size, offset in product((1, 3, 255, 1 << 20, (1 << 20) + 1, 9_500_000), (0, 1)):
        part = values[offset : offset + size]
        one = ordered_norm(part, chunks=1)
        assert torch.equal(one, ordered_norm(part, chunks=8)), size
        assert torch.equal(one, ordered_norm(part.clone(), chunks=3)), size
        assert torch.equal(ordered_norm(part.bfloat16()), ordered_norm(part.bfloat16().float(), chunks=8)), size
    assert torch.isnan(ordered_norm(torch.tensor([1.0, float("nan"), 2.0])))
    assert torch.isinf(ordered_norm(torch.tensor([1.0, float("inf"), 2.0])))


MICRO, STEPS = 2, 3  # micro-batches of each rank in a step
SHAPES = {  # pieces of norms are inside one rank's elements, or span two or all; some ranks have no elements of a unit
    **{"wte": (50, 100), "h.0.w": (60, 100), "h.0.none": (9000,), "h.0.b": (60,)},
    **{"h.1.large": (50_000,), "h.1.small": (300,), "h.1.last": (70, 301), "head.tiny": (7,)},
}
WEIGHTS = [
    Weight(name, shape, unit=name.rpartition(".")[0] or name, block=name[0:2] == "h.", uses=1 + (name == "wte"))
    for name, shape in SHAPES.items()
]
MODEL = units_of(ModelShape(tuple(WEIGHTS), layers=2, hidden=100, vocabulary=50, context=16))
NAMES = [weight.name for weight in WEIGHTS]


class OfGpu(CpuDevice):
    """A device whose norms are those of a GPU."""

    torch_device = torch.device("cuda")


# Elements of a norm's piece, where the sums are, and the device: each pair of them occurs.
CASES = [
    (piece, home, device)
    for number, piece in enumerate((1024, 5000, 16384, 65536, 1 << 17))
    for home, device in zip((RAM, 0), (CpuDevice, OfGpu) if number % 2 else (OfGpu, CpuDevice), strict=True)
]
Sums = dict[str, torch.Tensor]


def measure_in(piece: int, replace: Callable[..., None] = setattr) -> None:
    replace(communication, "_PIECE", piece)
    replace(communication, "_CHUNK", 1 << piece.bit_length() - 1)


def hand_over_some(to: Gradients | ShardedGradients, *, seed: int, last: bool) -> None:
    """Add a backward's gradients in random order; a third are missing, of tied weights perhaps only one use's."""
    generator = torch.Generator().manual_seed(seed)
    uses = [weight for weight in WEIGHTS for _ in range(weight.uses)]
    for number in torch.randperm(len(uses), generator=generator).tolist():
        gradient = torch.randn(uses[number].shape, generator=generator).bfloat16()
        gradient[torch.rand(uses[number].shape, generator=generator) < 0.5] = -0.0  # adding 0.0 would change the sign
        if torch.rand(1, generator=generator) < 0.66 and "none" not in uses[number].name:
            to.add(uses[number].name, gradient, last=last)
    to.end_of_backward(last=last)


def steps(
    gradients: Gradients | ShardedGradients, numbers: range, *, barrier: Callable[[], None]
) -> list[tuple[dict[str, float], Sums]]:
    """Add up the gradients of the micro-batches with these numbers; return each step's norms and sums."""
    found = []
    for step in range(STEPS):
        for number in numbers:
            hand_over_some(gradients, seed=100 * step + number, last=number == numbers[-1])
        gradients.finish()
        whole = {
            place.weight.name: gradients.store.get(unit.index, place.start, place.weight.numel)
            for unit, place in places(MODEL)
            if place.weight.name in gradients.arrived
        }
        found.append(({name: float(norm) for name, norm in gradients.norms().items()}, whole))
        barrier()  # a real update ends with a barrier, too
        gradients.clear()
    return found


def of_range(whole: Sums, rank: int, world: int) -> dict[str, str]:
    """Return digests of a rank's part of the sums."""
    found = {}
    for unit, place in places(MODEL):
        first, end = range_of_rank(unit, rank, ranks=world)
        own = slice(max(0, first - place.start), max(0, end - place.start))
        if place.weight.name in whole:
            found[place.weight.name] = digest([whole[place.weight.name][own]])
    return found


def add_up(folder: Path) -> list[list[tuple[dict[str, float], dict[str, str]]]]:
    """Return the norms and the digests of this rank's sums for each step of each case."""
    node, transfers, found = Node(together=True), Transfers(), []
    sizes = [4 * unit.trained for unit in MODEL]
    for piece, home, device in CASES:
        measure_in(piece)
        files, homes = [DriveFile(folder / f"sums-{node.number}", sum(sizes))], [home] * len(MODEL)
        store = UnitStore(sizes, homes, dtype=torch.float32, files=files, transfers=transfers, pinned=False, node=node)
        types = {"dtype": torch.bfloat16, "gradient_dtype": torch.float32}
        parts: Any = SimpleNamespace(node=node, device=device(), kernels=(TorchKernel(),), **types)
        gradients = ShardedGradients(parts, [MODEL[::-1]], StagedSums(MODEL, store, node=node), order=NAMES)
        done = steps(gradients, range(node.rank, MICRO * node.world, node.world), barrier=node.barrier)
        found.append([(norms, of_range(whole, node.rank, node.world)) for norms, whole in done])
        files[0].close()
    return found


@pytest.mark.parametrize(("world", "nodes"), [(2, 1), (3, 1), (2, 2), (4, 2), (5, 5)])
def test_sums_and_norms_are_one_ranks(world: int, nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are in RAM or on a node's drive. Norms are a CPU's or a GPU's, in pieces that span ranks and nodes."""
    of_ranks = in_ranks(add_up, tmp_path, count=world, nodes=nodes, folder=tmp_path)
    for (piece, _, device), *found in zip(CASES, *of_ranks, strict=True):
        measure_in(piece, monkeypatch.setattr)
        with sums(MODEL, RAM, device=device()) as alone:
            expected = steps(alone, range(MICRO * world), barrier=lambda: None)
        for (norms, whole), *of_step in zip(expected, *found, strict=True):
            assert of_step == [(norms, of_range(whole, rank, world)) for rank in range(world)]
            assert norms.keys() == whole.keys() < set(NAMES)
            alone = {name: float(norm_of(values, ordered=device is OfGpu)) for name, values in whole.items()}
            assert norms == alone


def test_a_unit_is_ready_once_all_ranks_have_updated_it() -> None:
    """An error of one rank's write in the next step is raised by every wait of that rank."""
    barrier = threading.Barrier(2, timeout=300)
    of_ranks = [(0, 0), (0, 8), (2, 0)], [(0, 16), (1, 0)]  # unit and start of each page
    pages = [[Page(unit, start, 8, RAM) for unit, start in of_rank] for of_rank in of_ranks]
    ranks = [UpdateProgress(own, units=range(3), agree=lambda unit: barrier.wait()) for own in pages]
    first, second = ranks

    def on_all(act: Callable[[UpdateProgress], Any]) -> list[Any]:
        return [act(one) for one in ranks]

    def write(one: UpdateProgress, unit: int, *, pages: int = 1, state: Future | None = None) -> None:
        one.when_written(unit, weights=done(), whole=state or done(), pages=pages)

    def ready(one: UpdateProgress) -> list[bool]:
        return [one.is_ready(unit) for unit in range(3)]

    on_all(UpdateProgress.begin)
    state = Future()  # is still being written
    write(first, 0, pages=2)
    write(first, 2, state=state)
    assert on_all(ready) == [[False] * 3] * 2
    write(second, 0)
    on_all(lambda one: one.wait(0))  # The first rank has no pages of unit 1, but must wait for it too.
    assert ready(first)[1:] == [False, False]
    write(second, 1)
    on_all(lambda one: one.wait(1))
    assert not first.is_ready(2)
    state.finish_part()
    on_all(UpdateProgress.wait_for_weights)
    assert on_all(ready) == [[True] * 3] * 2
    on_all(UpdateProgress.begin)
    failed = Future()
    failed.finish_part(TrainerError("the drive is gone"))
    write(first, 2, state=failed)
    for unit in range(3):
        with pytest.raises(TrainerError, match="the drive is gone"):
            first.wait(unit)
    barrier.abort()
    on_all(UpdateProgress.close)


def test_ranks_agree_on_a_unit_before_its_weights_are_sent() -> None:
    seen: list[Any] = []
    ways = {"side_connections": lambda: None, "exchange": lambda: seen.append}
    node = SimpleNamespace(world=2, rank=0, nodes=[range(2)], **ways)
    homes = SimpleNamespace(pages=[Page(0, 0, 8, RAM)], cut=SimpleNamespace(owners=[0]))
    parts: Any = SimpleNamespace(homes=homes, node=node, device=CpuDevice(), units=[None])
    weights: Any = SimpleNamespace(broadcast_unit=lambda *_, **__: seen.append("weights"))
    progress = allocation._update_progress(parts, weights)
    progress.begin()
    progress.when_written(0, weights=done(), whole=done())
    progress.wait(0)
    progress.close()
    assert seen == [0, "weights"]
