"""Conversion of conversations in lines of JSON to the rows of a token file.

records ── Example ── AnswerEncoder ── RowMaker (── Packer) ──> marked ids
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from offload_trainer.data.conversations import Example, example_of
from offload_trainer.data.loss_mask import AnswerEncoder
from offload_trainer.data.packing import NOT_LEARNED, Counts, Packer, RowMaker
from offload_trainer.data.tokenfile import TokenWriter
from offload_trainer.errors import UserError
from offload_trainer.units import format_count

# Increase it when the same conversations and template give other rows than before.
_VERSION = 2
_BATCH = 256  # conversations per tokenizer call
_SECONDS_BETWEEN_REPORTS = 5.0

PLAIN_TEMPLATE = Path(__file__).parent / "builtin" / "chat_template.jinja"


@dataclass(frozen=True)
class RowOptions:
    """Settings of the conversion of conversations to rows."""

    form: str  # name of the lines' form, see conversations.py
    everything: bool  # train on all tokens, not only on answers
    length: int  # row length in tokens
    packed: bool  # put several conversations in a row

    def key(self, tokenizer: PreTrainedTokenizerBase) -> list[Any]:
        """Return everything that the rows depend on except the lines and the tokenizer's ids."""
        template = hashlib.blake2b(repr(tokenizer.chat_template).encode(), digest_size=8).hexdigest()
        wish = asdict(self)
        # omit the key for unpacked rows, so that their existing cache files keep their names
        packed = ["packed"] if wish.pop("packed") else []
        return [_VERSION, *wish.values(), template, *packed]


def write_rows(
    writer: TokenWriter,
    records: Iterator[tuple[str, dict[str, Any]]],
    wish: RowOptions,
    *,
    tokenizer: PreTrainedTokenizerBase,
    end_of_text: int | None,
    say: Callable[[str], None],
) -> None:
    """Write the rows of all records and set the writer's summary; `tokenizer` must have its chat template.

    Raises UserError, with file and line, for a record that is not a conversation, and if no conversation has a learned
    token.
    """
    encoder = AnswerEncoder(tokenizer, everything=wish.everything, end_of_text=end_of_text)
    pad = next((id_ for id_ in (tokenizer.pad_token_id, end_of_text) if id_ is not None), 0)
    maker = RowMaker(wish.length, pad=pad)
    packer = Packer(wish.length, pad=pad)
    reported = time.monotonic()
    for batch in _batches(records, form=wish.form):
        for encoded in encoder.encode(batch):
            row = _packed(packer, maker.cut(encoded)) if wish.packed else maker.row_of(encoded)
            if row is not None:
                writer.write(row)
        if time.monotonic() - reported >= _SECONDS_BETWEEN_REPORTS:
            reported = time.monotonic()
            say(f"{maker.counts.conversations} conversations, {format_count(maker.counts.tokens)} tokens")
    for row in packer.rest():
        writer.write(row)
    if not writer.tokens:
        raise UserError(_nothing_learned(maker.counts, wish.length))
    rows = writer.tokens // wish.length
    writer.write([pad | NOT_LEARNED])  # the last row needs one token after it as its last target
    told = [maker.counts.told(rows=rows, length=wish.length), *encoder.unsaid.told()]
    writer.summary = "; ".join(told)


def _packed(packer: Packer, ids: np.ndarray | None) -> np.ndarray | None:
    return None if ids is None else packer.add(ids)


def _nothing_learned(counts: Counts, length: int) -> str:
    """Return why no conversation has produced a row, and what to do."""
    without = (
        f"{counts.unanswered} have no answer to train on (a message from the assistant, without 'weight': 0 or "
        "'train': false)"
    )
    if counts.unanswered and not counts.left_out:
        return f"of the conversations {without}, and there are no others; give them answers, or set data.train_on=all"
    left = f": all {counts.left_out} are left out" if counts.left_out else ""
    more = f"; {without}" if counts.unanswered else ""
    return (
        f"no conversation has tokens to train on within its first {length}{left}{more}; give more, a "
        "larger --seq-len, or data.train_on=all"
    )


def set_template(tokenizer: PreTrainedTokenizerBase, *, say: Callable[[str], None]) -> None:
    """Set a plain chat template on a tokenizer without one. Exports of the model then contain it too."""
    if not tokenizer.chat_template:
        tokenizer.chat_template = PLAIN_TEMPLATE.read_text()
        say('note: the tokenizer has no chat template: turns become lines with "User: ..." and "Assistant: ..."')


def _batches(records: Iterator[tuple[str, dict[str, Any]]], *, form: str) -> Iterator[list[Example]]:
    batch: list[Example] = []
    for where, record in records:
        batch.append(example_of(record, form=form, where=where))
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
