"""Conversations with images: rows with the ids that a processor makes, and the inputs that it makes of their pictures.

    records ── with_pictures ── Example ── ImageEncoder ──┬── ids, marked for the loss ──> NAME.bin
                                                          └── text, paths and hashes ───> NAME.bin.rows, a line a row

    NAME.bin.rows ── ImageTokens ── pictures ── the processor ──> pixel_values, attention_mask, ... of a batch

Pixels are not stored: the processor of transformers makes them when a batch is drawn. Their pictures must be those that
were tokenised, to the last byte, so that a run can be repeated and resumed.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic import with_config

from offload_trainer.data.conversations import COLUMNS, Example, Picture, with_pictures
from offload_trainer.data.documents import read_records
from offload_trainer.data.loss_mask import AnswerEncoder, Encoded, Span, inside
from offload_trainer.data.tokenfile import TokenFile, lines_path
from offload_trainer.data.tokenizer import padding_id
from offload_trainer.errors import RERUN_HINT, TrainerError, UserError
from offload_trainer.packages import is_installed, lacks
from offload_trainer.safe_files import EXACT, file_bytes, one_line, parsed, shown
from offload_trainer.storage.cache_files import open_owned

# Files that say what a processor does, next to those of its tokenizer.
_OF_PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def load_processor(directory: Path, *, trust_remote_code: bool) -> Any:
    """Load the processor of a model's directory. Its tokenizer gets the processor's chat template.

    Raises UserError if Pillow is missing, and if there is no processor for images or it cannot be loaded.
    """
    if not is_installed("PIL"):
        raise UserError(lacks("training on images", "pillow"))
    from transformers import AutoProcessor  # takes long to import

    try:
        processor = AutoProcessor.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # processors fail in many ways, also because of packages that only they need
        raise UserError(f"{directory}: its processor cannot be loaded: {one_line(error)}") from error
    if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
        raise UserError(
            f"{directory} has no processor for images: put preprocessor_config.json and the other files of the model's "
            "processor there"
        )
    tokenizer = processor.tokenizer
    if isinstance(processor.chat_template, str):
        tokenizer.chat_template = processor.chat_template
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding_id(tokenizer))
    return processor


def read_conversations(
    source: Path, *, seen: Callable[[bytes], object] = lambda _: None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the records of a file as `read_records` does, with the absolute paths of their pictures."""
    folder = source.absolute().parent
    for where, record in read_records(source, wanted=COLUMNS, strings=True, seen=seen):
        yield where, with_pictures(record, folder=folder, where=where)


def read_picture(path: str) -> tuple[Any, str]:
    """Return a picture as transformers loads it (upright, in RGB), and the hash of its file.

    Raises ValueError, a one-line message, if it cannot be read.
    """
    try:
        data = file_bytes(Path(path), links=True)
    except FileNotFoundError as error:
        raise ValueError("it is not there") from error
    from PIL import Image
    from transformers.image_utils import load_image

    try:
        image = load_image(Image.open(BytesIO(data)))
    except Exception as error:  # a decoder may raise anything for a damaged file
        raise ValueError(f"it is no picture that Pillow reads ({one_line(error)})") from error
    return image, hashlib.blake2b(data, digest_size=16).hexdigest()


def _call(processor: Any, texts: Sequence[str], pictures: Sequence[Sequence[Any]], **words: Any) -> Any:
    """Return what a processor makes of texts and each text's pictures, with the ids of its `apply_chat_template`.

    That adds special tokens, unless the template has printed the first one. `words` are for the tokenizer.
    """
    first = processor.tokenizer.bos_token
    special = first is None or not texts[0].startswith(first)
    given = {"images": [list(its) for its in pictures]} if any(pictures) else {}
    # Processors of transformers 5.8 do not pass other keywords on to the tokenizer if there are text_kwargs.
    tensors = {"return_tensors": "pt"}
    words |= {"add_special_tokens": special, **tensors}
    return processor(text=list(texts), text_kwargs=words, images_kwargs=tensors, **given)


# -- rows --------------------------------------------------------------------------------------------------------------


