"""Tests of streamed data sets: their ids are those of the prepared token file, and a killed run resumes bit for bit."""

import gzip
import json
import os
import re
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import sample_chats
import torch
from commands import KILL, TINY, assert_same_run, call, faulty
from forked_ranks import call_ranks
from pyarrow import Table, parquet
from sample_chats import chat_tokenizer, lines, message, token_spec, turns
from seen_calls import calls_of
from transformers.utils import chat_template_utils

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.data import stream
from offload_trainer.data.rows import RowReader
from offload_trainer.data.stream import StreamedTokens
from offload_trainer.run.process_setup import prepare_process
from offload_trainer.settings import load_config

LENGTH = 48
# Documents of different lengths, of which one is longer than a piece, one is empty, and the others fill many batches.
DOCUMENTS = [f"document {number} " * (1 + 7 * (number % 5)) for number in range(90)]
DOCUMENTS[3], DOCUMENTS[40] = "", "a long one, with many words. " * 3000


def chat(number: int) -> dict[str, Any]:
    """Return a conversation; some are cut, one has no answer, one teaches nothing, some have more turns."""
    told = f"{number} " * (1 + number % 4)
    talk = [message("user", f"Say {number}."), message("assistant", told)]
    if number % 7 == 3:
        talk = [message("system", "Be brief."), *talk, message("user", "Why? " * (number % 3))]
        talk.append(message("assistant", "!"))
    if number % 60 == 11:
        talk = talk[:1] if number < 60 else [message("user", "word " * 30), *talk[1:]]
    return {"id": number, "messages": talk}


RECORDS: dict[str, list[dict[str, Any]]] = {
    "text": [{"id": number, "text": text} for number, text in enumerate(DOCUMENTS)],
    "chat": [chat(number) for number in range(240)],
    "weights": [
        {"messages": [message("user", "a"), message("assistant", "b", weight=n % 2), *chat(n)["messages"]]}
        for n in range(240)
    ],
    "pairs": [{"prompt": f"{n} + 1 = ", "completion": str(n + 1) * (1 + n % 9)} for n in range(240)],
}


