"""Tests of code size: the length of functions and modules, the number of parameters, and users of the whole
configuration.

An exception that is no longer needed fails as a missing one does.
"""

import ast
from collections.abc import Iterator

from test_floors import imports, modules

LINES, PARAMETERS, OF_MODULE = 100, 7, 700

# Exceptions and their reasons.
MANY_PARAMETERS: dict[str, str] = {
    "data.stream.StreamedTokens.__init__": "what one stream is read with; only a stream for validation names the last",
    "engine.tiered.TieredEngine.__init__": "a run's facts, and what is built for it or, in tests, stands in for it",
    "optim.triton_adam.adamw": "pointers, and constants of the compilation",
}
# Modules that may use the whole configuration: those that read it, plan with it, and start from it.
WHOLE = {
    "settings",
    "arguments",  # groups help by section
    "plan.planner",
    "plan.engines",
    "run.build",  # the set-up of a run
    "run.process_setup",  # sets up a process from four sections
    "run.commands.plan",
    "run.planning",
    "run.train",
    "session.api",  # the entry point of the library
    "session.kwargs",
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


def test_modules_and_functions_are_short_and_take_few_parameters() -> None:
    found = [each for module in modules() for each in functions(module)]
    assert len(found) > 500
    assert {name for name, path in modules().items() if len(path.read_text().splitlines()) > OF_MODULE} == set()
    assert {name for name, each in found if (each.end_lineno or 0) - each.lineno + 1 > LINES} == set()
    assert {name for name, each in found if parameters(each) > PARAMETERS} == set(MANY_PARAMETERS)


def test_few_modules_take_the_whole_configuration() -> None:
    known = {name for name, path in modules().items() if "offload_trainer.config.TrainConfig" in imports(path)}
    assert known == WHOLE
