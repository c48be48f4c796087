"""Parsing of conversations: detect which published form a line of JSON has, and parse it.

    chat      {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}
    sharegpt  {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}
    alpaca    {"instruction": ..., "input": ..., "output": ...}, or another name for each: `_QUESTIONS`, `_ANSWERS`
    pairs     {"prompt": ..., "completion": ...}: two strings, or two lists of messages

The first three accept "system" and "tools", and the third accepts "history", as in LLaMA-Factory, Axolotl and TRL.
Forms of those projects for other kinds of training are refused with a message that names them (`_OTHERS`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from offload_trainer.data.documents import at, encodable, json_in, json_kind, named_fields, string_in
from offload_trainer.errors import UserError

TEXT = "text"
_KEYS = {"chat": ("messages",), "sharegpt": ("conversations",), "pairs": ("prompt", "completion")}
_QUESTIONS = ("instruction", "question", "query", "prompt")
_ANSWERS = ("output", "response", "answer")
_SYSTEM = ("system", "system_prompt")
_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_TEXT_ALONE = (
    "this command trains on text alone. To train an image-text model on images, load it with ot.load for a loop of "
    "your own, or with offload_trainer.hf.load for transformers' Trainer (docs/library.md, Images and text)"
)
_READ_HERE = (
    "give 'text', 'messages', a 'prompt' and its 'completion' (plain text), or an 'instruction' and its 'output' "
    "without such fields, and ids of tokens in a .bin file. TRL trains on preferences (`offload-train cp dpo` writes a "
    "script) and on answers marked as good or bad (docs/integrations.md)"
)
# Fields that together identify a form for another kind of training
_OTHERS = (
    *(("chosen", "rejected"), ("chosen_response", "rejected_response"), ("prompt", "completions", "labels")),
    *(("kto_tag",), ("input_ids",), ("segments",), ("prompt",)),
)
# Axolotl's fields for training on parts of an answer, which is not supported here
_NO_LOSS_HERE = ("train_detail", "training_detail")
# All columns read from a table in addition to its string columns.
COLUMNS = (
    *dict.fromkeys(key for keys in (*_KEYS.values(), *_OTHERS) for key in keys),
    *(*_QUESTIONS, "input", *_ANSWERS, *_SYSTEM, "history", "tools", "label", "chat_template_kwargs"),
    *_MEDIA,
)
# Metadata fields, which are not expected in a row.
_ABOUT = frozenset(
    (
        *("id", "uid", "uuid", "guid", "idx", "index", "hash", "source", "dataset", "subset", "split", "origin", "url"),
        *("license", "lang", "language", "locale", "date", "time", "timestamp", "created", "created_at", "updated_at"),
        *("author", "model", "version", "meta", "metadata", "tool_call_ids"),
    )
)
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
_CALL = "function_call"  # LLaMA-Factory's role of an answer that calls tools

Message = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """One line of a file: messages, whose answers from index `first` on are learned, or a `pair` of plain strings.

    `texts` are all strings of the line that a row is expected to contain, each as (field, string).
    """

    where: str  # file and line, for error messages
    messages: tuple[Message, ...] = ()
    first: int = 0
    tools: tuple[Any, ...] | None = None
    pair: tuple[str, str] | None = None
    texts: tuple[tuple[str, str], ...] = ()


def form_of_record(record: dict[str, Any], *, text_field: str, where: str) -> str:
    """Return a record's form, or `TEXT`. Raises UserError if it shows several, or one that is not trained on here."""
    if text_field in record:
        return TEXT
    fitting = [name for name, keys in _KEYS.items() if all(key in record for key in keys)]
    if _asks_and_answers(record) and "pairs" not in fitting:
        fitting.append("alpaca")
    with at(where):
        if len(fitting) > 1:
            raise UserError(f"it could be read as {' or as '.join(fitting)}: choose one with data.format=NAME")
        if not fitting:
            _refuse_other(record)
    return fitting[0] if fitting else TEXT  # the text reader then reports what is missing


