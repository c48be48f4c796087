"""The house: a module imports only from lower floors or its own package, and each library has one room."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "offload_trainer"

FLOORS = {
    "errors": 0, "signals": 0, "streams": 0, "units": 0, "places": 0, "": 0,
    "config": 0, "settings": 0, "readback": 0, "identity": 0, "packages": 0, "machine.profile": 0,
    "schedule": 1, "plan": 1,
    "tiers": 2,
    "machine.probe": 3, "machine.bench": 3, "machine.cache": 3, "model": 3, "data": 3, "engine": 3, "telemetry": 3,
    "retention": 3,
    "checkpoint": 4, "manifest": 1, "export": 4,
    "trainer": 5,
    "cli": 6, "usage": 6,
    "run": 6, "run_build": 6, "run_data": 6, "run_directory": 6, "run_report": 6,
    "planner": 6, "doctor": 6, "tune": 6, "launch": 6,
    "__main__": 6,
}  # fmt: skip
# engine/ runs models on batches under a clock, and so knows these neighbours; nothing knows engine/ on its own floor.
NEIGHBOURS = {("engine", "model"), ("engine", "data"), ("engine", "telemetry")}
# model/presets and model/source count shapes; nothing else on a floor looks sideways.
# In tiers/ only the loader of its Adam kernel.
ROOMS = {
    "deepspeed": {"engine", "tiers"},
    "transformers": {"model", "data"},
    "bitsandbytes": {"engine"},
    "gguf": {"export"},
}
LIBRARY_FREE = (
    *(
        "plan",
        "schedule",
        "config",
        "settings",
        "readback",
        "errors",
        "signals",
        "streams",
        "units",
        "places",
        "packages",
    ),
    "machine.profile",
)


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(path: Path) -> set[str]:
    """Every module named in an import, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(module: str) -> str:
    """The key of FLOORS that a module stands on."""
    parts = module.split(".")
    for length in (2, 1):
        if ".".join(parts[:length]) in FLOORS:
            return ".".join(parts[:length])
    if parts == ["machine"]:
        return "machine.profile"
    raise AssertionError(f"{module} stands on no floor: add it to FLOORS and to docs/design.md")


@pytest.mark.parametrize("module", modules())
def test_imports_go_down(module: str) -> None:
    here = room(module)
    package = module.split(".")[0]
    for name in imports(modules()[module]):
        if not name.startswith("offload_trainer."):
            continue
        target = name.removeprefix("offload_trainer.")
        if target not in modules():
            continue  # a name inside a module, whose module is in the set too
        there = room(target)
        allowed = (
            FLOORS[there] < FLOORS[here]
            or package == target.split(".")[0]
            or (package, target.split(".")[0]) in NEIGHBOURS
            or FLOORS[here] == FLOORS[there] == 0
            or FLOORS[here] == FLOORS[there] == 6
            or (here, there) == ("export", "checkpoint")  # both keepers; export reads what checkpoint wrote
        )
        assert allowed, f"{module} (floor {FLOORS[here]}) imports {target} (floor {FLOORS[there]})"


@pytest.mark.parametrize("module", modules())
def test_each_library_has_its_room(module: str) -> None:
    heads = {name.split(".")[0] for name in imports(modules()[module])}
    for library, rooms in ROOMS.items():
        assert library not in heads or module.split(".")[0] in rooms, f"{module} imports {library}"


@pytest.mark.parametrize("module", [name for name in modules() if room(name) in LIBRARY_FREE])
def test_plans_need_no_libraries(module: str) -> None:
    heads = {name.split(".")[0] for name in imports(modules()[module])}
    assert not heads & {"torch", "numpy", "transformers", "deepspeed", "psutil"}
