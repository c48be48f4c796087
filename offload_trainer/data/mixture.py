"""Mixtures of several texts: in each epoch every text supplies a fixed share of the rows, exact to the row.

    rows     0 .. T-1 are for training, one text's after the other's; then V rows for validation, drawn from all texts
    epoch    T places, of which text i has m_i = T * weight_i / sum of weights, rounded so that they sum to T
    place    -> by the run's shuffle, text i and k < m_i -> the text's own row number epoch * m_i + k, in its own epochs
                and shuffles: a small text repeats more often, and a large one supplies other rows in each epoch

All of it is computed from a row's position in the run, so a run needs only that number to resume.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from offload_trainer.data.concat import Tokens
from offload_trainer.data.order import order
from offload_trainer.errors import UserError


@dataclass(frozen=True, eq=False)
class _Part:
    """`count` rows of one text, from its row number `first` on."""

    tokens: Tokens
    first: int
    count: int


@dataclass(frozen=True, eq=False)
class MixedTokens:
    """Token files read as one sequence of rows in the numbering above; ids are read one row at a time.

    An attribute on which the files disagree, or that one lacks, is None.
    """

    files: tuple[Tokens, ...]
    train: tuple[_Part, ...]
    validation: tuple[_Part, ...]
    seq_len: int
    weights: tuple[float, ...]

    @property
    def name(self) -> str:
        return " and ".join(file.name for file in self.files)

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for file in self.files for path in file.paths)

    @property
    def sums(self) -> tuple[int, ...]:
        return tuple(crc for file in self.files for crc in (len(file), *file.sums))

    @property
    def row_length(self) -> int | None:
        return self.files[0].row_length

    @property
    def packed(self) -> bool:
        return self.files[0].packed

    @property
    def tokenizer(self) -> str | None:
        first = self.files[0].tokenizer
        return first if all(file.tokenizer == first for file in self.files) else None

    @property
    def summary(self) -> str | None:
        return "; ".join(file.summary for file in self.files if file.summary) or None

    def __len__(self) -> int:
        return sum(part.count for part in (*self.train, *self.validation)) * self.seq_len + 1

    def read(self, start: int, count: int) -> np.ndarray:
        """Return the ids of one row and the one id after it. Raises as `TokenFile.read`."""
        row, inside = divmod(start, self.seq_len)
        assert inside == 0, start
        assert count == self.seq_len + 1, count
        trained = sum(part.count for part in self.train)
        if row < trained:
            part, number = _found(self.train, row)
        else:
            held_out = sum(part.count for part in self.validation)
            # Shuffled, so that the first rows, which evaluations use, come from all texts.
            part, number = _found(self.validation, order(row - trained, held_out, seed=0, epoch=0, shuffle=True))
        return part.tokens.read((part.first + number) * self.seq_len, count)

    @property
    def shares(self) -> Shares:
        return Shares(tuple(part.count for part in self.train), self.weights)


def _found(parts: Sequence[_Part], number: int) -> tuple[_Part, int]:
    """Return the part that contains the row with this overall number, and the row's number in the part."""
    for part in parts:
        if number < part.count:
            return part, number
        number -= part.count
    raise AssertionError(number)


class Shares:
    """The rows of an epoch: `rows[i]` is the number of rows that text i has, `weights[i]` its relative share."""

    def __init__(self, rows: Sequence[int], weights: Sequence[float]) -> None:
        self.rows, self._starts = tuple(rows), [0, *accumulate(rows)]
        self.counts = _divided(sum(rows), weights)
        self._ends = list(accumulate(self.counts))

    def row(self, position: int, *, seed: int) -> int:
        """Return the number, counted over all texts, of the row at this position of the run."""
        epoch, place = divmod(position, self._ends[-1])
        place = order(place, self._ends[-1], seed=seed, epoch=epoch, shuffle=True)
        text = bisect_right(self._ends, place)
        own = epoch * self.counts[text] + place - (self._ends[text] - self.counts[text])
        around, place = divmod(own, self.rows[text])
        # A separate shuffle for each text and each pass over it. Negative, so that it differs from every epoch of the
        # run.
        drawn = -1 - (around * len(self.rows) + text)
        return self._starts[text] + order(place, self.rows[text], seed=seed, epoch=drawn, shuffle=True)

    def told(self, names: Sequence[str]) -> str:
        """Describe each text's share of an epoch and how often its rows repeat."""
        total = self._ends[-1]
        parts = [
            f"{name} {count / total:.1%} of the rows, each {count / rows:.3g} times"
            for name, count, rows in zip(names, self.counts, self.rows, strict=True)
        ]
        return f"mixture, in an epoch of {total} rows: {'; '.join(parts)}"


def _divided(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` by the weights into whole numbers, rounding up the largest remainders; on ties the first."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    rest = sorted(range(len(exact)), key=lambda n: counts[n] - exact[n])
    for place in rest[: total - sum(counts)]:
        counts[place] += 1
    return counts


def mixed(
    files: Sequence[Tokens], weights: Sequence[float], *, names: Sequence[str], seq_len: int, validation: float
) -> MixedTokens:
    """Return the texts as one mixture, with the last share `validation` of each text's rows held out.

    Raises UserError if they are not of one kind, or a text has too few rows.
    """
    for what in ("dtype", "row_length", "packed"):
        if len(said := {str(getattr(file, what)): name for file, name in zip(files, names, strict=True)}) > 1:
            told = " and ".join(f"{name} ({what.replace('_', ' ')} {value})" for value, name in said.items())
            raise UserError(f"data.mixture: {told} differ in kind: use only conversations, or only text")
    train, held_out = [], []
    for file, name in zip(files, names, strict=True):
        rows = (len(file) - 1) // seq_len
        kept = max(1, int(rows * validation)) if validation > 0 else 0
        if rows - kept < 1:
            raise UserError(
                f"data.mixture: {name} has {len(file)} tokens, and one row of {seq_len} to train on"
                f"{' and one for validation' if kept else ''} needs {(1 + (kept > 0)) * seq_len + 1}: give more of it, "
                f"a smaller --seq-len{', or data.validation=0' if kept else ''}"
            )
        train.append(_Part(file, 0, rows - kept))
        held_out.append(_Part(file, rows - kept, kept))
    found = MixedTokens(tuple(files), tuple(train), tuple(held_out), seq_len, tuple(weights))
    if 0 in found.shares.counts:
        name = names[found.shares.counts.index(0)]
        raise UserError(
            f"data.mixture: {name} would have no row in an epoch of {sum(found.shares.rows)}: give it a larger weight"
        )
    return found
