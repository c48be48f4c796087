"""Conversations -> ids, each with whether it is one of an answer's: by the tokenizer's chat template, whatever it is.

    template with {% generation %}     transformers says which tokens its blocks made
    any other                          the text of a conversation, cut where it ends before an answer and after it:

        <user>Why?<end><assistant> │ Because.<end> │ <user>...        the line's messages up to an answer, with the
        ──── not an answer ─────── │ ── answer ─── │                  generation prompt, are how the text begins

An answer ends with what ends a turn, since a model has to write that; white space behind it is no part of one.

A template decides what it prints. Text of a line that is not in the result is counted by field. A message of which
nothing is printed, calls of tools or descriptions of tools that are not printed are refused: what is left would teach
another answer, or the answer to another question.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jinja2
from transformers import PreTrainedTokenizerBase

from offload_trainer.data.conversations import Example, Message, texts_in
from offload_trainer.data.documents import json_in
from offload_trainer.errors import UserError

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PIECES = re.compile(r"\n|</?\w+>")  # templates may change what is between these: thoughts move, lines are stripped
_NAMED, _WHERE = 12, 120  # fields that are named; characters of a place that are shown
_OWN_TEMPLATE = "give data.chat_template=FILE with a template that prints"

Span = tuple[int, int]  # characters, from and to


class Encoded(NamedTuple):
    """A conversation's ids, and of each whether it is learned."""

    ids: list[int]
    counted: list[bool]


@dataclass
class OmittedText:
    """What the lines have that no row says, and rows that teach to say nothing."""

    fields: dict[str, int] = field(default_factory=dict)  # conversations, by field
    first: dict[str, str] = field(default_factory=dict)  # the file and line of the first of them
    empty: int = 0  # answers

    def add(self, fields: set[str], *, where: str) -> None:
        for name in sorted(fields):
            self.fields[name] = self.fields.get(name, 0) + 1
            self.first.setdefault(name, where)

    def told(self) -> list[str]:
        """Return a sentence for each, for a summary."""
        named = sorted(self.fields, key=lambda name: -self.fields[name])[:_NAMED]
        found = [f"{name[:60]!r} in {self.fields[name]} (first: {self.first[name][-_WHERE:]})" for name in named]
        more = [f"{len(self.fields) - len(named)} more fields"] * (len(self.fields) > len(named))
        told = [f"text that is missing from the rows: {', '.join(found + more)}"] if found else []
        return told + ([f"{self.empty} of the answers to train on are empty"] if self.empty else [])


class AnswerEncoder:
    """Renders with `tokenizer`, whose `chat_template` is set, and says what of it is answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, everything: bool, end_of_text: int | None) -> None:
        """`everything`: all tokens are learned. `end_of_text` is put behind a pair of plain strings, and learned."""
        if not tokenizer.is_fast:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} does not say which text its tokens are of (it has no "
                "tokenizer.json), which conversations need: convert it, or give them as rendered text in a text field"
            )
        self.unsaid = OmittedText()
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
            self.unsaid.add(
                {name for name, said in example.texts if not _holds(prompt + completion, said)}, where=example.where
            )
            self.unsaid.empty += not completion.strip()
            return prompt + completion, [(start, len(prompt + completion))]
        text = self._render(example, example.messages)
        answers = [n for n, message in enumerate(example.messages) if _is_learned(message, n >= example.first)]
        self._look_for_losses(example, text)
        said = (example.messages[number] for number in answers)
        self.unsaid.empty += sum(not _content(message).strip() and not message.get("tool_calls") for message in said)
        if self._everything:
            return text, [(0, len(text))]
        everyone = [n for n, message in enumerate(example.messages) if message["role"] == "assistant"]
        if self._marks and answers == everyone:
            return text, self._marked(example)
        return text, [self._answer(example, text, number) for number in answers]

    def _look_for_losses(self, example: Example, text: str) -> None:
        """Count the fields whose text is not all in `text`. UserError where a message or tools are not there at all."""
        lost = {name for name, said in example.texts if not _holds(text, said)}
        self.unsaid.add(lost, where=example.where)
        for number, message in enumerate(example.messages, 1) if lost else ():
            content = _content(message)
            if content.strip() and not _holds(text, content, any_piece=True):
                raise UserError(
                    f"{example.where}: the chat template leaves out message {number} "
                    f"({message['role'][:60]!r}): {_OWN_TEMPLATE} it, or leave that message out"
                )
        if any(message.get("tool_calls") for message in example.messages):
            self._refuse_unprinted_calls(example, text)
        if example.tools is not None and text == self._render(example, example.messages, tools=False):
            raise UserError(
                f"{example.where}: the chat template prints no 'tools', which this conversation has: {_OWN_TEMPLATE} "
                "them, or leave them out"
            )

    def _refuse_unprinted_calls(self, example: Example, text: str) -> None:
        """UserError for calls of tools that the template does not print: it is asked with names that it cannot know."""
        names = {n: f"offload_trainer_{n}" for n, message in enumerate(example.messages) if message.get("tool_calls")}
        messages = [
            _with_calls_of(message, names[n]) if n in names else message for n, message in enumerate(example.messages)
        ]
        found = self._render(example, messages)
        for number, name in names.items():
            if not re.search(rf"{name}\b", found):
                raise UserError(
                    f"{example.where}: the chat template does not print the 'tool_calls' of message {number + 1}, and "
                    f"the rest would be trained on as an answer: {_OWN_TEMPLATE} them, or leave that conversation out"
                )

    def _render(
        self, example: Example, messages: Sequence[Message], *, prompt: bool = False, tools: bool = True
    ) -> str:
        """Return the text of messages. `prompt`: with what asks for an answer behind them; `tools`: with those."""
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(example.tools) if tools and example.tools is not None else None,
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
            f"{example.where}: the chat template renders message {number + 1} differently once others follow it, so "
            "what of the text is that answer cannot be told: give data.chat_template=FILE with {% generation %} around "
            "what an assistant writes, one answer a line, or data.train_on=all"
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
    """Return whether a message is an answer that is asked for and that its file does not exclude from learning."""
    excluded = message.get("weight", 1) == 0 or message.get("train") is False
    return asked and message["role"] == "assistant" and not excluded


def _content(message: Message) -> str:
    return str(message.get("content") or "")


def _with_calls_of(message: Message, name: str) -> Message:
    """Return the message with each of its calls made one of the function `name`."""
    calls = [
        call | {"function": call["function"] | {"name": name}}
        if isinstance(call.get("function"), dict)
        else call | {"name": name}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def _holds(text: str, said: str, *, any_piece: bool = False) -> bool:
    """Return whether all of `said` is in `text`, or any piece of it, as it is or as JSON spells it."""
    if (said := said.strip()) in text:
        return True
    if said[:1] in ("{", "[") and not any_piece:
        try:
            return all(_holds(text, one) for _, one in texts_in(json_in(said)))
        except ValueError:
            pass
    pieces = (piece.strip() for piece in _PIECES.split(said))
    found = (
        piece in text or any(json.dumps(piece, ensure_ascii=ascii_only)[1:-1] in text for ascii_only in (False, True))
        for piece in pieces
        if piece
    )
    return any(found) if any_piece else all(found)


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
