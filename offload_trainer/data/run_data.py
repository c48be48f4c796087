"""Data of a run: tokenize it into the cache, split it into training and validation rows, and identify it.

Text is tokenised once into cache/NAME-KEY.bin, a ``.bin`` file is used unchanged, and a stream is tokenised while the
run reads it (stream.py). The key is a hash of everything that the ids depend on, including the text's bytes. Hashes of
text files are remembered in cache/NAME-PATHS.sums.json (`source_sums`).
"""

import hashlib
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.common.safe_files import file_bytes, open_given, parsed
from offload_trainer.common.units import format_bytes, format_count, format_seconds, is_utf8
from offload_trainer.config import DataSection
from offload_trainer.data.loss_mask import AnswerEncoder
from offload_trainer.data.packing import Encoder, TokenSpec, records_in
from offload_trainer.data.rows import JoinedFiles, Mixture, Split, Tokens, split_rows
from offload_trainer.data.sources import find_sources
from offload_trainer.data.stream import StreamedTokens
from offload_trainer.data.tokenfile import NOT_LEARNED, TokenFile, cached, stated_facts, write_tokens
from offload_trainer.data.tokenizer import document_marks, load_tokenizer, tokenizer_fingerprint, vocabulary_size
from offload_trainer.ranks import rank_zero_first
from offload_trainer.storage.atomic_io import write_text
from offload_trainer.storage.owned_dirs import MODE, cache_directory, open_owned

# Increase it when the same text or conversations and tokenizer give other ids than before.
FORMAT = 4
_SETTLED_NS = 2 * 10**9


def prepare_tokens(spec: TokenSpec, *, validation: bool = False) -> Tokens:
    """Return the token file or files of `data.path`, with all ids below the model's number of ids.

    Raises UserError for text without tokens, ids that the model does not have and token files of other settings, and
    TrainerError if the drive is full or the text changed meanwhile.
    """
    section, vocabulary = spec.section, spec.vocabulary
    sources = find_sources(section.path, say=spec.say, validation=validation)
    if sources[0].suffix == ".bin":
        files = [TokenFile.open(source) for source in sources]
        for file in files:
            if refused := _why_other(file, spec):
                raise UserError(f"{file.path} {refused}, or give the text or the conversations instead")
        if len(files) == 1:
            return files[0]
        if rows := [str(file.path) for file in files if file.row_length]:
            raise UserError(
                f"{rows[0]} holds conversations in rows, but is one of {len(files)} files: use it alone, or give the "
                "conversations of all files as .jsonl"
            )
        return JoinedFiles(files)
    found = _tokenised(spec, sources, spec.encoder(spec.form_of(sources)))
    if vocabulary_size(spec.tokenizer) > vocabulary:  # The file may have been made for another model.
        spec.known(np.array(found.largest_id()))
    return found


def _why_other(file: TokenFile, spec: TokenSpec) -> str:
    """Return why a token file is not for this run, and what to do, or ""."""
    if file.row_length not in (None, spec.seq_len):
        wanted = f"use --seq-len {file.row_length}"
        return f"holds conversations in rows of {file.row_length}, and this run uses {spec.seq_len}: {wanted}"
    if file.row_length is not None and file.packed != (spec.section.packing == "on"):
        holds, key = ("several in a row", "on") if file.packed else ("each in a separate row", "off")
        return f"holds conversations, {holds}: use data.packing={key}"
    if file.tokenizer not in (None, spec.fingerprint):
        return f"was made with the tokenizer {file.tokenizer} but this run uses {spec.fingerprint}: set data.tokenizer"
    end = spec.tokenizer.eos_token_id
    if spec.section.packing == "on" and file.row_length is None and file.end_of_text not in (None, end):
        return f"ends documents with id {file.end_of_text}, and the tokenizer with {end}: leave data.packing out"
    # A matching sidecar that states a vocabulary within the model's saves reading the ids.
    stated = file.tokenizer is not None and file.vocabulary is not None and file.vocabulary <= spec.vocabulary
    if not stated and (largest := file.largest_id()) >= spec.vocabulary:
        only = f"the model only has ids below {spec.vocabulary}"
        return f"holds ids up to {largest}, but {only}: choose the model that it was tokenised for"
    return ""


