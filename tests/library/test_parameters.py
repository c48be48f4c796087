"""Tests that every torch operation on an offloaded parameter gives plain torch's bits or is refused."""

import copy
import faulthandler
import inspect
import os
import re
import signal
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import offload_trainer as ot
from offload_trainer.hf import attach

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

# -- every operation that torch registers ------------------------------------------------------------------------------

SIZE = 6
TRIALS = 200  # combinations of arguments for an operation
Operation = tuple[str, list[list[Any]], Callable[..., Any]]  # name, candidates of the further arguments, call
Case = Callable[[Any], Any]  # an operation with its further arguments
# These block, end the process, or change torch's global state.
NOT_TRIED = ["_assert", "set_default", "__del__", "_nnpack", "pin_memory", "_sync", "_cslt", "batch_dim", "quantized_"]
NOT_TRIED += ["_embedding_bag_forward_only"]  # writes outside its memory, and ends the process only sometimes
# Results are memory that is not set, addresses, or (lstsq) bits that change with the alignment in plain torch too.
NOT_COMPARED = ["lstsq", "empty", "resize", "data_ptr", "storage", "_make_dep_token", "__hash__", "_cdata"]
# Always tried. Of the others, one in PARTS.
ALWAYS = ["aten.lerp", "aten.set_", "aten.unbind", "Tensor.data", "embedding", "dequantize", "reduce_ex", "set ."]
PARTS = 80


def candidates(kind: str) -> list[Any]:
    """Return values to try for an argument of this type of a schema."""
    torch.manual_seed(1)
    like, zeros = torch.rand(SIZE, SIZE), torch.zeros(SIZE, dtype=torch.int64)
    known: dict[str, list[Any]] = {
        "Tensor": [like, zeros.expand(SIZE, SIZE).clone(), torch.rand(SIZE), torch.tensor(1), like > 0.5],
        "Optional[Tensor]": [None, like],
        "List[Tensor]": [[like], [zeros]],
        "List[Optional[Tensor]]": [[zeros]],
        "int": [0, 1, 3, 6],
        "number": [2, 0.5],
        "float": [0.5],
        "bool": [False],
        "List[int]": [[SIZE, SIZE], [0], [1, 1], [0, 1], [1]],
        "List[number]": [[2]],
        "List[float]": [[0.5]],
        "str": ["mean", "none", "floor", "ij"],
        "Device": [torch.device("cpu")],
    }
    return known.get(kind, [None] if kind.startswith("Optional") else [])


def overloads() -> Iterator[Operation]:
    """Yield aten's overloads that take a tensor, or a list of tensors, first."""
    for schema in torch._C._jit_get_all_schemas():
        packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"), None)
        overload = getattr(packet, schema.overload_name or "default", None)
        first = str(schema.arguments[0].type) if schema.arguments else ""
        if not schema.name.startswith("aten::") or overload is None or first not in ("Tensor", "List[Tensor]"):
            continue
        needed = [argument for argument in schema.arguments[1:] if not argument.has_default_value()]
        words = [argument.name for argument in needed if argument.kwarg_only]  # they come last

        def call(p: Any, *rest: Any, run: Any = overload, words: Any = words, many: bool = first != "Tensor") -> Any:
            count = len(rest) - len(words)
            return run([p] if many else p, *rest[:count], **dict(zip(words, rest[count:], strict=True)))

        yield str(overload), [candidates(str(argument.type)) for argument in needed], call


def functions() -> Iterator[Operation]:
    """Yield what dispatches through `__torch_function__` (functions, methods, properties), and nn.init's functions."""
    values = [*candidates("Tensor")[:3], 1, 0, 0.5, (SIZE, SIZE), [torch.rand(SIZE, SIZE)], "mean", torch.float64]
    for function, like in torch.overrides.get_testing_overrides().items():
        needed = [given for given in inspect.signature(like).parameters.values() if given.default is given.empty]
        count = sum(given.kind in (given.POSITIONAL_ONLY, given.POSITIONAL_OR_KEYWORD) for given in needed)
        name = torch.overrides.resolve_name(function) or getattr(function, "__qualname__", repr(function))
        if count:
            yield name, [values] * (count - 1), function
            yield f"{name} of a list", [values] * (count - 1), lambda p, *rest, run=function: run([p], *rest)
    for name in dir(nn.init):
        if name.endswith("_") and not name.startswith("_"):
            yield f"nn.init.{name}", [], getattr(nn.init, name)
            yield f"nn.init.{name} by keyword", [], lambda p, name=name: getattr(nn.init, name)(tensor=p)
    for name, value in product(
        ("data", "grad", "requires_grad", "real", "names"), (torch.ones(SIZE, SIZE), None, True)
    ):
        yield f"set .{name} = {value!r:.12}", [], lambda p, name=name, value=value: setattr(p, name, value)


