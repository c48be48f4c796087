"""Tests of code size: the length of functions and modules, the number of parameters, and users of the whole
configuration.

An exception that is no longer needed fails as a missing one does.
"""

import ast
from collections.abc import Iterator

import pytest
from test_floors import imports, modules

LINES, PARAMETERS, OF_MODULE = 100, 7, 700

# Exceptions and their reasons.
LONG_MODULES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
MANY_PARAMETERS: dict[str, str] = {
    "engine.tiered.TieredEngine.__init__": "a run's facts, and what is built for it or, in tests, stands in for it",
    "offloading.gradients.collector.Gradients.__init__": "homes, and the sizes of all buffers on the way there",
    "offloading.update.updater.Updater.__init__": "the stores of three things, two kernels and their device",
    "plan.memory.peak_of": "counts, and all that changes which moment is the largest",
}
# Modules that may use the whole configuration: those that read it, plan with it, and start from it.
WHOLE = {
    "settings",
    "plan.planner",
    "plan.engines",
    "run.process_setup",  # sets up a process from four sections
    "run.commands.plan",
    "run.planning",
    "run.train",
    "session.api",  # the entry point of the library
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(module: str) -> Iterator[tuple[str, Function]]:
    """Yield (module.function or module.Class.function, its definition)."""

    def inside(node: ast.AST, name: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | Function):
                yield from inside(child, f"{name}.{child.name}")
                if isinstance(child, Function):
                    yield f"{name}.{child.name}", child

    yield from inside(ast.parse(modules()[module].read_text()), module)


def parameters(function: Function) -> int:
    """Return the number of parameters that a caller sees."""
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def test_modules_are_short() -> None:
    long = {name for name, path in modules().items() if len(path.read_text().splitlines()) > OF_MODULE}
    assert long == set(LONG_MODULES)


def test_functions_are_short() -> None:
    found = [each for module in modules() for each in functions(module)]
    assert len(found) > 900
    long = {name for name, one in found if (one.end_lineno or 0) - one.lineno + 1 > LINES}
    assert long == set(LONG_FUNCTIONS)


def test_functions_take_few_parameters() -> None:
    found = [each for module in modules() for each in functions(module)]
    assert {name for name, one in found if parameters(one) > PARAMETERS} == set(MANY_PARAMETERS)


def test_few_modules_take_the_whole_configuration() -> None:
    known = {name for name, path in modules().items() if "offload_trainer.config.TrainConfig" in imports(path)}
    assert known == WHOLE


def test_a_broken_limit_is_found() -> None:
    long = ast.parse("def long(a, b, c, d, e, f, g, *, h):\n" + "    a = b\n" * LINES).body[0]
    assert isinstance(long, Function)
    assert (long.end_lineno or 0) > LINES
    assert parameters(long) == PARAMETERS + 1


@pytest.mark.parametrize("bound", [LONG_MODULES, LONG_FUNCTIONS, MANY_PARAMETERS])
def test_each_exception_has_its_reason(bound: dict[str, str]) -> None:
    assert all(len(reason) > 10 for reason in bound.values())
