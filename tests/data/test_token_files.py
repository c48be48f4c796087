"""Tests of token files, ours and others', and of their rows: the tokenizer's ids, exact epochs, shares and resuming."""

import errno
import json
import math
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sample_chats
import torch
from sample_chats import CHATS, lines, run_data, turns
from seen_calls import calls_of, run_before

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.data import documents, packing, tokenfile
from offload_trainer.data import run_data as preparing
from offload_trainer.data.rows import Batch, Mixture, RowReader, order, shares_of, split_rows
from offload_trainer.data.stream import StreamedTokens
from offload_trainer.data.tokenfile import IDS, TokenFile, cached, sidecar_path, write_tokens
from offload_trainer.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from offload_trainer.run.loop import _evaluate
from offload_trainer.storage.owned_dirs import SCRATCH, ScratchDirectory
from offload_trainer.telemetry.metrics import EvalRecord

TOKENIZER = load_tokenizer("builtin")
TEXT = "When shall we three meet again\nIn thunder, lightning, or in rain?\n\nSECOND WITCH.\n" * 30


def ids_of(text: str) -> list[int]:
    """Return the ids of a document, with end-of-text."""
    return [*TOKENIZER.encode(text, add_special_tokens=False), 0]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that grows with each batch of texts that is tokenized."""
    return calls_of(monkeypatch.setattr, packing.DocumentEncoder, "_encode_all")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "my text.txt"
    path.write_text(TEXT)
    return path


prepared = partial(sample_chats.prepared, tokenizer=TOKENIZER, vocabulary=2048, seq_len=16)


def test_other_users_files(source: Path, encoded: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in a shared cache, also those of checksums, are not used if another user owns them or may change them."""
    monkeypatch.setattr(preparing, "_SETTLED_NS", 0)  # else the hash of a text that was just written is not kept
    cache = tmp_path / "shared"
    cache.mkdir()
    cache.chmod(0o1777)
    before = os.umask(0o002)  # lets the group write, which is not followed
    try:
        made = prepared(source, cache=cache)
    finally:
        os.umask(before)
    path, sidecar = made.path, sidecar_path(made.path)
    (memory,) = cache.glob("*.sums.json")
    assert {file.stat().st_mode & 0o777 for file in (path, sidecar, memory)} == {0o644}
    encoded.clear()
    for name in (path, sidecar):
        name.chmod(0o664)
        with pytest.raises(UserError, match=rf"{name.name} cannot be read: others may change it \(mode 664"):
            prepared(source, cache=cache)
        name.chmod(0o644)
        moved = name.rename(tmp_path / "moved")
        name.symlink_to(moved)
        with pytest.raises(UserError, match=r"it is a link\. .*data\.cache=DIR"):
            prepared(source, cache=cache)
        moved.replace(name)
    assert len(prepared(source, cache=cache)) == len(made)
    if os.geteuid() == 0:
        for name in (path, sidecar):
            os.chown(name, 65534, 65534)
            with pytest.raises(UserError, match=r"it belongs to another user \(number 65534\), and is not trusted"):
                prepared(source, cache=cache)
            os.chown(name, 0, 0)
    assert not encoded
    known = {path: ["00" * 16, state] for path, (_, state) in json.loads(memory.read_text()).items()}
    memory.write_text(json.dumps(known))
    memory.chmod(0o666)  # its checksums are not used, else the text would be taken for another
    assert prepared(source, cache=cache).path == made.path
    assert json.loads(memory.read_text()).keys() == known.keys()


def test_documents_become_their_tokens_with_end_of_text_behind_each(tmp_path: Path, source: Path) -> None:
    lines = tmp_path / "b.jsonl"
    lines.write_text("".join(json.dumps({"body": body}) + "\n" for body in ("one é", "", "two")))
    tokens = prepared(source, lines, cache=tmp_path / "cache", text_field="body")
    expected = [*ids_of(TEXT), *ids_of("one é"), *ids_of("two")]
    assert np.fromfile(tokens.path, dtype="<u2").tolist() == expected == tokens.read(0, len(tokens)).tolist()
    assert json.loads(sidecar_path(tokens.path).read_text()) == {
        "dtype": "uint16",
        "tokens": len(expected),
        "tokenizer": tokenizer_fingerprint(TOKENIZER),
        "vocabulary": 2048,
        "end_of_text": 0,
        "crc32": [zlib.crc32(tokens.path.read_bytes())],
    }
    assert tokens.path.name.startswith("my-text-")
    assert len(os.listdir(tmp_path / "cache")) == 2


