"""Conversations -> ids, each with whether it is one of an answer's: by the tokenizer's chat template, whatever it is.

    template with {% generation %}     transformers says which tokens its blocks made
    any other                          the text of a conversation, cut where it ends before an answer and after it:

        <user>Why?<end><assistant> │ Because.<end> │ <user>...        the line's messages up to an answer, with the
        ──── not an answer ─────── │ ── answer ─── │                  generation prompt, are how the text begins

An answer ends with what ends a turn, since a model has to write that; white space behind it is no part of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jinja2
from transformers import PreTrainedTokenizerBase

from offload_trainer.data.conversations import Example, Message
from offload_trainer.errors import UserError

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]  # characters, from and to


class Encoded(NamedTuple):
    """A conversation's ids, and of each whether it is learned."""

    ids: list[int]
    counted: list[bool]


class AnswerEncoder:
    """Renders with `tokenizer`, whose `chat_template` is set, and says what of it is answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, everything: bool, end_of_text: int | None) -> None:
        """`everything`: all tokens are learned. `end_of_text` is put behind a pair of plain strings, and learned."""
        if not tokenizer.is_fast:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} does not say which text its tokens are of (it has no "
                "tokenizer.json), and conversations need that: convert it, or give them rendered, in a text field"
            )
        self._tokenizer, self._everything, self._end_of_text = tokenizer, everything, end_of_text
        self._marks = bool(_MARKED.search(str(tokenizer.chat_template or "")))

    def encode(self, examples: Sequence[Example]) -> Iterator[Encoded]:
        """Of each example. UserError, with file and line, where the template refuses one or tells no answers apart."""
        rendered = [self._rendered(example) for example in examples]
        found = self._tokenizer(
            [text for text, _ in rendered],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        for example, (_, spans), ids, offsets in zip(
            examples, rendered, found["input_ids"], found["offset_mapping"], strict=True
        ):
            counted = _inside(offsets, spans)
            if example.pair is not None and self._end_of_text is not None:
                ids, counted = [*ids, self._end_of_text], [*counted, True]
            yield Encoded(ids, counted)

    def _rendered(self, example: Example) -> tuple[str, list[Span]]:
        if example.pair is not None:
            prompt, completion = example.pair
            start = 0 if self._everything else len(prompt)
            return prompt + completion, [(start, len(prompt + completion))]
        text = self._render(example, example.messages)
        if self._everything:
            return text, [(0, len(text))]
        answers = [n for n, message in enumerate(example.messages) if _is_learned(message, n >= example.first)]
        everyone = [n for n, message in enumerate(example.messages) if message["role"] == "assistant"]
        if self._marks and answers == everyone:
            return text, self._marked(example)
        return text, [self._answer(example, text, number) for number in answers]

    def _render(self, example: Example, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """`prompt`: with what asks for an answer behind them."""
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=None if example.tools is None else list(example.tools),
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            told = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(f"{example.where}: the chat template refuses this conversation: {told[0][:200]}") from error
        assert isinstance(text, str)
        return text

    def _marked(self, example: Example) -> list[Span]:
        """What the template's generation blocks made."""
        found = self._tokenizer.apply_chat_template(
            list(example.messages),
            tools=None if example.tools is None else list(example.tools),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )
        mask, offsets = found["assistant_masks"], found["offset_mapping"]
        return [(start, end) for one, (start, end) in zip(mask, offsets, strict=True) if one and end > start]

    def _answer(self, example: Example, text: str, number: int) -> Span:
        """Where in `text` the answer that is message `number` lies."""
        until = self._render(example, example.messages[: number + 1])
        before = self._before(example, until, number)
        said = str(example.messages[number].get("content") or "").strip()
        if text.startswith(before) and until.startswith(before):
            end = len(until) if text.startswith(until) else _end_of_said(text, until, said, start=len(before))
            if end is not None:
                return len(before), len(before) + _without_space(text[len(before) : end], said)
        raise UserError(
            f"{example.where}: the chat template renders message {number + 1} in another way once others follow it, so "
            "what of the text is that answer cannot be told: give data.chat_template=FILE with {% generation %} around "
            "what an assistant writes, one answer a line, or data.loss=all"
        )

    def _before(self, example: Example, until: str, number: int) -> str:
        """How `until`, the text to the end of message `number`, begins: all that is no part of that answer."""
        if number:
            before = self._render(example, example.messages[:number], prompt=True)
            # A template may ask for an answer by nothing.
            return before if until.startswith(before) else self._render(example, example.messages[:number])
        asking = self._render(example, example.messages[:1], prompt=True).removeprefix(until)
        return until[: until.find(asking) + len(asking)] if asking in until else ""


def _is_learned(message: Message, asked: bool) -> bool:
    """An answer that is asked for and has no weight of 0, as some files say of those that are not to be learned."""
    return asked and message["role"] == "assistant" and message.get("weight", 1) != 0


def _end_of_said(text: str, until: str, said: str, *, start: int) -> int | None:
    """The end of an answer that `text` has without what `until` had before its words, as thoughts of earlier turns."""
    place, last = text.find(said, start), until.rfind(said)
    if not said or place < 0 or last < 0:
        return None
    behind = until[last + len(said) :].rstrip()
    end = place + len(said)
    return end + len(behind) if text.startswith(behind, end) else None


def _without_space(answer: str, said: str) -> int:
    """Its length without white space behind what ends a turn; white space that itself ends it belongs to it."""
    stripped = answer.rstrip()
    return len(answer) if stripped.endswith(said) and said else len(stripped)


def _inside(offsets: Sequence[Any], spans: Sequence[Span]) -> list[bool]:
    """Which tokens have a character in one of `spans`, which are in order and apart."""
    counted, rest = [], list(spans)
    for start, end in offsets:
        while rest and rest[0][1] <= start:
            rest.pop(0)
        counted.append(bool(rest) and end > start and end > rest[0][0])
    return counted
