"""Tests that every torch operation on an offloaded parameter gives plain torch's bits or is refused."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import offload_trainer as ot
from offload_trainer.hf import attach

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import parameter_operations

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the reference's bits are the CPU's"),
    pytest.mark.usefixtures("nothing_is_small"),
]
HOMES: dict[str, dict[str, Any]] = {
    "resident": {"params": "gpu"},
    "in RAM": {"params": "cpu", "weight_buffers": 1},
    "on the drive": {"params": "nvme", "optimizer": "nvme", "gradients": "nvme", "weight_buffers": 1},
}
every_home = pytest.mark.parametrize("home", HOMES)
INPUTS = torch.linspace(-2, 2, 3 * 16).view(3, 16)


class Net(nn.Module):
    """Blocks, a scalar parameter that its own module does not use, and a head whose weight is read directly."""

    def __init__(self, *, save: str = "", plain: int = 0) -> None:
        """`save`: the operations that selective checkpointing saves; "" disables checkpointing.

        `plain`: number of first blocks that are not checkpointed.
        """
        super().__init__()
        self.save, self.plain = save, plain
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.head = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            saves = self.save and number >= self.plain
            x = x + (checkpoint(block, x, use_reentrant=False, context_fn=self.kept) if saves else block(x))
        return functional.linear(x * self.scale, self.head.weight)

    def kept(self) -> Any:
        def policy(context: Any, operation: Any, *args: Any, **words: Any) -> CheckpointPolicy:
            saved = self.save in str(operation)
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)


def net(**words: Any) -> Net:
    torch.manual_seed(3)
    return Net(**words)


def square(model: Any, step: int) -> torch.Tensor:
    return (model(INPUTS + step) ** 2).mean()


def penalised(model: Any, step: int) -> torch.Tensor:
    """Return WGAN-GP's gradient penalty."""
    inputs = (INPUTS + step).requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return ((gradient.norm(dim=1) - 1) ** 2).mean()


def penalised_weights(model: Any, step: int) -> torch.Tensor:
    """Return a penalty on the gradients of all weights."""
    gradients = torch.autograd.grad(square(model, step), list(model.parameters()), create_graph=True)
    return sum(((gradient**2).sum() for gradient in gradients), start=torch.tensor(0.0))


def twice_penalised(model: Any, step: int) -> torch.Tensor:
    """Return a loss that differentiates three times."""
    inputs = (INPUTS + step).requires_grad_()
    (first,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), inputs, create_graph=True)
    return (second**2).mean()


def trained(model: Any, session: ot.Session | None, loss_of: Callable[[Any, int], torch.Tensor]) -> Iterator[Any]:
    """Yield the losses and norms of three steps, then the weights."""
    parameters = list(model.parameters())
    optimizer = session.adamw(lr=1e-2) if session else torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward()
        yield float(loss.detach())
        if session:
            yield float(session.clip_grad_norm_(0.5))
        else:
            yield float(nn.utils.clip_grad_norm_(parameters, 0.5, foreach=False))
        optimizer.step()
        optimizer.zero_grad()
    yield [parameter.tolist() for parameter in parameters]


@pytest.fixture
def offloaded(home: str, tmp_path: Path) -> Iterator[tuple[Net, Net, ot.Session]]:
    model = net()
    reference = copy.deepcopy(model)
    with ot.offload(model, nvme=tmp_path, say=lambda line: None, **HOMES[home]) as session:
        yield model, reference, session


Offloaded = tuple[Net, Net, ot.Session]


# -- operations ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sessions() -> Iterator[parameter_operations.Sessions]:
    with pytest.MonkeyPatch.context() as patch, parameter_operations.Sessions() as opened:
        patch.undo()
        yield opened


TRIED = """aten.lerp aten._foreach_add aten.unbind aten.set_ aten.relu aten.swapaxes nn.init.x torch.Tensor.numpy
torch.Tensor.data torch.Tensor.__i torch.chunk torch.nn.functional.embedding module_load slice_inverse sparse_csr
__reduce_ex__ dequantize"""


