"""Tests of streamed conversations: their rows are those of the prepared file, and a killed run resumes bit for bit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sample_chats
import torch
from commands import TINY, call, figures, whole_and_resumed
from safetensors.torch import load_file
from sample_chats import chat_tokenizer

from offload_trainer.config import DataSection
from offload_trainer.data import stream
from offload_trainer.data.rows import Batch, RowReader
from offload_trainer.data.stream import StreamedTokens
from offload_trainer.errors import TrainerError, UserError

LENGTH = 48
COUNT = 240


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def chat(number: int) -> dict[str, Any]:
    """Return a conversation; some are cut, one has no answer, one teaches nothing, some have more turns."""
    told = f"{number} " * (1 + number % 4)
    talk = [message("user", f"Say {number}."), message("assistant", told)]
    if number % 7 == 3:
        talk = [
            message("system", "Be brief."),
            *talk,
            message("user", "Why? " * (number % 3)),
            message("assistant", "!"),
        ]
    if number % 60 == 11:
        talk = talk[:1] if number < 60 else [message("user", "word " * 30), *talk[1:]]
    return {"id": number, "messages": talk}


RECORDS = {
    "chat": chat,
    "weights": lambda n: {
        "messages": [message("user", "a"), message("assistant", "b", weight=n % 2), *chat(n)["messages"]]
    },
    "pairs": lambda n: {"prompt": f"{n} + 1 = ", "completion": str(n + 1) * (1 + n % 9)},
}


def written(path: Path, kind: str) -> Path:
    """Write conversations of a kind into a .jsonl or .parquet file."""
    records = [RECORDS[kind](number) for number in range(COUNT)]
    if path.suffix == ".parquet":
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(records), path, row_group_size=7)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenize few conversations at a time, and set a seek point at nearly each of these places."""
    monkeypatch.setattr(stream, "_CHARACTERS", 300)
    monkeypatch.setattr(stream, "_EVERY", 500)


def streamed(path: Path, **section: Any) -> StreamedTokens:
    words: dict[str, Any] = {"tokenizer": chat_tokenizer(), "fingerprint": "of this test", "seq_len": LENGTH}
    return StreamedTokens(f"stream:{path}", DataSection(**section), **words, say=print)


prepared = partial(sample_chats.prepared, seq_len=LENGTH)


def batches(tokens: Any, rows: range, *, over: int | None = None) -> Iterator[Batch]:
    """Yield each row of `rows`, which are counted anew after `over` rows."""
    reader = RowReader(tokens, seq_len=LENGTH, rows=range(over or 10**6), vocabulary=300)
    for row in rows:
        yield reader.rows_at([row % over if over else row])


