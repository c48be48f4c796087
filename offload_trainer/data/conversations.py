"""Lines of JSON -> conversations: which of the forms that people publish a file has, and what one line of it says.

chat      {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}
sharegpt  {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}
alpaca    {"instruction": ..., "input": ..., "output": ...}
pairs     {"prompt": ..., "completion": ...}      two strings, or two lists of messages
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_trainer.data.documents import encodable, holds_records, named_fields, read_records, string_in
from offload_trainer.errors import UserError

TEXT = "text"
_KEYS = {
    "chat": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "pairs": ("prompt", "completion"),
}
COLUMNS = ("input", "tools", *(key for keys in _KEYS.values() for key in keys))  # all that is read of a table
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}

Message = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """One line: messages, whose answers from number `first` on are learned; or, of plain strings, `pair`."""

    where: str  # file and line
    messages: tuple[Message, ...] = ()
    first: int = 0
    tools: tuple[Any, ...] | None = None
    pair: tuple[str, str] | None = None


def form_of_files(sources: Sequence[Path], *, form: str, text_field: str) -> str:
    """`TEXT`, or the form of conversation that all `sources` have, by the first line of each; `form` but for "auto".

    UserError where they differ, or have none of these forms.
    """
    found = {source: _form_of_file(source, form=form, text_field=text_field) for source in sources}
    kinds = list(dict.fromkeys(found.values()))
    if len(kinds) > 1:
        told = ", ".join(f"{kind} in {next(s for s, k in found.items() if k == kind)}" for kind in kinds)
        raise UserError(f"the files are not of one kind: {told}; give files of one kind, or name data.format")
    return kinds[0]


def _form_of_file(source: Path, *, form: str, text_field: str) -> str:
    is_lines = holds_records(source)
    if form == TEXT:
        return TEXT
    if form != "auto":
        if not is_lines:
            raise UserError(f"{source}: data.format={form} is for lines of JSON and tables: give .jsonl files")
        return form
    first = next(iter(read_records(source, wanted=(text_field, *COLUMNS))), None) if is_lines else None
    if first is None or text_field in first[1]:
        return TEXT
    where, record = first
    fitting = [name for name, keys in _KEYS.items() if all(key in record for key in keys)]
    if len(fitting) > 1:
        raise UserError(f"{where}: it may be read as {' or as '.join(fitting)}: say which with data.format=NAME")
    return fitting[0] if fitting else TEXT  # which then says what is missing


def example_of(record: dict[str, Any], *, form: str, where: str) -> Example:
    """What one line says. UserError, with file and line, for what has not that form."""
    for key in _KEYS[form]:
        if key not in record:
            raise UserError(f"{where}: no field {key!r}, which {form} has; there are: {named_fields(record)}")
    if form == "chat":
        tools = record.get("tools")
        if tools is not None and not isinstance(tools, list):
            raise UserError(f"{where}: 'tools' holds a {type(tools).__name__}, where a list is needed")
        return Example(where, _messages(record["messages"], where=where), tools=tuple(tools) if tools else None)
    if form == "sharegpt":
        turns = _list(record["conversations"], "conversations", where=where)
        return Example(where, tuple(_turn(turn, number, where=where) for number, turn in enumerate(turns, 1)))
    if form == "alpaca":
        asked = string_in(record, "instruction", where=where)
        more = string_in(record, "input", where=where) if record.get("input") else ""
        told = string_in(record, "output", where=where)
        question = {"role": "user", "content": f"{asked}\n\n{more}" if more else asked}
        return Example(where, (question, {"role": "assistant", "content": told}))
    if isinstance(record["prompt"], list) and isinstance(record["completion"], list):
        before = _messages(record["prompt"], where=where)
        return Example(where, (*before, *_messages(record["completion"], where=where)), first=len(before))
    pair = string_in(record, "prompt", where=where), string_in(record, "completion", where=where)
    return Example(where, pair=pair)


def _messages(value: Any, *, where: str) -> tuple[Message, ...]:
    found = []
    for number, message in enumerate(_list(value, "messages", where=where), 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"{where}: message {number} is no object with a 'role'")
        content = message.get("content")
        if content is not None or not message.get("tool_calls"):
            message = message | {"content": _text(content, number, where=where)}
        found.append(message)
    return tuple(found)


def _turn(turn: Any, number: int, *, where: str) -> Message:
    if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
        raise UserError(f"{where}: turn {number} is no object with a 'from'")
    if turn["from"].lower() not in _ROLES:
        known = ", ".join(_ROLES)
        raise UserError(f"{where}: turn {number} is from {ascii(turn['from'])[:60]}; known are {known}")
    return {"role": _ROLES[turn["from"].lower()], "content": _text(turn.get("value"), number, where=where)}


def _text(content: Any, number: int, *, where: str) -> str:
    """A message's text, in one string or in parts."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UserError(f"{where}: message {number} holds something else than text, which is not trained on here")
    return encodable("".join(part["text"] for part in parts), f"message {number}", where=where)


def _list(value: Any, name: str, *, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else f"a {type(value).__name__}"
        raise UserError(f"{where}: {name!r} holds {what}, where a list of messages is needed")
    return value