@pytest.mark.slow
@pytest.mark.parametrize("only", ["set .", *TRIED.split()])
def test_an_operation_is_plain_torchs_or_refused(only: str, sessions: parameter_operations.Sessions) -> None:
    """A part of the operations of scripts/parameter_operations.py gives plain torch's result or is refused."""
    tried = list(parameter_operations.cases(only))
    assert tried
    for name, case in tried:
        for place, (parameter, read) in sessions.parameters.items():
            verdict = parameter_operations.judged(name, case, parameter, read)
            assert not verdict[0].isupper(), f"{name} {place}: {verdict}"


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "foreach": lambda w: torch._foreach_mul_([w], 0.5),
    "foreach lerp": lambda w: torch._foreach_lerp_([w], [torch.ones_like(w)], 0.5),
    "init": lambda w: nn.init.normal_(w),
    "init by keyword": lambda w: nn.init.kaiming_uniform_(tensor=w),
    "row": lambda w: w[0].zero_(),
    "view": lambda w: w.view(-1).mul_(2),
    "transposed": lambda w: w.T.mul_(2),
    "reshaped": lambda w: w.reshape(-1).mul_(2),
    "unbound": lambda w: w.unbind()[1].mul_(2),
    "chunk": lambda w: w.chunk(2)[1].mul_(2),
    "view of a view": lambda w: w.detach().view(-1)[3:].mul_(2),
    "set": lambda w: w.set_(torch.ones(2)),
    "set_ without": lambda w: w.set_(),
    "data": lambda w: w.data.clamp_(-0.01, 0.01),
    "data of a view": lambda w: w.t().data.clamp_(-0.01, 0.01),
    "item": lambda w: w.__setitem__(0, 1.0),
    "item of data": lambda w: w.data.__setitem__(0, 1.0),
    "in place": lambda w: w.__imul__(2),
    "out": lambda w: torch.add(w, 1, out=w),
    "out of a view": lambda w: torch.add(w, 1, out=w.detach()),
    "inplace=True": lambda w: functional.relu(w, inplace=True),
    "dropout": lambda w: functional.dropout(w, 0.5, True, True),
    "max_norm": lambda w: functional.embedding(torch.tensor([0, 1]), w, max_norm=0.01),
    "bag": lambda w: functional.embedding_bag(torch.tensor([[0, 1]]), w, max_norm=0.01),
    "overload": lambda w: torch.ops.aten.mul_.Scalar(w, 2),
    "packet": lambda w: torch.ops.aten.mul_(w, 2),
    "swap": lambda w: torch.utils.swap_tensors(w, nn.Parameter(torch.ones(32, 16))),
    "swap with a view": lambda w: torch.utils.swap_tensors(torch.ones(32, 16), w.detach()),
    "data set": lambda w: setattr(w.detach(), "data", torch.ones(32, 16)),
    "apart": lambda w: w.detach_(),
    "dlpack": lambda w: torch.from_dlpack(w.detach()).zero_(),
    "storage": lambda w: w.detach().storage().fill_(0),
    "new parameter": nn.Parameter,
    "new parameter of a view": lambda w: nn.Parameter(w.data),
}


@every_home
def test_writes_are_refused_and_change_nothing(offloaded: Offloaded) -> None:
    model, reference, session = offloaded
    weight = model.blocks[1][0].weight
    weight.data  # noqa: B018 - it may be in separate memory, and in its buffer
    for name, write in WRITES.items():
        for mode in (torch.no_grad(), torch.enable_grad()):
            with mode, pytest.raises(ot.UserError, match=r"blocks\.1\.0\.weight"):
                pytest.fail(f"{name}: {write(weight)}")
    with pytest.raises(ot.UserError, match="would write"):
        model.blocks[1][0].reset_parameters()
    with pytest.raises(ValueError, match="read-only"):
        weight.detach().numpy()[0] = 9
    assert weight.data.clamp_(-120, 120).shape == weight.shape  # changes nothing, as in each forward of Gemma 3n
    assert list(trained(model, session, square)) == list(trained(reference, None, square))


