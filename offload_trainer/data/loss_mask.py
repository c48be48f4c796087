"""Tokenisation of conversations with a loss mask: render the tokenizer's chat template and find the answers' tokens.

    template with {% generation %}     transformers reports which tokens its generation blocks produced
    any other template                 render prefixes of the conversation and cut its text around each answer:

        <user>Why?<end><assistant> │ Because.<end> │ <user>...        the text of the messages before an answer, with
        ──── not an answer ─────── │ ── answer ─── │                  the generation prompt, is a prefix of the text

An answer includes the text that ends its turn, since a model has to generate that. White space after it is excluded.

A template may drop text of a line. Fields whose text is missing from the result are counted. A message of which nothing
is printed, tool calls or tool descriptions that are not printed are errors: the rest would teach another answer, or the
answer to another question.
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
from offload_trainer.data.tokenizer import document_marks
from offload_trainer.errors import UserError

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PIECES = re.compile(r"\n|</?\w+>")  # templates may change the text between these: reasoning moves, lines are stripped
_NAMED, _WHERE = 12, 120  # number of fields named in a summary; characters shown of a file and line
_OWN_TEMPLATE = "give data.chat_template=FILE with a template that prints"

Span = tuple[int, int]  # characters [from, to)


class Encoded(NamedTuple):
    """A conversation's ids, and for each id whether it counts in the loss."""

    ids: list[int]
    counted: list[bool]


@dataclass
class OmittedText:
    """Text of the lines that is in no row, and the number of learned answers that are empty."""

    fields: dict[str, int] = field(default_factory=dict)  # number of conversations, by field
    first: dict[str, str] = field(default_factory=dict)  # file and line of the first of them, by field
    empty: int = 0  # number of empty learned answers

    def add(self, fields: set[str], *, where: str) -> None:
        for name in sorted(fields):
            self.fields[name] = self.fields.get(name, 0) + 1
            self.first.setdefault(name, where)

    def told(self) -> list[str]:
        """Return one sentence for each finding, for a summary."""
        named = sorted(self.fields, key=lambda name: -self.fields[name])[:_NAMED]
        found = [f"{name[:60]!r} in {self.fields[name]} (first: {self.first[name][-_WHERE:]})" for name in named]
        more = [f"{len(self.fields) - len(named)} more fields"] * (len(self.fields) > len(named))
        sentences = [f"text that is missing from the rows: {', '.join(found + more)}"] if found else []
        return sentences + ([f"{self.empty} of the answers to train on are empty"] if self.empty else [])


