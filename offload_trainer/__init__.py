"""Train every parameter of a transformer far larger than the GPU, and larger than host memory, on one GPU.

session = offload_trainer.load("Qwen/Qwen3-8B", nvme=["/mnt/ssd"])      or offload(module): docs/library.md
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["NonFiniteGradient", "Session", "TrainerError", "UserError", "load", "offload"]

if TYPE_CHECKING:
    from offload_trainer.errors import NonFiniteGradient, TrainerError, UserError
    from offload_trainer.session.api import load, offload
    from offload_trainer.session.session import Session


def __getattr__(name: str) -> Any:
    """The library on first use: a plan, or a command's --help, needs none of it."""
    if name in ("load", "offload"):
        from offload_trainer.session import api

        return getattr(api, name)
    if name == "Session":
        from offload_trainer.session.session import Session

        return Session
    if name in __all__:
        from offload_trainer import errors

        return getattr(errors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