def accepted(kinds: list[list[Any]], call: Callable[..., Any]) -> Case | None:
    """Return the operation with the first arguments that plain torch accepts, or None."""

    def cases() -> Iterator[Case]:
        for rest in islice(product(*kinds), TRIALS):
            yield lambda p, rest=rest: call(p, *copy.deepcopy(rest))

    child = os.fork()  # some operations crash the process on meaningless arguments
    if not child:
        faulthandler.disable()
        signal.setitimer(signal.ITIMER_PROF, 20)  # CPU time, so that a busy machine does not matter
        signal.alarm(300)  # ends an operation that waits
        for number, case in enumerate(cases()):
            if outcome(case, plain())[0] == "gave":
                os._exit(number)
        os._exit(TRIALS)
    number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return next(islice(cases(), number, None)) if 0 <= number < TRIALS else None


def plain() -> nn.Parameter:
    torch.manual_seed(7)
    return nn.Parameter(torch.rand(SIZE, SIZE) + 0.25)


def outcome(case: Case, parameter: Any) -> tuple[str, Any]:
    """Return ("gave", result), ("refused", error) or ("raised", error), without gradients if it fails with them."""
    error: Any = None
    for mode in (nullcontext(), torch.no_grad()):
        torch.manual_seed(5)
        try:
            with mode:
                return "gave", case(parameter)
        except ot.UserError as refusal:
            return "refused", refusal
        except Exception as failure:
            error = failure
    return "raised", error


def shown(name: str, result: Any) -> str:
    """Return a result as text that two equal results share, with all digits of its values."""
    if any(word in name for word in NOT_COMPARED):
        return type(result).__name__
    if isinstance(result, list | tuple):
        return str([shown(name, item) for item in result])
    if not isinstance(result, torch.Tensor):
        return re.sub("0x[0-9a-f]+", "", repr(result))
    torch.set_printoptions(precision=10)
    try:
        return f"{result.requires_grad} {result.detach()!r}"
    finally:
        torch.set_printoptions(profile="default")


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    for item in value if isinstance(value, list | tuple) else ():
        yield from tensors(item)


def facts(parameter: Any) -> tuple[Any, ...]:
    return parameter.shape, parameter.stride(), parameter.dtype, parameter.requires_grad, parameter.grad is None


def mistake(name: str, case: Case, parameter: Any, stored: Callable[[], torch.Tensor]) -> str | None:
    """Return what is wrong with an operation on an offloaded parameter; `stored` returns the session's weight."""
    usual, values = plain(), plain().detach()
    before, version = facts(usual), usual._version
    expected = outcome(case, usual)
    writes = usual._version != version or facts(usual) != before or not torch.equal(usual.detach(), values)
    found = outcome(case, parameter)
    wrong = None
    if found[0] == "gave" and facts(parameter) == facts(usual) != before:
        parameter.requires_grad_(True)  # changing requires_grad of a parameter is allowed
    elif found[0] == "gave" and writes:
        wrong = "was not refused"
    elif found[0] == "raised" and expected[0] != "raised":
        wrong = f"raised {found[1]!r}"
    elif found[0] == "gave" and shown(name, found[1]) != shown(name, expected[1]):
        # The operation may read memory that is not set: then plain torch gives several results too.
        others = {shown(name, outcome(case, polluted())[1]) for _ in range(3)}
        wrong = None if others != {shown(name, expected[1])} else f"gave {found[1]}, and not {expected[1]}"
    elif found[0] == "gave":
        for view in tensors(found[1]):
            if view is not parameter and outcome(lambda _, view=view: view.fill_(3), None)[0] == "gave":
                wrong = wrong or ("gave a view that is written" if torch._C._is_alias_of(view, parameter) else None)
    same = torch.equal(stored(), values) and torch.equal(parameter.detach().clone(), values)
    return wrong if same else f"{wrong or found[0]}, and the weight has changed"


