"""Tests of rows and mixtures: epochs have each row or exact shares, batches the right rows; resuming is exact."""

import math
import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sample_chats import CHATS, lines, run_data, turns

from offload_trainer.data.rows import Batch, Mixture, RowReader, order, shares_of, split_rows
from offload_trainer.data.tokenfile import TokenFile, write_tokens
from offload_trainer.errors import TrainerError, UserError
from offload_trainer.run.loop import _evaluate
from offload_trainer.telemetry.metrics import EvalRecord

SEQ_LEN = 5
ROWS = 13  # none of the micro-batch sizes below divides it


def written(path: Path, *ids: Any, vocabulary: int = 1000, **about: Any) -> TokenFile:
    write_tokens(path, ids, vocabulary=vocabulary, **about)
    return TokenFile.open(path)


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    """Return a file whose token i is i + 7, so that each token identifies its position."""
    return written(tmp_path / "t.bin", np.arange(ROWS * SEQ_LEN + 1 + 3) + 7)


def reader(tokens: TokenFile, rows: range = range(ROWS), *, seed: int = 1, shuffle: bool = True) -> RowReader:
    return RowReader(tokens, seq_len=SEQ_LEN, rows=rows, vocabulary=1000, seed=seed, shuffle=shuffle)


def row_numbers(batch: Batch) -> list[int]:
    return [(int(first) - 7) // SEQ_LEN for first in batch.inputs[:, 0]]


def take(batches: Iterator[Batch], count: int) -> list[Batch]:
    return list(islice(batches, count))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 16, 17, 64, 65, 255, 1000])
