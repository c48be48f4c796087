"""Try every operation that torch registers on an offloaded parameter, and compare with a plain one.

    parameter_operations.py [--only TEXT] [--list]

The operations are aten's overloads that take a tensor or a list of tensors first, everything that dispatches through
`__torch_function__` (functions, methods, properties), the functions of nn.init, and the assignment of properties.
Arguments are varied until plain torch accepts them. Each operation then runs on the same parameter on the device, in
RAM and on a drive. A read must give plain torch's result. A write, direct or through a returned view, must raise
UserError. The weight must be unchanged after either. The exit status is 1 if anything else happened.
"""

from __future__ import annotations

import argparse
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from itertools import islice, product
from typing import Any

import torch
from torch import nn

import offload_trainer as ot
import offload_trainer.plan.tiered.layout as layout

PLACES: dict[str, dict[str, Any]] = {
    "resident": {"params": "gpu"},
    "in RAM": {"params": "cpu", "weight_buffers": 1},
    "on NVMe": {"params": "nvme", "optimizer": "nvme", "gradients": "nvme", "weight_buffers": 1},
}
Case = tuple[str, Callable[[Any], Any]]  # a name, and a function of the parameter

# Results of these are uninitialised memory, addresses, class names, or (lstsq) bits that change with the alignment of
# the operands in plain torch too: only types and shapes are compared.
_UNSET = (
    "lstsq",
    "empty",
    "resize",
    "data_ptr",
    "storage",
    "__repr__",
    "__format__",
    "_make_dep_token",
    "__hash__",
    "_cdata",
)
# These block, end the process, or change torch's global state.
_NOT_TRIED = (
    "_assert",
    "set_default",
    "__del__",
    "_nnpack",
    "_pin_memory",
    "pin_memory",
    "_sync",
    "_cslt",
    "batch_dim",
    "quantized_",
)
_SIZE = 6
_SPOILT = 7  # exit status of a process whose parameter cannot be used any more, as after Tensor.set_ by its class
_TRIALS = 200  # combinations of arguments for an operation


# -- operations ------------------------------------------------------------------------------------------------------


def cases(only: str = "") -> Iterator[Case]:
    """Yield the operations whose names contain `only`, each with arguments that plain torch accepts."""
    for name, kinds, function in (*_overloads(), *_functions(), *_initialisers()):
        tried = only in name and not any(word in name for word in _NOT_TRIED)
        if tried and (case := _accepted(name, kinds, function)):
            yield case
    for name in ("data", "grad", "requires_grad", "real", "imag", "names"):
        for value in (torch.ones(_SIZE, _SIZE), None, True):
            if only in "set .":
                yield f"set .{name} = {value!r:.12}", lambda p, name=name, value=value: setattr(p, name, value)


Found = tuple[str, list[list[Any]], Callable[..., Any]]  # name, candidates of the further arguments, call


def _overloads() -> Iterator[Found]:
    for schema in sorted(torch._C._jit_get_all_schemas(), key=lambda one: ("out" in one.overload_name, str(one))):
        space, _, name = schema.name.partition("::")
        packet = getattr(torch.ops.aten, name, None) if space == "aten" else None
        overload = getattr(packet, schema.overload_name or "default", None)
        first = str(schema.arguments[0].type) if schema.arguments else ""
        if overload is None or first not in ("Tensor", "List[Tensor]"):
            continue
        needed = [one for one in schema.arguments[1:] if not one.has_default_value()]
        words = [one.name if one.kwarg_only else None for one in needed]
        kinds = [_candidates(str(one.type)) for one in needed]

        def call(
            p: Any, *rest: Any, overload: Any = overload, words: Any = words, several: bool = first != "Tensor"
        ) -> Any:
            named = {word: value for word, value in zip(words, rest, strict=True) if word}
            placed = [value for word, value in zip(words, rest, strict=True) if not word]
            return overload([p] if several else p, *placed, **named)

        yield str(overload), kinds, call


