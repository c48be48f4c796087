"""Tests of mixtures: exact shares in every epoch, even use of each text's rows, and resuming in constant time."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sample_chats import CHATS

from offload_trainer.config import DataSection, ModelSection
from offload_trainer.data.mixture import Shares, mixed
from offload_trainer.data.rows import DataState, RowReader
from offload_trainer.data.run_data import RunData, check_data, prepare_data
from offload_trainer.data.tokenfile import TokenFile, TokenWriter
from offload_trainer.errors import UserError
from offload_trainer.model.loader import resolve_model

LENGTH = 5


def test_each_epoch_has_the_shares_to_the_row() -> None:
    """Texts of 6, 30 and 1 rows with weights 2 : 1 : 1 give 19 (rounded up), 9 and 9 of 37 rows an epoch."""
    shares = Shares([6, 30, 1], [2, 1, 1])
    assert shares.counts == [19, 9, 9]
    ends = (6, 36, 37)
    seen: list[list[int]] = []
    for epoch in range(4):
        rows = [shares.row(epoch * 37 + place, seed=3) for place in range(37)]
        texts = Counter(next(n for n, end in enumerate(ends) if row < end) for row in rows)
        assert texts == {0: 19, 1: 9, 2: 9}
        seen.append(rows)
    every = Counter(row for rows in seen for row in rows)
    small, large = ([every[row] for row in part] for part in (range(6), range(6, 36)))
    assert sum(small) == 4 * 19
    assert sum(large) == 4 * 9
    assert max(small) - min(small) <= 1
    assert max(large) - min(large) <= 1
    assert min(large) >= 1  # an epoch continues a large text where the last one stopped
    assert seen[0] != seen[1]
    assert [shares.row(place, seed=4) for place in range(37)] != seen[0]


def written(folder: Path, name: str, *, first: int, tokens: int, **about: Any) -> TokenFile:
    with TokenWriter(folder / f"{name}.bin", tokenizer=None, vocabulary=30000, **about) as writer:
        writer.write(list(range(first, first + tokens)))
    return TokenFile.open(folder / f"{name}.bin")


def test_rows_are_the_texts_own(tmp_path: Path) -> None:
    """Each row begins at a multiple of the length in its own text, and each text's last rows are validation only."""
    files = [written(tmp_path, "a", first=0, tokens=103), written(tmp_path, "b", first=10000, tokens=41)]
    found = mixed(files, (1, 3), names=("a", "b"), seq_len=LENGTH, validation=0.2)
    assert found.shares.rows == (16, 7)
    assert len(found) == (20 + 8) * LENGTH + 1
    reader = RowReader(found, seq_len=LENGTH, rows=range(23), vocabulary=30000, seed=1, shuffle=True)
    batches = reader.train_batches(DataState(0), micro_batch=1)
    given = [next(batches) for _ in range(92)]
    firsts = [int(batch.inputs[0, 0]) for batch in given]
    for batch, first in zip(given, firsts, strict=True):
        assert batch.inputs[0].tolist() == list(range(first, first + LENGTH))
        assert batch.targets[0].tolist() == list(range(first + 1, first + LENGTH + 1))
        assert first % LENGTH == 0
        assert first < 16 * LENGTH or 10000 <= first < 10000 + 7 * LENGTH
    for epoch in range(4):
        of_b = sum(first >= 10000 for first in firsts[23 * epoch : 23 * epoch + 23])
        assert of_b == 17  # three quarters of 23 are 17.25
    again = reader.train_batches(given[40].state, micro_batch=1)
    assert [int(next(again).inputs[0, 0]) for _ in range(51)] == firsts[41:]
    held_out = RowReader(found, seq_len=LENGTH, rows=range(23, 28), vocabulary=30000)
    rows = {int(row[0]) for batch in held_out.validation_batches(micro_batch=2, limit=9) for row in batch.inputs}
    assert rows == {*range(80, 100, LENGTH), 10035}
    first_two = next(held_out.validation_batches(micro_batch=5, limit=5))
    assert [int(row[0]) for row in first_two.inputs] != sorted(rows)