class AnswerEncoder:
    """A renderer of conversations with `tokenizer`, whose `chat_template` is set, that marks the tokens of answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, everything: bool) -> None:
        """Set up the encoder. `everything` marks all tokens as learned.

        Raises UserError if the tokenizer is not a fast one.
        """
        if not tokenizer.is_fast:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} does not say which text its tokens are of (it has no "
                "tokenizer.json), which conversations need: convert it, or give them as rendered text in a text field"
            )
        self.unsaid = OmittedText()
        self._tokenizer, self._everything, self._document_marks = tokenizer, everything, document_marks(tokenizer)
        self._marks = bool(_MARKED.search(str(tokenizer.chat_template or "")))

    def encode(self, examples: Sequence[Example]) -> Iterator[Encoded]:
        """Yield the ids and the loss mask of each example. A pair of plain strings begins and ends as a document does.

        Raises UserError, with file and line, if the template refuses an example or its answers cannot be located.
        """
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
            begin, end = self._document_marks if example.pair is not None else ([], [])
            if ids[: len(begin)] != begin:
                ids, counted = begin + ids, [False] * len(begin) + counted
            if ids[len(ids) - len(end) :] != end or not all(counted[len(ids) - len(end) :]):
                ids, counted = ids + end, counted + [True] * len(end)
            yield Encoded(ids, counted)

    def _rendered(self, example: Example) -> tuple[str, list[Span]]:
        """Return the text of an example, and the spans in it that are learned. Raises as `encode`."""
        if example.pair is not None:
            prompt, completion = example.pair
            start = 0 if self._everything else len(prompt)
            omitted = {name for name, field in example.texts if not _contains(prompt + completion, field)}
            self.unsaid.add(omitted, where=example.where)
            self.unsaid.empty += not completion.strip()
            return prompt + completion, [(start, len(prompt + completion))]
        text = self._render(example, example.messages)
        everyone = [n for n, message in enumerate(example.messages) if message["role"] == "assistant"]
        # A line may exclude an answer from learning.
        answers = [
            n
            for n in everyone
            if n >= example.first
            and example.messages[n].get("weight", 1) != 0
            and example.messages[n].get("train") is not False
        ]
        self._count_omitted_text(example, text)
        learned = (example.messages[number] for number in answers)
        self.unsaid.empty += sum(not _content(message).strip() and not message.get("tool_calls") for message in learned)
        if self._everything:
            return text, [(0, len(text))]
        if self._marks and answers == everyone:
            return text, self._marked(example)
        return text, [self._answer(example, text, number) for number in answers]

    def _count_omitted_text(self, example: Example, text: str) -> None:
        """Count the fields whose text is not all in `text`.

        Raises UserError if the whole content of a message or all the tools are missing.
        """
        omitted = {name for name, field in example.texts if not _contains(text, field)}
        self.unsaid.add(omitted, where=example.where)
        for number, message in enumerate(example.messages, 1) if omitted else ():
            content = _content(message)
            if content.strip() and not _contains(text, content, any_piece=True):
                raise UserError(
                    f"{example.where}: the chat template leaves out message {number} "
                    f"({message['role'][:60]!r}): {_OWN_TEMPLATE} it, or leave that message out"
                )
        self._refuse_unprinted_calls(example)
        if example.tools is not None and text == self._render(example, example.messages, tools=False):
            raise UserError(
                f"{example.where}: the chat template prints no 'tools', which this conversation has: {_OWN_TEMPLATE} "
                "them, or leave them out"
            )

    def _refuse_unprinted_calls(self, example: Example) -> None:
        """Raise UserError for tool calls that the template does not print.

        The calls are rendered with unique function names, which can only be in the text if the template prints them.
        """
        messages = list(example.messages)
        calling = [number for number, message in enumerate(messages) if message.get("tool_calls")]
        for number in calling:
            name = {"name": f"offload_trainer_{number}"}
            calls = [
                call | {"function": call["function"] | name} if isinstance(call.get("function"), dict) else call | name
                for call in messages[number]["tool_calls"]
            ]
            messages[number] = messages[number] | {"tool_calls": calls}
        found = self._render(example, messages) if calling else ""
        for number in calling:
            if not re.search(rf"offload_trainer_{number}\b", found):
                raise UserError(
                    f"{example.where}: the chat template does not print the 'tool_calls' of message {number + 1}, and "
                    f"the rest would be trained on as an answer: {_OWN_TEMPLATE} them, or leave that conversation out"
                )

    def _render(
        self, example: Example, messages: Sequence[Message], *, prompt: bool = False, tools: bool = True
    ) -> str:
        """Render messages to text, with the generation prompt at the end if `prompt`, and with the tools if `tools`."""
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(example.tools) if tools and example.tools is not None else None,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise UserError(f"{example.where}: the chat template refuses this conversation: {reason}") from error
        assert isinstance(text, str)
        return text

    def _marked(self, example: Example) -> list[Span]:
        """Return the character spans that the template's generation blocks produced."""
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
        """Return the character span in `text` of the answer in message `number`."""
        until = self._render(example, example.messages[: number + 1])
        before = self._before(example, until, number)
        content = _content(example.messages[number]).strip()
        if text.startswith(before) and until.startswith(before):
            end = len(until) if text.startswith(until) else _end_of_answer(text, until, content, start=len(before))
            if end is not None:
                # White space after the end of the turn is no part of the answer, unless it itself ends the turn.
                stripped = text[len(before) : end].rstrip()
                return len(before), end if content and stripped.endswith(content) else len(before) + len(stripped)
        raise UserError(
            f"{example.where}: the chat template renders message {number + 1} differently once others follow it, so "
            "what of the text is that answer cannot be told: give data.chat_template=FILE with {% generation %} around "
            "what an assistant writes, one answer a line, or data.train_on=all"
        )

    def _before(self, example: Example, until: str, number: int) -> str:
        """Return the prefix of `until` that is not part of the answer.

        `until` is the text up to and including message `number`.
        """
        if number:
            before = self._render(example, example.messages[:number], prompt=True)
            # A template may have an empty generation prompt.
            return before if until.startswith(before) else self._render(example, example.messages[:number])
        asking = self._render(example, example.messages[:1], prompt=True).removeprefix(until)
        return until[: until.find(asking) + len(asking)] if asking in until else ""


def _content(message: Message) -> str:
    return str(message.get("content") or "")


def _contains(text: str, content: str, *, any_piece: bool = False) -> bool:
    """Return whether `text` contains all of `content`, or with `any_piece` at least one piece of it.

    A piece may be in the text verbatim or as JSON escapes it.
    """
    if (content := content.strip()) in text:
        return True
    if content[:1] in ("{", "[") and not any_piece:
        try:
            return all(_contains(text, one) for _, one in texts_in(json_in(content)))
        except ValueError:
            pass
    pieces = (piece.strip() for piece in _PIECES.split(content))
    found = (
        piece in text or any(json.dumps(piece, ensure_ascii=ascii_only)[1:-1] in text for ascii_only in (False, True))
        for piece in pieces
        if piece
    )
    return any(found) if any_piece else all(found)


def _end_of_answer(text: str, until: str, answer: str, *, start: int) -> int | None:
    """Return the end of an answer in `text`, or None.

    `text` may lack what precedes the answer's words in `until`, since templates drop the reasoning of earlier turns.
    """
    place, last = text.find(answer, start), until.rfind(answer)
    if not answer or place < 0 or last < 0:
        return None
    ending = until[last + len(answer) :].rstrip()
    end = place + len(answer)
    return end + len(ending) if text.startswith(ending, end) else None


def _inside(offsets: Sequence[Any], spans: Sequence[Span]) -> list[bool]:
    """Return for each token whether it overlaps one of `spans`, which are in order and disjoint."""
    counted, remaining = [], list(spans)
    for start, end in offsets:
        while remaining and remaining[0][1] <= start:
            remaining.pop(0)
        counted.append(bool(remaining) and end > start and end > remaining[0][0])
    return counted
