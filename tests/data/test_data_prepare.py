"""Tests of token files, ours and others': they hold the tokenizer's ids, and a torn or foreign file is never used."""

import errno
import json
import os
import re
import time
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sample_chats
from seen_calls import calls_of, run_before

from offload_trainer.data import documents, packing, tokenfile
from offload_trainer.data import run_data as preparing
from offload_trainer.data.rows import RowReader
from offload_trainer.data.stream import StreamedTokens
from offload_trainer.data.tokenfile import IDS, TokenFile, cached, sidecar_path, write_tokens
from offload_trainer.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from offload_trainer.errors import TrainerError, UserError
from offload_trainer.storage.owned_dirs import SCRATCH, ScratchDirectory

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


def leftovers(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_token_files_of_other_users_are_not_used(
    source: Path, encoded: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert len(leftovers(tmp_path / "cache")) == 2


def test_an_unchanged_text_is_not_read_again(
    tmp_path: Path, source: Path, encoded: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text is tokenized once. It is read again if it may have changed: it was just written, touched, or the memory of
    its checksum is damaged. One of the same name, size and time gives its own tokens.
    """
    read = calls_of(monkeypatch.setattr, preparing, "open_given")
    now = [source.stat().st_ctime_ns + 10**9]
    monkeypatch.setattr(preparing, "time", SimpleNamespace(time_ns=lambda: now[0], monotonic=time.monotonic))

    def again() -> int:
        """Return how often the text was read."""
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


def test_a_kill_before_the_sidecar_leaves_nothing_and_is_redone(
    tmp_path: Path, source: Path, encoded: list[bool]
) -> None:
    first = prepared(source, cache=tmp_path)
    sidecar_path(first.path).unlink()
    first.path.write_bytes(b"\1\0")
    assert cached(first.path) is None
    again = prepared(source, cache=tmp_path)
    assert len(encoded) == 2
    assert again.read(0, len(again)).tolist() == ids_of(TEXT)


def test_the_sidecar_comes_last_and_a_stale_one_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token file and its sidecar are absent or whole at every rename."""
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
    assert leftovers(tmp_path) == ["t.bin", "t.bin.json"]


def test_what_a_killed_tokenisation_left_is_removed_and_nothing_else(tmp_path: Path, source: Path) -> None:
    cache = tmp_path / "cache"

    def alive() -> Iterator[list[int]]:
        yield [1, 2, 3]
        dead = ScratchDirectory(cache / ".offload-trainer-tokens-dead", what=SCRATCH)
        (dead.path / "ids").write_bytes(b"a")
        dead.leave()
        (cache / ".offload-trainer-tokens-mine").mkdir()
        (cache / ".offload-trainer-tokens-mine/precious").touch()
        before = set(leftovers(cache)) - {dead.path.name}
        prepared(source, cache=cache)
        assert before <= set(leftovers(cache))
        assert not dead.path.exists()

    write_tokens(cache / "alive.bin", alive(), vocabulary=9)
    assert TokenFile.open(cache / "alive.bin").read(0, 3).tolist() == [1, 2, 3]
    assert (cache / ".offload-trainer-tokens-mine/precious").exists()


@pytest.mark.parametrize(("vocabulary", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_ids_are_as_wide_as_the_vocabulary_needs(
    tmp_path: Path, vocabulary: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenfile, "_SCAN_TOKENS", 2)
    path = tmp_path / "t.bin"
    write_tokens(path, [[0, vocabulary - 1], np.array([5])], vocabulary=vocabulary)
    tokens = TokenFile.open(path)
    assert tokens.dtype == dtype
    assert np.fromfile(path, dtype=np.dtype(dtype).newbyteorder("<")).tolist() == [0, vocabulary - 1, 5]
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
    sidecar_path(path).write_text('{"dtype": "float32", "tokens": 1}')
    with pytest.raises(UserError, match="'uint16' or 'uint32'"):
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
    assert not [name for name in leftovers(tmp_path / "cache") if ".bin" in name]


@pytest.mark.parametrize("fails", ["open", "_commit"])
def test_a_full_drive_is_reported_and_left_clean(
    fails: str, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert not [name for name in leftovers(cache) if ".bin" in name or "tokens" in name]


# -- token files of others ---------------------------------------------------------------------------------------------


from_file = partial(prepared, vocabulary=200_000)


def draw(count: int, *, below: int, seed: int = 0) -> np.ndarray:
    """Draw ids with the skewed frequencies of text."""
    return (np.random.default_rng(seed).zipf(1.3, count) - 1) % below


def raw(path: Path, ids: Any, dtype: str = "uint16") -> Path:
    """Write ids as others do, with the least that a sidecar may say."""
    np.asarray(ids).astype(dtype).tofile(path)
    sidecar_path(path).write_text(json.dumps({"dtype": dtype, "tokens": len(ids)}))
    return path


def test_raw_ids_are_read_as_wide_as_their_sidecar_says(tmp_path: Path, encoded: list[bool]) -> None:
    """The message about a missing sidecar shows one that can be read."""
    path, ids = tmp_path / "t.bin", draw(4001, below=50257)
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
    """A changed file has another identity in the next run, and is an error within a run."""
    ids = draw(1_200_000, below=50257)
    path = raw(tmp_path / "t.bin", ids)
    first, again = TokenFile.open(path), TokenFile.open(path)
    assert len(first.sums) == 3
    assert first.sums == again.sums
    ids[1_000_000] ^= 1
    assert TokenFile.open(raw(path, ids)).sums != first.sums
    first.read(0, 1000)
    with pytest.raises(TrainerError, match=r"the block at byte 1048576 differs .*; restore it"):
        first.read(1_000_000, 1)


# -- several ---------------------------------------------------------------------------------------------------------


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


# -- a separate validation file --------------------------------------------------------------------------------------


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
