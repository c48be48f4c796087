"""Batches of fixed-length rows from token files, in a shuffled order in which any position is computed directly.

    position in the run -> epoch and place in it -> row -> tokens[row * L : row * L + L + 1]

The whole state of the data is therefore one number, and resuming reads nothing again. The rows of a step and the seeds
of their forwards do not depend on how they are divided over ranks and gradient accumulation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offload_trainer.data.mixture import Tokens, TokenShards, order
from offload_trainer.data.stream import StreamedTokens
from offload_trainer.data.tokenfile import BEGINS, IDS, NOT_LEARNED
from offload_trainer.errors import TrainerError

IGNORED = -100  # a target that is not counted in the loss; the same value as in torch and transformers


@dataclass(frozen=True)
class DataState:
    """Position of a run: the number of rows consumed since its first step, by all ranks together."""

    position: int = 0


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one micro-batch, with the state to resume from after it.

    `inputs` and `targets` are int64 [rows, seq_len]; a target is the token after its input, or IGNORED. `positions`, of
    the same shape, restart at 0 with each document if the documents of a row are kept apart. `padding` is the number of
    inputs, over all rows, that only fill up rows of conversations. `seed` determines everything random in a training
    forward (dropout, router noise).
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    state: DataState
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

    def piece(self, number: int, *, of: int) -> Batch:
        """Return piece `number` of `of` equal pieces along the sequence; its tokens keep their positions in the row.

        Each piece gets a different seed.
        """
        if of == 1:
            return self
        assert self.positions is None, "rows of several documents"
        rows, length = self.inputs.shape[0], self.inputs.shape[1] // of
        here = slice(number * length, (number + 1) * length)
        return Batch(
            self.inputs[:, here],
            self.targets[:, here],
            self.state,
            seed=forward_seed(self.seed, first=number),
            positions=torch.arange(here.start, here.stop).expand(rows, -1),
        )

    def arguments(self, place: torch.device, *, training: bool) -> tuple[Any, ...]:
        """Return the arguments of a loss (model/loss.py) on device `place`: inputs, targets, seed, count, positions."""
        positions = None if self.positions is None else _copied(self.positions, place)
        seed = self.seed if training else None
        return _copied(self.inputs, place), _copied(self.targets, place), seed, self.counted, positions


def _copied(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """Return `tensor` on device `place`. A copy from pageable memory would wait for all that a GPU has queued."""
    return tensor.pin_memory().to(place, non_blocking=True) if place.type == "cuda" else tensor.to(place)


def weights_in_step(counts: Sequence[int]) -> list[float]:
    """Return the weight of each micro-batch's mean loss in the mean over the step's targets.

    `counts` are the counted targets of the micro-batches. The weights are `counts` over their mean, exactly 1.0 if all
    are equal. Raises TrainerError if nothing is counted.
    """
    total = sum(counts)
    if not total:
        raise TrainerError(f"a step of {len(counts)} micro-batches has no target in the loss: all are {IGNORED}")
    return [count * len(counts) / total for count in counts]


def forward_seed(seed: int, *, first: int) -> int:
    """Return the seed of the forward of the micro-batch whose first row is number `first` of the run, over all ranks.

    It depends on no history and is the same on every rank and engine.
    """
    return int.from_bytes(hashlib.blake2b(f"forward {seed} {first}".encode(), digest_size=8).digest(), "little") >> 1


def padding_of(marks: np.ndarray) -> np.ndarray:
    """Return the number of padding tokens at the end of each row of marked ids, shape [rows, tokens]."""
    places = np.arange(marks.shape[1])
    last = np.where(marks & BEGINS, places, 0).max(axis=1)
    learned = (marks & NOT_LEARNED == 0) & (places >= last[:, None])
    found: np.ndarray = np.where(learned.any(axis=1), 0, marks.shape[1] - last)
    return found


def positions_of(begins: np.ndarray) -> np.ndarray:
    """Return each token's position in its document, int64 [rows, tokens].

    `begins`, bool of the same shape, marks where documents begin. Tokens before the first mark count from the row's
    start.
    """
    places = np.arange(begins.shape[1])
    found: np.ndarray = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return found


@dataclass(frozen=True, eq=False)
class RowReader:
    """Reads batches from the rows `rows` of a token file or a stream. The caller's `DataState` holds the position.

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

    def train_batches(self, state: DataState, *, micro_batch: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Yield this rank's micro-batches from `state` on, epoch after epoch, without end.

        Each step takes the next micro_batch * world rows of the order, and this rank takes its micro_batch of those.
        Two ranks therefore see in a step what one rank sees that accumulates twice, with the same dropout.
        """
        assert 0 <= rank < world
        position = state.position
        while True:
            first = position + rank * micro_batch
            indices = [self._row(place) for place in range(first, first + micro_batch)]
            position += micro_batch * world
            yield self.rows_at(indices, state=DataState(position), seed=forward_seed(self.seed, first=first))

    def validation_batches(self, *, micro_batch: int, limit: int) -> Iterator[Batch]:
        """Yield the first `limit` rows in the file's order, the same each time; the last batch may be smaller.

        `state` counts the rows of this pass.
        """
        rows = self.rows[:limit]
        for start in range(0, len(rows), micro_batch):
            some = rows[start : start + micro_batch]
            yield self.rows_at(some, state=DataState(start + len(some)))

    def rows_at(self, indices: Sequence[int], *, state: DataState = DataState(), seed: int = 0) -> Batch:
        """Return the rows with these numbers, counted from the file's beginning."""
        length = self.seq_len
        block = np.stack([self.tokens.read(i * length, length + 1) for i in indices]).astype(np.int64)
        marks, padding = None, 0
        if self.tokens.row_length is not None:
            marks, block = block, block & IDS
            padding = int(padding_of(marks[:, :-1]).sum())
        if block.max() >= self.vocabulary:
            row = indices[int(block.max(axis=1).argmax())]
            raise TrainerError(
                f"{self.tokens.name}: row {row} holds id {block.max()}, and the model's vocabulary is "
                f"{self.vocabulary}: the file was changed or damaged; create it again"
            )
        targets = block[:, 1:].copy()
        if marks is not None:
            targets[marks[:, 1:] & NOT_LEARNED != 0] = IGNORED
        begins = None
        if self.tokens.packed and marks is not None:
            begins = marks[:, :-1] & BEGINS != 0
        elif self.apart is not None and marks is None:
            begins = np.zeros_like(targets, dtype=bool)
            begins[:, 1:] = block[:, :-2] == self.apart
        positions = None if begins is None else torch.from_numpy(positions_of(begins))
        inputs = torch.from_numpy(block[:, :-1].copy())
        return Batch(inputs, torch.from_numpy(targets), state, seed=seed, positions=positions, padding=padding)

    def _row(self, position: int) -> int:
        if self.shuffle and isinstance(self.tokens, TokenShards) and self.tokens.shares is not None:
            return self.tokens.shares.row(position, seed=self.seed)
        block = self.tokens.block if self.shuffle and isinstance(self.tokens, StreamedTokens) else 0
        count = block or len(self.rows)  # Each block of a stream is shuffled as an epoch is.
        epoch, place = divmod(position, count)
        if self.shuffle:
            place = order(place, count, seed=self.seed, epoch=epoch)
        return self.rows[epoch * block + place]