def polluted() -> nn.Parameter:
    """Return the plain parameter, after filling freed memory with other numbers."""
    torch.seed()
    kept = [torch.rand(count) for count in (1, 2, 4, 6, 8, 16, 32, 36, 64, 72, 128, 256, 1024) for _ in range(20)]
    del kept
    return plain()


@contextmanager
def one_weight(home: str, drive: Path) -> Iterator[tuple[nn.Parameter, Callable[[], torch.Tensor]]]:
    """Yield an offloaded parameter with the values of `plain`, and a function that reads the stored weight."""
    module = nn.Module()
    module.blocks = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False) for _ in range(3))
    module.blocks[1].weight = weight = plain()
    with ot.offload(module, nvme=drive, say=lambda line: None, **HOMES[home]) as session:
        weight.sum()  # before the first use its strides are 0
        yield weight, lambda: session.weight("blocks.1.weight")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_operation_is_plain_torchs_or_refused(pytestconfig: pytest.Config, seed: int, tmp_path: Path) -> None:
    """A read gives plain torch's result, a write, also through a view, is refused, and the weight is unchanged."""
    wrong, tried = list[str](), 0
    with ExitStack() as stack:
        # A parameter whose weight is in RAM is that of a weight on the drive.
        places = {home: stack.enter_context(one_weight(home, tmp_path)) for home in ("resident", "on the drive")}
        for name, kinds, call in (*overloads(), *functions()):
            chosen = zlib.crc32(f"{seed} {name}".encode()) % PARTS == 0 or any(word in name for word in ALWAYS)
            if any(word in name for word in NOT_TRIED) or not (chosen or pytestconfig.getoption("--exhaustive")):
                continue
            if (case := accepted(kinds, call)) is None:
                continue
            tried += 1
            for home in places:
                try:
                    said = mistake(name, case, *places[home])
                except ot.UserError as refused:  # Tensor.set_ of the parameter's class is seen at its next use only
                    said = None if "could not be refused before" in str(refused) else repr(refused)
                    places[home] = stack.enter_context(one_weight(home, tmp_path))
                wrong += [f"{name}, {home}: {said}"] if said else []
    assert wrong == []
    assert tried > 30


# -- what users do with parameters -------------------------------------------------------------------------------------


class Net(nn.Module):
    """Blocks, a scalar parameter that its own module does not use, and a head whose weight is read directly."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.head = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return functional.linear(x * self.scale, self.head.weight)


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def square(model: Any, step: int) -> torch.Tensor:
    return (model(INPUTS + step) ** 2).mean()


def penalised(model: Any, step: int) -> torch.Tensor:
    """Return WGAN-GP's gradient penalty."""
    inputs = (INPUTS + step).requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return ((gradient.norm(dim=1) - 1) ** 2).mean()


def trained(model: Any, session: ot.Session | None, loss_of: Callable[[Any, int], torch.Tensor]) -> list[Any]:
    """Return the losses and norms of three steps, then the weights."""
    parameters, found = list(model.parameters()), list[Any]()
    optimizer = session.adamw(lr=1e-2) if session else torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    clip = session.clip_grad_norm_ if session else partial(nn.utils.clip_grad_norm_, parameters, foreach=False)
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward()
        found += [float(loss.detach()), float(clip(0.5))]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(parameter.tolist() for parameter in parameters)]


def offload(model: nn.Module, home: str, drive: Path, **keys: Any) -> ot.Session:
    return ot.offload(model, nvme=drive, say=lambda line: None, **HOMES[home] | keys)


Offloaded = tuple[Net, Net, ot.Session]


@pytest.fixture(params=HOMES)
def offloaded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Offloaded]:
    model = net()
    reference = copy.deepcopy(model)
    with offload(model, request.param, tmp_path) as session:
        yield model, reference, session


def assert_trains(offloaded: Offloaded, loss_of: Callable[[Any, int], torch.Tensor] = square) -> None:
    model, reference, session = offloaded
    assert trained(model, session, loss_of) == trained(reference, None, loss_of)