def _tokenised(spec: TokenSpec, sources: Sequence[Path], encoder: Encoder) -> TokenFile:
    section, say, separator = spec.section, spec.say, spec.tokenizer.eos_token_id
    cache = cache_directory() if section.cache == "auto" else Path(section.cache)
    # a readable name, made from the first source's
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(section.path[0]).resolve().stem)[:40].strip("-") or "text"
    memory = cache / f"{name}-{_digest([str(source.resolve()) for source in sources])}.sums.json"
    sums = source_sums(sources, memory=memory, say=say)
    # The key includes how the bytes are read: the same bytes may be a text or lines of JSON.
    suffixes = [source.suffix.lower() for source in sources]
    content = [FORMAT, sums, spec.fingerprint, separator, suffixes, encoder.identity, encoder.row_length]
    target = cache / f"{name}-{_digest(content)}.bin"
    if (found := cached(target)) is not None:
        say(f"tokens: {target}, already there")
        return found
    total = sum(source.stat().st_size for source in sources)
    say(f"tokenising {format_bytes(total)} of text in {len(sources)} file(s) into {target}")

    def arrays() -> Iterator[Any]:
        begin = reported = time.monotonic()
        tokens = 0
        records: Any = (record for source in sources for record in records_in(source, encoder))
        for ids in map(spec.known, encoder.encode(records)):
            yield ids
            tokens, now = tokens + len(ids), time.monotonic()
            if now - reported >= 5.0:  # seconds
                reported = now
                say(f"{format_count(tokens)} tokens, {format_count(tokens / (now - begin))} a second")
        say(f"{format_count(tokens)} tokens in {format_seconds(time.monotonic() - begin)}")
        if encoder.note:
            say(encoder.note)
        again = source_sums(sources, memory=memory, say=lambda _: None)
        if differ := [source for source, then, now_is in zip(sources, sums, again, strict=True) if then != now_is]:
            raise TrainerError(f"{differ[0]}: the text changed while it was tokenised: start again when it is complete")
        if not tokens:
            raise UserError(f"{', '.join(section.path)}: {encoder.why_none}")
        if encoder.row_length is not None:
            yield [NOT_LEARNED]  # the last target of the last row

    write_tokens(
        target,
        arrays(),
        tokenizer=spec.fingerprint,
        vocabulary=vocabulary_size(spec.tokenizer),
        end_of_text=separator,
        row_length=encoder.row_length,
        packed=encoder.packed,
        summary=lambda: encoder.summary,
    )
    return TokenFile.open(target, owned=True)


def _digest(content: object) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


def source_sums(sources: Sequence[Path], *, memory: Path, say: Callable[[str], None]) -> list[str]:
    """Return each file's hash, cached in the file `memory`. Raises UserError for a file that cannot be read."""
    try:
        known = parsed(file_bytes(memory, opener=open_owned), dict[str, tuple[str, list[int]]])
    except (FileNotFoundError, ValueError):
        known = {}
    names = ("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino", "st_dev")
    try:
        about = {path: [getattr(os.stat(path), name) for name in names] for path in map(os.path.realpath, sources)}
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error
    found = {path: known[path] for path, state in about.items() if path in known and known[path][1] == state}
    fresh = about.keys() - found.keys()
    total = sum(about[path][0] for path in fresh)
    if total >= 10**9:  # reading them takes seconds
        say(f"reading {format_bytes(total)} of text to check whether it was tokenised before")
    for path in sorted(fresh):
        settled = time.time_ns() - max(about[path][1:3]) > _SETTLED_NS and is_utf8(path)  # JSON has no other names
        try:
            with open_given(Path(path)) as file:
                made = hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
        found[path] = made.hexdigest(), about[path] if settled else []
    if any(found[path][1] for path in fresh):
        with suppress(OSError):  # without the cache the hashes are computed again next time
            memory.parent.mkdir(parents=True, exist_ok=True)
            kept = {path: known for path, known in sorted(found.items()) if known[1]}
            write_text(memory, json.dumps(kept), mode=MODE)
    return [found[os.path.realpath(source)][0] for source in sources]