def _candidates(kind: str) -> list[Any]:
    """Return values to try for an argument of this schema type."""
    torch.manual_seed(1)
    like = torch.rand(_SIZE, _SIZE)
    known: dict[str, list[Any]] = {
        "Tensor": [like, torch.zeros(_SIZE, _SIZE, dtype=torch.int64), torch.rand(_SIZE), torch.tensor(1), like > 0.5],
        "Optional[Tensor]": [None, like],
        "List[Tensor]": [[like], [torch.zeros(_SIZE, dtype=torch.int64)]],
        "List[Optional[Tensor]]": [[torch.zeros(_SIZE, dtype=torch.int64)]],
        "int": [0, 1, 3, 6],
        "number": [2, 0.5],
        "float": [0.5],
        "bool": [False],
        "List[int]": [[_SIZE, _SIZE], [0], [1, 1], [0, 1], [1]],
        "List[number]": [[2]],
        "List[float]": [[0.5]],
        "str": ["mean", "none", "floor", "ij"],
        "Device": [torch.device("cpu")],
    }
    return known.get(kind, [None] if kind.startswith("Optional") else [])


def _functions() -> Iterator[Found]:
    """Yield the functions that dispatch through `__torch_function__`."""
    values = [*_candidates("Tensor")[:3], 1, 0, 0.5, (_SIZE, _SIZE), [torch.rand(_SIZE, _SIZE)], "mean", torch.float64]
    for function, like in torch.overrides.get_testing_overrides().items():
        needed = [one for one in inspect.signature(like).parameters.values() if one.default is one.empty]
        count = sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in needed)
        name = torch.overrides.resolve_name(function) or getattr(function, "__qualname__", repr(function))
        for several in (False, True):
            if count:

                def call(p: Any, *rest: Any, function: Any = function, several: bool = several) -> Any:
                    return function([p] if several else p, *rest)

                yield f"{name}{' of a list' if several else ''}", [values] * (count - 1), call


def _initialisers() -> Iterator[Found]:
    for name in dir(nn.init):
        if name.endswith("_") and not name.startswith("_"):
            function = getattr(nn.init, name)
            for word in ("", "tensor"):

                def call(p: Any, *rest: Any, function: Any = function, word: str = word) -> Any:
                    return function(*rest, **{word: p}) if word else function(p, *rest)

                yield f"nn.init.{name}{word and ' by keyword'}", [], call


def _accepted(name: str, kinds: list[list[Any]], function: Callable[..., Any]) -> Case | None:
    """Return the operation with the first arguments that plain torch accepts, or None."""

    def cases() -> Iterator[Callable[[Any], Any]]:
        for rest in islice(product(*kinds), _TRIALS):

            def case(p: Any, rest: tuple[Any, ...] = rest) -> Any:
                copies = [one.clone() if isinstance(one, torch.Tensor) else one for one in rest]
                return function(p, *[[x.clone() for x in one] if _of_tensors(one) else one for one in copies])

            yield case

    child = os.fork()  # some operations crash the process on meaningless arguments
    if not child:
        signal.setitimer(signal.ITIMER_PROF, 20)  # CPU time, so that a busy machine does not matter
        signal.alarm(600)
        for number, case in enumerate(cases()):
            if _run(case, _plain())[0] != "raised":
                os._exit(number)
        os._exit(_TRIALS)
    status = os.waitpid(child, 0)[1]
    number = os.waitstatus_to_exitcode(status)
    return (name, next(islice(cases(), number, None))) if 0 <= number < _TRIALS else None


def _of_tensors(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, torch.Tensor) for one in value)


# -- what they do ----------------------------------------------------------------------------------------------------


def _plain() -> nn.Parameter:
    torch.manual_seed(7)
    return nn.Parameter(torch.rand(_SIZE, _SIZE) + 0.25)