def assert_same(found: Iterator[Batch], expected: Iterator[Batch]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
        assert one.padding == other.padding
        assert (one.positions is None) == (other.positions is None)
        assert one.positions is None or torch.equal(one.positions, other.positions)


CASES = [
    *((kind, "jsonl", {}) for kind in RECORDS),
    ("chat", "parquet", {}),
    ("chat", "jsonl", {"train_on": "all"}),
    ("chat", "jsonl", {"packing": "on"}),
    ("pairs", "parquet", {"packing": "on", "format": "pairs"}),
]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("kind", "suffix", "section"), CASES)
def test_rows_are_those_of_the_prepared_file(
    kind: str, suffix: str, section: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass has the prepared rows in their order, and every row is reached from the seek point before it."""
    path = written(tmp_path / f"data.{suffix}", kind)
    expected = prepared(path, **section)
    count = (len(expected) - 1) // LENGTH
    assert 10 < count <= COUNT
    first, points, last = streamed(path, **section), tmp_path / "points.jsonl", 2 * count + 7
    first.remember(points, writes=True)
    assert_same(batches(first, range(last)), batches(expected, range(last), over=count))
    packed = section.get("packing") == "on"
    assert len(points.read_text().splitlines()) > 10 or packed
    parsed: list[int] = []
    real = StreamedTokens._parsed
    monkeypatch.setattr(StreamedTokens, "_parsed", lambda *given: parsed.append(0) or real(*given))
    for start in (0, 9, count - 2, count + 8, last - 3):
        again = streamed(path, **section)
        again.remember(points, writes=False)
        parsed.clear()
        assert_same(batches(again, range(start, start + 3)), batches(expected, range(start, start + 3), over=count))
        assert len(parsed) < (2 * COUNT if packed else 100)
    assert_same(batches(again, range(1)), batches(expected, range(1), over=count))  # backwards, too


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("packing", ["off", "on"])
def test_the_first_rows_are_the_prepared_ones(packing: str, tmp_path: Path) -> None:
    path = written(tmp_path / "data.jsonl", "chat")
    expected = prepared(path, packing=packing)
    most = (len(expected) - 1) // LENGTH
    for count in (1, 9, most, most + 4):
        found = streamed(path, packing=packing).first(count)
        there = (len(found) - 1) // LENGTH
        assert there == min(count, most)
        assert_same(batches(found, range(there), over=there), batches(expected, range(there), over=most))


def test_the_summary_and_the_settings(tmp_path: Path) -> None:
    """The summary is that of the prepared file, and each setting makes another stream."""
    path = written(tmp_path / "data.jsonl", "chat")
    found = streamed(path)
    found.read(0, 1)
    assert found.summary == prepared(path).summary
    others = [{"train_on": "all"}, {"packing": "on"}, {"format": "text", "text_field": "id"}]
    assert len({found.identity, *(streamed(path, **other).identity for other in others)}) == 4
    assert len({found._key, *(streamed(path, **other)._key for other in others)}) == 4


@pytest.mark.parametrize(
    ("records", "error", "told"),
    [
        ([{"messages": "hello"}], TrainerError, "a record behind token 0: 'messages' holds a string"),
        ([{"messages": [message("user", "a")]}] * 3, TrainerError, "of the conversations 3 have no answer to train on"),
        (
            [{"prompt": "a", "chosen": "b", "rejected": "c"}],
            UserError,
            "the first record: 'chosen' and 'rejected' hold",
        ),
    ],
)
def test_records_that_cannot_be_used(records: list[Any], error: type[Exception], told: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(error, match=re.escape(told)):
        streamed(path).read(0, 1)


# -- whole runs --------------------------------------------------------------------------------------------------------

WORDS = [*TINY, "--save-every", "2", "train.eval_every=0", "--micro-batch", "2"]


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    """Return a file of 22 short conversations, which a run of 8 steps reads more than once."""
    path = tmp_path / "talks.jsonl"
    told = [{"messages": [message("user", f"{n}?"), message("assistant", f"{n}" * (n % 4 + 1))]} for n in range(22)]
    path.write_text("".join(json.dumps(one) + "\n" for one in told))
    return path


@pytest.mark.slow
def test_a_stream_trains_as_the_prepared_conversations(talks: Path, tmp_path: Path) -> None:
    """Beyond the first pass, too, a run has the bits of one over the prepared file without shuffling."""
    words = [*WORDS, "--steps", "8", "--accumulate", "2", "data.validation=0", "data.packing=on"]
    found = call(*words, "--data", f"stream:{talks}", output=tmp_path / "streamed")
    expected = call(*words, "--data", talks, "data.shuffle=false", output=tmp_path / "prepared")
    assert figures(found) == figures(expected)
    assert "conversations, the first of them: 22 conversations, " in found.text
    for path in (expected.output / "checkpoints/step-00000008").glob("*.safetensors"):
        other = load_file(found.output / "checkpoints/step-00000008" / path.name)
        for name, tensor in load_file(path).items():
            assert torch.equal(tensor, other[name]), name


@pytest.mark.slow
def test_a_killed_run_over_conversations_resumes(talks: Path, drive: Path, tmp_path: Path) -> None:
    words = [*WORDS, "--steps", "6", "--accumulate", "3", "--data", f"stream:{talks}", "--nvme", drive]
    words += ["data.packing=on", "data.shuffle_block_size=3"]
    words += ["--validation-data", f"stream:{talks}", "model.overrides.resid_pdrop=0.1"]
    whole, again = whole_and_resumed(*words, folder=tmp_path)
    for path in (whole.output / "checkpoints/step-00000006").glob("*.safetensors"):
        assert (again.output / "checkpoints/step-00000006" / path.name).read_bytes() == path.read_bytes(), path.name
    changed = call(*words, "data.train_on=all", output=tmp_path / "killed", check=False)
    assert changed.code == 2
    assert "train_on=answers" in changed.text
