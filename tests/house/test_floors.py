"""Tests of the package's layers, and of the length of functions and modules and their numbers of parameters."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from offload_trainer.common.packages import OPTIONAL

PACKAGE = Path(__file__).resolve().parents[2] / "offload_trainer"

# From the bottom up; the packages of one layer do not import each other.
HOUSE = (
    ("common", "config"),
    ("plan", "ranks"),
    ("settings", "storage"),
    ("optim", "data", "telemetry"),
    ("offloading",),
    ("machine", "model"),
    ("engine",),
    ("run",),
    ("session", "cli"),
    ("hf", "__main__", ""),
)
FLOORS = {name: number for number, floor in enumerate(HOUSE) for name in floor}
ROOMS = {
    "deepspeed": {"engine", "optim"},  # optim/ counts DeepSpeed's Adam optimizers
    "transformers": {"model", "data", "hf"},
    "peft": {"session"},
    "bitsandbytes": {"engine", "offloading"},  # DeepSpeed's 8-bit AdamW; the arithmetic of quantised weights
    "datasets": {"data"},
}
LIBRARY_FREE = {"common", "config", "plan", "settings"}  # plans need none of LIBRARIES
LIBRARIES = {"torch", "numpy", "transformers", "deepspeed", "psutil"}


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name == "recipes":  # recipes are copied, and belong to users then
            continue
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path, *, inside: bool = True) -> set[str]:
    """Return every module named in an import, with `inside` also within functions."""
    names = set()
    for node in ast.walk(parsed(path)) if inside else parsed(path).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(module: str) -> str:
    """Return the package of a module, or the module itself at the top level."""
    name = module.split(".")[0]
    assert name in FLOORS, f"{module} stands on no floor: add it to HOUSE and to docs/design.md"
    return name


def test_imports_go_down_and_each_library_has_its_layer() -> None:
    for module, path in modules().items():
        here = room(module)
        for name in imports(path):
            target, library = name.removeprefix("offload_trainer."), name.split(".")[0]
            assert library not in ROOMS or here in ROOMS[library], f"{module} imports {library}"
            assert here not in LIBRARY_FREE or library not in LIBRARIES, f"{module} imports {library}"
            # Others are names of another library, or inside a module that is in the set too.
            if name.startswith("offload_trainer.") and target in modules():
                there = room(target)
                assert here == there or FLOORS[there] < FLOORS[here], f"{module} ({FLOORS[here]}) imports {target}"
        assert not {name.partition(".")[0] for name in imports(path, inside=False)} & OPTIONAL.keys(), module


def test_programs_import_names_that_exist() -> None:
    """Scripts, benchmarks and recipes, which few tests run, import no name that has gone."""
    missing = []
    folders = [PACKAGE / "recipes", *(PACKAGE.parent / name for name in ("scripts", "benchmarks", "soak"))]
    for path in (file for folder in folders for file in folder.rglob("*.py")):
        for name in imports(path):
            module, _, what = name.removeprefix(PACKAGE.name).lstrip(".").rpartition(".")
            if name.partition(".")[0] != PACKAGE.name or f"{module}.{what}".lstrip(".") in modules():
                continue
            text = modules()[module].read_text() if module in modules() else ""
            if not re.search(rf"\b{what}\b", text):
                missing.append(f"{path.name}: {name}")
    assert missing == []


PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
UNSAFE = re.compile(
    r"\btorch\.load\b(?!\(.*weights_only=True)|\btorch\.serialization\.load\b|\bpickle\.(?!Unpickler\b)"
    r"|\.\w*object_list\b|\.\w+_object\b"
)
# Modules that parse JSON otherwise than by `safe_files`, and the reason.
JSON = {
    "data.documents": "users' own text, a line at a time",
    "data.tokenizer": "what a tokenizer in memory says of itself",
    "model.loader": "a configuration in memory, as transformers writes it",
    "hf": "whether the Trainer's own state was written to its end",
    "storage.tensorfile": "a header that the safetensors library has checked",
}


def test_only_one_module_reads_pickles() -> None:
    """It reads those of imports, without running their code; object collectives would unpickle too."""
    for module, path in modules().items():
        reads, text = module == "run.commands.import_checkpoint", path.read_text()
        assert {name.partition(".")[0] for name in imports(path)} & PICKLES == ({"pickle"} if reads else set()), module
        assert not {"torch.load", "torch.serialization"} & imports(path), module
        assert ("torch.load(" in text) == reads, module
        assert not UNSAFE.search(text), module
    for bad in ("torch.load(f)", "map(torch.load, fs)", "torch.serialization.load(f)", "dist.gather_object(x)"):
        assert UNSAFE.search(bad), bad


def test_json_goes_through_the_one_reader_and_no_duration_is_measured_by_a_clock_that_jumps() -> None:
    texts = {module: path.read_text() for module, path in modules().items()}
    found = {
        name for name, text in texts.items() if re.search(r"\bjson\.(?!dump|JSONDecodeError)\w|from json import", text)
    }
    assert found == JSON.keys()
    assert not [name for name, text in texts.items() if re.search(r"\btime\.time\b|from time import", text)]


# -- sizes: an exception that is no longer needed fails as a missing one does ------------------------------------------

# Exceptions and their reasons.
MANY_PARAMETERS: dict[str, str] = {
    "engine.tiered.TieredEngine.__init__": "a run's facts, and what is built for it or, in tests, stands in for it",
    "optim.triton_adam.adamw": "pointers, and constants of the compilation",
    "optim.triton_adam.add_gradient": "pointers, and constants of the compilation",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(node: ast.AST, name: str) -> Iterator[tuple[str, Function]]:
    """Yield (module.function or module.Class.function, its definition)."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | Function):
            yield from functions(child, f"{name}.{child.name}")
            if isinstance(child, Function):
                yield f"{name}.{child.name}", child


def test_modules_and_functions_are_short_and_take_few_parameters() -> None:
    found = [each for module, path in modules().items() for each in functions(parsed(path), module)]
    assert len(found) > 500
    assert {name for name, path in modules().items() if len(path.read_text().splitlines()) > 700} == set()
    assert {name for name, each in found if (each.end_lineno or 0) - each.lineno + 1 > 100} == set()
    given = {name: [*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs] for name, each in found}
    seen = {name: [one.arg for one in some if one.arg not in ("self", "cls")] for name, some in given.items()}
    assert {name for name, names in seen.items() if len(names) > 7} == set(MANY_PARAMETERS)