@dataclass(frozen=True)
class RunData:
    """A run's tokens, and in `split` the numbers of training rows in `tokens` and of validation rows in `held_out`."""

    spec: TokenSpec
    tokens: Any  # Tokens
    held_out: Any  # Tokens: `tokens` themselves, or those of the validation text
    split: Split
    ends_of_answers: tuple[int, ...]  # ids that end answers of conversations, at which generation has to stop

    @property
    def apart(self) -> int | None:
        """The token that ends a document, if packed documents must not attend to each other."""
        return self.spec.tokenizer.eos_token_id if self.spec.section.packing == "on" else None

    def identity(self) -> dict[str, Any]:
        """Return the facts about the data that must be equal at resume; a value of None is not known."""
        known: dict[str, Any] = {"tokenizer": self.tokens.tokenizer}
        if self.spec.section.streamed:
            known["stream"] = self.tokens.identity
        else:
            known |= {
                "tokens": len(self.tokens),
                "training rows": len(self.split.train),
                "text": zlib.crc32(repr(self.tokens.sums).encode()),
            }
        if self.spec.section.mixture:
            known["mixture"] = list(self.spec.section.mixture)
        if self.apart is not None:
            known["documents apart"] = self.apart
        if self.held_out is not self.tokens:
            known["validation text"] = zlib.crc32(repr(self.held_out.sums).encode())
        return known


# The keys of `RunData.identity`, for a check before the data is read
UNKNOWN_IDENTITY: dict[str, Any] = dict.fromkeys(
    ("tokenizer", "stream", "tokens", "training rows", "text", "mixture", "documents apart", "validation text")
)


def check_data(section: DataSection, source: Any, *, say: Callable[[str], None]) -> None:
    """Raise UserError for data paths that are missing or hold no text or tokens; reads only the start of each file."""
    for paths, validation in ((section.path, False), (section.validation_path, True)):
        if paths:
            find_sources(paths, say=say, validation=validation)
    _refuse_unknown(section, source)


