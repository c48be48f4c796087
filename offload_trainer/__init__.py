"""Train every parameter of a transformer larger than GPU memory, or larger than host RAM, on one GPU.

    session = offload_trainer.load("Qwen/Qwen3-8B", nvme=["/mnt/ssd"])

`load` takes a transformers model by name, `offload` any `nn.Module`; docs/library.md describes both.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["NonFiniteGradient", "Session", "TrainerError", "UserError", "load", "offload"]

if TYPE_CHECKING:
    from offload_trainer.common.errors import NonFiniteGradient, TrainerError, UserError
    from offload_trainer.session.api import load, offload
    from offload_trainer.session.session import Session


def __getattr__(name: str) -> Any:
    """Import the library on first use, so that `--help` and mistakes do not load torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    places = {"load": "session.api", "offload": "session.api", "Session": "session.session"}
    return getattr(import_module(f"offload_trainer.{places.get(name, 'common.errors')}"), name)
