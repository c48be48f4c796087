"""Tests of loops written for plain models: their use of gradients and the optimizer gives torch's results."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from engine_bench import batches
from session_loop import HOMES, Spare, loss_of
from torch import nn

import offload_trainer as ot
from offload_trainer.session.api import INSTEAD, KEYS
from offload_trainer.settings import all_keys

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the reference's bits are the CPU's"),
    pytest.mark.usefixtures("nothing_is_small"),
]
QUIET: dict[str, Any] = {"page_size": 8192, "say": lambda _: None}


def models() -> tuple[Spare, Spare]:
    torch.manual_seed(3)
    model = Spare()
    return model, copy.deepcopy(model)


@contextmanager
def both(drive: Path, home: str = "on the drive") -> Iterator[Any]:
    """Yield a model, its session and optimizer, and one in memory with its optimizer; then compare their weights."""
    model, reference = models()
    usual = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    with ot.offload(model, nvme=drive, **QUIET, **HOMES[home]) as session:
        yield model, session, session.adamw(lr=1e-2), reference, usual
        for name, master in session.named_masters():
            assert torch.equal(master, reference.get_parameter(name)), name


def backward(model: nn.Module, batch: Any) -> None:
    loss_of(model, batch).backward()


@pytest.mark.parametrize(
    ("way", "home"), [("session's", "in RAM"), ("session's", "on the drive"), ("torch's", "resident")]
)
def test_clipped_several_times_by_any_norm(way: str, home: str, drive: Path) -> None:
    """A second clip starts from the result of the first; an infinite limit, or one not reached, changes nothing."""
    with both(drive, home) as (model, session, optimizer, reference, usual):
        for batch in batches(4):
            backward(model, batch)
            backward(reference, batch)
            for limit, order in ((0.1, 2.0), (float("inf"), 2.0), (0.3, 1.0), (1e-3, float("inf")), (1e9, 2.0)):
                expected = nn.utils.clip_grad_norm_(reference.parameters(), limit, order)
                if way == "session's":
                    assert session.clip_grad_norm_(limit, order) == expected
                else:
                    assert nn.utils.clip_grad_norm_(model.parameters(), limit, order) == expected
            optimizer.step()
            usual.step()
            usual.zero_grad()


def test_a_norm_that_is_not_finite(drive: Path) -> None:
    with both(drive) as (model, session, optimizer, *_):
        backward(model, batches(1)[0])
        model.scale.grad[0] = torch.inf
        with pytest.raises(ot.NonFiniteGradient, match=r"norm of order 1\.0 is inf"):
            session.clip_grad_norm_(1.0, 1.0, error_if_nonfinite=True)
        assert session.clip_grad_norm_(1.0).isinf()
        assert session.clip_grad_norm_(1.0).isnan()  # infinity times 0, which is NaN in torch too
        with pytest.raises(ot.NonFiniteGradient, match="zero_grad"):
            optimizer.step()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def centralise(model: nn.Module) -> None:
    for gradient in gradients(model):
        if gradient.dim() > 1:
            gradient.data.add_(-gradient.data.mean(dim=1, keepdim=True))


def write_views(model: nn.Module) -> None:
    for gradient in gradients(model):
        gradient.view(-1)[1:5].mul_(3)
        gradient.detach().chunk(2)[0].add_(1e-3)
        gradient[0] = 0.5


def drop_some(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "floors.1" in name:
            parameter.grad = None


def drop_all(model: nn.Module) -> None:
    model.zero_grad()
    backward(model, batches(5)[4])


@pytest.mark.parametrize(
    ("change", "home", "clipped"),
    [
        (lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3), "resident", True),
        (centralise, "in RAM", False),
        (write_views, "on the drive", True),
        (drop_some, "on the drive", False),
        (drop_all, "in RAM", True),
        (lambda model: torch._foreach_mul_(gradients(model), 0.5), "on the drive", True),
    ],
)
def test_gradients_are_as_in_torch(clipped: bool, change: Callable[[nn.Module], Any], home: str, drive: Path) -> None:
    """Gradients include the factor of an earlier clip, and another backward adds to the changed ones."""
    with both(drive, home) as (model, session, optimizer, reference, usual):
        for batch in batches(3):
            for one in (model, reference):
                backward(one, batch)
            if clipped:
                session.clip_grad_norm_(0.1)
                nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            for one in (model, reference):
                change(one)
                backward(one, batch)
            for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
                assert (parameter.grad is None) == (other.grad is None)
                if other.grad is not None:
                    assert torch.equal(parameter.grad, other.grad)
                    assert parameter.grad.shape == other.grad.shape
            assert session.clip_grad_norm_(0.2) == nn.utils.clip_grad_norm_(reference.parameters(), 0.2)
            optimizer.step()
            usual.step()
            assert all(parameter.grad is None for parameter in model.parameters())
            usual.zero_grad()


def test_a_gradient_of_an_earlier_step_cannot_be_read(drive: Path) -> None:
    with both(drive) as (model, _, optimizer, reference, usual):
        for one in (model, reference):
            backward(one, batches(1)[0])
        held, kept = model.head.weight.grad, model.head.weight.grad.clone()
        assert torch.equal(held, kept)
        with pytest.raises(ot.UserError, match="clone"):
            held.data_ptr()
        with pytest.raises(ot.UserError, match=r"\.data cannot be set"):
            held.data = kept
        optimizer.step()
        usual.step()
        backward(model, batches(1)[0])
        with pytest.raises(ot.UserError, match=r"gradient of head\.weight was used up"):
            held.sum()
        assert type(kept) is torch.Tensor


def test_a_state_dict_without_moments_is_refused(drive: Path, tmp_path: Path) -> None:
    """Before the first step the state_dict equals torch's; one with moments, or one after a step, is refused."""
    model, reference = models()
    usual = torch.optim.AdamW(reference.parameters())
    with ot.offload(model, nvme=drive, **QUIET) as session:
        optimizer = session.adamw()
        with pytest.raises(ot.UserError, match="leave set_to_none out"):
            optimizer.zero_grad(set_to_none=False)
        before = optimizer.state_dict()
        assert before["state"] == {}
        assert before["param_groups"][0]["params"] == usual.state_dict()["param_groups"][0]["params"]
        optimizer.load_state_dict(before)
        backward(reference, batches(1)[0])
        usual.step()
        with pytest.raises(ot.UserError, match=r"has the state of 29 offloaded weights.*session\.resume"):
            optimizer.load_state_dict(usual.state_dict())
        backward(model, batches(1)[0])
        optimizer.step()
        with pytest.raises(ot.UserError, match=r"no moments of the offloaded weights after 1 steps: session\.save"):
            torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "all.pt")
        with pytest.raises(ot.UserError, match="has no state of the offloaded weights"):
            optimizer.load_state_dict(before)
        session.save(tmp_path / "save")
        assert session.resume(tmp_path / "save") == 1