def test_text_is_read_once(tmp_path: Path, source: Path, encoded: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read again, and not tokenized, if it was just written or touched, or the memory of its sum is damaged."""
    read = calls_of(monkeypatch.setattr, preparing, "open_given")
    now = [source.stat().st_ctime_ns + 10**9]
    monkeypatch.setattr(preparing, "time", SimpleNamespace(time_ns=lambda: now[0], monotonic=time.monotonic))

    def again() -> int:
        read.clear()
        tokens = prepared(source, cache=tmp_path / "cache")
        assert tokens.read(0, len(tokens)).tolist() == ids_of(source.read_text())
        return len(read)

    assert [again(), again()] == [2, 1]  # a text that was just written may change again within one tick of the clock
    now[0] += 10**10
    assert [again(), again()] == [1, 0]
    (memory,) = (tmp_path / "cache").glob("*.sums.json")
    for damaged in ("{", "[]", '{"x": 1}', json.dumps({str(source): [5, []]})):
        memory.write_text(damaged)
        assert again() == 1
    os.utime(source, ns=(time.time_ns(), source.stat().st_mtime_ns + 1))
    assert again() == 1
    assert len(encoded) == 1
    for place, word in ((source, "hail"), (tmp_path / "new", "mist")):  # written over, and another file of its name
        before = source.stat()
        place.write_text(TEXT.replace("rain", word))
        os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))
        place.rename(source)
        assert (source.stat().st_size, source.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        assert again() == 1
    assert len(encoded) == 3
    path = prepared(source, cache=tmp_path / "cache").path
    sidecar_path(path).unlink()  # a kill comes before it is written, and the text is tokenized again
    path.write_bytes(b"\1\0")
    assert cached(path) is None
    again()
    assert len(encoded) == 4


def test_the_sidecar_comes_last_and_a_stale_one_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.bin"
    there = lambda _, new: (new, sidecar_path(path).exists())  # noqa: E731
    seen = calls_of(monkeypatch.setattr, tokenfile.os, "replace", there)
    for count in (3, 4):
        write_tokens(path, [[1] * count], vocabulary=9)
        assert len(TokenFile.open(path)) == count
    assert [each for each in seen if each[0].parent == tmp_path] == [(path, False), (sidecar_path(path), False)] * 2


def test_a_second_writer_of_the_same_text_keeps_the_pair(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"

    def slow() -> Iterator[list[int]]:
        yield [1, 2]
        write_tokens(path, [[1, 2]], tokenizer="f", vocabulary=9)
        held.append(TokenFile.open(path))

    held: list[TokenFile] = []
    write_tokens(path, slow(), tokenizer="f", vocabulary=9)
    mapped = held[0]
    assert mapped.read(0, len(mapped)).tolist() == TokenFile.open(path).read(0, 2).tolist() == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["t.bin", "t.bin.json"]


def test_what_a_killed_tokenisation_left_is_removed_and_nothing_else(tmp_path: Path, source: Path) -> None:
    cache = tmp_path / "cache"

    def alive() -> Iterator[list[int]]:
        yield [1, 2, 3]
        dead = ScratchDirectory(cache / ".offload-trainer-tokens-dead", what=SCRATCH)
        (dead.path / "ids").write_bytes(b"a")
        dead.leave()
        (cache / ".offload-trainer-tokens-mine").mkdir()
        (cache / ".offload-trainer-tokens-mine/precious").touch()
        before = set(os.listdir(cache)) - {dead.path.name}
        prepared(source, cache=cache)
        assert before <= set(os.listdir(cache))
        assert not dead.path.exists()

    write_tokens(cache / "alive.bin", alive(), vocabulary=9)
    assert TokenFile.open(cache / "alive.bin").read(0, 3).tolist() == [1, 2, 3]
    assert (cache / ".offload-trainer-tokens-mine/precious").exists()


@pytest.mark.parametrize(("vocabulary", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_the_width_of_ids(tmp_path: Path, vocabulary: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenfile, "_SCAN_TOKENS", 2)
    tokens = written(tmp_path / "t.bin", [0, vocabulary - 1], np.array([5]), vocabulary=vocabulary)
    assert tokens.dtype == dtype
    assert np.fromfile(tokens.path, dtype=np.dtype(dtype).newbyteorder("<")).tolist() == [0, vocabulary - 1, 5]
    assert tokens.read(0, len(tokens)).tolist() == [0, vocabulary - 1, 5]
    assert tokens.largest_id() == vocabulary - 1


def test_sizes_that_do_not_match_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    write_tokens(path, [[1, 2, 3]], vocabulary=9)
    whole = path.read_bytes()
    for size, told in ((4, r"says 3 uint16 ids.*holds 2"), (5, r"5 bytes are not"), (0, r"0 bytes are not")):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=told):
            TokenFile.open(path)
    for sidecar in ('{"dtype": "float32", "tokens": 1}', '{"dtype": "uint16", "tokens": 1, "crc32": 5}', "[]"):
        sidecar_path(path).write_text(sidecar)
        with pytest.raises(UserError, match=r"t\.bin\.json cannot be read: .*make them again"):
            TokenFile.open(path)


@pytest.mark.parametrize("way", ["text", "ids", "stream"])
@pytest.mark.parametrize("field", ["text", "prompt"])
def test_the_ids_that_occur_decide_whether_the_model_has_them(field: str, way: str, tmp_path: Path) -> None:
    """A pad token that the model lacks is refused only if the data have it, also where a larger model left its file."""
    tokenizer = load_tokenizer("builtin")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # id 2048

    def use(word: str, *, vocabulary: int) -> None:
        path = tmp_path / f"{len(word)}.jsonl"
        path.write_text(json.dumps({field: f"one {word} two " * 4, "completion": "so"}) + "\n")
        settings: dict[str, Any] = {"tokenizer": tokenizer, "vocabulary": vocabulary, "seq_len": 32}
        if way == "stream":
            StreamedTokens(sample_chats.token_spec(f"stream:{path}", **settings)).read(0, 33)
            return
        tokens = prepared(path, **settings | ({"vocabulary": 2049} if way == "ids" else {}))
        prepared(tokens.path if way == "ids" else path, **settings)
        assert (tokens.read(0, len(tokens)).astype(int) & IDS).max() < vocabulary

    use("hat", vocabulary=2048)
    use("[PAD]", vocabulary=2049)
    with pytest.raises((UserError, TrainerError), match=r"2048, but the model only has ids below 2048: "):
        use("[PAD]", vocabulary=2048)


def test_a_text_that_grows_meanwhile_is_refused(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_before(monkeypatch.setattr, documents, "text_blocks", lambda path, _: path.write_text(TEXT + "more"))
    with pytest.raises(TrainerError, match="changed while"):
        prepared(source, cache=tmp_path / "cache")
    assert not [name for name in os.listdir(tmp_path / "cache") if ".bin" in name]


@pytest.mark.parametrize("fails", ["open", "_commit"])
def test_a_full_drive_is_left_clean(fails: str, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: Any, **__: Any) -> Any:
        if fails == "_commit":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.touch()
        return open("/dev/full", "wb", buffering=0)

    monkeypatch.setattr(tokenfile, fails, full, raising=False)
    cache = tmp_path / "cache"
    told = r"cache: tokens could not be written: No space left on device\. They had .*B.*, and there are .*B free now"
    with pytest.raises(TrainerError, match=told) as caught:
        prepared(source, cache=cache)
    assert caught.value.exit_code == 1
    assert not [name for name in os.listdir(cache) if ".bin" in name or "tokens" in name]


# -- token files of others ---------------------------------------------------------------------------------------------

from_file = partial(prepared, vocabulary=200_000)


def raw(path: Path, ids: Any, dtype: str = "uint16") -> Path:
    """Write ids as others do, with the least that a sidecar may say."""
    np.asarray(ids).astype(dtype).tofile(path)
    sidecar_path(path).write_text(json.dumps({"dtype": dtype, "tokens": len(ids)}))
    return path


def test_raw_ids_are_read_as_wide_as_their_sidecar_says(tmp_path: Path, encoded: list[bool]) -> None:
    """The message about a missing sidecar shows one that can be read."""
    path, ids = tmp_path / "t.bin", (np.random.default_rng(0).zipf(1.3, 4001) - 1) % 50257
    ids[:4000].astype("<u2").tofile(path)
    with pytest.raises(UserError, match="does not say how wide its ids are") as error:
        from_file(path)
    narrow, said, wide = re.findall(
        r'write ({.*?}) into (\S+); for those of 32 bits "uint32" and (\d+)', str(error.value)
    )[0]
    assert said == str(sidecar_path(path))
    sidecar_path(path).write_text(narrow)
    assert from_file(path).read(0, 4000).tolist() == ids[:4000].tolist()
    sidecar_path(path).write_text(json.dumps({"dtype": "uint32", "tokens": int(wide)}))
    assert TokenFile.open(path).read(0, 2000).tolist() == (ids[:4000:2] + 65536 * ids[1:4000:2]).tolist()
    for dtype in ("uint16", "uint32"):
        assert from_file(raw(path, ids, dtype)).read(0, 4001).tolist() == ids.tolist()
    assert not encoded
    with pytest.raises(UserError, match=f"holds ids up to {ids.max()}, but the model only has ids below {ids.max()}"):
        from_file(path, vocabulary=int(ids.max()))


def test_a_file_without_checksums_gets_them(tmp_path: Path) -> None:
    ids = np.arange(1_200_000) % 50257
    path = raw(tmp_path / "t.bin", ids)
    first, again = TokenFile.open(path), TokenFile.open(path)
    assert len(first.sums) == 3
    assert first.sums == again.sums
    ids[1_000_000] ^= 1
    assert TokenFile.open(raw(path, ids)).sums != first.sums
    first.read(0, 1000)
    with pytest.raises(TrainerError, match=r"the block at byte 1048576 differs .*; restore it"):
        first.read(1_000_000, 1)


def test_several_files_are_read_as_one(tmp_path: Path) -> None:
    """Files of different widths and odd sizes, one with a single id; rows cross their borders."""
    kinds, cuts = ("uint16", "uint16", "uint32"), [(0, 333), (333, 334), (334, 1000)]
    paths = [raw(tmp_path / f"{n}.bin", range(*cut), kinds[n]) for n, cut in enumerate(cuts)]
    shards, whole = from_file(*paths), from_file(raw(tmp_path / "whole.bin", range(1000)))
    assert len(shards) == len(whole) == 1000
    for start, count in ((0, 1000), (330, 8), (333, 1), (999, 1), (400, 100)):
        assert shards.read(start, count).tolist() == [*range(start, start + count)]
    readers = [RowReader(tokens, seq_len=7, rows=range(142), vocabulary=2048) for tokens in (shards, whole)]
    joined, alone = (reader.rows_at([0, 47, 141]).targets.tolist() for reader in readers)
    assert joined == alone
    assert from_file(*reversed(paths)).sums != shards.sums
    with pytest.raises(TrainerError, match=r"0\.bin and 2 more: row 47 holds id"):
        RowReader(shards, seq_len=7, rows=range(142), vocabulary=1).rows_at([47])
    write_tokens(tmp_path / "rows.bin", [range(15)], vocabulary=2048, row_length=7)
    with pytest.raises(UserError, match=r"rows\.bin holds conversations in rows, but is one of 2 files"):
        from_file(paths[0], tmp_path / "rows.bin", seq_len=7)
    write_tokens(tmp_path / "b.bin", [range(30)], tokenizer="0123456789abcdef", vocabulary=2048)
    with pytest.raises(UserError, match="made with the tokenizer 0123456789abcdef"):
        from_file(*paths, tmp_path / "b.bin")
    write_tokens(tmp_path / "c.bin", [range(30)], vocabulary=2048, end_of_text=5)
    with pytest.raises(UserError, match=r"c\.bin ends documents with id 5, and the tokenizer with 0: leave"):
        from_file(tmp_path / "c.bin", packing="on")


def test_validation_from_a_file_of_its_own_takes_nothing_from_the_training(tmp_path: Path) -> None:
    """The validation text belongs to the identity, must have a row, and is compared with the training text."""
    train, validation = tmp_path / "train.txt", tmp_path / "val.txt"
    train.write_text("Tomorrow, and tomorrow, and tomorrow. " * 20)
    validation.write_text("Creeps in this petty pace from day to day. " * 20)
    said: list[str] = []
    made = partial(sample_chats.run_data, train, tokenizer="builtin", say=said.append)
    given = {"validation_path": (str(validation),)}
    alone, apart = made(), made(**given)
    assert alone.held_out is alone.tokens
    assert len(apart.split.train) == (len(apart.tokens) - 1) // 8 > len(alone.split.train)
    assert apart.split.validation == range((len(apart.held_out) - 1) // 8)
    text = apart.spec.tokenizer.decode(apart.held_out.read(0, 12).tolist())
    assert text.startswith("Creeps in this petty pace")
    assert "for validation of" in said[-1]
    left = (len(apart.tokens) - 1) % 8
    assert f"the last {left} tokens do not fill a row" in said[-1]
    assert "validation text" not in alone.identity()
    validation.write_text("To the last syllable. " * 20)
    one, other = apart.identity(), made(**given).identity()
    assert [key for key in one if one[key] != other[key]] == ["validation text"]
    assert not [line for line in said if "is the text of --data" in line]
    validation.write_text(train.read_text())
    made(**given)
    assert [line for line in said if "is the text of --data" in line]
    validation.write_text("Out")
    with pytest.raises(UserError, match=r"--validation-data has \d tokens, and one row of 8 needs 9"):
        made(**given)


# -- rows --------------------------------------------------------------------------------------------------------------

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
    unshuffled = next(reader(tokens, shuffle=False).train_batches(0, micro_batch=ROWS + 2))
    assert row_numbers(unshuffled) == [*range(ROWS), 0, 1]
    batch = next(reader(tokens).train_batches(4, micro_batch=3))
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
        return list(islice(rows.train_batches(position, micro_batch=3, rank=world - 1, world=world), count))

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


@pytest.mark.parametrize("place", [0, (1 << 20) + 17, (5 << 19) - 1])
def test_a_changed_byte_is_found_when_its_block_is_read_and_so_is_the_end(place: int, tmp_path: Path) -> None:
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