def prepare_data(section: DataSection, source: Any, *, seq_len: int, say: Callable[[str], None]) -> RunData:
    """Tokenize the data unless it is in the cache, on rank 0 first, and return it split into rows. Collective."""
    _refuse_unknown(section, source)
    name, vocabulary = section.tokenizer, source.shape.vocabulary
    if name == "auto":
        name = "builtin" if source.directory is None else str(source.directory)
    remote = source.section.trust_remote_code
    tokenizer = load_tokenizer(name, trust_remote_code=remote, chat_template=section.chat_template)
    if not vocabulary / 2 <= len(tokenizer) <= vocabulary:
        say(f"note: the tokenizer {name} has {len(tokenizer)} ids, the model has {vocabulary}")
    whole = TokenSpec(section, tokenizer, tokenizer_fingerprint(tokenizer), vocabulary, seq_len, say)
    kept = 0.0 if section.validation_path or section.streamed else section.validation  # share of rows held out

    def text(*paths: str, validation: bool = False) -> Any:
        spec = replace(whole, section=section.model_copy(update={"path": paths}))
        if not spec.section.streamed:
            return prepare_tokens(spec, validation=validation)
        try:
            stream = StreamedTokens(spec)
            stream.read(0, 1)
        except TrainerError as error:
            raise UserError(str(error)) from error
        return stream

    def texts() -> Any:
        if not section.mixture:
            return text(*section.path)
        files = [text(path) for path in section.path]
        return Mixture(files, section.mixture, names=section.path, seq_len=seq_len, validation=kept)

    tokens = held_out = rank_zero_first(texts)
    if section.validation_path:
        held_out = rank_zero_first(lambda: text(*section.validation_path, validation=True))
        if held_out.sums == tokens.sums or section.validation_path == section.path:
            say("note: --validation-data is the text of --data: its loss says nothing about other text")
    end = tokenizer.eos_token_id
    unmarked = end is None or end in document_marks(tokenizer)[0]
    if section.packing == "on" and unmarked and (tokens.row_length is None or held_out.row_length is None):
        raise UserError("data.packing=on needs a tokenizer with a token that ends documents and does not begin them")
    talks = tokens.row_length is not None and bool(tokenizer.chat_template)
    ends = AnswerEncoder(tokenizer, everything=False).end_ids if talks else []
    if isinstance(tokens, Mixture):
        train = range(sum(tokens.counts))
        split = Split(train, range(len(train), (len(tokens) - 1) // seq_len))
    else:
        split = split_rows(len(tokens), seq_len=seq_len, validation=kept)
    if section.validation_path:  # all of it is used
        every = split_rows(len(held_out), seq_len=seq_len, validation=0.0, name="--validation-data").train
        split = split._replace(validation=every)
    data = RunData(whole, tokens, held_out, split, tuple(ends))
    for line in _describe(data):
        say(line)
    return data


def _describe(data: RunData) -> Iterator[str]:
    section, tokens, held_out, split = data.spec.section, data.tokens, data.held_out, data.split
    separate = held_out is not tokens
    of = f" of {format_count(len(held_out))} tokens" if separate else ""
    validation = f"{len(split.validation)} for validation{of}"
    if section.streamed:
        blocks = f"; rows are shuffled in blocks of {tokens.block}"
        own = ", in its own order; rows are not shuffled (data.shuffle=N shuffles N rows at a time)"
        yield f"data: {tokens.name} is tokenized while the run reads it{blocks if tokens.block else own}"
        if tokens.summary:
            yield f"conversations, the first of them: {tokens.summary}"
        without = "note: nothing of a stream is held out for validation: give --validation-data"
        yield f"data: {validation}" if separate else without
        return
    if tokens.summary:
        yield f"conversations: {tokens.summary}"
    left = len(tokens) - (len(split.train) + (0 if separate else len(split.validation))) * data.spec.seq_len - 1
    rest = f"; the last {left} tokens do not fill a row" if left else ""
    padded = " with padding" if tokens.summary else ""
    yield f"data: {len(tokens)} tokens{padded}, {len(split.train)} rows to train on, {validation}{rest}"
    if isinstance(tokens, Mixture):
        yield tokens.told


def epoch_line(data: RunData, *, rows_per_step: int, steps: int) -> str:
    """Return a line with the number of steps per epoch and the number of epochs of the run."""
    if data.spec.section.streamed:
        return "an epoch: the length of a stream is not known; behind its end it begins again"
    rows = len(data.split.train)
    return (
        f"an epoch: {rows} rows are {-(-rows // rows_per_step)} steps of {rows_per_step} "
        f"(--micro-batch x --accumulate x ranks); --steps {steps} is {steps * rows_per_step / rows:.3g} epochs"
    )


def _refuse_unknown(section: DataSection, source: Any) -> None:
    """Raise UserError for ids of a tokenizer that nothing names: exports would include a wrong one."""
    is_unknown = section.tokenizer == "auto" and source.directory is None
    for path in map(Path, (*section.path, *section.validation_path) if is_unknown else ()):
        if path.suffix == ".bin" and stated_facts(path.expanduser()).get("tokenizer") is None:
            raise UserError(
                f"{path} does not say which tokenizer its ids belong to, and samples and exports need it: name it with "
                "--tokenizer (a directory, a hub id, or builtin)"
            )