class ImageEncoder:
    """An encoder of conversations, which may hold images, with the ids of a processor.

    `line` describes the conversation that was encoded last, for `ImageTokens`.
    """

    def __init__(self, processor: Any, *, length: int) -> None:
        """Set up the encoder; `length` is that of a row in tokens.

        Raises UserError if there is no chat template.
        """
        self.line = ""
        self._processor, self._length = processor, length
        self._tokenizer = processor.tokenizer
        self._placeholder = str(getattr(processor, "image_token", None) or "")
        if not self._tokenizer.chat_template:
            raise UserError(
                "the model's processor has no chat template, which says where images are placed: give "
                "data.chat_template=FILE"
            )
        self._answers = AnswerEncoder(self._tokenizer, everything=False, end_of_text=None)
        self.unsaid = self._answers.unsaid

    def key(self, sources: Sequence[Path]) -> list[str]:
        """Return what the rows of `sources` depend on in addition to the text: processor and pictures.

        Raises UserError, with file and line, for a picture that is missing.
        """
        found = hashlib.blake2b(digest_size=16)
        for source in sources:
            for where, record in read_conversations(source):
                for path in _pictures(record.get("messages")):
                    try:
                        state = os.stat(path)
                    except OSError as error:
                        raise _unusable(path, error.strerror or "it cannot be read", where=where) from error
                    found.update(f"{path}\n{state.st_size} {state.st_mtime_ns}\n".encode())
        directory = Path(self._tokenizer.name_or_path)
        files = [file_bytes(directory / name, links=True) for name in _OF_PROCESSOR if (directory / name).is_file()]
        settings = hashlib.blake2b(b"\n".join(files), digest_size=16).hexdigest()
        return [found.hexdigest(), settings, version("transformers")]

    def encode(self, examples: Sequence[Example]) -> Iterator[Encoded]:
        """Yield the ids and the loss mask of each example.

        Raises UserError, with file and line, for a picture that cannot be read, for images that take more room than a
        row has, for text that contains the placeholder of an image, and as `AnswerEncoder.encode`.
        """
        for example in examples:
            paths = _pictures(example.messages)
            images, hashes = [], []
            for path in paths:
                try:
                    image, found = read_picture(path)
                except ValueError as error:
                    raise _unusable(path, str(error), where=example.where) from error
                images.append(image)
                hashes.append(found)
            bare = _in_parts(example)
            text, spans = self._answers.rendered(bare)
            twice = self._answers.render(bare, _in_parts(example, times=2).messages) if paths else text
            if paths and text == twice:
                raise UserError(
                    f"{example.where}: the chat template leaves out the images of this conversation: give "
                    "data.chat_template=FILE with a template that places them"
                )
            # Twice the images have twice the placeholders, unless some placeholders are in the text itself.
            token = self._placeholder
            if token and twice.count(token) != 2 * text.count(token):
                raise UserError(
                    f"{example.where}: its text contains {token}, which the processor replaces with an image: write it "
                    "differently, or leave that line out"
                )
            ids, counted, needed = self._located(bare, text, spans, images)
            if any(counted) and needed > self._length:
                raise UserError(
                    f"{example.where}: the images, and the text up to the first answer after them, take {needed} "
                    f"tokens, and a row has {self._length}: use a larger --seq-len, let the processor make smaller "
                    "pictures (preprocessor_config.json), or leave that line out"
                )
            self.line = f"{','.join(hashes)}\t{json.dumps({'text': text, 'paths': paths})}"
            yield Encoded(ids, counted)

    def _located(
        self, example: Example, text: str, spans: Sequence[Span], images: Sequence[Any]
    ) -> tuple[list[int], list[bool], int]:
        """Return the ids, whether each counts in the loss, and how many of them a row needs for all the images.

        A processor makes an unknown number of tokens of each image, but the text after the last image has the tokens
        that the tokenizer makes of it. So learned tokens are counted from the end, and those before another image from
        the end of the text up to there.
        """
        whole = self._ids(text, images, where=example.where)
        counted, needed = [False] * len(whole), len(whole) if images else 0
        for until, learned, shown_before in self._stretches(example, text, spans):
            ids = whole if until == len(text) else self._ids(text[:until], images[:shown_before], where=example.where)
            found = self._tokenizer(text[:until], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            marks = inside(found["offset_mapping"], learned)
            if True not in marks:
                continue
            tail = len(marks) - marks.index(True)
            start = len(ids) - tail
            if start < 0 or whole[: len(ids)] != ids or ids[start:] != list(found["input_ids"])[-tail:]:
                raise _unclear(example)
            counted[start : len(ids)] = marks[-tail:]
            if shown_before == len(images):
                needed = min(needed, start + 1)
        return whole, counted, needed

    def _stretches(
        self, example: Example, text: str, spans: Sequence[Span]
    ) -> Iterator[tuple[int, Sequence[Span], int]]:
        """Yield (end of a text, learned spans in it, images before them), for the spans between images in turn."""
        rest, before, answered = list(spans), 0, False
        for number, message in enumerate(example.messages):
            images = sum(part["type"] == "image" for part in _parts(message))
            if images and answered:
                begins = self._answers.render(example, example.messages[:number])
                if not text.startswith(begins):
                    raise _unclear(example)
                early = [span for span in rest if span[1] <= len(begins)]
                if early:
                    yield early[-1][1], early, before
                rest = rest[len(early) :]
            before += images
            answered = answered or message["role"] == "assistant"
        if rest:
            yield len(text), rest, before

    def _ids(self, text: str, images: Sequence[Any], *, where: str) -> list[int]:
        try:
            found: list[int] = _call(self._processor, [text], [images])["input_ids"][0].tolist()
        except Exception as error:  # processors check images and their number, each in its own way
            raise UserError(f"{where}: the processor refuses this conversation: {one_line(error)}") from error
        return found


def _parts(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _pictures(messages: Any) -> list[str]:
    """Return the paths of the pictures in a list of messages, in order."""
    held = messages if isinstance(messages, list | tuple) else ()
    parts = (part for message in held if isinstance(message, dict) for part in _parts(message))
    return [part["path"] for part in parts if isinstance(part, dict) and isinstance(part.get("path"), Picture)]


def _in_parts(example: Example, *, times: int = 1) -> Example:
    """Return the example with lists of parts, as templates of image-text models expect, without the pictures' paths.

    Each image is there `times` times.
    """
    made = []
    for message in example.messages:
        content = message.get("content")
        parts = _parts(message) or ([{"type": "text", "text": content}] if content else [])
        bare = [[{"type": "image"}] * times if part["type"] == "image" else [part] for part in parts]
        made.append(message | {"content": [part for some in bare for part in some] if bare else content})
    return replace(example, messages=tuple(made))


def _unusable(path: str, why: str, *, where: str) -> UserError:
    return UserError(f"{where}: the picture {shown(path)} cannot be used: {why}. Correct it, or leave that line out")


def _unclear(example: Example) -> UserError:
    return UserError(
        f"{example.where}: which of the processor's tokens are an answer cannot be told, because the text around the "
        "images has other tokens than alone: give one answer a line, after all images, or leave that line out"
    )


# -- batches -----------------------------------------------------------------------------------------------------------


@with_config(EXACT)
@dataclass(frozen=True)
class _Source:
    """The text that a row was made of, and the paths of its pictures."""

    text: str
    paths: list[str]


class ImageTokens:
    """A token file of rows with images, and the processor that makes a batch's other inputs."""

    packed = False

    def __init__(self, tokens: TokenFile, processor: Any) -> None:
        """Find the line of each row. Raises UserError if they are not those of the token file."""
        self._tokens, self._processor = tokens, processor
        path = lines_path(tokens.path)
        try:
            self._file: BinaryIO = open(open_owned(path), "rb", buffering=1 << 20)  # noqa: SIM115 - stays open
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}. Delete {tokens.path}, and it is made again") from error
        self._starts, hashes = array("q", [0]), 0
        for line in self._file:
            hashes = zlib.crc32(line.partition(b"\t")[0] + b"\n", hashes)
            self._starts.append(self._starts[-1] + len(line))
        rows = (len(tokens) - 1) // (tokens.row_length or 1)
        if len(self._starts) - 1 != rows:
            raise UserError(
                f"{path} has {len(self._starts) - 1} lines, and {tokens.path} {rows} rows: delete both, and they are "
                "made again"
            )
        self.sums = (*tokens.sums, hashes)  # also tells other pictures apart

    @property
    def name(self) -> str:
        return self._tokens.name

    @property
    def paths(self) -> tuple[Path, ...]:
        return self._tokens.paths

    @property
    def row_length(self) -> int | None:
        return self._tokens.row_length

    @property
    def tokenizer(self) -> str | None:
        return self._tokens.tokenizer

    @property
    def summary(self) -> str | None:
        return self._tokens.summary

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, count: int) -> np.ndarray:
        return self._tokens.read(start, count)

    def inputs(self, rows: Sequence[int], ids: np.ndarray) -> dict[str, Any]:
        """Return the inputs other than `ids` that the processor makes of these rows; `ids` is int64 [rows, tokens].

        Raises TrainerError if a picture has changed, or the processor makes other ids of the rows.
        """
        texts, pictures = [], []
        for row in rows:
            hashes, source = self._line(row)
            texts.append(source.text)
            pictures.append([_unchanged(*one) for one in zip(source.paths, hashes, strict=True)])
        words = {"padding": "max_length", "max_length": ids.shape[1], "truncation": True, "padding_side": "right"}
        try:
            found = _call(self._processor, texts, pictures, **words)
        except Exception as error:  # each processor checks in its own way
            raise TrainerError(f"the processor refuses rows {list(rows)}: {one_line(error)}") from error
        if not np.array_equal(found["input_ids"].numpy(), ids):
            raise TrainerError(
                f"the processor makes other ids of rows {list(rows)} than {self.name} holds: it has changed since they "
                f"were tokenised. Delete that file, and {RERUN_HINT}"
            )
        return {key: value for key, value in found.items() if key != "input_ids"}

    def _line(self, row: int) -> tuple[list[str], _Source]:
        start, end = self._starts[row], self._starts[row + 1]
        try:
            hashes, _, source = os.pread(self._file.fileno(), end - start, start).decode().partition("\t")
            return hashes.split(",") if hashes else [], parsed(source, _Source)
        except (OSError, ValueError) as error:
            raise TrainerError(
                f"{lines_path(self._tokens.path)}: line {row + 1} cannot be read: {error}. Delete that file and "
                f"{self.name}, and {RERUN_HINT}"
            ) from error


def _unchanged(path: str, expected: str) -> Any:
    """Return a picture. Raises TrainerError if its file is not the one that was tokenised."""
    try:
        image, found = read_picture(path)
    except ValueError as error:
        raise TrainerError(
            f"the picture {shown(path)} cannot be read: {error}. Restore it, and {RERUN_HINT}"
        ) from error
    if found != expected:
        raise TrainerError(
            f"the picture {shown(path)} has changed since it was tokenised: restore it, and {RERUN_HINT}; or begin a "
            "new run with another --output"
        )
    return image