def _polluted() -> nn.Parameter:
    """Return the same parameter, after filling freed memory with other numbers.

    An operation that reads uninitialised memory, for instance because its callers compute other arguments, then gives
    another result.
    """
    values = _plain()
    torch.seed()
    kept = [torch.rand(count) for count in (1, 2, 4, 6, 8, 16, 32, 36, 64, 72, 128, 256, 1024) for _ in range(20)]
    del kept
    return values


def _run(case: Callable[[Any], Any], parameter: Any) -> tuple[str, Any]:
    """Return ("gave", result), ("refused", error) or ("raised", error).

    A second attempt disables gradients, which forbid some writes.
    """
    error: Any = None
    for mode in (nullcontext(), torch.no_grad()):
        torch.manual_seed(5)
        try:
            with mode:
                return "gave", case(parameter)
        except ot.UserError as refused:
            return "refused", refused
        except Exception as found:
            error = found
    return "raised", error


def _facts(parameter: Any) -> tuple[Any, ...]:
    return parameter.shape, parameter.stride(), parameter.dtype, parameter.requires_grad, parameter.grad is None


def _seen(name: str, value: Any) -> Any:
    """Return the comparable part of a result."""
    shapes = any(word in name for word in _UNSET)
    if isinstance(value, torch.Tensor):
        facts = (str(value.dtype), value.is_nested or tuple(value.shape), value.requires_grad)
        if shapes or value.is_nested or value.layout is not torch.strided or value.is_quantized:
            return facts
        return (
            *facts,
            value.detach()
            .resolve_conj()
            .resolve_neg()
            .reshape(-1)
            .clone(memory_format=torch.contiguous_format)
            .view(torch.uint8)
            .tolist()
            if value.dim()
            else value.item().__repr__(),
        )
    if isinstance(value, list | tuple):
        return [_seen(name, one) for one in value]
    if type(value).__name__ == "ndarray":
        return value.tolist()
    plain = isinstance(value, int | float | complex | bool | str | bytes | torch.dtype | torch.device | None.__class__)
    return value if plain and not shapes else type(value).__name__


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _write_to_view(parameter: Any, result: Any) -> bool:
    """Write to the first result that shares memory with the parameter; return whether there is one."""
    for one in _tensors(result):
        if one is not parameter and torch._C._is_alias_of(one, parameter) and one.numel():
            with torch.no_grad():
                one.fill_(3)
            return True
    return False


def judged(name: str, case: Callable[[Any], Any], parameter: Any, read: Callable[[], torch.Tensor]) -> str:
    """Return a verdict on the operation applied to the offloaded parameter; `read` returns the stored weight."""
    plain = _plain()
    before, facts = plain.detach().clone(), _facts(plain)
    same, version = before.clone(), plain._version
    plainly, result = _run(case, plain)
    writes = plain._version != version or _facts(plain) != facts or not torch.equal(plain.detach(), before)
    expected = None if writes else _seen(name, result)
    unset = not writes and any(_seen(name, _run(case, _polluted())[1]) != expected for _ in range(3))
    outcome, found = _run(case, parameter)
    if outcome == "gave" and facts != _facts(parameter) and _facts(plain) == _facts(parameter):
        parameter.requires_grad_(True)  # changing requires_grad of a parameter is allowed
        writes = False
    if outcome == plainly == "raised":
        verdict = "equal, an error of torch's"
    elif outcome == "raised":
        verdict = f"RAISED {type(found).__name__}: {found}"
    elif outcome == "refused":
        verdict = "refused a write" if writes else "refused a read"
    elif writes:
        verdict = "NOT REFUSED"
    elif unset:
        verdict = "not compared: plain torch reads memory that is not set"
    elif expected is not None and _seen(name, found) != expected:
        verdict = "DIFFERENT"
    else:
        verdict = "equal"
        if _write_to_view(plain, result):
            try:
                seen = _write_to_view(parameter, found) or any(map(_writes, _tensors(found)))
            except ot.UserError:
                verdict = "equal, and refused a write to the view"
            else:
                verdict = "VIEW NOT REFUSED" if seen else "equal, in memory of its own"
    if not (torch.equal(read(), same) and torch.equal(parameter.detach().clone(), same)):
        verdict = f"LOST ITS VALUES, {verdict}"
    return verdict


