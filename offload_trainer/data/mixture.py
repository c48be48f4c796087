"""Several token files read as one, one after the other or mixed by weights, and the order in which rows are read.

    joined(files)          their ids follow each other as in a single file; rows cross from one file into the next
    mixed(files, weights)  in each epoch every text supplies a fixed share of the rows, exact to the row:

    rows     0 .. T-1 are for training, one text's after the other's; then V rows for validation, drawn from all texts
    epoch    T places, of which text i has m_i = T * weight_i / sum of weights, rounded so that they sum to T
    place    -> by the run's shuffle, text i and k < m_i -> the text's own row number epoch * m_i + k, in its own epochs
                and shuffles: a small text repeats more often, and a large one supplies other rows in each epoch

All of it is computed from a row's position in the run, so a run needs only that number to resume.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from offload_trainer.data.tokenfile import TokenFile
from offload_trainer.errors import UserError

_ROUNDS = 8


def order(index: int, count: int, *, seed: int, epoch: int) -> int:
    """Return the row at place `index` of an epoch, by a permutation of range(count) determined by seed and epoch.

    It takes O(1) time and memory: a balanced Feistel network permutes the next power of four, and a value outside
    range(count) is permuted again until it falls inside (cycle walking: Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", 2002), under 4 times on average. The result is the same on every machine and version.
    """
    assert 0 <= index < count
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    key = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=16).digest()
    while True:
        left, right = index >> half_bits, index & mask
        for turn in range(_ROUNDS):
            mixed = hashlib.blake2b(right.to_bytes(8, "little"), digest_size=8, key=key, salt=bytes([turn]))
            left, right = right, left ^ (int.from_bytes(mixed.digest(), "little") & mask)
        index = left << half_bits | right
        if index < count:
            return index


# -- rows ------------------------------------------------------------------------------------------------------------


class Split(NamedTuple):
    """Row numbers for training, and those for validation after them."""

    train: range
    validation: range


def split_rows(token_count: int, *, seq_len: int, validation: float, name: str = "the text") -> Split:
    """Divide the rows of a token file into training rows and, at the end, a share `validation` of held-out rows.

    There is at least one held-out row if `validation` is above 0. A row needs `seq_len` tokens and the one after, which
    is the next row's first: there are (token_count - 1) // seq_len rows, and tokens after the last are not used. No
    token is predicted in both training and validation: the last training row's last target is the first validation
    row's first input.

    Raises UserError, with `name`, if no row is left to train on.
    """
    rows = (token_count - 1) // seq_len
    held_out = max(1, int(rows * validation)) if validation > 0 else 0
    if rows - held_out < 1:
        needed = (1 + (held_out > 0)) * seq_len + 1
        raise UserError(
            f"{name} has {token_count} tokens, and one training row of {seq_len}"
            f"{' and one for validation' if held_out else ''} needs {needed}: "
            f"give more text, a smaller --seq-len{', or data.validation=0' if held_out else ''}"
        )
    return Split(train=range(rows - held_out), validation=range(rows - held_out, rows))


class Shares:
    """The rows of an epoch: `rows[i]` is the number of rows that text i has, `weights[i]` its relative share."""

    def __init__(self, rows: Sequence[int], weights: Sequence[float]) -> None:
        self.rows, self._starts = tuple(rows), [0, *accumulate(rows)]
        # Rows by weight, rounded down; the largest remainders, on ties the first, get one more.
        exact = [sum(rows) * weight / sum(weights) for weight in weights]
        self.counts = [int(share) for share in exact]
        rest = sorted(range(len(exact)), key=lambda n: self.counts[n] - exact[n])
        for text in rest[: sum(rows) - sum(self.counts)]:
            self.counts[text] += 1
        self._ends = list(accumulate(self.counts))

    def row(self, position: int, *, seed: int) -> int:
        """Return the number, counted over all texts, of the row at this position of the run."""
        epoch, place = divmod(position, self._ends[-1])
        place = order(place, self._ends[-1], seed=seed, epoch=epoch)
        text = bisect_right(self._ends, place)
        own = epoch * self.counts[text] + place - (self._ends[text] - self.counts[text])
        around, place = divmod(own, self.rows[text])
        # A separate shuffle for each text and each pass over it. Negative, so that it differs from every epoch of the
        # run.
        drawn = -1 - (around * len(self.rows) + text)
        return self._starts[text] + order(place, self.rows[text], seed=seed, epoch=drawn)

    def told(self, names: Sequence[str]) -> str:
        """Describe each text's share of an epoch and how often its rows repeat."""
        total = self._ends[-1]
        parts = [
            f"{name} {count / total:.1%} of the rows, each {count / rows:.3g} times"
            for name, count, rows in zip(names, self.counts, self.rows, strict=True)
        ]
        return f"mixture, in an epoch of {total} rows: {'; '.join(parts)}"


# -- several files -----------------------------------------------------------------------------------------------------


class TokenShards:
    """Ids of several token files of one dtype: one file after the other, or the rows of a mixture as numbered above.

    Has the attributes of a `TokenFile` that its readers use. One on which the files disagree is None.
    """

    def __init__(
        self, files: Sequence[Tokens], *, seq_len: int = 0, splits: Sequence[Split] = (), shares: Shares | None = None
    ) -> None:
        """Set the files and, of a mixture alone, the row length, the rows of each text and their shares of an epoch."""
        self._files, self._seq_len, self._splits, self.shares = tuple(files), seq_len, tuple(splits), shares
        first, *others = (file.name for file in files)
        self.name: str = " and ".join([first, *others]) if shares else f"{first} and {len(others)} more"
        self.paths: tuple[Path, ...] = tuple(path for file in files for path in file.paths)
        self.sums: tuple[int, ...] = tuple(crc for file in files for crc in (len(file), *file.sums))
        self.dtype: np.dtype = files[0].dtype
        self.row_length: int | None = files[0].row_length
        self.packed: bool = files[0].packed
        self.tokenizer: str | None = files[0].tokenizer if len({file.tokenizer for file in files}) == 1 else None
        self.summary: str | None = "; ".join(file.summary for file in files if file.summary) or None

    def __len__(self) -> int:
        if self.shares is None:
            return sum(map(len, self._files))
        return sum(len(rows) for split in self._splits for rows in split) * self._seq_len + 1

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` ids from `start` on, in the files' dtype; of a mixture, one row and the one id after it.

        Raises as `TokenFile.read`.
        """
        if self.shares is not None:
            return self._row_of_mixture(start, count)
        assert 0 <= start <= start + count <= len(self), (start, count, len(self))
        parts = []
        for file, end in zip(self._files, accumulate(map(len, self._files)), strict=True):
            begin = end - len(file)
            first, last = max(start, begin), min(start + count, end)
            if first < last:
                parts.append(file.read(first - begin, last - first))
        return np.concatenate(parts) if parts else np.empty(0, dtype=self.dtype)

    def _row_of_mixture(self, start: int, count: int) -> np.ndarray:
        row, inside = divmod(start, self._seq_len)
        assert inside == 0, start
        assert count == self._seq_len + 1, count
        train, validation = zip(*self._splits, strict=True)
        trained, held_out = (sum(map(len, parts)) for parts in (train, validation))
        if row >= trained:  # shuffled, so that the first rows, which evaluations use, come from all texts
            row = trained + order(row - trained, held_out, seed=0, epoch=0)
        for file, rows in zip(self._files * 2, (*train, *validation), strict=True):
            if row < len(rows):
                return file.read(rows[row] * self._seq_len, count)
            row -= len(rows)
        raise AssertionError(start)


Tokens = TokenFile | TokenShards


def joined(files: Sequence[TokenFile]) -> Tokens:
    """Return the files as one sequence of ids.

    Raises UserError if they differ in dtype, tokenizer, vocabulary or end-of-text (a file that does not state a value
    fits any), or if one of several files holds rows of conversations.
    """
    for what in ("dtype", "tokenizer", "vocabulary", "end_of_text"):
        values = {str(getattr(file, what)): file.path for file in files if getattr(file, what) is not None}
        if len(values) > 1:
            listing = ", ".join(f"{value} in {path}" for value, path in values.items())
            raise UserError(f"the token files differ: their {what.replace('_', ' ')} is {listing}; make them equal")
    if len(files) > 1 and (rows := [str(file.path) for file in files if file.row_length]):
        raise UserError(
            f"{rows[0]} holds conversations in rows, but is one of {len(files)} files: use it alone, or give "
            "the conversations of all files as .jsonl"
        )
    return files[0] if len(files) == 1 else TokenShards(files)


def mixed(
    files: Sequence[Tokens], weights: Sequence[float], *, names: Sequence[str], seq_len: int, validation: float
) -> TokenShards:
    """Return the texts as one mixture, with the last share `validation` of each text's rows held out.

    Raises UserError if they are not of one kind, or a text has too few rows.
    """
    for what in ("dtype", "row_length", "packed"):
        if len(values := {str(getattr(file, what)): name for file, name in zip(files, names, strict=True)}) > 1:
            listing = " and ".join(f"{name} ({what.replace('_', ' ')} {value})" for value, name in values.items())
            raise UserError(f"data.mixture: {listing} differ in kind: use only conversations, or only text")
    splits = tuple(
        split_rows(len(file), seq_len=seq_len, validation=validation, name=f"data.mixture: {name}")
        for file, name in zip(files, names, strict=True)
    )
    shares = Shares([len(split.train) for split in splits], weights)
    if 0 in shares.counts:
        name = names[shares.counts.index(0)]
        raise UserError(
            f"data.mixture: {name} would have no row in an epoch of {sum(shares.rows)}: give it a larger weight"
        )
    return TokenShards(files, seq_len=seq_len, splits=splits, shares=shares)
