"""Rows of fixed length from token files or a stream: their order, mixtures of several files, and batches of them.

The order is computed, so the whole state of the data is one number: a position in the run gives an epoch and a place in
it, this a row, and a row R of length L is tokens[R * L : R * L + L + 1]. With micro-batches of one size, the rows of a
step and the seeds of their forwards do not depend on how they are divided over ranks and gradient accumulation.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.data.stream import StreamedTokens
from offload_trainer.data.tokenfile import BEGINS, IDS, NOT_LEARNED, TokenFile

IGNORED = -100  # a target that is not counted in the loss; the same value as in torch and transformers
_STRETCHES, _CHARACTERS = 16, 300  # lines shown of the first row, and characters of each


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
        for turn in range(8):
            mixed = hashlib.blake2b(right.to_bytes(8, "little"), digest_size=8, key=key, salt=bytes([turn]))
            left, right = right, left ^ (int.from_bytes(mixed.digest(), "little") & mask)
        index = left << half_bits | right
        if index < count:
            return index


class Split(NamedTuple):
    """Row numbers for training, and those for validation after them."""

    train: range
    validation: range


def split_rows(token_count: int, *, seq_len: int, validation: float, name: str = "the text") -> Split:
    """Divide the rows of a token file into training rows and, at the end, a share `validation` of held-out rows.

    There is at least one held-out row if `validation` is above 0. A row needs `seq_len` tokens and the one after, which
    is the next row's first: there are (token_count - 1) // seq_len rows, and no token is predicted in both parts.
    Raises UserError, with `name`, if no row is left to train on.
    """
    rows = (token_count - 1) // seq_len
    held_out = max(1, int(rows * validation)) if validation > 0 else 0
    if rows - held_out < 1:
        needed = (1 + (held_out > 0)) * seq_len + 1
        raise UserError(
            f"{name} has {token_count} tokens, and one row of {seq_len}"
            f"{' and one for validation' if held_out else ''} needs {needed}: "
            f"give more text, a smaller --seq-len{', or data.validation=0' if held_out else ''}"
        )
    return Split(train=range(rows - held_out), validation=range(rows - held_out, rows))


def shares_of(total: int, weights: Sequence[float]) -> list[int]:
    """Return `total` divided by weight, rounded down; the largest remainders, on ties the first, get one more."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    for number in sorted(range(len(exact)), key=lambda n: counts[n] - exact[n])[: total - sum(counts)]:
        counts[number] += 1
    return counts


