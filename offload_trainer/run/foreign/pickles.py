"""Read pickles of other trainers as plain data. No other module of the package reads pickles.

torch's weights-only reader builds tensors, numbers, text and collections, and refuses every other class.

`.metadata` of torch.distributed.checkpoint holds torch's classes in a protocol that the weights-only reader does not
know, and torch's own FileSystemReader reads it with `pickle.load`, which runs what a hostile file names. Here `Record`
stands for these classes, and no other class is built.
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


def load_pickle(source: Path | bytes, *, told: str | None = None) -> Any:
    """Return what `torch.save` has written to a file, or the bytes of one. Tensors of a file are mapped, not read.

    Raises UserError if the file is missing or damaged, or holds an object of another class.
    """
    told = told or str(source)
    try:
        if isinstance(source, Path):
            os.close(open_file(source, links=True))  # refuses pipes, which would block
            return torch.load(source, map_location="cpu", mmap=True, weights_only=True)
        return torch.load(io.BytesIO(source), map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{told} is missing") from None
    except Exception as error:  # a damaged pickle may raise anything
        if named := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise UserError(
                f"{told} holds a {shown(named[1])}, and an import reads tensors and plain data only: save the "
                "checkpoint without that object"
            ) from error
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{told} cannot be read as a file of torch.save: {shown(why)}") from error


class Record:
    """The attributes of a pickled object, without its class."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


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
    ("builtins", "getattr"): lambda _, name: name,  # an enumeration's member as Python 3.11 stores it
}
