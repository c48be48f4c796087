"""Tests of foreign token files: the width of their ids, shards read as one, and detection of changes."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sample_chats

from offload_trainer.config import DataSection, ModelSection
from offload_trainer.data.mixture import TokenShards
from offload_trainer.data.rows import RowReader
from offload_trainer.data.run_data import prepare_data
from offload_trainer.data.tokenfile import TokenFile, TokenWriter, sidecar_path
from offload_trainer.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from offload_trainer.errors import TrainerError, UserError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("builtin")


prepared = partial(sample_chats.prepared, vocabulary=200_000, seq_len=16)


def draw(count: int, *, below: int, seed: int = 0) -> np.ndarray:
    """Draw ids with the skewed frequencies of text."""
    return (np.random.default_rng(seed).zipf(1.3, count) - 1) % below


# -- which width -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [4, 20, 65, 2048, 50257, 65536])
def test_real_files_of_uint16_pass(vocabulary: int, tmp_path: Path, tokenizer: Any) -> None:
    """Real uint16 files pass, also with a vocabulary of a few ids, and with an even or odd number of ids."""
    ids = draw(4001, below=vocabulary)
    ids[:vocabulary] = np.arange(min(vocabulary, len(ids)))
    for count in (4000, 4001):
        ids[:count].astype("<u2").tofile(tmp_path / "t.bin")
        assert prepared(tmp_path / "t.bin", tokenizer=tokenizer).read(0, count).tolist() == ids[:count].tolist()


@pytest.mark.parametrize("vocabulary", [10, 2048, 50257, 128_256, 151_936, 262_144])
def test_uint32_without_a_sidecar_is_recognised(vocabulary: int, tmp_path: Path) -> None:
    ids = draw(4001, below=vocabulary)
    ids.astype("<u4").tofile(tmp_path / "t.bin")
    tokens = TokenFile.open(tmp_path / "t.bin")
    assert tokens.read(0, len(tokens)).tolist() == ids.tolist()
    assert tokens.largest_id() == ids.max()
    assert "read as uint32" in str(tokens.assumed)


def test_what_may_be_either_needs_the_sidecar_that_the_message_shows(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "t.bin"
    for ids in ([70, 0, 80, 0], [0] * 400):
        np.array(ids, dtype="<u2").tofile(path)
        sidecar_path(path).unlink(missing_ok=True)
        with pytest.raises(UserError, match="16-bit or 32-bit ids") as error:
            prepared(path, tokenizer=tokenizer)
        narrow, count, said = re.findall(r"({.*?}), or uint32 and (\d+), into (\S+)", str(error.value))[0]
        assert said == str(sidecar_path(path))
        sidecar_path(path).write_text(narrow)
        assert prepared(path, tokenizer=tokenizer).read(0, len(ids)).tolist() == ids
        sidecar_path(path).write_text(json.dumps({"dtype": "uint32", "tokens": int(count)}))
        assert prepared(path, tokenizer=tokenizer).read(0, int(count)).tolist() == ids[::2]


def test_other_formats_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    ids = draw(4000, below=50257)
    ids.astype("<i8").tofile(path)
    with pytest.raises(UserError, match="64 bits"):
        TokenFile.open(path)
    with path.open("wb") as file:
        np.save(file, ids.astype("<u2"))
    with pytest.raises(UserError, match=r"not raw ids, but a file of NumPy"):
        TokenFile.open(path)
    header = np.zeros(256, dtype="<i4")
    header[0] = 20240520
    path.write_bytes(header.tobytes() + ids.astype("<u2").tobytes())
    with pytest.raises(UserError, match=r"tail -c \+1025 FILE > ids\.bin for llm\.c's"):
        TokenFile.open(path)
    path.write_bytes(path.read_bytes()[1024:])
    assert TokenFile.open(path).read(0, 4000).tolist() == ids.tolist()


# -- that a file changes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sidecar", [False, True])
def test_a_file_without_checksums_gets_them(sidecar: bool, tmp_path: Path) -> None:
    """A changed file has another identity in the next run, and is an error within a run."""
    path = tmp_path / "t.bin"
    ids = draw(1_200_000, below=50257).astype("<u2")
    ids.tofile(path)
    if sidecar:
        sidecar_path(path).write_text(json.dumps({"dtype": "uint16", "tokens": len(ids)}))
    first, again = TokenFile.open(path), TokenFile.open(path)
    assert len(first.sums) == 3
    assert first.sums == again.sums
    ids[1_000_000] ^= 1
    ids.tofile(path)
    assert TokenFile.open(path).sums != first.sums
    first.read(0, 1000)
    with pytest.raises(TrainerError, match="has changed since the run opened it"):
        first.read(1_000_000, 1)


# -- several ---------------------------------------------------------------------------------------------------------


def test_shards_are_read_as_one_file(tmp_path: Path, tokenizer: Any) -> None:
    """Shards of odd sizes, one with a single id, read as one file; rows cross their borders."""
    ids = draw(1000, below=2048)
    paths = []
    for number, (start, end) in enumerate([(0, 333), (333, 334), (334, 1000)]):
        paths.append(tmp_path / f"{number}.bin")
        ids[start:end].astype("<u2").tofile(paths[-1])
    ids.astype("<u2").tofile(tmp_path / "whole.bin")
    shards, whole = prepared(*paths, tokenizer=tokenizer), prepared(tmp_path / "whole.bin", tokenizer=tokenizer)
    assert isinstance(shards, TokenShards)
    assert len(shards) == len(whole) == 1000
    for start, count in ((0, 1000), (330, 8), (333, 1), (999, 1), (400, 100), (5, 0)):
        assert shards.read(start, count).tolist() == ids[start : start + count].tolist()
    rows = [
        RowReader(tokens, seq_len=7, rows=range(142), vocabulary=2048).rows_at([0, 47, 141])
        for tokens in (shards, whole)
    ]
    assert (rows[0].targets == rows[1].targets).all()
    assert prepared(*reversed(paths), tokenizer=tokenizer).sums != shards.sums
    with pytest.raises(TrainerError, match=r"0\.bin and 2 more: row 47 holds id"):
        RowReader(shards, seq_len=7, rows=range(142), vocabulary=1).rows_at([47])


def test_shards_of_different_kinds_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    fingerprint = tokenizer_fingerprint(tokenizer)
    for name, vocabulary in (("a", 2048), ("b", 2048), ("c", 70000), ("d", 2049)):
        with TokenWriter(tmp_path / f"{name}.bin", tokenizer=fingerprint, vocabulary=vocabulary) as writer:
            writer.write([1, 2, 3])
    a, b, c, d = (tmp_path / f"{name}.bin" for name in "abcd")
    both = prepared(a, b, tokenizer=tokenizer)
    assert (both.tokenizer, len(both)) == (fingerprint, 6)
    with pytest.raises(UserError, match=r"dtype is uint16 in .*a\.bin, uint32 in .*c\.bin"):
        prepared(a, c, tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"vocabulary is 2048 in .*, 2049 in"):
        prepared(a, d, tokenizer=tokenizer)
    fields = json.loads(sidecar_path(b).read_text())
    sidecar_path(b).write_text(json.dumps(fields | {"tokenizer": "0123456789abcdef"}))
    with pytest.raises(UserError, match="made with the tokenizer 0123456789abcdef"):
        prepared(a, b, tokenizer=tokenizer)


# -- a separate validation file --------------------------------------------------------------------------------------


def run_data(tmp_path: Path, *, said: list[str] | None = None, seq_len: int = 8, **section: Any) -> Any:
    wish = DataSection(tokenizer="builtin", cache=str(tmp_path / "cache"), **section)
    source: Any = SimpleNamespace(directory=None, shape=SimpleNamespace(vocabulary=2048), section=ModelSection())
    return prepare_data(wish, source, seq_len=seq_len, say=(said if said is not None else []).append)


def test_validation_from_a_file_of_its_own_takes_nothing_from_the_training(tmp_path: Path) -> None:
    """The validation text belongs to the identity, must have a row, and is compared with the training text."""
    train, validation = tmp_path / "train.txt", tmp_path / "val.txt"
    train.write_text("Tomorrow, and tomorrow, and tomorrow. " * 20)
    validation.write_text("Creeps in this petty pace from day to day. " * 20)
    given = {"path": (str(train),), "validation_path": (str(validation),)}
    alone = run_data(tmp_path, path=(str(train),))
    said: list[str] = []
    apart = run_data(tmp_path, **given, said=said)
    assert alone.held_out is alone.tokens
    assert len(apart.split.train) == (len(apart.tokens) - 1) // 8 > len(alone.split.train)
    assert apart.split.validation == range((len(apart.held_out) - 1) // 8)
    text = apart.tokenizer.decode(apart.held_out.read(0, 12).tolist())
    assert text.startswith("Creeps in this petty pace")
    assert "for validation of" in said[-1]
    left = (len(apart.tokens) - 1) % 8
    assert f"the last {left} tokens do not fill a row" in said[-1]
    assert "validation text" not in alone.identity()
    validation.write_text("To the last syllable. " * 20)
    one, other = apart.identity(), run_data(tmp_path, **given, said=said).identity()
    assert [key for key in one if one[key] != other[key]] == ["validation text"]
    assert not [line for line in said if "is the text of --data" in line]
    validation.write_text(train.read_text())
    run_data(tmp_path, **given, said=said)
    assert [line for line in said if "is the text of --data" in line]
    validation.write_text("Out")
    with pytest.raises(UserError, match=r"--validation-data has \d tokens, and one row of 8 needs 9"):
        run_data(tmp_path, **given)


def test_token_files_train_and_validate_like_nanogpts(tmp_path: Path) -> None:
    """Training uses train.bin, in two shards, and validation uses val.bin."""
    ids = draw(500, below=2048)
    for name, part in (("t0", ids[:203]), ("t1", ids[203:400]), ("val", ids[400:])):
        part.astype("<u2").tofile(tmp_path / f"{name}.bin")
    train = (str(tmp_path / "t0.bin"), str(tmp_path / "t1.bin"))
    data = run_data(tmp_path, path=train, validation_path=(str(tmp_path / "val.bin"),))
    assert data.tokens.read(200, 6).tolist() == ids[200:206].tolist()
    assert data.held_out.read(0, 5).tolist() == ids[400:405].tolist()
    assert [path.name for path in data.paths] == ["t0.bin", "t1.bin", "val.bin"]
