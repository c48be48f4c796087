"""Preparation of the run's token file: text is tokenised once into the cache, and a ``.bin`` file is used unchanged.

    find_sources -> read_documents -> batches of pieces -> tokenizer -> TokenWriter -> cache/NAME-KEY.bin
                    read_records ──> conversations -> rows (conversation_rows.py)

The key is a hash of everything that the ids depend on, including the text's bytes, so a changed text, field or
tokenizer leads to another file.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from offload_trainer.config import DataSection
from offload_trainer.data.chunked_tokenize import Piece, TextSplitter
from offload_trainer.data.concat import Tokens, joined
from offload_trainer.data.conversation_rows import RowOptions, set_template, write_rows
from offload_trainer.data.conversations import COLUMNS, TEXT, form_of_files
from offload_trainer.data.documents import read_documents, read_records
from offload_trainer.data.file_hashes import new_sum, source_sums
from offload_trainer.data.sources import find_sources
from offload_trainer.data.tokenfile import TokenFile, TokenWriter, is_complete, refuse_not_owned
from offload_trainer.data.tokenizer import end_of_text, tokenizer_fingerprint, vocabulary_size
from offload_trainer.errors import TrainerError, UserError
from offload_trainer.storage.locks import NoLocks, turn
from offload_trainer.units import format_bytes, format_count, format_seconds

# Increase it when the same text and tokenizer give other ids than before.
FORMAT = 2
BATCH_CHARACTERS = 1 << 20
BATCH_PIECES = 4096
SECONDS_BETWEEN_REPORTS = 5.0
_LONGEST = 86400.0  # seconds to wait for another process that tokenises the same text

Found = TypeVar("Found")


def prepare_tokens(
    section: DataSection,
    *,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int,
    seq_len: int,
    cache: Path,
    say: Callable[[str], None],
) -> Tokens:
    """Return the token file or files of `section.path`, with all ids below `vocabulary`, the model's number of ids.

    Text is tokenised into ``cache/NAME-KEY.bin``, unless that file exists. Each document, including the last, is
    followed by end-of-text if the tokenizer has one. Special tokens spelled out in the text become their ids, as in
    transformers. If several processes prepare the same text, one does the work and the others wait for it; where the
    cache's filesystem has no locks, each does it.

    Raises UserError for the errors of `find_sources` and `read_documents`, for empty text, and for a tokenizer or token
    files that do not fit the model or each other. Raises TrainerError if the drive is full or the text changed
    meanwhile.
    """
    sources = find_sources(section.path, say=say)
    fingerprint = tokenizer_fingerprint(tokenizer)
    if sources[0].suffix == ".bin":
        given = (TokenFile.open(source, dtype=section.token_dtype) for source in sources)
        checked = [
            _checked(file, fingerprint=fingerprint, vocabulary=vocabulary, seq_len=seq_len, say=say) for file in given
        ]
        for file in checked:
            _refuse_other_rows(file, packing=section.packing == "on")
        return joined(checked)
    if section.token_dtype != "auto":
        raise UserError(
            f"data.token_dtype={section.token_dtype} is for .bin files, and {sources[0]} is text: leave it out"
        )
    size = vocabulary_size(tokenizer)
    if size > vocabulary:
        raise UserError(
            f"the tokenizer has {size} ids and the model only {vocabulary}: set data.tokenizer to the "
            f"model's own, or, with random weights, model.overrides.vocab_size={size}"
        )
    form = form_of_files(sources, form=section.format, text_field=section.text_field)
    rows = None
    if form != TEXT:
        set_template(tokenizer, say=say)
        rows = RowOptions(form, everything=section.train_on == "all", length=seq_len, packed=section.packing == "on")
    elif end_of_text(tokenizer) is None:
        say("note: the tokenizer has no end-of-text: document boundaries are not marked")
    return _tokenised(section, sources, rows, tokenizer=tokenizer, cache=cache, say=say)


def _tokenised(
    section: DataSection,
    sources: Sequence[Path],
    rows: RowOptions | None,
    *,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    say: Callable[[str], None],
) -> TokenFile:
    """Return the cached token file of these sources, creating it if needed; `rows` is None for plain text."""
    fingerprint, separator = tokenizer_fingerprint(tokenizer), end_of_text(tokenizer)
    name = _stem(section.path[0])
    memory = cache / f"{name}-{_digest([str(source.resolve()) for source in sources])}.sums.json"
    sums = source_sums(sources, memory=memory, say=say)
    # The key includes how the bytes are read: the same bytes may be a text or lines of JSON.
    content = [section.text_field, fingerprint, separator, [source.suffix.lower() for source in sources]]
    if rows is not None:
        content = [fingerprint, separator, *rows.key(tokenizer)]
    target = cache / f"{name}-{_digest([FORMAT, sums, *content])}.bin"
    refuse_not_owned(target)
    with nullcontext() if is_complete(target) else _only_writer(target, say=say):
        if is_complete(target):
            found = TokenFile.open(target, owned=True)
            say(f"tokens: {target}, already there")
            return found
        size = format_bytes(sum(source.stat().st_size for source in sources))
        say(f"tokenising {size} of text in {len(sources)} file(s) into {target}")
        with TokenWriter(
            target,
            tokenizer=fingerprint,
            vocabulary=vocabulary_size(tokenizer),
            end_of_text=separator,
            row_length=None if rows is None else rows.length,
            packed=rows is not None and rows.packed,
        ) as writer:
            if rows is None:
                _write_text(writer, sources, sums=sums, text_field=section.text_field, tokenizer=tokenizer, say=say)
            else:
                read = partial(read_records, wanted=COLUMNS, strings=True)
                records = _of_all(sources, sums=sums, read=read, writer=writer)
                write_rows(writer, records, rows, tokenizer=tokenizer, end_of_text=separator, say=say)
            if not writer.tokens:
                raise UserError(f"{', '.join(section.path)}: it contains no text; correct the path")
    return TokenFile.open(target, owned=True)


@contextmanager
def _only_writer(target: Path, *, say: Callable[[str], None]) -> Iterator[None]:
    """Wait for a lock on creating `target` and hold it inside the context. The lock is released if its process dies.

    Without locks, or if the lock file is another user's, every process does the work.
    """

    def waiting(_: str) -> None:
        say(f"another process is tokenising the same text: waiting for {target}")

    with ExitStack() as stack:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(turn(target.with_suffix(".lock"), say=waiting, patience=_LONGEST))
        except (OSError, NoLocks):
            pass  # if the directory cannot be written, the writer reports it
        yield


def _checked(
    tokens: TokenFile, *, fingerprint: str, vocabulary: int, seq_len: int, say: Callable[[str], None]
) -> TokenFile:
    """Return a ``.bin`` file named by the user if it fits the tokenizer, the model and the row length."""
    path = tokens.path
    if tokens.row_length not in (None, seq_len):
        raise UserError(
            f"{path} holds conversations in rows of {tokens.row_length}, and this run uses {seq_len}: use --seq-len "
            f"{tokens.row_length}, or give the conversations instead"
        )
    if tokens.tokenizer is not None and tokens.tokenizer != fingerprint:
        raise UserError(
            f"{path} was made with the tokenizer {tokens.tokenizer} but this run uses {fingerprint}: "
            "set data.tokenizer to the one it was made with, or give the text instead"
        )
    if tokens.assumed:
        say(f"{path}: {tokens.assumed}")
    # A matching sidecar states the vocabulary; without one, only the ids themselves show it.
    if tokens.tokenizer is None or tokens.vocabulary is None:
        needed = tokens.largest_id() + 1
    else:
        needed = tokens.vocabulary
    if needed > vocabulary:
        raise UserError(
            f"{path} holds ids up to {needed - 1}, but the model only has ids below {vocabulary}: "
            "choose the model that it was tokenised for, or give the text instead"
        )
    return tokens


def _refuse_other_rows(tokens: TokenFile, *, packing: bool) -> None:
    """Raise UserError for a file of rows that does not match `data.packing`."""
    if tokens.row_length is not None and tokens.packed != packing:
        holds, key = ("several in a row", "on") if tokens.packed else ("each in a separate row", "off")
        raise UserError(
            f"{tokens.path} holds conversations, {holds}: use data.packing={key}, or give the conversations instead"
        )


def _digest(content: object) -> str:
    """Hash JSON-serialisable content to 16 hex digits."""
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


def _stem(path: str) -> str:
    """Return a readable name for a cached file, made from the source's name."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(path).resolve().stem)[:40].strip("-") or "text"


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a text without the special tokens that a tokenizer adds around it."""
    ids: list[int] = _encode_all(tokenizer, [text])[0]
    return ids


def _encode_all(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Any:
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def _of_all(
    sources: Sequence[Path], *, sums: Sequence[str], read: Callable[..., Iterator[Found]], writer: TokenWriter
) -> Iterator[Found]:
    """Yield what `read` finds in the files. Raises TrainerError after a file whose hash is not the `sums` entry.

    Sets `writer.share` to the share of the bytes read before the current block.
    """
    total, done = sum(source.stat().st_size for source in sources), 0
    for source, expected in zip(sources, sums, strict=True):
        found = new_sum()

        def see(data: bytes, found: Any = found) -> None:
            nonlocal done
            found.update(data)
            writer.share = done / max(1, total)
            done += len(data)

        yield from read(source, seen=see)
        if found.hexdigest() != expected:
            raise TrainerError(
                f"{source}: the text changed while it was being tokenised: start again when it is complete"
            )


def _write_text(
    writer: TokenWriter,
    sources: Sequence[Path],
    *,
    sums: Sequence[str],
    text_field: str,
    tokenizer: PreTrainedTokenizerBase,
    say: Callable[[str], None],
) -> None:
    """Write the documents' ids, one document after another."""
    cutter = TextSplitter(partial(_encode, tokenizer))
    read = partial(read_documents, text_field=text_field, cutter=cutter)
    pieces = _of_all(sources, sums=sums, read=read, writer=writer)
    total = sum(source.stat().st_size for source in sources)
    separator = end_of_text(tokenizer)
    writer.text_bytes = _tokenise(pieces, tokenizer=tokenizer, separator=separator, writer=writer, total=total, say=say)
    if cutter.inexact:
        say(
            f"note: {cutter.inexact} splits text that has no lines or words, so a few ids may differ from those "
            "of the unsplit text"
        )