def test_writes_are_refused_and_change_nothing(offloaded: Offloaded) -> None:
    writes: dict[str, Callable[[nn.Parameter], Any]] = {
        "foreach": lambda w: torch._foreach_mul_([w], 0.5),
        "init by keyword": lambda w: nn.init.kaiming_uniform_(tensor=w),
        "view of a view": lambda w: w.detach().view(-1)[3:].mul_(2),
        "chunk": lambda w: w.chunk(2)[1].mul_(2),
        "set": lambda w: w.set_(torch.ones(2)),
        "data of a view": lambda w: w.t().data.clamp_(-0.01, 0.01),
        "item of data": lambda w: w.data.__setitem__(0, 1.0),
        "in place": lambda w: w.__imul__(2),
        "out": lambda w: torch.add(w, 1, out=w),
        "out of a view": lambda w: torch.add(w, 1, out=w.detach()),
        "dropout": lambda w: functional.dropout(w, 0.5, True, True),
        "max_norm": lambda w: functional.embedding(torch.tensor([0, 1]), w, max_norm=0.01),
        "bag": lambda w: functional.embedding_bag(torch.tensor([[0, 1]]), w, max_norm=0.01),
        "swap": lambda w: torch.utils.swap_tensors(w, nn.Parameter(torch.ones(32, 16))),
        "swap with a view": lambda w: torch.utils.swap_tensors(torch.ones(32, 16), w.detach()),
        "data set": lambda w: setattr(w.detach(), "data", torch.ones(32, 16)),
        "dlpack": lambda w: torch.from_dlpack(w.detach()).zero_(),
        "storage": lambda w: w.detach().storage().fill_(0),
        "new parameter": nn.Parameter,
        "new parameter of a view": lambda w: nn.Parameter(w.data),
    }
    model, _, _ = offloaded
    weight = model.blocks[1][0].weight
    weight.data  # noqa: B018 - it may be in separate memory, and in its buffer
    for name, write in writes.items():
        for mode in (torch.no_grad(), torch.enable_grad()):
            with mode, pytest.raises(ot.UserError, match=r"blocks\.1\.0\.weight"):
                pytest.fail(f"{name}: {write(weight)}")
    with pytest.raises(ot.UserError, match=r"blocks\.1\.0\.weight.*parametrizations .*before the model is offloaded"):
        parametrizations.weight_norm(model.blocks[1][0])
    with torch.no_grad(), pytest.raises(ot.UserError, match="scale"):
        model.scale.data.clamp_(0, 1)
    with pytest.raises(ValueError, match="read-only"):
        weight.detach().numpy()[0] = 9
    assert weight.data.clamp_(-120, 120).shape == weight.shape  # changes nothing, as in each forward of Gemma 3n
    assert_trains(offloaded)


@pytest.mark.parametrize("assign", [False, True])
def test_equal_weights_can_be_loaded_and_others_are_refused(assign: bool, offloaded: Offloaded) -> None:
    """Also into a part of the model; an assignment would leave the session with parameters that nothing uses."""
    model, reference, _ = offloaded
    before = dict(model.named_parameters())
    parts = {"blocks.1.0.weight": (model, reference), "0.weight": (model.blocks[1], reference.blocks[1])}
    for name, (one, plain) in parts.items():
        assert not any(one.load_state_dict(plain.state_dict(), assign=assign))
        other = plain.state_dict()
        other[name] = other[name] + 1
        with pytest.raises((ot.UserError, RuntimeError), match=r"blocks\.1\.0\.weight"):
            one.load_state_dict(other, assign=assign)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert_trains(offloaded)


@every_home
def test_a_module_with_parametrizations_trains_as_in_plain_torch(home: str, tmp_path: Path) -> None:
    model = net()
    parametrizations.weight_norm(model.blocks[0][0])
    parametrizations.spectral_norm(model.blocks[1][0])
    reference = copy.deepcopy(model)
    with offload(model, home, tmp_path) as session:
        assert_trains((model, reference, session))


@every_home
def test_an_unforeseen_write_stops_the_step(home: str, tmp_path: Path) -> None:
    """A write through an older view is detected at the step, and resuming a save restores the weight."""
    model = net()
    view, before = model.blocks[1][0].weight.detach(), model.blocks[1][0].weight.detach().clone()
    with offload(model, home, tmp_path) as session:
        optimizer = session.adamw(lr=1e-2)
        square(model, 0).backward()
        session.save(tmp_path / "save")
        view.mul_(2)
        for use in (optimizer.step, lambda: square(model, 1), lambda: session.save(tmp_path / "other")):
            with pytest.raises(ot.UserError, match=r"blocks\.1\.0\.weight was written to .* session\.resume"):
                use()
        session.resume(tmp_path / "save")
        assert torch.equal(dict(session.named_masters())["blocks.1.0.weight"], before)
        square(model, 1).backward()
        optimizer.step()


