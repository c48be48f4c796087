"""The packages beside this one: the lowest versions it was tried with, and what to say where one is missing.

`REQUIRED` and `OPTIONAL` are pyproject.toml's own bounds (a test holds them together; scripts/lowest_versions.py runs
them), repeated because a checkout that is only on the path has no metadata.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

REQUIRED = {
    "torch": "2.9",
    "transformers": "5.8",
    "pydantic": "2.8",
    "safetensors": "0.4.3",
    "psutil": "5.9.4",
    "tqdm": "4.66.3",
    "PyYAML": "6.0.2",
}
OPTIONAL = {
    "deepspeed": "0.19.8",
    "bitsandbytes": "0.50.2",
    "gguf": "0.17.1",
    "tensorboard": "2.19",
    "accelerate": "1.10.1",
    "trl": "1.10",
    "peft": "0.19",
    "datasets": "4.7",
    "pyarrow": "21",
    "wandb": "0.22",
    "trackio": "0.41",
    "mlflow-skinny": "3.5",
    "sqlalchemy": "2.0.30",
    "alembic": "1.13.1",
}
_MODULES = {"yaml": "PyYAML", "mlflow": "mlflow-skinny"}  # where a module is not called as its package


def is_installed(module: str) -> bool:
    """Whether it can be found; it is not imported."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def too_old(package: str) -> str | None:
    """The installed version, where it is below the bound; None where it is not, or nothing is known of it."""
    try:
        found = version(package)
    except PackageNotFoundError:
        return None
    bound = (REQUIRED | OPTIONAL)[package]
    return found if _numbers(found) < _numbers(bound) else None


def to_install(*packages: str) -> str:
    """The command for it."""
    bounds = REQUIRED | OPTIONAL
    return "pip install " + " ".join(f"'{name}>={bounds[name]}'" if name in bounds else name for name in packages)


def lacks(wish: str, package: str) -> str:
    """What is said where `wish` needs a package that is not there."""
    also = ("ninja",) if package == "deepspeed" else ()
    return f"{wish} needs {package}, which is not installed: {to_install(package, *also)}"


def explain_import(error: ImportError) -> str | None:
    """The line for a package that is missing or too old; None where it is one of our own modules."""
    module = (error.name or "").partition(".")[0]
    package = _MODULES.get(module, module)
    if module in ("", "offload_trainer"):
        return None
    if old := too_old(package) if package in REQUIRED | OPTIONAL else None:
        return f"{package} {old} is too old: {to_install(package)}"
    if isinstance(error, ModuleNotFoundError) and not is_installed(module):
        return f"the package {package} is not installed: {to_install(package)}"
    return None


def _numbers(text: str) -> tuple[int, ...]:
    """A version's leading numbers, without zeros at their end: 2.9.0+cu128 -> (2, 9)."""
    numbers = [int(part) for part in re.split(r"[^\d.]", text)[0].split(".") if part]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