def example_of(record: dict[str, Any], *, form: str, where: str) -> Example:
    """Parse one line. Raises UserError, with file and line, for a line of another form."""
    with at(where):
        lacks = [f"no field {key!r}, which {form} has" for key in _KEYS.get(form, ()) if key not in record]
        if form == "alpaca" and not _asks_and_answers(record):
            question, answer = f"{', '.join(_QUESTIONS)} or input", ", ".join(_ANSWERS)
            lacks = [f"no fields of a question ({question}) and its answer ({answer})"]
        _refuse_other(record, form=None if lacks else form)
        if lacks:
            raise UserError(f"{lacks[0]}; there are: {named_fields(record)}")
        first = 0
        pair: tuple[str, str] | None = None
        if form == "alpaca":
            messages = _alpaca(record)
        elif form != "pairs":
            messages = _messages(record, _KEYS[form][0])
        elif not (isinstance(record["prompt"], list) and isinstance(record["completion"], list)):
            messages, unused = (), [key for key in (*_SYSTEM, "tools") if record.get(key)]
            if unused:
                raise UserError(
                    f"{unused[0]!r} has no place next to a prompt and a completion of plain text: put it into the "
                    "prompt, or give 'messages'"
                )
            pair = string_in(record, "prompt"), string_in(record, "completion")
        else:
            messages = _messages(record, "prompt")
            first = len(messages)
            messages += _messages(record, "completion")
        system = _only(record, _SYSTEM) if messages else None
        if system is not None and record[system] not in (None, "") and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": string_in(record, system)}, *messages)
            first += 1
        tools = _tools(record) if messages else None
    return Example(where, messages, first=first, tools=tools, pair=pair, texts=tuple(texts_in(record)))


def _refuse_other(record: dict[str, Any], *, form: str | None = None) -> None:
    """Raise UserError for a line of a form that is not trained on here, or that holds more than text.

    If the line has the fields of `form`, a "prompt" field alone does not make it a prompt without an answer.
    """
    marked = [("label",)] if isinstance(record.get("label"), bool) else []
    for keys in (*_OTHERS, *marked):
        if all(record.get(key) is not None for key in keys) and (form is None or keys != ("prompt",)):
            fields = "'prompt' without an answer" if keys == ("prompt",) else " and ".join(map(repr, keys))
            raise UserError(f"a line with {fields} is not trained on: {_READ_HERE}")
    for key in _MEDIA:
        if record.get(key):
            raise UserError(f"{key!r} is not empty: {_TEXT_ALONE}")
    if record.get("chat_template_kwargs"):
        raise UserError("'chat_template_kwargs' is not read: set its values in data.chat_template=FILE")


def _asks_and_answers(record: dict[str, Any]) -> bool:
    return any(key in record for key in (*_QUESTIONS, "input")) and any(key in record for key in _ANSWERS)


# -- messages ----------------------------------------------------------------------------------------------------------


def _alpaca(record: dict[str, Any]) -> tuple[Message, ...]:
    question, answer = _only(record, _QUESTIONS), _only(record, _ANSWERS)
    parts = [string_in(record, key) for key in (question, "input") if key and record.get(key) is not None]
    assert answer is not None, record
    turns = [("user", "\n\n".join(part for part in parts if part)), ("assistant", string_in(record, answer))]
    history = [] if record.get("history") in (None, "") else record["history"]
    if not isinstance(history, list):
        raise UserError(f"'history' holds {json_kind(history)}, where a list is needed")
    for number, turn in reversed(list(enumerate(history, 1))):
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(one, str) for one in turn):
            raise UserError(f"turn {number} of 'history' is no list of a question and its answer")
        turns = [("user", turn[0]), ("assistant", turn[1]), *turns]
    return tuple({"role": role, "content": encodable(text, role)} for role, text in turns)