def test_a_view_reads_its_parameters_current_values(offloaded: Offloaded) -> None:
    model, reference, _ = offloaded
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
    assert_trains(offloaded)
    assert len(views[model]) == len(views[reference]) == 7
    for view, expected in zip(views[model], views[reference], strict=True):
        assert torch.equal(view.clone(), expected)
    kept = views[model][0]
    assert torch.equal(copy.deepcopy(kept), views[reference][0])
    assert repr(kept) == repr(views[reference][0])
    assert type(kept * 1) is torch.Tensor


def test_one_operation_reads_several_weights(offloaded: Offloaded) -> None:
    """It gets the values of weights that the operation before it has read, and of others, also of another session."""
    other = net()

    def joined(one: Net, step: int) -> torch.Tensor:
        first, second = (one.blocks[at][0].weight.t() for at in (0, 3))
        weights = [first, second, one.head.weight, other.head.weight.detach()]
        return square(one, step) + (torch.cat(weights, 1) ** 2).mean()

    with ot.offload(other, params="cpu", say=lambda line: None):
        assert_trains(offloaded, joined)


def test_parameters_without_dimensions_are_listed_and_have_gradients(offloaded: Offloaded) -> None:
    model, reference, session = offloaded
    attach(session)
    assert model.scale.item() == 1.25
    assert torch.equal(model.state_dict()["scale"], reference.scale)
    for one in (model, reference):
        square(one, 0).backward()
    assert model.scale.grad.shape == ()
    assert torch.equal(model.scale.grad, reference.scale.grad)


def test_gradients_of_gradients_without_micro_batch(offloaded: Offloaded) -> None:
    assert_trains(offloaded, penalised)
    model = offloaded[0]
    for inputs in (model.scale, [model.scale, *model.parameters()], dict(model.named_parameters())):
        with pytest.raises(ot.UserError, match=r"torch\.autograd\.grad of an offloaded model's parameters"):
            torch.autograd.grad(square(model, 0), inputs)


def test_selective_checkpointing_is_refused(tmp_path: Path) -> None:
    """It would save views of weights whose memory is reused."""
    saves = partial(create_selective_checkpoint_contexts, [torch.ops.aten.t.default])
    model = net()
    with offload(model, "on the drive", tmp_path), pytest.raises(ot.UserError, match="selective checkpointing"):
        checkpoint(model.blocks[0], INPUTS, use_reentrant=False, context_fn=saves)


@pytest.mark.slow
def test_torch_compile(tmp_path: Path) -> None:
    """A model compiled before it is offloaded, and a function that reads its parameter, run eagerly."""
    torch._dynamo.reset()
    model = net()
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    square(compiled, 0)
    with offload(model, "on the drive", tmp_path) as session:
        function = torch.compile(lambda x: (x @ model.head.weight.t()).cos(), backend="aot_eager")
        assert torch.equal(function(INPUTS), (INPUTS @ reference.head.weight.t()).cos())
        found = trained(model, session, lambda _, step: square(compiled, step))
    assert found == trained(reference, None, square)


def by_transform(model: nn.Module) -> Any:
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    loss = lambda values, x: torch.func.functional_call(model, values, (x,)).sum()  # noqa: E731
    return torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, INPUTS)


def test_tracing_a_model_is_refused(offloaded: Offloaded) -> None:
    model, _, _ = offloaded
    for recorded in (
        lambda: torch.jit.trace(model, INPUTS),
        lambda: torch.export.export(model, (INPUTS,)),
        lambda: torch.fx.experimental.proxy_tensor.make_fx(lambda x: x * model.scale)(INPUTS),
        lambda: torch.vmap(lambda x: x * model.scale)(INPUTS),
        lambda: by_transform(model),
    ):
        with pytest.raises(ot.UserError, match=r"was used inside .*, which cannot follow weights"):
            recorded()
    assert_trains(offloaded)