def written(path: Path, kind: str) -> Path:
    """Write the records of a kind into a .jsonl, .gz or .parquet file, or else into three files of a directory."""
    records = RECORDS[kind]
    if path.suffix == ".parquet":
        parquet.write_table(Table.from_pylist(records), path, row_group_size=7)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines(records).encode()))
    elif path.suffix:
        path.write_text(lines(records))
    else:
        path.mkdir()
        for number in range(3):
            (path / f"{number}.jsonl").write_text(lines(records[number * 30 : number * 30 + 30]))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return written(tmp_path / "data.jsonl", "text")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenize few records at a time, and set a seek point at nearly each of these places."""
    monkeypatch.setattr(stream, "_CHARACTERS", 300)
    monkeypatch.setattr(stream, "_EVERY", 500)


def of_the_hub(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every stream read the lines of `path` through `datasets`, as a data set of the hub."""
    monkeypatch.setattr(stream, "find_sources", lambda paths, **_: [])
    dataset = partial(datasets.load_dataset, "json", data_files=str(path), split="train", streaming=True)
    monkeypatch.setattr(stream, "load_from_hub", lambda wish, streaming: dataset())


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each record that a stream reads."""
    return calls_of(monkeypatch.setattr, stream, "_characters")


prepared = partial(sample_chats.prepared, seq_len=LENGTH)


def ids_of(path: Path, **section: Any) -> np.ndarray:
    """Return the ids that are prepared from a file; of conversations, those of its rows."""
    file = prepared(path, **section)
    ids: np.ndarray = file.read(0, len(file)).astype(np.uint32)
    return ids if file.row_length is None else ids[:-1]


def tokens(path: object, **given: Any) -> StreamedTokens:
    return StreamedTokens(token_spec(f"stream:{path}", seq_len=LENGTH, **given))


def rows(found: StreamedTokens, *numbers: int) -> list[list[int]]:
    return [found.read(number * LENGTH, LENGTH + 1).tolist() for number in numbers]


CASES = [
    *(("text", suffix, {}) for suffix in (".jsonl", ".jsonl.gz", ".parquet", "")),
    *((kind, ".jsonl", {}) for kind in ("chat", "weights", "pairs")),
    ("chat", ".parquet", {}),
    ("chat", ".jsonl", {"train_on": "all"}),
    ("chat", ".jsonl", {"packing": "on"}),
    ("pairs", ".parquet", {"packing": "on", "format": "pairs"}),
    *((kind, "of the hub", {}) for kind in ("text", "weights")),
]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("kind", "suffix", "section"), CASES)
def test_any_place_is_reached_from_the_nearest_seek_point(
    kind: str,
    suffix: str,
    section: dict[str, Any],
    tmp_path: Path,
    parsed: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each pass has the prepared ids, and after a restart a row is read from the seek point before it."""
    path = written(tmp_path / f"data{'.jsonl' if suffix == 'of the hub' else suffix}", kind)
    if suffix == "of the hub":
        of_the_hub(path, monkeypatch)
    ids = ids_of(path, **section)
    count, packed = len(ids) // LENGTH, section.get("packing") == "on"
    assert kind == "text" or 10 < count <= len(RECORDS[kind])
    first, points, last = tokens(path, **section), tmp_path / "points.jsonl", count + min(count, 100) + 7
    first.remember(points, writes=True)
    endless = np.tile(ids, 3)
    before = rows(first, *range(last))
    assert before == [endless[row * LENGTH : row * LENGTH + LENGTH + 1].tolist() for row in range(last)]
    assert len(first._ids) < 120_000  # little more than the longest document
    assert len(points.read_text().splitlines()) > (20 if kind == "text" else 10) or packed
    most = 2 * len(RECORDS[kind]) if packed else 45 if kind == "text" else 100
    for start in (0, 9, count // 2, count - 2, count + 8, last - 3):
        again = tokens(path, **section)
        again.remember(points, writes=False)
        parsed.clear()
        assert rows(again, start, start + 1, start + 2) == before[start : start + 3]
        assert len(parsed) < most
        assert rows(again, 0) == before[:1]  # backwards, too
    if packed:
        expected, batch = (
            RowReader(made, seq_len=LENGTH, rows=range(9), vocabulary=300).rows_at(range(9))
            for made in (prepared(path, **section), first)
        )
        assert batch.padding == expected.padding
        for name in ("inputs", "targets", "positions"):
            assert torch.equal(getattr(batch, name), getattr(expected, name))


@pytest.mark.usefixtures("small")
def test_without_its_list_of_points_it_begins_at_the_beginning(data: Path, tmp_path: Path) -> None:
    points = tmp_path / "points.jsonl"
    first = tokens(data)
    first.remember(points, writes=True)
    before = rows(first, *range(200))
    assert rows(tokens(data), 150) == before[150:151]
    other = tokens(data, text_field="id")
    other.remember(points, writes=False)
    assert len(other._points) == 1  # points of another stream are not used

    def places() -> set[int]:
        reader = tokens(data)
        reader.remember(points, writes=False)
        return {point.tokens for point in reader._points}

    saved, text = places(), points.read_text()
    assert len(saved) > 5
    points.write_text(text[: len(text) * 2 // 3])  # a kill has torn the last line
    again = tokens(data)
    again.remember(points, writes=True)
    assert rows(again, *range(200)) == before
    assert places() == saved


def test_each_setting_makes_another_stream(tmp_path: Path) -> None:
    """A tokenizer whose template prints another token makes one too. The summary is that of the prepared file."""
    path = written(tmp_path / "data.jsonl", "chat")
    tokenizer, other = (chat_tokenizer("{{ bos_token }}" + sample_chats.TEMPLATE) for _ in range(2))
    other.bos_token = "<user>"
    others = [{"train_on": "all"}, {"packing": "on"}, {"format": "text", "text_field": "id"}, {"tokenizer": other}]
    streams = [tokens(path, **{"tokenizer": tokenizer} | more) for more in ({}, {}, *others)]
    assert len({one.identity for one in streams}) == len({one._key for one in streams}) == 5
    streams[0].read(0, 1)
    assert streams[0].summary == prepared(path, tokenizer=tokenizer).summary


def test_a_template_prints_the_date_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have data.template_date, whatever day it is, so they are those of a template with that date in it."""
    path = written(tmp_path / "data.jsonl", "chat")
    dates = ('{{ strftime_now("%d %b %Y") }}|', "31 Jan 2026|")
    now, fixed = (chat_tokenizer(date + sample_chats.TEMPLATE) for date in dates)
    expected = ids_of(path, tokenizer=fixed)
    for days in (0, 1, 400):
        moved = SimpleNamespace(now=lambda days=days: datetime.now() + timedelta(days))
        monkeypatch.setattr(chat_template_utils, "datetime", moved)
        file = prepared(path, tokenizer=now, template_date="2026-01-31", cache=tmp_path / str(days))
        assert np.array_equal(file.read(0, len(expected)), expected)
        found = tokens(path, tokenizer=now, template_date="2026-01-31")
        assert np.array_equal(found.read(0, len(expected)), expected)
        printed = now.apply_chat_template([message("user", "a")], tokenize=False)
        assert printed.startswith(f"{datetime.now() + timedelta(days):%d %b %Y}|")  # other callers get today's
    other = tokens(path, tokenizer=now, template_date="2026-01-30")
    assert not {other.identity, other._key} & {found.identity, found._key}
    assert found.identity.endswith(" on 2026-01-31")
    assert tokens(path, template_date="2026-01-31")._key == tokens(path, template_date="2026-01-30")._key


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_rows_are_shuffled_inside_blocks(data: Path, tmp_path: Path, parsed: list[int]) -> None:
    expected = ids_of(data)
    block, count = 30, len(expected) // LENGTH + 90
    twice = np.tile(expected, 2)[: len(expected) * 2 // LENGTH * LENGTH].reshape(-1, LENGTH).tolist()

    def read(begin: int, *, seed: int = 0, points: bool = False) -> list[list[int]]:
        found = tokens(data, shuffle=block)
        if points:
            found.remember(tmp_path / "points.jsonl", writes=not begin)
        reader = RowReader(found, seq_len=LENGTH, rows=range(10**6), vocabulary=300, seed=seed, shuffle=True)
        batches = reader.train_batches(begin, micro_batch=5)
        return [row for batch in islice(batches, (count - begin) // 5) for row in batch.inputs.tolist()]

    shuffled = read(0, points=True)
    assert len(parsed) < 1.6 * len(DOCUMENTS)  # A third of them are read again after the last.
    assert len(shuffled) > 300
    orders = []
    for start in range(0, len(shuffled) - block + 1, block):
        own, drawn = twice[start : start + block], shuffled[start : start + block]
        orders.append([own.index(row) for row in drawn])
        assert sorted(drawn) == sorted(own)
    assert len(set(map(tuple, orders))) == len(orders)
    assert read(0, seed=1)[:block] != shuffled[:block]
    for begin in (5, 35, 155, len(shuffled) - 60):
        for points in (False, True):
            assert read(begin, points=points) == shuffled[begin : begin + (count - begin) // 5 * 5]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("changed", [0, 60])
def test_another_text_is_noticed(changed: int, data: Path, tmp_path: Path) -> None:
    first = tokens(data)
    first.remember(tmp_path / "points.jsonl", writes=True)
    rows(first, *range(2133))
    other = [{"id": number, "text": "something else"} for number in range(changed, changed + 25)]
    data.write_text(lines(RECORDS["text"][:changed] + other + RECORDS["text"][changed + 25 :]))
    again = tokens(data)
    again.read(0, 1)

    def resumed() -> None:
        again.remember(tmp_path / "points.jsonl", writes=False)
        for number in range(2000, 2133, 5):
            again._begin = 10**9  # makes reading begin at the nearest point, as a new process does
            rows(again, number)

    with pytest.raises(TrainerError, match=r"the records behind its first \d+ tokens are not those"):
        resumed()


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ("/nowhere/a.jsonl", UserError, "no such file or directory"),
        ("corpus", UserError, "written stream:OWNER/NAME, with /CONFIGURATION"),
        ("{here}/text.txt", UserError, "a stream is read from JSON, CSV or tables, and"),
        ([{"content": "a"}], TrainerError, "no field 'text'; there are: content. Set data.text_field=NAME to train on"),
        ([{"text": ""}, {"text": ""}], TrainerError, "it contains no text"),
        ([{"messages": "hello"}], TrainerError, "a.jsonl, line 1: 'messages' holds a string"),
        ([{"messages": [message("user", "a")]}] * 3, TrainerError, "3 have no answer to train on"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], UserError, "line 1: a line with 'chosen' and 'rejected'"),
    ],
)
def test_what_is_refused(given: str | list[dict[str, Any]], error: type[Exception], told: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text")
    if not isinstance(given, str):
        (tmp_path / "a.jsonl").write_text(lines(given))
        given = "{here}/a.jsonl"
    with pytest.raises(error, match=re.escape(told)):
        tokens(given.format(here=tmp_path)).read(0, 1)


def test_a_record_of_the_hub_is_named_by_the_tokens_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text(lines([{"text": "a"}, {"other": "b"}]))
    of_the_hub(tmp_path / "a.jsonl", monkeypatch)
    with pytest.raises(TrainerError, match="stream:someone/corpus, a record behind token 0: field 'text' holds null"):
        tokens("someone/corpus").read(0, 3)
    (tmp_path / "a.jsonl").write_text(lines([{"prompt": "a"}]))
    with pytest.raises(UserError, match="the first record: a line with 'prompt' without an answer is not trained on"):
        tokens("someone/corpus")


def test_a_data_set_of_the_hub_may_use_the_network(data: Path) -> None:
    for path, offline in (("hub:a/b", False), ("stream:a/b", False), (f"stream:{data}", True), (str(data), True)):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "HF_HUB_OFFLINE"):
            os.environ.pop(name, None)
        prepare_process(load_config(["--data", path]))
        assert ("HF_HUB_OFFLINE" in os.environ) == offline, path


# -- whole runs --------------------------------------------------------------------------------------------------------

WORDS = [*TINY, "--steps", "6", "--save-every", "2", "train.eval_every=0", "--micro-batch", "2"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Return a jsonl file that a run of 6 steps reads more than once; next to it is one of short conversations."""
    path = tmp_path / "text.jsonl"
    path.write_text(lines({"text": f"It was the best of times, number {n}, and the worst."} for n in range(40)))
    talks = ({"messages": turns(f"{n}?", f"{n}" * (n % 4 + 1))} for n in range(22))
    path.with_name("talks.jsonl").write_text(lines(talks))
    return path


PAGE_FILES = ["--save-every", "0", "--ram-fraction", "0", "tiered.state_copies=2", "data.shuffle=7"]
PACKED = ["data.packing=on", "data.shuffle=3", "model.overrides.resid_pdrop=0.1"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [PAGE_FILES, PACKED], ids=["page files", "packed"])
def test_a_killed_run_resumes_bit_for_bit(more: list[str], text: Path, tmp_path: Path, drive: Path) -> None:
    path = text.with_name("talks.jsonl") if more is PACKED else text
    words = [*WORDS, "--accumulate", "4", "--data", f"stream:{path}", "--nvme", drive, *more]
    whole = call(*words, output=tmp_path / "whole")
    saved = "" if more is PAGE_FILES else f"pause~{tmp_path}/killed/checkpoints/step-00000002/MANIFEST.json+"
    assert faulty(f"{saved}kill@line=3", *words, output=tmp_path / "killed").code == -KILL
    again = call(*words, output=tmp_path / "killed")
    assert "resum" in again.text
    assert_same_run(again, whole)
    assert json.loads((tmp_path / "whole/stream.jsonl").read_text())["tokens"] == 0
    assert ("conversations, the first of them: 22 conversations, " in whole.text) == (more is PACKED)
    other = "data.train_on=all" if more is PACKED else "data.shuffle=8"
    assert call(*words, other, output=tmp_path / "killed", check=False).code == 2


@pytest.mark.slow
def test_two_ranks_take_the_rows_of_one(text: Path, tmp_path: Path) -> None:
    words = [*WORDS, "--data", f"stream:{text}", "data.shuffle=7"]
    alone = call(*words, "--accumulate", "2", output=tmp_path / "alone")
    both = call_ranks(*words, "--accumulate", "1", output=tmp_path / "both", count=2)
    assert [run.code for run in both] == [0, 0], both
    assert_same_run(both[0], alone)