class Halved(nn.Module):
    """A parametrization with an inverse."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "its own": lambda module: parametrize.register_parametrization(module, "weight", Halved()),
}


@every_home
def test_parametrizations_come_before_offloading(offloaded: Offloaded, home: str, tmp_path: Path) -> None:
    """On an offloaded module they are refused with that advice; a module that has them trains as in plain torch."""
    model, reference, session = offloaded
    advice = r"blocks\.1\.0\.weight.*parametrizations .*before the model is offloaded"
    for name, register in PARAMETRIZATIONS.items():
        with pytest.raises(ot.UserError, match=advice):
            pytest.fail(f"{name}: {register(model.blocks[1][0])}")
    assert list(trained(model, session, square)) == list(trained(reference, None, square))
    session.close()
    model = net()
    for block, register in zip(model.blocks, PARAMETRIZATIONS.values(), strict=False):
        register(block[0])
    reference = copy.deepcopy(model)
    with ot.offload(model, nvme=tmp_path, say=lambda line: None, **HOMES[home]) as session:
        assert list(trained(model, session, square)) == list(trained(reference, None, square))


@every_home
def test_an_unforeseen_write_stops_the_step(home: str, tmp_path: Path) -> None:
    """A write through an older view is detected at the step, and resuming a save restores the weight."""
    model = net()
    reference = copy.deepcopy(model)
    view = model.blocks[1][0].weight.detach()
    with ot.offload(model, nvme=tmp_path, say=lambda line: None, **HOMES[home]) as session:
        optimizer = session.adamw(lr=1e-2)
        usual = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        for one, its in ((model, optimizer), (reference, usual)):
            square(one, 0).backward()
            its.step()
            its.zero_grad()
        session.save(tmp_path / "save")
        square(model, 1).backward()
        view.mul_(2)
        for use in (optimizer.step, lambda: square(model, 1), lambda: session.save(tmp_path / "other")):
            with pytest.raises(ot.UserError, match=r"blocks\.1\.0\.weight was written to .* session\.resume"):
                use()
        assert session.resume(tmp_path / "save") == 1
        for one, its in ((model, optimizer), (reference, usual)):
            its.zero_grad()
            square(one, 1).backward()
            its.step()
        for name, master in session.named_masters():
            assert torch.equal(master, reference.get_parameter(name)), name


@every_home
def test_a_view_reads_its_parameters_current_values(offloaded: Offloaded) -> None:
    """A view reads the parameter's current values, wherever it was made and whether the weight is on the device."""
    model, reference, session = offloaded
    views: dict[Any, list[torch.Tensor]] = {model: [], reference: []}

    def keep(module: nn.Module, *_: Any) -> None:
        weight = module[0].weight
        with torch.no_grad():
            views[model if module is model.blocks[1] else reference] += [weight.t(), weight.detach()[3:, 2]]

    for one in (model, reference):
        weight = one.blocks[1][0].weight
        views[one] += [weight.data, weight.view(-1)[5:], *weight.chunk(2), weight.detach().view(torch.int32)]
        handle = one.blocks[1].register_forward_pre_hook(keep)
        square(one, 0)
        handle.remove()
    list(trained(model, session, square))
    list(trained(reference, None, square))
    assert len(views[model]) == len(views[reference]) == 7
    for view, expected in zip(views[model], views[reference], strict=True):
        assert torch.equal(view.clone(), expected)
    kept = views[model][0]
    assert torch.equal(copy.deepcopy(kept), views[reference][0])
    assert repr(kept) == repr(views[reference][0])
    assert type(kept * 1) is torch.Tensor


@every_home
def test_one_operation_reads_several_weights(offloaded: Offloaded) -> None:
    """It gets the values of weights that the operation before it has read, and of others."""
    model, reference, session = offloaded

    def joined(one: Net, step: int) -> torch.Tensor:
        first, second = (one.blocks[at][0].weight.t() for at in (0, 3))
        return square(one, step) + (torch.cat([first, second, one.head.weight], 1) ** 2).mean()

    assert list(trained(model, session, joined)) == list(trained(reference, None, joined))


