"""What the user named -> one token file: a ``.bin`` as it is, text tokenised once and kept in the cache.

    find_sources -> read_documents -> batches of pieces -> tokenizer -> TokenWriter -> cache/NAME-KEY.bin
                    read_records ──> conversations -> rows (conversation_rows.py)

The key hashes everything that the ids depend on, the text's own bytes too, so a changed text, field or tokenizer is
another file.
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

# Raise it when the same text and tokenizer give other ids than before.
FORMAT = 2
BATCH_CHARACTERS = 1 << 20
BATCH_PIECES = 4096
SECONDS_BETWEEN_REPORTS = 5.0
_LONGEST = 86400.0  # seconds that another process may take for the same text

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
    """The token file or files of `section.path`, all of whose ids are below `vocabulary`, the model's number of ids.

    Text becomes ``cache/NAME-KEY.bin``, or is found there and not tokenised again. Each document, the last
    one too, is followed by end-of-text, if the tokenizer has one. Special tokens that are spelled out in the
    text become their ids, as transformers does it. Of several processes that prepare the same text one does the work,
    and the others wait for it; where the cache's filesystem has no locks, each does it.

    Raises UserError: what `find_sources` and `read_documents` raise, no text, a tokenizer or a token file
    that does not fit the model or each other. TrainerError: the drive is full, or the text changed meanwhile.
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
    """The file of these sources in the cache, made where it is not there; None: of text, else of `rows`."""
    fingerprint, separator = tokenizer_fingerprint(tokenizer), end_of_text(tokenizer)
    name = _stem(section.path[0])
    memory = cache / f"{name}-{_digest([str(source.resolve()) for source in sources])}.sums.json"
    sums = source_sums(sources, memory=memory, say=say)
    # What the bytes are read as belongs to them: the same may be a text or lines of JSON.
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
    """Wait until no other process makes `target`; inside, none begins to. A process that dies gives its lock back.

    Where there are no locks, or the lock file is another user's, every process does the work.
    """

    def waiting(_: str) -> None:
        say(f"another process is tokenising the same text: waiting for {target}")

    with ExitStack() as stack:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(turn(target.with_suffix(".lock"), say=waiting, patience=_LONGEST))
        except (OSError, NoLocks):
            pass  # a directory that cannot be written is refused by the writer
        yield


def _checked(
    tokens: TokenFile, *, fingerprint: str, vocabulary: int, seq_len: int, say: Callable[[str], None]
) -> TokenFile:
    """A ``.bin`` that the user named, if tokenizer, model and rows are its own."""
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
    # A matching sidecar says how many ids there are; without one, only the ids themselves do.
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
    """UserError for a file of rows that `data.packing` does not fit."""
    if tokens.row_length is not None and tokens.packed != packing:
        holds, key = ("several in a row", "on") if tokens.packed else ("each in a separate row", "off")
        raise UserError(
            f"{tokens.path} holds conversations, {holds}: use data.packing={key}, or give the conversations instead"
        )


def _digest(content: object) -> str:
    """16 hex digits of it."""
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


def _stem(path: str) -> str:
    """What a person recognises a cached file by."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(path).resolve().stem)[:40].strip("-") or "text"


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text, without what a tokenizer adds around one."""
    ids: list[int] = _encode_all(tokenizer, [text])[0]
    return ids


def _encode_all(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Any:
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def _of_all(
    sources: Sequence[Path], *, sums: Sequence[str], read: Callable[..., Iterator[Found]], writer: TokenWriter
) -> Iterator[Found]:
    """Yield what `read` finds in the files; TrainerError behind a file that is not the one whose sum was taken.

    `writer` is told which share of the bytes has been read, without the block that is being looked at.
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
    """The documents' ids, one after another."""
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
    """Write the pieces' ids. Returns the UTF-8 bytes of text in them."""
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
    """Enough pieces at a time for a tokenizer with many threads, few enough for little memory."""
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
