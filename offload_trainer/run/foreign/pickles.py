"""Read pickles of other trainers as plain data. No other module of the package reads pickles.

torch's weights-only reader builds tensors, numbers, text and collections, and refuses every other class. Classes that
DeepSpeed's checkpoints always contain are replaced by `Record`, so DeepSpeed need not be installed and none of its code
runs.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from pathlib import Path
from typing import Any, BinaryIO

import torch

from offload_trainer.errors import UserError
from offload_trainer.safe_files import open_file, shown


class Record:
    """The attributes of a pickled object, without its class."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def _member(_: Any, name: str) -> str:
    """Return the name of an enumeration's member, which Python 3.11 stores as getattr(class, name)."""
    return name


# Other versions of Python store such a member as its class and its value, of which `int` makes the value.
_REPLACED: tuple[tuple[Any, str], ...] = (
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_member, "builtins.getattr"),
    (Record, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Record, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Record, "deepspeed.utils.tensor_fragment.fragment_address"),
)


def load_pickle(path: Path) -> Any:
    """Return what `torch.save` has written to `path`. Tensors are mapped from the file and read when they are used.

    Raises UserError if the file is missing or damaged, or holds an object of another class.
    """
    try:
        os.close(open_file(path, links=True))
        with torch.serialization.safe_globals(list(_REPLACED)):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except Exception as error:  # a damaged pickle may raise anything
        if named := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise UserError(
                f"{path} holds a {shown(named[1])}, and an import reads tensors and plain data only: save the "
                "checkpoint without that object"
            ) from error
        told = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{path} cannot be read as a file of torch.save: {shown(told)}") from error


def unpacked(data: bytes, *, told: str) -> Any:
    """Return what `torch.save` has written to a part of a file. Raises UserError as `load_pickle` does."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{told} cannot be read: {shown(why)}") from error


def load_metadata(file: BinaryIO, *, told: str) -> Any:
    """Return the content of a .metadata file of torch.distributed.checkpoint, with `Record` for its classes.

    Raises UserError if the file is damaged, or holds an object of a class that such files do not have.
    """
    try:
        return _Metadata(file).load()
    except Exception as error:  # a damaged pickle may raise anything
        raise UserError(f"{told} cannot be read: {shown(str(error).strip() or type(error).__name__)}") from error


class _Metadata(pickle.Unpickler):
    """Unpickler that builds plain values and `Record`, and calls no function of another module."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"):
            return int if name == "_MEM_FORMAT_ENCODING" else Record
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        raise ValueError(f"it holds a {module}.{name}, which no .metadata file needs")


_PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
    ("pathlib._local", "PosixPath"): lambda *parts: "/".join(parts),
    ("builtins", "getattr"): _member,
}