@every_home
def test_parameters_without_dimensions(offloaded: Offloaded) -> None:
    model, reference, session = offloaded
    assert model.scale.item() == 1.25
    assert list(trained(model, session, square)) == list(trained(reference, None, square))
    with torch.no_grad(), pytest.raises(ot.UserError, match="scale"):
        model.scale.data.clamp_(0, 1)


@every_home
def test_parameters_without_dimensions_are_listed_and_have_gradients(offloaded: Offloaded) -> None:
    model, reference, session = offloaded
    attach(session)
    assert torch.equal(model.state_dict()["scale"], reference.scale)
    for one in (model, reference):
        square(one, 0).backward()
    assert model.scale.grad.shape == ()
    assert torch.equal(model.scale.grad, reference.scale.grad)


@every_home
@pytest.mark.parametrize("nested", [False, True])
def test_one_operation_uses_parameters_of_two_sessions(
    nested: bool, home: str, offloaded: Offloaded, tmp_path: Path
) -> None:
    """Weights of two sessions, also of the same names, have their values and gradients in one operation."""
    model, reference, _ = offloaded
    other = net()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    other_reference = copy.deepcopy(other)

    def together(one: Net, two: Net) -> torch.Tensor:
        found = []
        for name, parameter in one.named_parameters():
            its = two.get_parameter(name)
            found.append(torch.stack([parameter, its]).prod(0).sum() if nested else (parameter * its).sum())
        return torch.stack(found).sum() + (one.head.weight.T @ two.head.weight.T).square().sum()

    with ot.offload(other, nvme=tmp_path, say=lambda line: None, **HOMES[home]):
        assert torch.equal(model.head.weight, reference.head.weight)
        assert not torch.equal(model.head.weight, other.head.weight)
        found, expected = together(model, other), together(reference, other_reference)
        assert float(found.detach()) == float(expected.detach())
        found.backward()
        expected.backward()
        for ours, theirs in ((model, reference), (other, other_reference)):
            for name, parameter in ours.named_parameters():
                gradient = theirs.get_parameter(name).grad
                assert (parameter.grad is None) == (gradient is None), name
                assert gradient is None or torch.equal(parameter.grad, gradient), name
        with pytest.raises(ot.UserError, match="write"):
            other.scale.copy_(model.scale)


@pytest.mark.parametrize("part", [nn.Embedding(8, 4, max_norm=1.0), nn.EmbeddingBag(8, 4, max_norm=1.0)], ids=repr)
def test_modules_that_write_to_their_weights_are_refused(part: nn.Module) -> None:
    with pytest.raises(ot.UserError, match=r"1 \(Embedding\w*\) has max_norm=1\.0"):
        ot.offload(nn.Sequential(nn.Linear(4, 4), part), say=lambda line: None)


# -- backwards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_of", [penalised, penalised_weights, twice_penalised])
@every_home
def test_gradients_of_gradients_without_micro_batch(
    loss_of: Callable[[Any, int], torch.Tensor], offloaded: Offloaded
) -> None:
    model, reference, session = offloaded
    assert list(trained(model, session, loss_of)) == list(trained(reference, None, loss_of))


@every_home
def test_gradients_that_are_returned(offloaded: Offloaded) -> None:
    """torch.autograd.grad returns torch's gradients of parameters, with every form of its arguments."""
    model, reference, session = offloaded

    def found(one: Net) -> Iterator[Any]:
        weights = list(one.parameters())
        yield torch.autograd.grad(square(one, 0), weights)
        yield torch.autograd.grad(square(one, 0), one.scale)
        gradients = torch.autograd.grad(square(one, 0), weights, create_graph=True)
        yield torch.autograd.grad(gradients, weights, grad_outputs=weights)  # a Hessian-vector product with the weights
        yield torch.autograd.grad(one.scale * 2, [one.scale, one.head.weight], materialize_grads=True)
        yield torch.autograd.grad(one.head.weight, one.head.weight, torch.ones(16, 16))
        yield list(torch.autograd.grad(square(one, 0), dict(one.named_parameters())).items())
        batched = torch.autograd.grad(one(INPUTS)[0], [one.scale], torch.eye(16), is_grads_batched=True)
        yield [gradient.shape for gradient in batched]
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(one.scale * 2, one.head.weight)

    for ours, expected in zip(found(model), found(reference), strict=True):
        assert str(ours) == str(expected)
    assert session._offloaded.sum_changes == 0  # no step consumed these gradients