def test_the_state_of_parameters_outside_the_model_is_torchs(drive: Path) -> None:
    found = []
    for stops in (False, True):
        torch.manual_seed(3)
        model, head = nn.Linear(16, 16), nn.Parameter(torch.ones(16))
        model.requires_grad_(False)
        with ot.offload(model, nvme=drive, **QUIET) as session:
            optimizer = session.adamw([head], lr=1e-2)
            for step in range(4):
                if stops and step == 2:
                    held = copy.deepcopy(optimizer.state_dict())
                    optimizer.state[head]["exp_avg"].zero_()
                    optimizer.load_state_dict(held)
                (model(torch.ones(16)) * head).square().sum().backward()
                optimizer.step()
            found.append(head.detach().clone())
    assert torch.equal(*found)


def accelerated(model: nn.Module, optimizer: Any) -> Iterator[tuple[float, float]]:
    """Run the loop of accelerate's documentation: accumulation, clipping, a scheduler."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for batch in batches(8):
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            norm = 0.0
            if accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            yield loss.item(), norm


@pytest.mark.slow
def test_accelerate(drive: Path) -> None:
    with both(drive) as (model, _, optimizer, reference, usual):
        assert list(accelerated(model, optimizer)) == list(accelerated(reference, usual))
        with pytest.raises(ot.UserError, match=r"accelerator\.prepare\(\) before session\.resume"):
            Accelerator(cpu=True).prepare(optimizer)


def test_clipping_within_a_closure(drive: Path) -> None:
    """Clipping at the end of the closure given to `step`, as Lightning does, works."""
    with both(drive) as (model, _, optimizer, reference, usual):
        for batch in batches(4):

            def closure(one: nn.Module, its: torch.optim.Optimizer, batch: Any = batch) -> torch.Tensor:
                its.zero_grad()
                loss = loss_of(one, batch)
                loss.backward()
                nn.utils.clip_grad_norm_(one.parameters(), 0.1)
                return loss

            with torch.no_grad():
                ours = optimizer.step(partial(closure, model, optimizer))
                assert ours == usual.step(partial(closure, reference, usual))


@pytest.mark.parametrize("home", HOMES)
def test_forward_is_called_without_the_hooks(home: str, drive: Path) -> None:
    """Calling `forward` directly, as PEFT's AdaLoRA does, works, and a forward that fails leaves no state."""
    beyond = torch.full((1, 2), 10**6)
    with both(drive, home) as (model, session, optimizer, reference, usual):
        assert list(inspect.signature(model.forward).parameters) == ["input_ids"]
        for batch in batches(4):
            for one, its in ((model, optimizer), (reference, usual)):
                loss_of(one.forward, batch).backward()
                its.step()
                its.zero_grad()
        for call in (model.forward, model, reference):
            with pytest.raises(IndexError):
                call(beyond)
        with pytest.raises(IndexError), session.micro_batch(last=False):
            model(beyond)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        backward(model, batches(1)[0])
        backward(reference, batches(1)[0])
        assert torch.equal(model.head.weight.grad, reference.head.weight.grad)


