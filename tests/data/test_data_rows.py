"""Tests of rows: each epoch is a permutation, batches have the right rows, and resuming changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from offload_trainer.data.mixture import order, split_rows
from offload_trainer.data.rows import Batch, DataState, RowReader
from offload_trainer.data.tokenfile import TokenFile, TokenWriter
from offload_trainer.errors import TrainerError, UserError

SEQ_LEN = 5
ROWS = 13  # none of the micro-batch sizes below divides it


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    """Return a file whose token i is i + 7, so that each token identifies its position."""
    with TokenWriter(tmp_path / "t.bin", tokenizer=None, vocabulary=1000) as writer:
        writer.write(np.arange(ROWS * SEQ_LEN + 1 + 3) + 7)
    return TokenFile.open(tmp_path / "t.bin")


def reader(tokens: TokenFile, rows: range = range(ROWS), *, seed: int = 1, shuffle: bool = True) -> RowReader:
    return RowReader(tokens, seq_len=SEQ_LEN, rows=rows, vocabulary=1000, seed=seed, shuffle=shuffle)


def row_numbers(batch: Batch) -> list[int]:
    return [(int(first) - 7) // SEQ_LEN for first in batch.inputs[:, 0]]


def take(batches: Iterator[Batch], count: int) -> list[Batch]:
    return list(islice(batches, count))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 16, 17, 64, 65, 255, 1000])
@pytest.mark.parametrize("epoch", [0, 1])
def test_order_is_a_permutation(count: int, epoch: int) -> None:
    places = [order(i, count, seed=3, epoch=epoch) for i in range(count)]
    assert sorted(places) == list(range(count))


def test_order_differs_by_epoch_and_seed_and_mixes() -> None:
    def places(*, seed: int, epoch: int) -> np.ndarray:
        return np.array([order(i, 1000, seed=seed, epoch=epoch) for i in range(1000)])

    first = places(seed=0, epoch=0)
    for other in (places(seed=0, epoch=1), places(seed=1, epoch=0), np.arange(1000)):
        assert (first == other).sum() < 10  # a random permutation agrees with another in one position on average
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.15  # more than 4 standard deviations
    assert 400 < np.sum(np.diff(first) > 0) < 600


def test_order_is_pinned() -> None:
    """The order never changes between machines or versions, since a resumed run depends on these numbers."""
    assert [order(i, 10, seed=0, epoch=0) for i in range(10)] == [0, 6, 2, 9, 1, 7, 4, 5, 8, 3]
    assert order(10**15, 10**16, seed=0, epoch=0) == 7365325784422396


def test_without_shuffling_rows_have_the_order_of_the_file(tokens: TokenFile) -> None:
    assert [reader(tokens, shuffle=False)._row(place) for place in range(ROWS + 2)] == [*range(ROWS), 0, 1]


def test_a_row_is_its_slice_of_the_file_and_targets_are_shifted(tokens: TokenFile) -> None:
    (batch,) = take(reader(tokens).train_batches(DataState(4), micro_batch=3), 1)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs.shape == batch.targets.shape == (3, SEQ_LEN)
    assert batch.inputs.is_contiguous()
    assert batch.targets.is_contiguous()
    raw = np.fromfile(tokens.path, dtype="<u2")
    for row, inputs, targets in zip(row_numbers(batch), batch.inputs, batch.targets, strict=True):
        assert inputs.tolist() == raw[row * SEQ_LEN : row * SEQ_LEN + SEQ_LEN].tolist()
        assert targets.tolist() == raw[row * SEQ_LEN + 1 : row * SEQ_LEN + SEQ_LEN + 1].tolist()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_resuming_anywhere_gives_what_would_have_followed(tokens: TokenFile, shuffle: bool, world: int) -> None:
    def batches(state: DataState, count: int) -> list[Batch]:
        rows = reader(tokens, shuffle=shuffle)
        return take(rows.train_batches(state, micro_batch=3, rank=world - 1, world=world), count)

    whole = batches(DataState(), 12)
    for done in range(1, 12):
        state = whole[done - 1].state
        for resumed, expected in zip(batches(state, 12 - done), whole[done:], strict=True):
            assert torch.equal(resumed.inputs, expected.inputs)
            assert torch.equal(resumed.targets, expected.targets)
            assert resumed.state == expected.state


def test_ranks_divide_the_rows_and_steps_do_not_depend_on_them(tokens: TokenFile) -> None:
    def step_rows(*, world: int, accumulate: int, steps: int) -> list[list[int]]:
        ranks = [
            take(
                reader(tokens).train_batches(DataState(), micro_batch=2, rank=rank, world=world),
                accumulate * steps,
            )
            for rank in range(world)
        ]
        assert len({tuple(batch.state.position for batch in rank) for rank in ranks}) == 1
        return [
            [
                row
                for micro in range(step * accumulate, (step + 1) * accumulate)
                for rank in ranks
                for row in row_numbers(rank[micro])
            ]
            for step in range(steps)
        ]

    expected = [order(i % ROWS, ROWS, seed=1, epoch=i // ROWS) for i in range(40)]
    two_ranks = step_rows(world=2, accumulate=1, steps=10)
    assert two_ranks == [expected[i : i + 4] for i in range(0, 40, 4)]
    assert two_ranks == step_rows(world=1, accumulate=2, steps=10)
    assert step_rows(world=4, accumulate=1, steps=5) == step_rows(world=2, accumulate=2, steps=5)


def test_split_has_no_overlap_and_leaves_no_row_out() -> None:
    for token_count in (SEQ_LEN * 2 + 1, 64, 101, 1000):
        for validation in (0.0, 0.01, 0.3, 0.5):
            split = split_rows(token_count, seq_len=SEQ_LEN, validation=validation)
            rows = [*split.train, *split.validation]
            assert rows == list(range(len(rows)))
            assert rows[-1] * SEQ_LEN + SEQ_LEN + 1 <= token_count < (rows[-1] + 1) * SEQ_LEN + SEQ_LEN + 1
            assert len(split.validation) == (max(1, int(len(rows) * validation)) if validation else 0)


def test_no_token_that_validation_predicts_is_one_that_training_predicts(tokens: TokenFile) -> None:
    """Training and validation share one token only: the last target of training is the first input of validation."""
    split = split_rows(len(tokens), seq_len=SEQ_LEN, validation=0.3)
    trained, held_out = (reader(tokens, rows).rows_at(rows) for rows in split)
    trained_targets = set(trained.targets.flatten().tolist())
    assert not trained_targets & set(held_out.targets.flatten().tolist())
    assert trained_targets & set(held_out.inputs.flatten().tolist()) == {int(held_out.inputs[0, 0])}


def test_split_refuses_a_text_that_is_too_short() -> None:
    assert split_rows(6, seq_len=5, validation=0.0).train == range(1)
    with pytest.raises(UserError, match=r"5 tokens.*row of 5 needs 6"):
        split_rows(5, seq_len=5, validation=0.0)
    with pytest.raises(UserError, match=r"10 tokens.*needs 11.*validation=0"):
        split_rows(10, seq_len=5, validation=0.1)


def test_validation_is_in_file_order_and_keeps_the_rest(tokens: TokenFile) -> None:
    rows = reader(tokens, range(6, ROWS))
    batches = list(rows.validation_batches(micro_batch=2, limit=5))
    assert [row_numbers(batch) for batch in batches] == [[6, 7], [8, 9], [10]]
    again = list(rows.validation_batches(micro_batch=2, limit=5))
    assert all(torch.equal(a.targets, b.targets) for a, b in zip(batches, again, strict=True))
    everything = list(rows.validation_batches(micro_batch=4, limit=1000))
    assert [row_numbers(batch) for batch in everything] == [[6, 7, 8, 9], [10, 11, 12]]


# -- files that change under a run -----------------------------------------------------------------------------------


@pytest.fixture
def long(tmp_path: Path) -> TokenFile:
    """Return a token file with three checksum blocks: 2.5 MiB of uint16."""
    with TokenWriter(tmp_path / "long.bin", tokenizer=None, vocabulary=1000) as writer:
        for part in range(5):
            writer.write(np.arange(part, part + (1 << 18)) % 1000)
    return TokenFile.open(tmp_path / "long.bin")


@pytest.mark.parametrize("place", [0, (1 << 20) + 17, (5 << 19) - 1])
def test_a_changed_byte_is_found_when_its_block_is_read(long: TokenFile, place: int) -> None:
    whole = np.concatenate([np.arange(part, part + (1 << 18)) % 1000 for part in range(5)])
    assert len(long.sums) == 3
    for first, count in ((0, 7), ((1 << 19) - 3, 6), (len(long) - 1, 1), (5, len(long) - 5)):
        assert (long.read(first, count) == whole[first : first + count]).all()
    data = bytearray(long.path.read_bytes())
    data[place] ^= 1
    long.path.write_bytes(data)
    again = TokenFile.open(long.path)
    start = place // (1 << 20) * (1 << 20)
    if start:
        again.read(0, 1000)  # another block is intact
    with pytest.raises(TrainerError, match=f"the block at byte {start} differs from what was written"):
        again.read(start // 2, 4)  # another position in the damaged block


def test_a_file_that_is_cut_short_while_it_is_open(long: TokenFile) -> None:
    long.read(0, 10)
    os.truncate(long.path, 1 << 20)
    with pytest.raises(TrainerError, match="cut short"):
        long.read(1 << 20, 10)


def test_an_id_beyond_the_vocabulary_is_reported_with_its_row(tmp_path: Path) -> None:
    """An id beyond the vocabulary is reported with its row, also in nanoGPT's files, which have no checksums."""
    path = tmp_path / "bare.bin"
    ids = np.arange(100, dtype="<u2") % 50
    ids[33] = 60
    path.write_bytes(ids.tobytes())
    tokens = TokenFile.open(path)
    assert RowReader(tokens, seq_len=10, rows=range(9), vocabulary=61).rows_at([2, 3]).inputs.shape == (2, 10)
    reader = RowReader(tokens, seq_len=10, rows=range(9), vocabulary=60)
    reader.rows_at([2])
    with pytest.raises(TrainerError, match="row 3 holds id 60, and the model's vocabulary is 60"):
        reader.rows_at([2, 3])
