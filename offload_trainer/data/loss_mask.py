"""Tokenisation of conversations with a loss mask: render a chat template and find the answers' tokens.

If a template has {% generation %}, or trl has a training variant of it that does, transformers reports the text that
these blocks wrote. With any other template the conversation is rendered again with another text in place of an answer,
and what differs is the answer. The generation prompt is not learned, since a model never writes it. An answer includes
the token that ends its turn, at which generation stops. Without marks both are proven, or the template is refused;
with marks the template decides, and answers without an end are counted. So are fields whose text is in no row.
"""

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from offload_trainer.common.errors import UserError
from offload_trainer.common.packages import is_installed, to_install
from offload_trainer.data.documents import Example, Message, json_in, texts_in
from offload_trainer.data.tokenizer import document_marks

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PIECES = re.compile(r"\n|</?\w+>")  # templates may change the text between these: reasoning moves, lines are stripped
_NAMED, _WHERE = 12, 120  # number of fields named in a summary; characters shown of a file and line
_TEXT = "\ufdd0"  # stands for the text of an answer; Unicode reserves it, so no template and no data contain it
_NAMES = {"tools": "offload_trainer_tool", "tool_calls": "offload_trainer_call"}  # stand for names of functions
_ASKING = [{"role": "user", "content": "?"}]
_QUESTIONS = (_ASKING, [{"role": "system", "content": "."}, *_ASKING])  # some templates require a system message
_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}

Span = tuple[int, int]  # characters [from, to)


class Encoded(NamedTuple):
    """A conversation's ids, and for each id whether it counts in the loss."""

    ids: list[int]
    counted: list[bool]


class _Turn(NamedTuple):
    """The text that a template writes around the text of a single answer."""

    asked: Sequence[Message]  # the messages before the answer
    prompt: str  # the generation prompt, or as much of it as is inside the marks
    around: str  # all that depends on the answer's being there, with `_TEXT` as the answer; empty if it is not known
    ends: tuple[str, ...]  # tokens at which generation stops


def training_variant(template: str) -> str:
    """Return the variant with generation marks that the installed trl ships for a published template, or `template`.

    It is the one that trl's `get_training_chat_template` returns, without the seconds that an import of trl takes.
    """
    package = None if _MARKED.search(template) else find_spec("trl")
    for folder in (package and package.submodule_search_locations) or ():
        for variant in Path(folder, "chat_templates").glob("*_training.jinja"):
            known = variant.with_name(variant.name.replace("_training", ""))
            if known.is_file() and known.read_text(encoding="utf-8") == template:
                return variant.read_text(encoding="utf-8")
    return template


