"""Several token files read as one: their ids follow each other in the given order, as in a single file.

Rows cross from one file into the next as they do from document to document, and no token at a file's end is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from offload_trainer.data.tokenfile import TokenFile
from offload_trainer.errors import UserError


@dataclass(frozen=True, eq=False)
class TokenShards:
    """Ids of several token files of one dtype. An attribute on which the files disagree, or that one lacks, is None."""

    files: tuple[TokenFile, ...]

    @property
    def name(self) -> str:
        return f"{self.files[0].path} and {len(self.files) - 1} more"

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(file.path for file in self.files)

    @property
    def dtype(self) -> np.dtype:
        return self.files[0].dtype

    @property
    def sums(self) -> tuple[int, ...]:
        return tuple(crc for file in self.files for crc in (file.tokens, *file.sums))

    @property
    def row_length(self) -> None:
        """None: several files are never files of rows (`joined` refuses those)."""

    @property
    def packed(self) -> bool:
        """False, since several files are never files of rows."""
        return False

    @property
    def summary(self) -> None:
        """None, since several files are never files of rows."""

    @property
    def text_bytes(self) -> int | None:
        sizes = [file.text_bytes for file in self.files]
        return sum(size for size in sizes if size is not None) if None not in sizes else None

    @property
    def tokenizer(self) -> str | None:
        first = self.files[0].tokenizer
        return first if all(file.tokenizer == first for file in self.files) else None

    def __len__(self) -> int:
        return sum(map(len, self.files))

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` ids from `start` on, in the files' dtype. Raises as `TokenFile.read`."""
        assert 0 <= start <= start + count <= len(self), (start, count, len(self))
        parts = []
        for file, end in zip(self.files, accumulate(map(len, self.files)), strict=True):
            begin = end - len(file)
            first, last = max(start, begin), min(start + count, end)
            if first < last:
                parts.append(file.read(first - begin, last - first))
        return np.concatenate(parts) if parts else np.empty(0, dtype=self.dtype)


Tokens = TokenFile | TokenShards


def joined(files: Sequence[TokenFile]) -> Tokens:
    """Return the files as one sequence of ids.

    Raises UserError if they differ in dtype, tokenizer, vocabulary or end-of-text (a file that does not state a value
    fits any), or if one of several files holds rows of conversations.
    """
    for what in ("dtype", "tokenizer", "vocabulary", "end_of_text"):
        said = {str(getattr(file, what)): file.path for file in files if getattr(file, what) is not None}
        if len(said) > 1:
            told = ", ".join(f"{value} in {path}" for value, path in said.items())
            raise UserError(f"the token files differ: their {what.replace('_', ' ')} is {told}; make them equal")
    if len(files) > 1 and (rows := [str(file.path) for file in files if file.row_length]):
        raise UserError(
            f"{rows[0]} holds conversations in rows, but is one of {len(files)} files: use it alone, or give "
            "the conversations of all files as .jsonl"
        )
    return files[0] if len(files) == 1 else TokenShards(tuple(files))