def test_what_cannot_be_mixed_is_refused(tmp_path: Path) -> None:
    text = written(tmp_path, "a", first=0, tokens=103)
    rows = written(tmp_path, "b", first=0, tokens=51, row_length=LENGTH)
    with pytest.raises(UserError, match=r"data\.mixture: a \(dtype uint16\) and b \(dtype uint32\) differ in kind"):
        mixed([text, rows], (1, 1), names=("a", "b"), seq_len=LENGTH, validation=0.1)
    short = written(tmp_path, "c", first=0, tokens=8)
    with pytest.raises(UserError, match=r"c has 8 tokens, and one training row of 5 and one for validation needs 11"):
        mixed([text, short], (1, 1), names=("a", "c"), seq_len=LENGTH, validation=0.1)
    assert mixed([text, short], (1, 1), names=("a", "c"), seq_len=LENGTH, validation=0).shares.rows == (20, 1)
    with pytest.raises(UserError, match=r"c would have no row in an epoch of 21: give it a larger weight"):
        mixed([text, short], (1000, 1), names=("a", "c"), seq_len=LENGTH, validation=0)


def prepared(folder: Path, *, said: list[str], **section: Any) -> RunData:
    source = resolve_model(ModelSection(overrides={"n_layer": 1}), seed=0)
    wish = DataSection(cache=str(folder / "cache"), **section)
    check_data(wish, source, say=said.append)
    return prepare_data(wish, source, seq_len=16, say=said.append)


@pytest.mark.slow
def test_a_run_of_two_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Of one thing, and of another. " * 200)
    (tmp_path / "b.txt").write_text("But rarely this. " * 60)
    paths, said = (str(tmp_path / "a.txt"), str(tmp_path / "b.txt")), []
    data = prepared(tmp_path, said=said, path=paths, mixture=(1, 1))
    assert any(line.startswith("mixture, in an epoch of ") and "50.0% of the rows" in line for line in said)
    assert data.identity()["mixture"] == [1, 1]
    assert len(data.split.train) == sum(data.tokens.shares.rows)
    assert data.split.validation == range(len(data.split.train), (len(data.tokens) - 1) // 16)
    other = prepared(tmp_path, said=said, path=paths, mixture=(2, 1))
    assert other.identity() != data.identity()
    apart = prepared(tmp_path, said=said, path=paths, mixture=(1, 1), validation_path=paths[:1])
    assert sum(apart.tokens.shares.rows) == sum(data.tokens.shares.rows) + len(data.split.validation)
    assert len(apart.split.validation) > 100
    assert "mixture" not in prepared(tmp_path, said=said, path=paths).identity()
    for wrong, told in (
        ({"mixture": (1.0,)}, "data.mixture has 1 weights, and data.path 2 texts: give one for each"),
        ({"mixture": (1.0, 1.0), "shuffle": False}, "leave data.shuffle=false out"),
    ):
        with pytest.raises(UserError, match=told):
            prepared(tmp_path, said=said, path=paths, **wrong)


@pytest.mark.slow
def test_packed_conversations_are_mixed_as_well(tmp_path: Path) -> None:
    for name, chats in (("a", CHATS * 5), ("b", CHATS[:3] * 5)):
        talks = [[{"role": "user", "content": q}, {"role": "assistant", "content": r[:8]}] for q, r in chats]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    paths = (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    source = resolve_model(ModelSection(overrides={"n_layer": 1}), seed=0)
    wish = DataSection(cache=str(tmp_path / "cache"), path=paths, mixture=(1, 2), packing="on")
    data = prepare_data(wish, source, seq_len=64, say=lambda line: None)
    reader = RowReader(data.tokens, seq_len=64, rows=data.split.train, vocabulary=2048, shuffle=True)
    batch = next(reader.train_batches(DataState(0), micro_batch=len(data.split.train)))
    assert batch.counted > 0
    assert int((batch.targets == -100).sum()) > 0
    assert batch.positions is not None