class JoinedFiles:
    """Ids of several token files, one file after the other. Has the attributes of a `TokenFile` for readers."""

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self._files, self.name = tuple(files), f"{files[0].name} and {len(files) - 1} more"
        self.paths = tuple(path for file in files for path in file.paths)
        self.sums = tuple(crc for file in files for crc in (len(file), *file.sums))
        self.row_length, self.packed = files[0].row_length, files[0].packed
        self.tokenizer = files[0].tokenizer if len({file.tokenizer for file in files}) == 1 else None
        self.summary = "; ".join(file.summary for file in files if file.summary) or None

    def __len__(self) -> int:
        return sum(map(len, self._files))

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` ids from `start` on, as `TokenFile.read` does."""
        ends = [0, *accumulate(map(len, self._files))]
        parts = [
            file.read(max(start - begin, 0), min(start + count, end) - max(start, begin))
            for file, (begin, end) in zip(self._files, pairwise(ends), strict=True)
            if begin < start + count and start < end
        ]
        return np.concatenate(parts)


class Mixture(JoinedFiles):
    """The rows of several token files of one kind. Has the attributes of a `TokenFile` for readers.

    Rows 0 .. T-1 are for training, one file's after the other's; then come the held-out rows of all files, shuffled. Of
    the T places of an epoch file i has m_i = T * weight_i / sum of weights, rounded so that they sum to T. The run's
    shuffle maps a place to a file i and k < m_i, which is the file's own row number epoch * m_i + k in its own epochs
    and shuffles: a small file repeats more often, and a large one supplies other rows in each epoch.
    """

    def __init__(
        self,
        files: Sequence[TokenFile],
        weights: Sequence[float],
        *,
        names: Sequence[str],
        seq_len: int,
        validation: float,
    ) -> None:
        """Hold out the last share `validation` of each file's rows."""
        super().__init__(files)
        for what in ("row_length", "packed"):
            if len(values := {str(getattr(file, what)): name for file, name in zip(files, names, strict=True)}) > 1:
                listing = " and ".join(f"{name} ({what.replace('_', ' ')} {value})" for value, name in values.items())
                raise UserError(f"data.mixture: {listing} differ in kind: use only conversations, or only text")
        self._seq_len = seq_len
        self.splits = tuple(
            split_rows(len(file), seq_len=seq_len, validation=validation, name=f"data.mixture: {name}")
            for file, name in zip(files, names, strict=True)
        )
        self._rows = [len(split.train) for split in self.splits]
        total = sum(self._rows)
        self.counts = shares_of(total, weights)
        if 0 in self.counts:
            name = names[self.counts.index(0)]
            raise UserError(f"data.mixture: {name} would have no row in an epoch of {total}: give it a larger weight")
        self.told = f"mixture, in an epoch of {total} rows: " + "; ".join(
            f"{name} {count / total:.1%} of the rows, each {count / rows:.3g} times"
            for name, count, rows in zip(names, self.counts, self._rows, strict=True)
        )
        self.name = " and ".join(file.name for file in files)

    def __len__(self) -> int:
        return sum(len(rows) for split in self.splits for rows in split) * self._seq_len + 1

    def row(self, position: int, *, seed: int) -> int:
        """Return the number, counted over all files, of the row at this position of the run."""
        ends = list(accumulate(self.counts))
        epoch, place = divmod(position, ends[-1])
        place = order(place, ends[-1], seed=seed, epoch=epoch)
        file = bisect_right(ends, place)
        own = epoch * self.counts[file] + place - (ends[file] - self.counts[file])
        around, place = divmod(own, self._rows[file])
        # A shuffle for each file and each pass over it, negative so that it differs from every epoch of the run.
        drawn = -1 - (around * len(self._rows) + file)
        return sum(self._rows[:file]) + order(place, self._rows[file], seed=seed, epoch=drawn)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return one row and the id after it, as `TokenFile.read` does."""
        row, inside = divmod(start, self._seq_len)
        assert (inside, count) == (0, self._seq_len + 1), (start, count)
        train, validation = zip(*self.splits, strict=True)
        trained, held_out = (sum(map(len, parts)) for parts in (train, validation))
        if row >= trained:  # shuffled, so that the first rows, which evaluations use, come from all texts
            row = trained + order(row - trained, held_out, seed=0, epoch=0)
        for file, rows in zip(self._files * 2, (*train, *validation), strict=True):
            if row < len(rows):
                return file.read(rows[row] * self._seq_len, count)
            row -= len(rows)
        raise AssertionError(start)


Tokens = TokenFile | JoinedFiles  # also a Mixture


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one micro-batch, with the number of rows that all ranks have read after it, from which to resume.

    `inputs` and `targets` are int64 [rows, seq_len]; a target is the token after its input, or IGNORED. `positions`, of
    the same shape, restart at 0 with each document if the documents of a row are kept apart. `padding` is the number of
    inputs that only fill up rows of conversations. `seed` determines dropout and router noise of a training forward.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    data_position: int = 0
    seed: int = 0
    positions: torch.Tensor | None = None
    padding: int = 0

    @property
    def tokens(self) -> int:
        """Number of inputs that are not padding."""
        return self.inputs.numel() - self.padding

    @property
    def counted(self) -> int:
        """Number of targets that are counted in the loss."""
        return int((self.targets != IGNORED).sum())

    def arguments(self, device: torch.device, *, training: bool) -> tuple[Any, ...]:
        """Return the arguments of a loss (model/loss.py) on `device`: inputs, targets, seed, count, positions."""
        positions = None if self.positions is None else _copied(self.positions, device)
        seed = self.seed if training else None
        return _copied(self.inputs, device), _copied(self.targets, device), seed, self.counted, positions


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` on `device`. A copy from pageable memory would wait for all that a GPU has queued."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def weights_in_step(counts: Sequence[int]) -> list[float]:
    """Return the weight of each micro-batch's mean loss in the mean over the step's targets.

    They are `counts`, the counted targets, over their mean: 1.0 if all are equal. Raises TrainerError without any.
    """
    total = sum(counts)
    if not total:
        raise TrainerError(f"a step of {len(counts)} micro-batches has no target in the loss: all are {IGNORED}")
    return [count * len(counts) / total for count in counts]


def padding_of(marks: np.ndarray) -> np.ndarray:
    """Return the number of padding tokens at the end of each row of marked ids, shape [rows, tokens]."""
    places = np.arange(marks.shape[1])
    last = np.where(marks & BEGINS, places, 0).max(axis=1)
    learned = (marks & NOT_LEARNED == 0) & (places >= last[:, None])
    return np.where(learned.any(axis=1), 0, marks.shape[1] - last)


