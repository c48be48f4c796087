"""Data of a run: tokenize it into the cache, split it into training and validation rows, and identify it.

DataSection, ModelSource ── prepare_data ──> RunData ── identity ──> compared at resume
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_trainer.config import STREAM, DataSection
from offload_trainer.errors import TrainerError, UserError
from offload_trainer.units import format_count

_STRETCHES, _CHARACTERS = 16, 300  # lines shown of the first row, and characters of each


@dataclass(frozen=True)
class RunData:
    """Tokenizer, tokens and rows of a run.

    `split` holds row numbers: training rows of `tokens` and validation rows of `held_out`.
    """

    tokenizer: Any
    tokens: Any  # Tokens
    held_out: Any  # Tokens: `tokens` themselves, or those of the validation text
    split: Any
    end_of_text: int | None
    ends_of_answers: tuple[int, ...]  # ids that end answers of conversations, at which generation has to stop
    vocabulary: int  # size of the model's vocabulary
    apart: int | None = None  # token that ends a document, if packed documents must not attend to each other
    mixture: tuple[float, ...] = ()  # weights of the texts, if they are mixed
    shuffle: bool = True  # training rows are read in a random order
    streamed: bool = False  # tokenized while the run reads it, so that its length is not known

    @property
    def paths(self) -> list[Path]:
        """Paths of the token files, those for validation last."""
        return list(dict.fromkeys((*self.tokens.paths, *self.held_out.paths)))

    def identity(self) -> dict[str, Any]:
        """Return the facts about the data that must be equal at resume; a value of None is not known."""
        known: dict[str, Any] = {"tokenizer": self.tokens.tokenizer}
        if self.streamed:
            known["stream"] = self.tokens.identity
        else:
            known |= {
                "tokens": len(self.tokens),
                "training rows": len(self.split.train),
                "text": _sum(self.tokens),
            }
        if self.mixture:
            known["mixture"] = list(self.mixture)
        if self.apart is not None:
            known["documents apart"] = self.apart
        return known if self.held_out is self.tokens else known | {"validation text": _sum(self.held_out)}


# The keys of `RunData.identity`, for a check before the data is read
UNKNOWN_IDENTITY: dict[str, Any] = dict.fromkeys(
    ("tokenizer", "stream", "tokens", "training rows", "text", "mixture", "documents apart", "validation text")
)


def check_data(section: DataSection, source: Any, *, say: Callable[[str], None]) -> None:
    """Raise UserError for data paths that are missing or hold no text or tokens; reads only the start of each file."""
    from offload_trainer.data.sources import find_sources
    from offload_trainer.data.stream import check_stream

    for paths, validation in ((section.path, False), (section.validation_path, True)):
        if paths and paths[0].startswith(STREAM):
            check_stream(paths[0], say=say, validation=validation)
        elif paths:
            find_sources(paths, say=say, validation=validation)
    _refuse_unsuitable(section, source)


def _sum(tokens: Any) -> int:
    return zlib.crc32(repr(tokens.sums).encode())


def prepare_data(
    section: DataSection, source: Any, *, seq_len: int, say: Callable[[str], None], eval_rows: int = 32
) -> RunData:
    """Tokenize the data unless it is in the cache, on rank 0 first, and return it split into rows. Collective.

    A stream is opened and its first documents tokenized. Of a validation stream, `eval_rows` rows are read.
    """
    from offload_trainer.data.loss_mask import AnswerEncoder
    from offload_trainer.data.mixture import mixed
    from offload_trainer.data.prepare import prepare_tokens
    from offload_trainer.data.stream import StreamedTokens
    from offload_trainer.data.tokenizer import document_marks, tokenizer_fingerprint
    from offload_trainer.ranks import rank_zero_first

    _refuse_unsuitable(section, source)
    tokenizer = _tokenizer(section, source, say=say)
    given: Any = {
        "tokenizer": tokenizer,
        "fingerprint": tokenizer_fingerprint(tokenizer),
        "vocabulary": source.shape.vocabulary,
        "seq_len": seq_len,
        "say": say,
    }

    def text(*paths: str, validation: bool = False) -> Any:
        wish = section.model_copy(update={"path": paths})
        if not wish.streamed:
            return prepare_tokens(wish, validation=validation, **given)
        try:
            stream = StreamedTokens(paths[0], wish, validation=validation, **given)
            if validation:
                return stream.first(eval_rows)
            stream.read(0, 1)
        except TrainerError as error:
            raise UserError(str(error)) from error
        return stream

    def texts() -> Any:
        if not section.mixture:
            return text(*section.path)
        files = [text(path) for path in section.path]
        kept = 0.0 if section.validation_path else section.validation
        return mixed(files, section.mixture, names=section.path, seq_len=seq_len, validation=kept)

    tokens = held_out = rank_zero_first(texts)
    if section.validation_path:
        held_out = rank_zero_first(lambda: text(*section.validation_path, validation=True))
        if held_out.sums == tokens.sums or section.validation_path == section.path:
            say("note: --validation-data is the text of --data: its loss says nothing about other text")
    split = _rows(section, tokens, held_out, seq_len=seq_len)
    for line in _describe(section, tokens, held_out, split, seq_len=seq_len):
        say(line)
    end = tokenizer.eos_token_id
    unmarked = end is None or end in document_marks(tokenizer)[0]
    if section.packing == "on" and unmarked and (tokens.row_length is None or held_out.row_length is None):
        raise UserError("data.packing=on needs a tokenizer with a token that ends documents and does not begin them")
    talks = tokens.row_length is not None and bool(tokenizer.chat_template)
    ends = AnswerEncoder(tokenizer, everything=False).end_ids if talks else []
    return RunData(
        tokenizer,
        tokens,
        held_out,
        split,
        end,
        tuple(ends),
        source.shape.vocabulary,
        apart=end if section.packing == "on" else None,
        mixture=section.mixture,
        shuffle=bool(section.shuffled_block if section.streamed else section.shuffle),
        streamed=section.streamed,
    )


def _describe(section: DataSection, tokens: Any, held_out: Any, split: Any, *, seq_len: int) -> Iterator[str]:
    """Yield lines for the user on the amount of data and its division."""
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
    left = len(tokens) - (len(split.train) + (0 if separate else len(split.validation))) * seq_len - 1
    rest = f"; the last {left} tokens do not fill a row" if left else ""
    yield f"data: {len(tokens)} tokens, {len(split.train)} rows to train on, {validation}{rest}"
    if section.mixture:
        yield tokens.shares.told(section.path)


def first_row(data: RunData, *, seq_len: int) -> list[str]:
    """Return the first row as text, one line per span with or without loss.

    In a packed row each conversation starts with a line with its number. The last line counts the padding.
    """
    from itertools import groupby

    from offload_trainer.data.rows import IGNORED, RowReader

    reader = RowReader(data.tokens, seq_len=seq_len, rows=range(1), vocabulary=data.vocabulary)
    row = reader.rows_at([0])
    inputs, targets = row.inputs[0].tolist(), row.targets[0].tolist()
    # The first token has no loss in any row; where it is the only one, the row is shown as learned.
    learned = [IGNORED not in targets, *(target != IGNORED for target in targets[:-1])]
    positions = list(range(seq_len)) if row.positions is None else row.positions[0].tolist()
    text_end = seq_len - row.padding
    begins = [place for place in range(text_end) if positions[place] == 0]
    printed = []
    for number, (start, end) in enumerate(zip(begins, [*begins[1:], text_end], strict=True), 1):
        printed += [f"conversation {number} of {len(begins)}:"] if len(begins) > 1 else []
        for is_learned, places in groupby(range(start, end), key=learned.__getitem__):
            text = data.tokenizer.decode([inputs[place] for place in places])
            shown = repr(text) if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]!r}..."
            printed.append(f"{'learned' if is_learned else 'given':<8} {shown}")
    hidden = len(printed) - _STRETCHES
    lines = [*printed[:_STRETCHES], *([f"... and {hidden} more lines"] if hidden > 0 else [])]
    if row.padding:
        lines.append(f"{'padding':<8} {row.padding} x {data.tokenizer.decode(inputs[-1:])!r}")
    return ["the first row:", *(f"  {line}" for line in lines)]


def epoch_line(data: RunData, *, rows_per_step: int, steps: int) -> str:
    """Return a line with the number of steps per epoch and the number of epochs of the run."""
    if data.streamed:
        return "an epoch: the length of a stream is not known; behind its end it begins again"
    rows = len(data.split.train)
    epochs = steps * rows_per_step / rows
    return (
        f"an epoch: {rows} rows are {-(-rows // rows_per_step)} steps of {rows_per_step} "
        f"(--micro-batch x --accumulate x ranks); --steps {steps} is {epochs:.3g} epochs"
    )


def _tokenizer(section: DataSection, source: Any, *, say: Callable[[str], None]) -> Any:
    from offload_trainer.data.tokenizer import load_tokenizer, read_template

    name = section.tokenizer
    if name == "auto":
        name = "builtin" if source.directory is None else str(source.directory)
    tokenizer = load_tokenizer(name, trust_remote_code=source.section.trust_remote_code)
    if section.chat_template != "auto":
        tokenizer.chat_template = read_template(Path(section.chat_template).expanduser())
    if not source.shape.vocabulary / 2 <= len(tokenizer) <= source.shape.vocabulary:
        say(f"note: the tokenizer {name} has {len(tokenizer)} ids, the model has {source.shape.vocabulary}")
    return tokenizer


def _refuse_unsuitable(section: DataSection, source: Any) -> None:
    """Raise UserError for a mixture that does not fit data.path, and for ids of an unknown tokenizer.

    Exports would include a wrong tokenizer beside a token file that does not name its own.
    """
    from offload_trainer.data.tokenfile import stated_tokenizer

    if section.mixture and len(section.mixture) != len(section.path):
        raise UserError(
            f"data.mixture has {len(section.mixture)} weights, and data.path {len(section.path)} texts: give one for "
            "each"
        )
    if section.mixture and not section.shuffle:
        raise UserError("data.mixture needs shuffled rows: leave data.shuffle=false out")
    is_unknown = section.tokenizer == "auto" and source.directory is None
    for path in map(Path, (*section.path, *section.validation_path) if is_unknown else ()):
        if path.suffix == ".bin" and stated_tokenizer(path.expanduser()) is None:
            raise UserError(
                f"{path} does not say which tokenizer its ids belong to, and samples and exports need it: name it with "
                "--tokenizer (a directory, a hub id, or builtin)"
            )


def _rows(section: DataSection, tokens: Any, held_out: Any, *, seq_len: int) -> Any:
    """Split rows into training and validation; separate validation data is used completely."""
    from offload_trainer.data.mixture import Split, split_rows

    separate, rows = held_out is not tokens, (len(held_out) - 1) // seq_len
    if separate and not rows:
        raise UserError(
            f"--validation-data has {len(held_out)} tokens, and one row of {seq_len} needs {seq_len + 1}: give more "
            "text or a smaller --seq-len"
        )
    if section.mixture:
        train = range(sum(tokens.shares.rows))
        return Split(train, range(0 if separate else len(train), rows))
    kept = 0.0 if separate or section.streamed else section.validation
    split = split_rows(len(tokens), seq_len=seq_len, validation=kept)
    return split._replace(validation=range(rows)) if separate else split
