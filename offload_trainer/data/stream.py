"""Streamed data sets: `StreamedTokens.read(start, count)` returns ids by number, as a token file does, without one.

Ids are in the data set's own order, and behind the last record the data set begins again. The ids of a path are those
of the token file that would be written. To reach an id without tokenizing everything before it, the run directory has a
list of seek points (stream.jsonl, `Point`). Packed conversations have them only where no row is open, which is where
the data set begins again.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from offload_trainer.common.errors import RERUN_HINT, TrainerError
from offload_trainer.common.safe_files import Count, Crc32, Line, exact_record, file_bytes, one_line, parsed
from offload_trainer.data.documents import TEXT, Example, form_of_record, without_nulls
from offload_trainer.data.packing import TokenSpec, records_in
from offload_trainer.data.sources import find_sources, load_from_hub
from offload_trainer.storage.atomic_io import open_to_append

POINTS = "stream.jsonl"
_place = attrgetter("tokens")  # the order of points; of two at the beginning, the one with a checksum is the later
_CHARACTERS = 1 << 18  # characters of the records that are tokenized together
_EVERY = 1 << 20  # ids between two seek points
_FORMAT = 3  # increase it when the same documents and tokenizer give other ids than before


@exact_record
class Point:
    """A position between two records at which reading can begin."""

    stream: Line  # hash of what the ids depend on, except the records
    tokens: Count  # ids before it
    state: dict[str, Any] | None  # state_dict() of the data set; None: its beginning
    count: Count  # number of ids of the records that are tokenized together from here on
    crc32: Crc32  # checksum of these ids as uint32


class StreamedTokens:
    """The ids of a streamed data set, without end. Has the attributes of a `TokenFile` that readers of rows use."""

    sums: tuple[Any, ...] = ()
    paths = ()

    def __init__(self, spec: TokenSpec) -> None:
        """Open the stream that `data.path` names. Raises UserError for a wrong name or form, else TrainerError."""
        section, self.name = spec.section, spec.section.path[0]
        self._files = find_sources(section.path, say=spec.say)
        self.tokenizer, self._seq_len, self._known = spec.fingerprint, spec.seq_len, spec.known
        self.block = section.shuffled_block  # rows
        self._begin, self._ids = 0, np.empty(0, dtype=np.uint32)  # ids of the block that was read last, and some behind
        self._end = 0  # number of the ids up to the last of them
        self._expected: Point | None = None  # the point at which reading has begun, until its checksum is compared
        self._encoder = spec.encoder(spec.form_of(self._files) if self._files else self._form(spec))
        self._load(None)
        self.row_length, self.packed = self._encoder.row_length, self._encoder.packed
        self.identity = self.name + self._encoder.identity
        content = [_FORMAT, self.identity, spec.fingerprint, spec.tokenizer.eos_token_id, self.row_length]
        self._key = hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()
        self._points = [Point(self._key, 0, None, 0, 0)]  # Points are sorted by their position.
        self._file: Path | None = None  # New points are appended to this file.

    @property
    def summary(self) -> str | None:
        """Statistics of the conversations that have been read."""
        return self._encoder.summary

    def __len__(self) -> int:
        """Return the largest number of ids that Python can state: the data set is repeated without end."""
        return sys.maxsize

    def remember(self, points: Path, *, writes: bool) -> None:
        """Use the seek points in a file, and add new ones to it if `writes` is set.

        Raises TrainerError if one of them describes other records than have been read.
        """
        known = {point.tokens: point for point in self._points if point.count}
        try:
            lines = file_bytes(points).splitlines()
        except (FileNotFoundError, ValueError):  # without the file, reading begins at the beginning
            lines = []
        written: set[int] = set()
        for line in lines:
            with suppress(ValueError):  # empty, or torn by a kill
                point = parsed(line, Point)
                if point.stream == self._key:
                    self._compare(point, known.setdefault(point.tokens, point))
                    written.add(point.tokens)
        self._points = sorted([self._points[0], *known.values()], key=_place)
        if writes:
            self._file = points
            for place in sorted(known.keys() - written):
                self._write(known[place])

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` ids from `start` on. Reads in one block of rows are fast, and so are those whose start grows.

        Raises TrainerError if the data set cannot be read, has no text, or is not the one that seek points describe.
        """
        begin = start - start % (self.block * self._seq_len or 1)  # Later reads need the ids from here on.
        near = self._points[bisect_right(self._points, begin, key=_place) - 1]
        if begin < self._begin or near.tokens > self._end:
            self._begin = self._end = near.tokens
            self._ids = self._ids[:0]
            self._expected = near if near.count else None
            self._encoder.open_rows = []
            self._load(near.state)
        parts = [self._ids]
        while self._end < start + count:
            parts.append(self._next_ids())
            if self._end <= begin:
                parts, self._begin = [], self._end
        ids = np.concatenate(parts) if len(parts) > 1 else parts[0]  # A block is large, and most reads find it whole.
        self._ids, self._begin = ids[begin - self._begin :], begin
        return self._ids[start - begin :][:count]

    def _form(self, spec: TokenSpec) -> str:
        if spec.section.format != "auto":
            return spec.section.format
        with self._reading():
            first = next(iter(load_from_hub(self.name, streaming=True)), None)
        if first is None:
            return TEXT
        return form_of_record(first, text_field=spec.section.text_field, where=f"{self.name}, the first record")

    def _load(self, state: dict[str, Any] | None) -> None:
        """Read on from a state of the data set, which is also that behind the ids so far; None: its beginning."""
        self._records, self._state = self._read(state), state

    def _read(self, state: dict[str, Any] | None) -> Iterator[tuple[Any, Callable[[], dict[str, Any]]]]:
        """Yield each document or conversation from a state on, with a function that returns the state behind it."""
        if not self._files:
            dataset = load_from_hub(self.name, streaming=True)
            if state is not None:
                dataset.load_state_dict(state)
            for raw in dataset:
                record = {name: without_nulls(value) for name, value in raw.items()}
                where = f"{self.name}, a record behind token {self._end}"
                yield self._encoder.parsed(record, where=where), dataset.state_dict
            return
        first, skipped = (state["file"], state["records"]) if state else (0, 0)
        for number, path in enumerate(self._files[first:], first):
            for count, record in enumerate(islice(records_in(path, self._encoder), skipped, None), skipped + 1):
                yield record, partial(dict, file=number, records=count)
            skipped = 0

    def _next_ids(self) -> np.ndarray:
        before, state = self._end, self._state
        between_rows = not self._encoder.open_rows
        ids, ended = self._ids[:0], False
        try:
            while not len(ids) and not ended:
                records: Any = self._next_records()
                ended = self._state is None
                ids = self._known(np.concatenate([ids, *self._encoder.encode(records, last=ended)]))
        except TrainerError as error:
            raise TrainerError(str(error)) from error  # a UserError would say that nothing has been written
        if not len(ids) and state is None:
            raise TrainerError(f"{self.name}: {self._encoder.why_none}")
        point = Point(self._key, before, state, len(ids), zlib.crc32(ids.tobytes()))
        if self._expected is not None:
            self._compare(self._expected, point)
            self._expected = None
        last = self._points[-1]
        if len(ids) and between_rows and (last.count == 0 or before >= last.tokens + _EVERY):
            insort(self._points, point, key=_place)
            if self._file is not None:
                self._write(point)
        self._end += len(ids)
        return ids

    def _compare(self, then: Point, now: Point) -> None:
        if (then.count, then.crc32) != (now.count, now.crc32):
            raise TrainerError(
                f"{self.name}: the records behind its first {now.tokens} tokens are not those that were read before. "
                "Restore the data set, or begin anew with another --output"
            )

    def _write(self, point: Point) -> None:
        """Append a point to the file. It begins a line, since a kill may have torn the last one."""
        assert self._file is not None
        with open(open_to_append(self._file), "ab", buffering=0) as file:
            file.write(f"\n{json.dumps(asdict(point))}".encode())

    def _next_records(self) -> list[Any]:
        """Return the next documents or conversations; fewer at the end of the data set, which is opened again there."""
        found: list[Any] = []
        size = 0
        with self._reading():
            while size < _CHARACTERS:
                record, state = next(self._records, (None, dict))
                if record is None:
                    self._load(None)
                    return found
                found.append(record)
                size += _characters(record)
            self._state = state()
        return found

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise TrainerError for any error of a library: the hub, the network and files fail in many ways."""
        try:
            yield
        except TrainerError:
            raise
        except Exception as error:
            rerun = f"; {RERUN_HINT}" if self._end else ""
            raise TrainerError(
                f"{self.name} could not be read behind token {self._end}: {one_line(error)}. Check the name, the split "
                f"and the network{rerun}"
            ) from error


def _characters(record: list[str] | Example) -> int:
    return sum(map(len, record)) if isinstance(record, list) else sum(len(text) for _, text in record.texts)