def first_row(tokens: Tokens | StreamedTokens, tokenizer: PreTrainedTokenizerBase, *, seq_len: int) -> list[str]:
    """Return the first row as text, one line per span with or without loss, and one with the padding's length."""
    row = tokens.read(0, seq_len + 1)[:-1].astype(np.int64)  # ids of text have no marks
    ids, learned = (row & IDS).tolist(), (row & NOT_LEARNED == 0).tolist()
    text_end = seq_len - int(padding_of(row[None])[0])
    begins = [place for place in range(text_end) if row[place] & BEGINS] or [0]
    printed = []
    for number, (start, end) in enumerate(zip(begins, [*begins[1:], text_end], strict=True), 1):
        printed += [f"conversation {number} of {len(begins)}:"] if len(begins) > 1 else []
        for is_learned, places in groupby(range(start, end), key=learned.__getitem__):
            text = tokenizer.decode([ids[place] for place in places])
            shown = repr(text) if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]!r}..."
            printed.append(f"{'learned' if is_learned else 'given':<8} {shown}")
    hidden = len(printed) - _STRETCHES
    lines = [*printed[:_STRETCHES], *([f"... and {hidden} more lines"] if hidden > 0 else [])]
    if text_end < seq_len:
        lines.append(f"{'padding':<8} {seq_len - text_end} x {tokenizer.decode(ids[-1:])!r}")
    return ["the first row:", *(f"  {line}" for line in lines)]


@dataclass(frozen=True, eq=False)
class RowReader:
    """Reads batches from the rows `rows` of a token file or a stream. The caller holds the position.

    Reading an id that is not below `vocabulary` raises TrainerError. `apart` is the id that ends a document of text, if
    documents are to be kept apart; rows of conversations are marked already. If `shuffle` is set, the rows of a mixture
    come by its shares instead of each once an epoch, and those of a stream are shuffled in its blocks.
    """

    tokens: Tokens | StreamedTokens
    seq_len: int
    rows: range
    vocabulary: int
    seed: int = 0
    shuffle: bool = False
    apart: int | None = None

    def train_batches(self, position: int, *, micro_batch: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Yield this rank's micro-batches from row `position` of the run on, epoch after epoch, without end.

        Each step takes the next micro_batch * world rows of the order, and this rank takes its micro_batch of those.
        Two ranks therefore see in a step what one rank sees that accumulates twice, with the same dropout.
        """
        assert 0 <= rank < world
        while True:
            first = position + rank * micro_batch
            indices = [self._row(place) for place in range(first, first + micro_batch)]
            position += micro_batch * world
            drawn = hashlib.blake2b(f"forward {self.seed} {first}".encode(), digest_size=8).digest()
            yield self.rows_at(indices, data_position=position, seed=int.from_bytes(drawn, "little") >> 1)

    def validation_batches(self, *, micro_batch: int, limit: int) -> Iterator[Batch]:
        """Yield the first `limit` rows in the file's order, the same each time; the last batch may be smaller."""
        rows = self.rows[:limit]
        for start in range(0, len(rows), micro_batch):
            yield self.rows_at(rows[start : start + micro_batch])

    def rows_at(self, indices: Sequence[int], *, data_position: int = 0, seed: int = 0) -> Batch:
        """Return the rows with these numbers, counted from the file's beginning."""
        length = self.seq_len
        ids = np.stack([self.tokens.read(i * length, length + 1) for i in indices]).astype(np.int64)
        is_marked = self.tokens.row_length is not None
        marks = ids & ~IDS if is_marked else np.zeros_like(ids)
        ids ^= marks
        if ids.max() >= self.vocabulary:
            row = indices[int(ids.max(axis=1).argmax())]
            raise TrainerError(
                f"{self.tokens.name}: row {row} holds id {ids.max()}, and the model's vocabulary is "
                f"{self.vocabulary}: the file was changed or damaged; create it again"
            )
        targets = np.where(marks[:, 1:] & NOT_LEARNED, IGNORED, ids[:, 1:])
        padding = int(padding_of(marks[:, :-1]).sum())
        begins = None
        if is_marked and self.tokens.packed:
            begins = marks[:, :-1] & BEGINS != 0
        elif self.apart is not None and not is_marked:
            begins = np.zeros_like(targets, dtype=bool)
            begins[:, 1:] = ids[:, :-2] == self.apart
        positions = None
        if begins is not None:  # tokens before the first mark count from the row's start
            places = np.arange(length)
            positions = torch.from_numpy(places - np.maximum.accumulate(np.where(begins, places, 0), axis=1))
        inputs = torch.from_numpy(ids[:, :-1].copy())
        return Batch(inputs, torch.from_numpy(targets), data_position, seed=seed, positions=positions, padding=padding)

    def _row(self, position: int) -> int:
        if self.shuffle and isinstance(self.tokens, Mixture):
            return self.tokens.row(position, seed=self.seed)
        block = self.tokens.block if self.shuffle and isinstance(self.tokens, StreamedTokens) else 0
        count = block or len(self.rows)  # Each block of a stream is shuffled as an epoch is.
        epoch, place = divmod(position, count)
        if self.shuffle:
            place = order(place, count, seed=self.seed, epoch=epoch)
        return self.rows[epoch * block + place]
