"""Tests of the package's layers: a module imports only from lower layers or its own, and each library has one user."""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "offload_trainer"

# From the bottom up; the packages of one layer do not import each other.
HOUSE = (
    ("packages", "units", "stdio", "numa"),
    ("errors",),
    ("safe_files", "signals", "mesh"),
    ("config", "synonyms"),
    ("manifest", "plan"),
    ("settings",),
    ("storage", "ranks"),
    ("optim", "retention"),
    ("offloading",),
    ("machine", "model", "data", "telemetry"),
    ("engine",),
    ("checkpoint",),
    ("trainer", "export"),
    ("run",),
    ("session",),
    ("hf",),
    ("arguments",),
    ("cli",),
    ("__main__", ""),
)
FLOORS = {name: number for number, floor in enumerate(HOUSE) for name in floor}
ROOMS = {
    "deepspeed": {"engine", "optim"},  # optim/ counts DeepSpeed's Adam optimizers
    "transformers": {"model", "data", "hf"},
    "peft": {"session"},
    "bitsandbytes": {"engine", "offloading"},  # DeepSpeed's 8-bit AdamW; the arithmetic of quantised weights
    "datasets": {"data"},
}
LIBRARY_FREE = {"packages", "units", "stdio", "numa", "errors", "safe_files", "signals", "mesh", "config", "synonyms"}
LIBRARY_FREE |= {"plan", "settings"}


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
def imports(path: Path) -> set[str]:
    """Return every module named in an import, also within functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
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


def test_imports_go_down() -> None:
    for module, path in modules().items():
        here = room(module)
        for name in imports(path):
            target = name.removeprefix("offload_trainer.")
            if not name.startswith("offload_trainer.") or target not in modules():
                continue  # another library, or a name inside a module that is in the set too
            there = room(target)
            assert here == there or FLOORS[there] < FLOORS[here], f"{module} ({FLOORS[here]}) imports {target}"


def test_each_library_is_imported_in_its_layer() -> None:
    for module, path in modules().items():
        heads = {name.split(".")[0] for name in imports(path)}
        for library, rooms in ROOMS.items():
            assert library not in heads or module.split(".")[0] in rooms, f"{module} imports {library}"


def test_plans_need_no_libraries() -> None:
    for module, path in modules().items():
        if room(module) in LIBRARY_FREE:
            heads = {name.split(".")[0] for name in imports(path)}
            assert not heads & {"torch", "numpy", "transformers", "deepspeed", "psutil"}, module


def test_programs_import_names_that_exist() -> None:
    """Scripts, benchmarks and recipes, which few tests run, import no name that has gone."""
    missing = []
    folders = [PACKAGE / "recipes", *(PACKAGE.parent / name for name in ("scripts", "benchmarks", "soak"))]
    for path in (file for folder in folders for file in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name):
                module = import_module(str(node.module))
                for name in (alias.name for alias in node.names if not hasattr(module, alias.name)):
                    if f"{node.module}.{name}".removeprefix(f"{PACKAGE.name}.") not in modules():
                        missing.append(f"{path.name}: {node.module}.{name}")
    assert missing == []