def test_each_epoch_and_seed_has_an_order_of_its_own(count: int) -> None:
    orders = [
        np.array([order(i, count, seed=seed, epoch=epoch) for i in range(count)])
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    for found in orders:
        assert sorted(found) == list(range(count))
    first, *others = orders
    if count == 1000:
        for other in (*others, np.arange(1000)):
            assert (first == other).sum() < 10  # a random permutation agrees with another in one position on average
            assert abs(np.corrcoef(first, other)[0, 1]) < 0.15  # more than 4 standard deviations
        assert 400 < np.sum(np.diff(first) > 0) < 600


def test_order_is_pinned() -> None:
    """The order never changes between machines or versions, since a resumed run depends on these numbers."""
    assert [order(i, 10, seed=0, epoch=0) for i in range(10)] == [0, 6, 2, 9, 1, 7, 4, 5, 8, 3]
    assert order(10**15, 10**16, seed=0, epoch=0) == 7365325784422396


def test_a_row_is_its_slice_of_the_file_and_targets_are_shifted(tokens: TokenFile) -> None:
    (unshuffled,) = take(reader(tokens, shuffle=False).train_batches(0, micro_batch=ROWS + 2), 1)
    assert row_numbers(unshuffled) == [*range(ROWS), 0, 1]
    (batch,) = take(reader(tokens).train_batches(4, micro_batch=3), 1)
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
    def batches(position: int, count: int) -> list[Batch]:
        rows = reader(tokens, shuffle=shuffle)
        return take(rows.train_batches(position, micro_batch=3, rank=world - 1, world=world), count)

    whole = batches(0, 12)
    assert len({batch.seed for batch in whole}) == 12
    for done in range(1, 12):
        position = whole[done - 1].data_position
        for resumed, expected in zip(batches(position, 12 - done), whole[done:], strict=True):
            assert torch.equal(resumed.inputs, expected.inputs)
            assert torch.equal(resumed.targets, expected.targets)
            assert (resumed.data_position, resumed.seed) == (expected.data_position, expected.seed)


def test_ranks_divide_the_rows_and_steps_do_not_depend_on_them(tokens: TokenFile) -> None:
    def steps(count: int, *, world: int, accumulate: int) -> list[list[tuple[list[int], int]]]:
        """Return the rows and the seed of each micro-batch of each step."""
        ranks = [reader(tokens).train_batches(0, micro_batch=2, rank=rank, world=world) for rank in range(world)]
        given = list(islice(zip(*ranks, strict=True), accumulate * count))
        assert all(len({batch.data_position for batch in batches}) == 1 for batches in given)
        every = [(row_numbers(batch), batch.seed) for batches in given for batch in batches]
        return [every[start : start + accumulate * world] for start in range(0, len(every), accumulate * world)]

    two_ranks = steps(10, world=2, accumulate=1)
    assert {len(step) for step in two_ranks} == {2}
    assert [row for step in two_ranks for rows, _ in step for row in rows] == [
        order(i % ROWS, ROWS, seed=1, epoch=i // ROWS) for i in range(40)
    ]
    assert two_ranks == steps(10, world=1, accumulate=2)
    assert steps(5, world=4, accumulate=1) == steps(5, world=2, accumulate=2)


def test_split_has_no_overlap_leaves_no_row_out_and_refuses_a_short_text() -> None:
    for token_count in (SEQ_LEN * 2 + 1, 64, 101, 1000):
        for validation in (0.0, 0.01, 0.3, 0.5):
            split = split_rows(token_count, seq_len=SEQ_LEN, validation=validation)
            rows = [*split.train, *split.validation]
            assert rows == list(range(len(rows)))
            assert rows[-1] * SEQ_LEN + SEQ_LEN + 1 <= token_count < (rows[-1] + 1) * SEQ_LEN + SEQ_LEN + 1
            assert len(split.validation) == (max(1, int(len(rows) * validation)) if validation else 0)
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


def test_a_validation_loss_is_the_mean_over_all_counted_targets() -> None:
    """Batches of 5, 1 and 3 counted targets have the losses 5, 1 and 3."""
    targets = [torch.tensor([[7] * count + [-100] * (6 - count)]) for count in (5, 1, 3)]
    made = [Batch(torch.zeros(1, 6, dtype=torch.int64), one) for one in targets]
    records: list[EvalRecord] = []
    for batches, scale in ((made, 1.0), (made[:1], 200.0)):
        job: Any = SimpleNamespace(
            train=SimpleNamespace(micro_batch_size=1, eval_rows=3),
            engine=SimpleNamespace(eval_loss=lambda batch, scale=scale: scale * batch.counted),
            validation_rows=SimpleNamespace(validation_batches=lambda batches=batches, **_: iter(batches)),
            telemetry=SimpleNamespace(evaluation=records.append),
        )
        _evaluate(job, 1)
    first, huge = records
    assert first.validation_loss == (25 + 1 + 9) / 9
    assert first.perplexity == math.exp(35 / 9)
    assert (huge.validation_loss, huge.perplexity) == (1000.0, math.inf)


# -- files that change under a run -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, (1 << 20) + 17, (5 << 19) - 1])
def test_a_changed_byte_is_found_when_its_block_is_read_and_so_is_the_end(place: int, tmp_path: Path) -> None:
    """A file of 2.5 MiB of uint16 has three blocks."""
    parts = [np.arange(part, part + (1 << 18)) % 1000 for part in range(5)]
    whole, long = np.concatenate(parts), written(tmp_path / "long.bin", *parts)
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
    told = f"the block at byte {start} differs from what was written .* delete the file and its sidecar"
    with pytest.raises(TrainerError, match=told):
        again.read(start // 2, 4)  # another position in the damaged block
    os.truncate(long.path, 1 << 20)
    with pytest.raises(TrainerError, match="cut short"):
        long.read(1 << 20, 10)


def test_an_id_beyond_the_vocabulary_is_reported_with_its_row(tmp_path: Path) -> None:
    ids = np.arange(100) % 50
    ids[33] = 60
    tokens = written(tmp_path / "t.bin", ids)
    assert RowReader(tokens, seq_len=10, rows=range(9), vocabulary=61).rows_at([2, 3]).inputs.shape == (2, 10)
    reader = RowReader(tokens, seq_len=10, rows=range(9), vocabulary=60)
    reader.rows_at([2])
    with pytest.raises(TrainerError, match="row 3 holds id 60, and the model's vocabulary is 60"):
        reader.rows_at([2, 3])


# -- mixtures ----------------------------------------------------------------------------------------------------------


def test_each_epoch_has_the_shares_to_the_row(tmp_path: Path) -> None:
    """Texts of 6, 30 and 1 rows with weights 2 : 1 : 1 give 19 (rounded up), 9 and 9 of 37 rows an epoch."""
    assert shares_of(37, [2, 1, 1]) == [19, 9, 9]
    files = [written(tmp_path / str(rows), range(rows * SEQ_LEN + 1)) for rows in (6, 30, 1)]
    found = Mixture(files, [2, 1, 1], names="abc", seq_len=SEQ_LEN, validation=0)
    ends = (6, 36, 37)
    seen: list[list[int]] = []
    for epoch in range(4):
        rows = [found.row(epoch * 37 + place, seed=3) for place in range(37)]
        texts = Counter(next(n for n, end in enumerate(ends) if row < end) for row in rows)
        assert texts == {0: 19, 1: 9, 2: 9}
        seen.append(rows)
    every = Counter(row for rows in seen for row in rows)
    small, large = ([every[row] for row in part] for part in (range(6), range(6, 36)))
    assert max(small) - min(small) <= 1
    assert max(large) - min(large) <= 1
    assert min(large) >= 1  # an epoch continues a large text where the last one stopped
    assert seen[0] != seen[1]
    assert [found.row(place, seed=4) for place in range(37)] != seen[0]


def test_rows_are_the_texts_own(tmp_path: Path) -> None:
    """Each row begins at a multiple of the length in its own text, and each text's last rows are validation only."""
    ids = {"a": range(103), "b": range(10000, 10041)}
    files = [written(tmp_path / name, some, vocabulary=30000) for name, some in ids.items()]
    found = Mixture(files, (1, 3), names=("a", "b"), seq_len=SEQ_LEN, validation=0.2)
    assert len(found) == (20 + 8) * SEQ_LEN + 1
    reader = RowReader(found, seq_len=SEQ_LEN, rows=range(23), vocabulary=30000, seed=1, shuffle=True)
    batches = reader.train_batches(0, micro_batch=1)
    given = [next(batches) for _ in range(92)]
    firsts = [int(batch.inputs[0, 0]) for batch in given]
    for batch, first in zip(given, firsts, strict=True):
        assert batch.inputs[0].tolist() == list(range(first, first + SEQ_LEN))
        assert batch.targets[0].tolist() == list(range(first + 1, first + SEQ_LEN + 1))
        assert first % SEQ_LEN == 0
        assert first < 16 * SEQ_LEN or 10000 <= first < 10000 + 7 * SEQ_LEN
    for epoch in range(4):
        of_b = sum(first >= 10000 for first in firsts[23 * epoch : 23 * epoch + 23])
        assert of_b == 17  # three quarters of 23 are 17.25
    again = reader.train_batches(given[40].data_position, micro_batch=1)
    assert [int(next(again).inputs[0, 0]) for _ in range(51)] == firsts[41:]
    held_out = RowReader(found, seq_len=SEQ_LEN, rows=range(23, 28), vocabulary=30000)
    rows = {int(row[0]) for batch in held_out.validation_batches(micro_batch=2, limit=9) for row in batch.inputs}
    assert rows == {*range(80, 100, SEQ_LEN), 10035}
    first_two = next(held_out.validation_batches(micro_batch=5, limit=5))
    assert [int(row[0]) for row in first_two.inputs] != sorted(rows)


def test_what_cannot_be_mixed_is_refused(tmp_path: Path) -> None:
    text = written(tmp_path / "a", range(103))
    rows = written(tmp_path / "b", range(51), row_length=SEQ_LEN)
    with pytest.raises(UserError, match=r"data\.mixture: a \(row length None\) and b \(row length 5\) differ in kind"):
        Mixture([text, rows], (1, 1), names=("a", "b"), seq_len=SEQ_LEN, validation=0.1)
    short = written(tmp_path / "c", range(8))
    with pytest.raises(UserError, match=r"c has 8 tokens, and one row of 5 and one for validation needs 11"):
        Mixture([text, short], (1, 1), names=("a", "c"), seq_len=SEQ_LEN, validation=0.1)
    assert Mixture([text, short], (1, 1), names=("a", "c"), seq_len=SEQ_LEN, validation=0).counts == [11, 10]
    with pytest.raises(UserError, match=r"c would have no row in an epoch of 21: give it a larger weight"):
        Mixture([text, short], (1000, 1), names=("a", "c"), seq_len=SEQ_LEN, validation=0)


def test_a_run_of_two_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Of one thing, and of another. " * 200)
    (tmp_path / "b.txt").write_text("But rarely this. " * 60)
    paths, said = (tmp_path / "a.txt", tmp_path / "b.txt"), list[str]()
    made = partial(run_data, *paths, seq_len=16, say=said.append)
    data, other, apart = (
        made(mixture=mixture, **more)
        for mixture, more in (((1, 1), {}), ((2, 1), {}), ((1, 1), {"validation_path": (str(paths[0]),)}))
    )
    assert any(line.startswith("mixture, in an epoch of ") and "50.0% of the rows" in line for line in said)
    assert data.identity()["mixture"] == [1, 1]
    assert other.identity() != data.identity()
    assert len(data.split.train) == sum(data.tokens.counts)
    assert data.split.validation == range(len(data.split.train), (len(data.tokens) - 1) // 16)
    assert sum(apart.tokens.counts) == sum(data.tokens.counts) + len(data.split.validation)
    assert len(apart.split.validation) > 100
    assert "mixture" not in made().identity()


def test_packed_conversations_are_mixed_as_well(tmp_path: Path) -> None:
    for name, chats in (("a", CHATS * 5), ("b", CHATS[:3] * 5)):
        talks = [turns(asked, told[:8]) for asked, told in chats]
        (tmp_path / f"{name}.jsonl").write_text(lines({"messages": talk} for talk in talks))
    data = run_data(tmp_path / "a.jsonl", tmp_path / "b.jsonl", seq_len=64, mixture=(1, 2), packing="on")
    reader = RowReader(data.tokens, seq_len=64, rows=data.split.train, vocabulary=2048, shuffle=True)
    batch = next(reader.train_batches(0, micro_batch=len(data.split.train)))
    assert batch.counted > 0
    assert int((batch.targets == -100).sum()) > 0
    assert batch.positions is not None
    assert 0 < batch.tokens == batch.inputs.numel() - batch.padding < batch.inputs.numel()
