"""Third-party packages: minimum versions, and error messages for those that are missing or too old.

The bounds repeat pyproject.toml's, because a checkout that is only on the path has no metadata. A test compares them.
"""

import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

REQUIRED = {
    "torch": "2.9",
    "transformers": "5.8",
    "pydantic": "2.8",
    "safetensors": "0.4.3",
    "psutil": "5.9.4",
    "PyYAML": "6.0.2",
}
OPTIONAL = {
    "deepspeed": "0.19.8",
    "bitsandbytes": "0.50.2",
    "tensorboard": "2.19",
    "accelerate": "1.10.1",
    "trl": "1.10",
    "peft": "0.19",
    "datasets": "4.7",
    "pyarrow": "21",
    "wandb": "0.22",
    "trackio": "0.41",
}
_BOUNDS = REQUIRED | OPTIONAL


def is_installed(module: str) -> bool:
    """Return True if the module can be found, without importing it."""
    with suppress(ImportError, ValueError):
        return find_spec(module) is not None
    return False


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it has no metadata."""
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def too_old(package: str) -> str | None:
    """Return the installed version if it is below the bound; None if it is not, or if the package has no metadata."""
    found, bound = version_of(package), _BOUNDS[package]
    return found if found and _numbers(found) < _numbers(bound) else None


def to_install(*packages: str) -> str:
    """Return the pip command that installs the packages, with their bounds."""
    return "pip install " + " ".join(f"'{name}>={_BOUNDS[name]}'" if name in _BOUNDS else name for name in packages)


def lacks(feature: str, package: str) -> str:
    """Return the error message for a feature that needs a package which is not installed."""
    also = ("ninja",) if package == "deepspeed" else ()
    return f"{feature} needs {package}, which is not installed: {to_install(package, *also)}"


def explain_import(error: ImportError) -> str | None:
    """Return the error message for a package that is missing or too old; None for any other import error."""
    module = (error.name or "").partition(".")[0]
    package = "PyYAML" if module == "yaml" else module
    if module in ("", "offload_trainer"):
        return None
    if old := too_old(package) if package in _BOUNDS else None:
        return f"{package} {old} is too old: {to_install(package)}"
    if isinstance(error, ModuleNotFoundError) and not is_installed(module):
        return f"the package {package} is not installed: {to_install(package)}"
    return None


def _numbers(text: str) -> tuple[int, ...]:
    """Return a version's leading numbers without trailing zeros: 2.9.0+cu128 -> (2, 9)."""
    numbers = [int(part) for part in re.split(r"[^\d.]", text)[0].split(".") if part]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