class AnswerEncoder:
    """A renderer of conversations with `tokenizer`, whose `chat_template` is set, that marks the tokens of answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, everything: bool) -> None:
        """Set up the encoder, or raise UserError for a slow tokenizer. `everything` marks all tokens as learned."""
        if not tokenizer.is_fast:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} does not say which text its tokens are of (it has no "
                "tokenizer.json), which conversations need: convert it, or give them as rendered text in a text field"
            )
        self._omitted = Counter[str]()  # number of conversations with text that is in no row, by field
        self._first: dict[str, str] = {}  # file and line of the first of them, by field
        self._empty = self._endless = 0  # learned answers: empty ones; those whose marks exclude the end of generation
        self._tokenizer, self._everything, self._document_marks = tokenizer, everything, document_marks(tokenizer)
        try:
            given = [tokenizer.get_chat_template(tools=tools) for tools in (None, [_TOOL])]
        except ValueError as error:
            raise UserError(f"{tokenizer.name_or_path}: {error}: choose one with data.chat_template=FILE") from error
        # the templates of conversations without and with tools
        self.templates = given if everything else [training_variant(template) for template in given]
        self.uses_variant = self.templates != given
        self._special = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)

    @property
    def end_ids(self) -> list[int]:
        """The ids of the tokens that end answers, at which generation has to stop."""
        ends = dict.fromkeys(token for turn in self._turns for token in turn.ends)
        return [int(self._tokenizer.convert_tokens_to_ids(token)) for token in ends]

    def told(self) -> list[str]:
        """Return one sentence for each finding on the conversations so far, for a summary."""
        named = self._omitted.most_common(_NAMED)
        found = [f"{name[:60]!r} in {count} (first: {self._first[name][-_WHERE:]})" for name, count in named]
        more = [f"{len(self._omitted) - len(named)} more fields"] * (len(self._omitted) > len(named))
        sentences = [f"text that is missing from the rows: {', '.join(found + more)}"] if found else []
        sentences += [f"{self._empty} of the answers to train on are empty"] if self._empty else []
        if self._endless:
            sentences.append(
                f"{self._endless} of the answers to train on have no token that ends them, so the model does not learn "
                "to stop: {% endgeneration %} belongs behind that token"
            )
        return sentences

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
        for example, (text, spans), ids, offsets in zip(
            examples, rendered, found["input_ids"], found["offset_mapping"], strict=True
        ):
            learned = np.zeros(len(text) + 1, dtype=np.int64)  # characters, each counted behind it
            for start, stop in spans:
                learned[start + 1 : stop + 1] = 1
            upto = learned.cumsum()[np.array(offsets, dtype=np.int64).reshape(-1, 2)]
            counted = (upto[:, 1] > upto[:, 0]).tolist()
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
            text = prompt + completion
            self._omit(example, text, set())
            self._empty += not completion.strip()
            return text, [(0 if self._everything else len(prompt), len(text))]
        messages = tuple(_with_functions(message, self._printable) for message in example.messages)
        example = replace(example, messages=messages)
        text, marked = self._render(example, example.messages)
        omitted = self._omit(example, text, self._omitted_functions(example))
        everyone = [n for n, message in enumerate(example.messages) if message["role"] == "assistant"]
        # A line may exclude an answer from learning.
        answers = [
            n
            for n in everyone
            if n >= example.first
            and example.messages[n].get("weight", 1) != 0
            and example.messages[n].get("train") is not False
        ]
        for message in map(example.messages.__getitem__, answers):
            is_called = bool(message.get("tool_calls")) and "tool_calls" not in omitted
            self._empty += not _content(message).strip() and not is_called
        if self._everything:
            return text, [(0, len(text))]
        turn = self._turns[example.tools is not None]
        if not turn.around:  # The template refuses other questions than the example's own.
            roles = [message["role"] for message in (*messages, {"role": "assistant"})]
            turn = self._turn_behind(example, messages[: roles.index("assistant")])
        if not _MARKED.search(self.templates[example.tools is not None]):
            return text, [self._searched(example, text, number, turn) for number in answers]
        is_simple = answers == everyone and len(marked) == len(everyone)
        owners = everyone if is_simple else self._owners(example, marked)
        if unknown := set(everyone) - set(answers) - set(owners):
            raise UserError(
                f"{example.where}: message {min(unknown) + 1} is not to be learned, and it cannot be told which of the "
                "text that the chat template marks is that message's: leave the message or its 'weight' out"
            )
        following = [*owners[1:], None] if owners else []
        return text, [
            self._trimmed(text, span, turn, ends=owner not in (None, after), final=span == marked[-1])
            for span, owner, after in zip_longest(marked, owners, following)
            if owner is None or owner in answers
        ]

    def _omit(self, example: Example, text: str, functions: set[str]) -> set[str]:
        """Count the fields of an example that are not all in its text, and `functions`; return their names."""
        omitted = functions | {name for name, field in example.texts if not _contains(text, field)}
        self._omitted.update(sorted(omitted))
        for name in omitted:
            self._first.setdefault(name, example.where)
        return omitted

    def _owners(self, example: Example, marked: Sequence[Span]) -> list[int | None]:
        """Return the number of the message that each marked span is of, or nothing if that cannot be told.

        Answers are rendered with their numbers as text. A span without one belongs to the answer before it.
        """

        def numbered(n: int, message: Message) -> Message:
            number = f"{_TEXT}{n}{_TEXT}"
            texts = {key: number for key, value in message.items() if isinstance(value, str) and value}
            content = {} if message.get("tool_calls") and not _content(message) else {"content": number}
            message = message | texts | content | {"role": message["role"]}
            return _with_functions(message, lambda its: its | {"name": number})

        messages = [numbered(n, one) if one["role"] == "assistant" else one for n, one in enumerate(example.messages)]
        text, spans = self._tried(example, messages)
        owners: list[int | None] = []
        for start, end in spans:
            found = re.search(rf"{_TEXT}(\d+){_TEXT}", text[start:end])
            owners.append(int(found[1]) if found else owners[-1] if owners else None)
        return owners if len(spans) == len(marked) else []

    def _trimmed(self, text: str, span: Span, turn: _Turn, *, ends: bool, final: bool) -> Span:
        """Exclude a generation prompt from a marked span, and if it `ends` an answer, an end that ends no generation.

        gpt-oss marks its prompt, and writes <|end|> behind earlier answers: a model that learned this there would
        continue with the next question. Answers that end without a special token are counted, and a `final` one that
        is cut. If the template's turns are not known, nothing is excluded.
        """
        start, end = span
        start += len(turn.prompt) * text.startswith(turn.prompt, start)
        written = text[start:end].rstrip()
        if ends and not written.endswith(turn.ends):
            other = next(filter(written.endswith, self._special), None)
            self._endless += other is None or bool(final and turn.around)
            end = start + len(written) - len(other) if other and turn.around else end
        return start, end

    def _searched(self, example: Example, text: str, number: int, turn: _Turn) -> Span:
        """Return the span in `text` of the answer in message `number`, found by rendering `_TEXT` instead of it."""
        if span := self._searched_calls(example, text, number, turn):
            return span
        message, messages = example.messages[number], list(example.messages)
        messages[number] = {"role": message["role"], "content": _TEXT}
        other, _ = self._tried(example, messages)
        start = _common(text, other)
        end = len(text) - _common(text[start:][::-1], other[start:][::-1])
        replaced = other[start : len(other) - len(text) + end]
        # Between the generation prompt and the text there may be more to learn, such as an empty thinking block.
        between = text[:start].rpartition(turn.prompt)[2] if turn.prompt else ""
        begin = start - len(between) * (turn.prompt + between in turn.around)
        spaces = len(text) - end - len(text[end:].lstrip())
        most = end + spaces + len(turn.around.partition(_TEXT)[2])
        places = {token: text.rfind(token, end - len(token), max(most, end + len(token))) for token in turn.ends}
        last = max((place + len(token) for token, place in places.items() if place >= 0), default=0)
        ends = sum(text.count(token, begin, last) - str(message).count(token) for token in turn.ends)
        if last and ends == 1 and _TEXT in replaced and replaced in turn.around:
            return begin, last
        reason = "does not show where it begins and ends" if last else "ends it with no token at which generation stops"
        reason = reason if other else "refuses another text in its place, so where it begins and ends cannot be proven"
        install = "" if is_installed("trl") else f"{to_install('trl')}, which knows published templates, or "
        raise UserError(
            f"{example.where}: message {number + 1} is an answer to learn, and the chat template {reason}: {install}"
            "give data.chat_template=FILE with {% generation %} around what an assistant writes and the token that "
            "ends it, or data.train_on=all"
        )

    def _searched_calls(self, example: Example, text: str, number: int, turn: _Turn) -> Span | None:
        """Return the span in `text` of the tool calls in message `number`, or nothing if it cannot be proven.

        The conversation is rendered with `_TEXT` in the names of the functions. If nothing else differs, and it then
        contains what the template writes for the same message behind a question, the span belongs to this message.
        """
        message, messages = example.messages[number], list(example.messages)
        if not message.get("tool_calls") or not turn.around:
            return None
        messages[number] = _with_functions(message, lambda its: its | {"name": f"{_TEXT}{its.get('name')}"})
        other, asked, written = (
            self._tried(example, those)[0] for those in (messages, turn.asked, [*turn.asked, messages[number]])
        )
        written = written[_common(asked, written) :]
        prompted = bool(turn.prompt) and written.startswith(turn.prompt)
        written = written[len(turn.prompt) if prompted else _common(written, turn.around) :]
        stops = [written.rfind(token) + len(token) for token in turn.ends if token in written]
        written = written[: max(stops, default=0)]
        ends = sum(written.count(token) - str(message).count(token) for token in turn.ends)
        if ends != 1 or _TEXT not in written or other.count(written) != 1 or other.replace(_TEXT, "") != text:
            return None
        begin = len(other.partition(written)[0].replace(_TEXT, ""))
        return begin, begin + len(written.replace(_TEXT, ""))

    @cached_property
    def _turns(self) -> list[_Turn]:
        return [self._turn_behind(probe, *_QUESTIONS) for probe in (Example(""), Example("", tools=(_TOOL,)))]

    def _turn_behind(self, example: Example, *questions: Sequence[Message]) -> _Turn:
        """Find what the template writes around an answer to the first of `questions` that it does not refuse."""
        eos = self._tokenizer.eos_token
        for asking in questions:
            text, marked = self._tried(example, [*asking, {"role": "assistant", "content": _TEXT}])
            if (place := text.find(_TEXT)) >= 0:
                break
        else:
            return _Turn((), "", "", (eos,) if eos else ())
        asked, prompted = (self._tried(example, asking, prompt=prompt)[0] for prompt in (False, True))
        prompt = prompted[_common(asked, prompted) :]
        token = "|".join(map(re.escape, sorted(self._tokenizer.get_added_vocab(), key=len, reverse=True))) or "(?!)"
        if marked:
            start, end = next((span for span in marked if span[0] <= place < span[1]), (place, place))
            shared = _common(prompt, text[start:end])
            prompt = prompt[:shared] if shared == len(prompt) or start + shared == place else ""
        else:
            following = re.compile(rf"(?:{token})+").search(text, place)
            end = following.end() if following else len(text)
        found = re.findall(token, text[place:end])
        ends = [eos, *([eos] if eos in found else found[-1:])]
        # An answer that calls tools may end in another token.
        called, spans = self._tried(example, [*asking, _with_functions(_calling({"a": "b"}), self._printable)])
        written = called[slice(*spans[-1]) if spans else slice(_common(asked, called), None)].rstrip()
        if marked or not any(known and known in written for known in ends):
            ends += [last for last in self._special if written.endswith(last)]
        return _Turn(asking, prompt, text[_common(asked, text) : end], tuple(dict.fromkeys(filter(None, ends))))

    def _tried(self, example: Example, messages: Sequence[Message], *, prompt: bool = False) -> tuple[str, list[Span]]:
        """Render messages as `_render` does, or return nothing if the template refuses them."""
        try:
            return self._render(example, messages, prompt=prompt)
        except UserError:
            return "", []

    def _render(self, example: Example, messages: Sequence[Message], *, prompt: bool = False) -> tuple[str, list[Span]]:
        """Return the text of messages, and of a generation `prompt`, with the spans that generation blocks wrote."""
        template = self.templates[example.tools is not None]
        try:
            texts, spans = render_jinja_template(
                [[{key: value for key, value in message.items() if value is not None} for message in messages]],
                tools=None if example.tools is None else list(example.tools),
                chat_template=template,
                return_assistant_tokens_mask=bool(_MARKED.search(template)),
                add_generation_prompt=prompt,
                **self._tokenizer.special_tokens_map,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise UserError(f"{example.where}: the chat template refuses this conversation: {reason}") from error
        return texts[0], spans[0] if spans else []

    def _printable(self, function: dict[str, Any]) -> dict[str, Any]:
        """Return a called function with its arguments in the form that the template prints: JSON text or an object."""
        given = function.get("arguments")
        prints_text, prints_objects = self._argument_forms
        if isinstance(given, dict) and prints_text and not prints_objects:
            return function | {"arguments": json.dumps(given, ensure_ascii=False)}
        if isinstance(given, str) and not prints_text:
            with suppress(UserError):
                return function | {"arguments": json_in(given, "arguments")}
        return function

    @cached_property
    def _argument_forms(self) -> tuple[bool, bool]:
        """Return whether the template prints arguments as text, and as objects.

        One that expects objects fails or quotes text; one that expects text fails or prints objects as Python does.
        """
        text, probe = '{"a": "b"}', Example("", tools=(_TOOL,))
        as_text, as_object = (
            "".join(self._tried(probe, [*asking, _calling(given)])[0] for asking in _QUESTIONS)
            for given in (text, {"a": "b"})
        )
        return text in as_text, "a" in as_object and "'a'" not in as_object

    def _omitted_functions(self, example: Example) -> set[str]:
        """Return which of an example's tools and calls are not all in the text if it is rendered with other names."""

        def renamed(message: Message, name: str) -> Message:
            return _with_functions(message, lambda its: its | {"name": name})

        tools = renamed({"tool_calls": example.tools}, _NAMES["tools"])["tool_calls"]
        messages = [renamed(message, _NAMES["tool_calls"]) for message in example.messages]
        counts = {"tools": len(tools or ()), "tool_calls": sum(len(one.get("tool_calls") or ()) for one in messages)}
        text = self._tried(replace(example, tools=tools), messages)[0] if any(counts.values()) else ""
        return {field for field, count in counts.items() if text and text.count(_NAMES[field]) < count}


def _calling(arguments: Any) -> Message:
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _with_functions(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    """Return the message with `change` applied to the function of each of its calls."""
    calls = [
        call | {"function": change(call["function"])} if isinstance(call.get("function"), dict) else change(call)
        for call in message.get("tool_calls") or ()
    ]
    return message | {"tool_calls": calls} if calls else message


def _common(one: str, other: str) -> int:
    """Return the length of the longest common prefix."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda n: one[: n + 1] != other[: n + 1])


def _content(message: Message) -> str:
    return str(message.get("content") or "")


def _contains(text: str, content: str) -> bool:
    """Return whether `text` contains all of `content`, its pieces verbatim or as JSON escapes them."""
    if (content := content.strip()) in text:
        return True
    if content[:1] in ("{", "["):
        with suppress(UserError):
            return all(_contains(text, one) for _, one in texts_in(json_in(content, "a string")))
    pieces = (piece.strip() for piece in _PIECES.split(content))
    return all(
        piece in text or any(json.dumps(piece, ensure_ascii=ascii_only)[1:-1] in text for ascii_only in (False, True))
        for piece in pieces
        if piece
    )