def _only(record: dict[str, Any], names: Sequence[str]) -> str | None:
    """Return which of several names of one field is present, or None. Raises UserError for several."""
    there = [name for name in names if record.get(name) not in (None, "")] or [n for n in names if n in record][:1]
    if len(there) > 1:
        raise UserError(f"{' and '.join(map(repr, there))} both match; leave one of them out")
    return there[0] if there else None


def _messages(record: dict[str, Any], field: str) -> tuple[Message, ...]:
    """Return the messages of a field, each with `role` and `content`; ShareGPT's key names are accepted too."""
    value = record[field]
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else json_kind(value)
        fix = "; a string is not parsed, and CSV has strings only: write lines of JSON" * isinstance(value, str)
        raise UserError(f"{field!r} holds {what}, where a list of messages is needed{fix}")
    return tuple(_message(message, number) for number, message in enumerate(value, 1))


def _message(message: Any, number: int) -> Message:
    its: Message = dict(message) if isinstance(message, dict) else {}
    role = its.get("role", its.get("from"))
    if not isinstance(role, str):
        raise UserError(f"message {number} is no object with a 'role' or a 'from'")
    known = _ROLES.get(role.lower())
    if "role" not in its:
        value = its.pop("value", None)
        del its["from"]
        if role.lower() == _CALL:
            its = {key: its[key] for key in ("weight", "train") if key in its}
            known, its["tool_calls"], value = "assistant", _called(value, number), None
        elif known is None:
            raise UserError(f"message {number} is from {role[:60]!r}; known are {', '.join((*_ROLES, _CALL))}")
        its["content"] = value
    role = known or role
    calls, content = its.get("tool_calls"), its.get("content")
    if calls and (not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls)):
        raise UserError(f"'tool_calls' of message {number} is no list of objects")
    for key in _NO_LOSS_HERE:
        if its.get(key):
            raise UserError(f"message {number} has {key!r}: an answer is trained on whole, or not at all ('weight': 0)")
    if its.get("train") is True and role != "assistant":
        raise UserError(f"message {number} has 'train': true, and only messages of the assistant can be trained on")
    return its | {"role": role, "content": "" if content is None and calls else _text(content, number)}


def _called(value: Any, number: int) -> list[Any]:
    """Parse LLaMA-Factory's calls in JSON: {"name": ..., "arguments": ...}, or a list of those."""
    found = json_in(value, f"message {number}, a {_CALL},")
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise UserError(f"message {number} is a {_CALL} without the 'name' of a function")
    return [{"type": "function", "function": call} for call in calls]


def _tools(record: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return a line's tools, which are a list or JSON text, each in the form that templates expect."""
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = json_in(tools, "'tools'")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise UserError(f"'tools' holds {json_kind(tools)}, where a list is needed")
    return tuple(
        {"type": "function", "function": tool}
        if isinstance(tool, dict) and "function" not in tool and isinstance(tool.get("name"), str)
        else tool
        for tool in tools
    )


def _text(content: Any, number: int) -> str:
    """Return a message's text, which may be one string or a list of text parts."""
    if content is None:
        raise UserError(f"message {number} has no content; if it is empty, use an empty string")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UserError(f"message {number} holds something other than text: {_TEXT_ALONE}")
        if "train" in part or "weight" in part:
            raise UserError(f"message {number} mixes parts to train on with others: an answer is trained on whole")
    return encodable("".join(part["text"] for part in parts), f"message {number}")


def texts_in(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """Yield each non-empty string of a line with its field; metadata fields are left out."""
    if isinstance(value, str):
        if value.strip():
            yield field, value
    elif isinstance(value, list):
        for one in value:
            yield from texts_in(one, field)
    elif isinstance(value, dict):
        for key, one in value.items():
            if key not in _ABOUT and not key.endswith("_id") and not (field and key in ("role", "from", "type")):
                yield from texts_in(one, f"{field}.{key}" if field else key)