def _tokenise(
    pieces: Iterator[Piece],
    *,
    tokenizer: PreTrainedTokenizerBase,
    separator: int | None,
    writer: TokenWriter,
    total: int,
    say: Callable[[str], None],
) -> int:
    """Write the pieces' ids. Returns the number of UTF-8 bytes of their text."""
    done = 0
    begin = reported = time.monotonic()
    for batch in _batches(pieces):
        rows = _encode_all(tokenizer, [piece.before + piece.text for piece in batch])
        ids: list[int] = []
        for piece, row in zip(batch, rows, strict=True):
            ids += row[len(_encode(tokenizer, piece.before)) :] if piece.before else row
            if piece.ends_document and separator is not None:
                ids.append(separator)
        writer.write(ids)
        done += sum(len(piece.text.encode()) for piece in batch)
        now = time.monotonic()
        if now - reported >= SECONDS_BETWEEN_REPORTS:
            reported = now
            say(
                f"tokenised {format_bytes(done)} of {format_bytes(total)}: {format_count(writer.tokens)} "
                f"tokens, {format_bytes(done / (now - begin))}/s"
            )
    say(f"{format_count(writer.tokens)} tokens in {format_seconds(time.monotonic() - begin)}")
    return done


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Group pieces into batches: large enough for a multi-threaded tokenizer, small enough for memory."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