@pytest.mark.slow
@pytest.mark.parametrize("save", ["addmm", "tanh", "aten."])
@every_home
def test_selective_checkpointing(home: str, save: str, tmp_path: Path) -> None:
    """Selective checkpointing works with any saved operations, also views of weights whose memory is reused."""
    model = net(save=save)
    reference = copy.deepcopy(model)
    expected = list(trained(reference, None, square))
    with ot.offload(model, nvme=tmp_path, say=lambda line: None, **HOMES[home]) as session:
        assert list(trained(model, session, square)) == expected


def test_blocks_that_are_not_checkpointed_before_those_that_are(tmp_path: Path) -> None:
    """In the backward their weights replace those of a recomputed block, so two buffers are enough."""
    model = net(save="aten.", plain=2)
    reference = copy.deepcopy(model)
    expected = list(trained(reference, None, square))
    keys = HOMES["on the drive"] | {"weight_buffers": 2}
    with ot.offload(model, nvme=tmp_path, say=lambda line: None, **keys) as session:
        assert list(trained(model, session, square)) == expected


# -- what records or compiles ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("called", [True, False], ids=["called before", "not called before"])
@pytest.mark.parametrize("when", ["before", "after"])
@every_home
def test_torch_compile(home: str, when: str, called: bool, tmp_path: Path) -> None:
    """An offloaded model runs eagerly within torch.compile, with torch's results."""
    torch._dynamo.reset()
    model = net()
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager") if when == "before" else None
    if compiled is not None and called:
        square(compiled, 0)
    with ot.offload(model, nvme=tmp_path, say=lambda line: None, **HOMES[home]) as session:
        if compiled is None:
            compiled = torch.compile(model, backend="aot_eager")
        loss_of: Any = lambda _, step: square(compiled, step)  # noqa: E731
        assert list(trained(model, session, loss_of)) == list(trained(reference, None, square))


@pytest.mark.parametrize("compiled", [lambda m: torch.compile(m), lambda m: m.compile() or m], ids=["new", "in place"])
def test_a_compiled_module_is_refused(compiled: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(ot.UserError, match="is compiled"):
        ot.offload(compiled(net()), say=lambda line: None)


@pytest.mark.slow
@every_home
def test_a_function_that_reads_a_parameter_is_compiled(offloaded: Offloaded) -> None:
    torch._dynamo.reset()
    model, reference, _ = offloaded

    def function(one: Net, x: torch.Tensor) -> torch.Tensor:
        return (x @ one.head.weight.t()).cos() * 2

    compiled = torch.compile(function, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(model, INPUTS), function(reference, INPUTS))


def by_transform(model: nn.Module) -> Any:
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    loss = lambda values, x: torch.func.functional_call(model, values, (x,)).sum()  # noqa: E731
    return torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, INPUTS)


@pytest.mark.parametrize(
    "recorded",
    [
        lambda model: torch.jit.trace(model, INPUTS),
        lambda model: torch.export.export(model, (INPUTS,)),
        lambda model: torch.fx.experimental.proxy_tensor.make_fx(model)(INPUTS),
        lambda model: torch.fx.experimental.proxy_tensor.make_fx(lambda x: x * model.scale)(INPUTS),
        lambda model: torch.vmap(lambda x: x * model.scale)(INPUTS),
        by_transform,
    ],
    ids=["trace", "export", "make_fx", "make_fx of a function", "vmap of a function", "vmap of grad"],
)
@every_home
def test_tracing_a_model_is_refused(recorded: Callable[[nn.Module], Any], offloaded: Offloaded) -> None:
    model, reference, session = offloaded
    with pytest.raises(ot.UserError, match=r"was used inside .*, which cannot follow weights"):
        recorded(model)
    assert list(trained(model, session, square)) == list(trained(reference, None, square))