def _writes(tensor: torch.Tensor) -> bool:
    with torch.no_grad():
        tensor.fill_(3)
    return False


class Sessions(ExitStack):
    """The same module in each of the placements."""

    def __init__(self) -> None:
        super().__init__()
        self.callback(setattr, layout, "SMALL", layout.SMALL)
        layout.SMALL = 0  # small weights are offloaded as large ones are
        self.parameters: dict[str, tuple[Any, Callable[[], torch.Tensor]]] = {}
        for place, keys in PLACES.items():
            module = nn.Module()
            module.blocks = nn.ModuleList(nn.Linear(_SIZE, _SIZE, bias=False) for _ in range(3))
            module.blocks[1].weight = weight = _plain()
            drive = self.enter_context(tempfile.TemporaryDirectory())
            session = self.enter_context(ot.offload(module, nvme=drive, say=lambda line: None, **keys))
            self.parameters[place] = weight, lambda session=session: session.weight("blocks.1.weight")


# -- the command -----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="operations whose name has this in it")
    parser.add_argument("--list", action="store_true", help="print every operation")
    parser.add_argument("--after", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.after is not None:
        _work(given.only, after=given.after)
        return 0
    counts: dict[str, Counter[str]] = {place: Counter() for place in PLACES}
    wrong, done = list[str](), 0
    while True:
        words = [sys.executable, __file__, "--only", given.only, "--after", str(done)]
        ended = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        name = place = verdict = ""
        for line in ended.stdout.splitlines():
            number, place, verdict, name = line.split("\t")
            done = int(number)
            if verdict != "begun":
                counts[place][verdict.partition(":")[0]] += 1
                if given.list or verdict[0].isupper():
                    print(f"{name}: {place}: {verdict}", flush=True)
                wrong += [name] if verdict[0].isupper() else []
        if not ended.returncode:
            break
        if ended.returncode == _SPOILT:
            continue
        wrong.append(name)
        print(f"{name}: {place}: THE PROCESS DIED, with status {ended.returncode}", flush=True)
        if verdict != "begun":
            sys.exit(ended.stderr)
    verdicts = sorted({verdict for of in counts.values() for verdict in of})
    print(f"{'':40}" + "".join(f"{place:>10}" for place in PLACES))
    for verdict in verdicts:
        print(f"{verdict:40}" + "".join(f"{counts[place][verdict]:10}" for place in PLACES))
    print(f"{'all':40}" + "".join(f"{sum(counts[place].values()):10}" for place in PLACES))
    return 1 if wrong else 0


def _work(only: str, *, after: int) -> None:
    """Print a line for each operation in each placement, beginning after operation number `after`."""
    warnings.simplefilter("ignore")
    with Sessions() as sessions:
        for number, (name, case) in enumerate(cases(only), 1):
            if number <= after:
                continue
            spoilt = False
            for place, (parameter, read) in sessions.parameters.items():
                print(number, place, "begun", name, sep="\t", flush=True)
                try:
                    verdict = judged(name, case, parameter, read).replace("\n", " ").replace("\t", " ")
                except Exception as error:  # raised by the comparison, not the operation
                    spoilt = spoilt or "could not be refused before" in str(error)
                    verdict = (
                        "refused at its next use"
                        if spoilt
                        else f"COULD NOT BE COMPARED {error!r}".replace("\n", " ").replace("\t", " ")
                    )
                print(number, place, verdict[:200], name, sep="\t", flush=True)
            if spoilt:
                sys.exit(_SPOILT)


if __name__ == "__main__":
    sys.exit(main())
