"""Preparation of the run's token file: text is tokenised once into the cache, and a ``.bin`` file is used unchanged.

    find_sources ── DocumentEncoder or RowEncoder ── TokenWriter ──> cache/NAME-KEY.bin

Documents are plain text; conversations are divided into rows as they are tokenised. The key is a hash of everything
that the ids depend on, including the text's bytes, so a changed text, field or tokenizer leads to another file.

Hashes of text files are remembered in cache/NAME-KEY.sums.json. A file is read again unless its size, modification
times, inode and device equal the remembered ones and it had not changed for two seconds when it was hashed: a second
change within one clock tick would leave the same times. The inode's ctime is compared too, since no program can set it
back.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from offload_trainer.config import DataSection
from offload_trainer.data.conversations import form_of_files
from offload_trainer.data.mixture import Tokens, joined
from offload_trainer.data.packing import Encoder, encoder_of
from offload_trainer.data.sources import find_sources
from offload_trainer.data.tokenfile import NOT_LEARNED, TokenFile, TokenWriter, is_complete, refuse_not_owned
from offload_trainer.data.tokenizer import known_ids, tokenizer_fingerprint, vocabulary_size
from offload_trainer.errors import TrainerError, UserError
from offload_trainer.safe_files import file_bytes, open_given, parsed
from offload_trainer.storage.atomic_io import write_text
from offload_trainer.storage.owned_dirs import MODE, cache_directory, open_owned
from offload_trainer.units import format_bytes, format_count, format_seconds, is_utf8

# Increase it when the same text and tokenizer give other ids than before.
FORMAT = 3
_SECONDS_BETWEEN_REPORTS = 5.0
_SETTLED_NS = 2 * 10**9
_LONG = 10**9  # bytes whose reading takes seconds


def prepare_tokens(
    section: DataSection,
    *,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int,
    seq_len: int,
    say: Callable[[str], None],
    fingerprint: str | None = None,
    validation: bool = False,
) -> Tokens:
    """Return the token file or files of `section.path`, with all ids below `vocabulary`, the model's number of ids.

    Text is tokenised into NAME-KEY.bin in the cache, unless that file exists. Each document, including the last, is
    between its `document_marks`. Several runs that prepare the same text at once each do the work, and the last file
    replaces equal ones. `fingerprint` is the tokenizer's. `validation` is as for `find_sources`.

    Raises UserError for the errors of `find_sources` and `read_documents`, for empty text, for ids that the model does
    not have, and for token files that do not fit each other. Raises TrainerError if the drive is full or the text
    changed meanwhile.
    """
    sources = find_sources(section.path, say=say, validation=validation)
    fingerprint = fingerprint or tokenizer_fingerprint(tokenizer)
    if sources[0].suffix == ".bin":
        files = [TokenFile.open(source) for source in sources]
        for file in files:
            if file.row_length not in (None, seq_len):
                raise UserError(
                    f"{file.path} holds conversations in rows of {file.row_length}, and this run uses {seq_len}: use "
                    f"--seq-len {file.row_length}, or give the conversations instead"
                )
            if file.row_length is not None and file.packed != (section.packing == "on"):
                holds, key = ("several in a row", "on") if file.packed else ("each in a separate row", "off")
                raise UserError(
                    f"{file.path} holds conversations, {holds}: use data.packing={key}, or give the conversations "
                    "instead"
                )
            if file.tokenizer is not None and file.tokenizer != fingerprint:
                raise UserError(
                    f"{file.path} was made with the tokenizer {file.tokenizer} but this run uses {fingerprint}: "
                    "set data.tokenizer to the one it was made with, or give the text instead"
                )
            if file.assumed:
                say(f"{file.path}: {file.assumed}")
            # A matching sidecar that states a vocabulary within the model's saves reading the ids.
            stated = file.tokenizer is not None and file.vocabulary is not None and file.vocabulary <= vocabulary
            if not stated and (largest := file.largest_id()) >= vocabulary:
                raise UserError(
                    f"{file.path} holds ids up to {largest}, but the model only has ids below {vocabulary}: "
                    "choose the model that it was tokenised for, or give the text instead"
                )
        return joined(files)
    form = form_of_files(sources, form=section.format, text_field=section.text_field)
    encoder = encoder_of(section, form, tokenizer=tokenizer, length=seq_len, say=say)
    known = partial(known_ids, tokenizer=tokenizer, vocabulary=vocabulary, name=", ".join(section.path))
    found = _tokenised(section, sources, encoder, tokenizer=tokenizer, fingerprint=fingerprint, known=known, say=say)
    if vocabulary_size(tokenizer) > vocabulary:  # The file may have been made for another model.
        known(np.array(found.largest_id()))
    return found


def _tokenised(
    section: DataSection,
    sources: Sequence[Path],
    encoder: Encoder,
    *,
    tokenizer: PreTrainedTokenizerBase,
    fingerprint: str,
    known: Callable[[np.ndarray], np.ndarray],
    say: Callable[[str], None],
) -> TokenFile:
    """Return the cached token file of these sources, creating it if needed."""
    separator, cache = tokenizer.eos_token_id, cache_directory() if section.cache == "auto" else Path(section.cache)
    # a readable name, made from the first source's
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(section.path[0]).resolve().stem)[:40].strip("-") or "text"
    memory = cache / f"{name}-{_digest([str(source.resolve()) for source in sources])}.sums.json"
    sums = source_sums(sources, memory=memory, say=say)
    # The key includes how the bytes are read: the same bytes may be a text or lines of JSON.
    content = [FORMAT, sums, fingerprint, separator, [source.suffix.lower() for source in sources], *encoder.key]
    target = cache / f"{name}-{_digest(content)}.bin"
    refuse_not_owned(target)
    if is_complete(target):
        found = TokenFile.open(target, owned=True)
        say(f"tokens: {target}, already there")
        return found
    total = sum(source.stat().st_size for source in sources)
    say(f"tokenising {format_bytes(total)} of text in {len(sources)} file(s) into {target}")
    begin = reported = time.monotonic()
    before = _bytes_read()
    records: Any = (record for source in sources for record in encoder.read(source))
    with TokenWriter(
        target,
        tokenizer=fingerprint,
        vocabulary=vocabulary_size(tokenizer),
        end_of_text=separator,
        row_length=encoder.row_length,
        packed=encoder.packed,
    ) as writer:
        for ids in map(known, encoder.encode(records)):
            writer.write(ids)
            now = time.monotonic()
            if now - reported >= _SECONDS_BETWEEN_REPORTS:
                reported, speed = now, format_count(writer.tokens / (now - begin))
                share = min(1.0, (_bytes_read() - before) / max(1, total))
                read = f", {share:.0%} of the text read" if share else ""
                say(f"{format_count(writer.tokens)} tokens{read}, {speed} a second")
        for ids in encoder.rest():
            writer.write(ids)
        say(f"{format_count(writer.tokens)} tokens in {format_seconds(time.monotonic() - begin)}")
        if encoder.note:
            say(encoder.note)
        for source, then, now_is in zip(
            sources, sums, source_sums(sources, memory=memory, say=lambda _: None), strict=True
        ):
            if then != now_is:
                raise TrainerError(
                    f"{source}: the text changed while it was tokenised: start again when it is complete"
                )
        if not writer.tokens:
            raise UserError(f"{', '.join(section.path)}: {encoder.why_none()}")
        if encoder.row_length is not None:
            # The last row needs one token after it as its last target.
            writer.write([NOT_LEARNED])
            writer.summary = encoder.summary
    return TokenFile.open(target, owned=True)


def _digest(content: object) -> str:
    """Hash JSON-serialisable content to 16 hex digits."""
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


def _bytes_read() -> int:
    """Return the bytes that this process has read (rchar of proc(5)), 0 where the system does not count them."""
    try:
        return int(Path("/proc/self/io").read_text().split()[1])
    except OSError:
        return 0


# -- hashes of the text ------------------------------------------------------------------------------------------------


def source_sums(sources: Sequence[Path], *, memory: Path, say: Callable[[str], None]) -> list[str]:
    """Return the hash of each file. `memory` is the file that caches hashes between runs; losing it costs only time.

    Raises UserError for a file that cannot be read.
    """
    try:
        known = parsed(file_bytes(memory, opener=open_owned), dict[str, tuple[str, list[int]]])
    except (FileNotFoundError, ValueError):
        known = {}
    names = ("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino", "st_dev")
    try:
        about = {path: [getattr(os.stat(path), name) for name in names] for path in map(os.path.realpath, sources)}
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error
    found = {path: known[path][0] for path, state in about.items() if path in known and known[path][1] == state}
    fresh = about.keys() - found.keys()
    total = sum(about[path][0] for path in fresh)
    if total >= _LONG:
        say(f"reading {format_bytes(total)} of text to check whether it was tokenised before")
    settled = set(found)
    for path in sorted(fresh):
        if time.time_ns() - max(about[path][1:3]) > _SETTLED_NS and is_utf8(path):  # JSON has no other names
            settled.add(path)
        found[path] = _sum(Path(path))
    if settled & fresh:
        try:
            memory.parent.mkdir(parents=True, exist_ok=True)
            write_text(memory, json.dumps({path: (found[path], about[path]) for path in sorted(settled)}), mode=MODE)
        except OSError:
            pass  # without the cache the hashes are computed again next time
    return [found[os.path.realpath(source)] for source in sources]


def _sum(path: Path) -> str:
    try:
        with open_given(path) as file:
            return str(hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest())  # type: ignore[arg-type]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