def test_modules_that_cannot_be_offloaded_as_they_are(drive: Path) -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    mixed = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4, dtype=torch.bfloat16))
    for module, words in (
        (mixed, r"2 in fp32 \(0\.weight\), 2 in bf16 \(1\.weight\).*dtype='fp32'"),
        (lazy, r"0\.weight has no shape before the first forward"),
        (nn.LazyBatchNorm1d(affine=False), "running_mean has no shape"),
        (nn.Linear(2, 2, device="meta"), "weight is on the meta device and has no values"),
        (nn.Linear(2, 2, dtype=torch.float64), r"weight is torch\.float64"),
        (nn.Sequential(nn.Linear(4, 4), nn.Embedding(8, 4, max_norm=1.0)), r"1 \(Embedding\) has max_norm=1\.0"),
        (nn.EmbeddingBag(8, 4, max_norm=1.0), r"the module \(EmbeddingBag\) has max_norm=1\.0"),
        (torch.compile(nn.Linear(4, 4)), "is compiled"),
    ):
        with pytest.raises(ot.UserError, match=words):
            ot.offload(module, nvme=drive, **QUIET)
    lazy(torch.ones(1, 3))
    for module, dtype in ((lazy, "fp32"), (mixed, "fp32")):
        with ot.offload(module, nvme=drive, dtype=dtype, **QUIET) as session:
            assert {weight.dtype for _, weight in session.named_weights()} == {torch.float32}


def test_sparse_gradients_are_refused(drive: Path) -> None:
    model = nn.Sequential(nn.Embedding(16, 16, sparse=True), nn.Linear(16, 4))
    beside = nn.Embedding(16, 16, sparse=True)
    with ot.offload(model, nvme=drive, **QUIET, **HOMES["on the drive"]) as session:
        optimizer = session.adamw([*model.parameters(), *beside.parameters()])
        with pytest.raises(ot.UserError, match=r"0\.weight got a sparse gradient.*sparse=False"):
            model(torch.arange(4)).sum().backward()
        optimizer.zero_grad()
        beside(torch.arange(4)).sum().backward()
        with pytest.raises(ot.UserError, match=r"shape \(16, 16\) got a sparse gradient.*sparse=False"):
            optimizer.step()


def test_each_key_of_the_model_and_its_placement_is_a_keyword_or_refused_with_advice() -> None:
    assert not KEYS.keys() & INSTEAD.keys()
    leaves = [key.rpartition(".")[2] for key in all_keys()]
    assert all(leaves.count(keyword) == 1 for keyword in KEYS if keyword != "rule")
    for key in all_keys():
        if key.startswith(("model.", "placement.", "tiered.")):
            assert key in KEYS.values() or key.rpartition(".")[2] in INSTEAD, key
