"""Tests of every record form of LLaMA-Factory, Axolotl and TRL, and of text that a chat template does not print.

The forms are those that the three projects document (LLaMA-Factory `data/README.md`, Axolotl `docs/dataset-formats`,
TRL "Dataset formats and types"), as of 2026.
"""

import json
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

import pytest
import sample_chats
from datasets import Dataset
from sample_chats import TEMPLATE, chat_tokenizer, message, turns

from offload_trainer.common.errors import UserError
from offload_trainer.data.tokenfile import BEGINS, IDS, NOT_LEARNED

# Prints roles, contents, reasoning, calls and tools.
TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}[{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}]{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Prints no system prompt.
NO_SYSTEM = TEMPLATE.replace("for message in messages", "for message in messages if message.role != 'system'")
WEATHER = {
    "name": "weather",
    "description": "Tells it.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOL = {"type": "function", "function": WEATHER}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
AS_JSON = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}

A = "assistant"


def share(role: str, text: Any, **more: Any) -> dict[str, Any]:
    return {"from": role, "value": text} | more


def shares(*texts: str) -> list[dict[str, Any]]:
    return [share(("human", "gpt")[number % 2], text) for number, text in enumerate(texts)]


def talk(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"conversations" if "from" in messages[0] else "messages": list(messages)} | more


def row(*texts: str, system: str | None = None) -> str:
    """Return a row's text with trained spans in « »: a system prompt, then questions and answers in turn."""
    begin = "" if system is None else f"<system>{system}<end>"
    return begin + "".join(
        f"<assistant>«{text}<end>»" if number % 2 else f"<user>{text}<end>" for number, text in enumerate(texts)
    )


def untrained(fields: str) -> str:
    told = r".*ids of tokens in a \.bin file\. TRL trains on preferences \(`offload-train cp dpo`"
    return f"a line with {fields} is not trained on: {told}"


CALLED = (
    json.dumps(TOOL)
    + '<user>Rain?<end><assistant>«[weather {"city": "Oslo"}]<end>»<tool>wet<end><assistant>«Yes.<end>»'
)
UNLEARNED = "<user>a<end><assistant>A<end>" + row("b", "B")
# project and form: (a record, the row's text with trained spans in « », or a pattern of the refusal)
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "llamafactory alpaca": ({"instruction": "Add.", "input": "1 2", "output": "3"}, row("Add.\n\n1 2", "3")),
    "llamafactory alpaca, system and history": (
        {"instruction": "b", "input": "", "output": "B", "system": "Shout.", "history": [["a", "A"]]},
        row("a", "A", "b", "B", system="Shout."),
    ),
    "llamafactory sharegpt": (talk(*shares("a", "A", "b", "B")), row("a", "A", "b", "B")),
    "llamafactory sharegpt, tools as JSON": (
        talk(
            share("human", "Rain?"),
            share("function_call", json.dumps(CALL["function"])),
            share("observation", "wet"),
            share("gpt", "Yes."),
            tools=json.dumps([WEATHER]),
        ),
        CALLED,
    ),
    "llamafactory sharegpt KTO": (talk(*shares("a", "A"), kto_tag=False), untrained("'kto_tag'")),
    "llamafactory KTO as label": (talk(*turns("a", "A"), label=True), untrained("'label'")),
    "llamafactory images": (talk(*shares("<image>a", "A"), images=["1.jpg"]), r"'images' .*ot\.load.*library\.md"),
    "axolotl chat_template, content in parts, roles of others": (
        talk(*(message(who, [{"type": "text", "text": text}]) for who, text in (("human", "a"), ("gpt", "A")))),
        row("a", "A"),
    ),
    "axolotl chat_template, tools and calls": (
        talk(
            message("user", "Rain?"),
            message(A, None, tool_calls=[AS_JSON | {"id": "c1"}]),
            message("tool", "wet", tool_call_id="c1"),
            message(A, "Yes."),
            tools=[TOOL],
        ),
        CALLED,
    ),
    "axolotl chat_template, reasoning": (talk(*turns("a"), message(A, "A", reasoning_content="hm")), row("a", "(hm)A")),
    "axolotl train": (talk(*shares("a"), share("gpt", "A", train=False), *shares("b", "B")), UNLEARNED),
    "axolotl train on a question": (talk(share("human", "a", train=True), share("gpt", "A")), "has 'train': true"),
    "axolotl train_detail": (
        talk(*shares("a"), share("gpt", "A", train_detail=[{"begin_offset": 0}])),
        "message 2 has 'train_detail'",
    ),
    "axolotl parts to train": (
        talk(message(A, [{"type": "text", "text": "A", "train": False}])),
        "message 1 mixes parts to train on with others",
    ),
    "axolotl open_orca": (
        {"system_prompt": "Shout.", "question": "a", "response": "A"},
        row("a", "A", system="Shout."),
    ),
    "axolotl oasst": (
        {"INSTRUCTION": "a", "RESPONSE": "A"},
        "no field 'text'; there are: INSTRUCTION, RESPONSE.*'instruction' and 'output'",
    ),
    "axolotl metharme": ({"prompt": "a", "generation": "A"}, untrained("'prompt' without an answer")),
    "axolotl stepwise": (
        {"prompt": "a", "completions": ["A"], "labels": [True]},
        untrained("'prompt' and 'completions' and 'labels'"),
    ),
    "trl language modeling": ({"text": "Some text."}, "Some text.<end>"),
    "trl prompt-completion": ({"prompt": "The sky", "completion": " is blue."}, "The sky« is blue.<end>»"),
    "trl conversational prompt-completion": (
        {"prompt": turns("a", "A", "b"), "completion": [message(A, "B")]},
        UNLEARNED,
    ),
    "trl preference": ({"prompt": "a", "chosen": "b", "rejected": "c"}, untrained("'chosen' and 'rejected'")),
    "trl chat_template_kwargs": (
        talk(*turns("a", "A"), chat_template_kwargs={"enable_thinking": False}),
        "'chat_template_kwargs' is not read",
    ),
    # other forms
    "two answers": ({"question": "a", "answer": "A", "response": "B"}, "'response' and 'answer' both match"),
    "a system prompt for text": ({"prompt": "a", "completion": "b", "system": "s"}, "'system' has no place next to"),
    "a history that is none": ({"instruction": "a", "output": "b", "history": ["x"]}, "turn 1 of 'history' is no list"),
    "content that is null": (talk(*turns("a", "A"), message("user", None)), "message 3 has no content; if it is empty"),
    "no messages": ({"messages": []}, "'messages' holds an empty list"),
    "strings for messages": ({"messages": ["hello"]}, "message 1 is no object with a 'role'"),
    "an image in a message": (
        talk(message("user", [{"type": "text", "text": "a"}]), message(A, [{"type": "b"}])),
        "message 2 holds something other than text",
    ),
    "tools that are no JSON": (talk(*turns("a", "A"), tools="x"), "'tools' holds no JSON"),
    "an unknown role": (talk(share("narrator", "x")), "1 is from 'narrator'; known are human"),
    "a completion of another kind": ({"prompt": "x", "completion": []}, "field 'completion' holds a list"),
}


def prepared(folder: Path, *records: dict[str, Any], template: str = TOOLS, table: bool = False, **section: Any) -> Any:
    tokenizer = chat_tokenizer(template, special=["<system>", "<tool>"])
    file = folder / ("a.parquet" if table else "a.jsonl")
    if table:
        Dataset.from_list(list(records)).to_parquet(file)
    else:
        file.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return tokenizer, sample_chats.prepared(file, tokenizer=tokenizer, seq_len=512, **section)


def shown(tokenizer: Any, tokens: Any) -> str:
    """Return the first row's text without padding, with trained spans in « »; plain text is unmarked."""
    if tokens.row_length is None:
        return str(tokenizer.decode(tokens.read(0, len(tokens)).tolist()))
    marked = takewhile(lambda id_: not id_ & BEGINS, tokens.read(0, 512).tolist())  # up to the padding
    spans = groupby(marked, key=lambda id_: not id_ & NOT_LEARNED)
    texts = [(learned, tokenizer.decode([id_ & IDS for id_ in span])) for learned, span in spans]
    return "".join(f"«{text}»" if learned else text for learned, text in texts)


@pytest.mark.parametrize("table", [False, True], ids=["lines", "table"])
@pytest.mark.parametrize("name", FORMS)
def test_what_becomes_of_each_form(name: str, table: bool, tmp_path: Path) -> None:
    record, expected = FORMS[name]
    if any(letter in expected for letter in "«<") or expected.startswith("Some text"):
        tokenizer, tokens = prepared(tmp_path, record, table=table)
        assert shown(tokenizer, tokens) == expected
        assert "missing from the rows" not in (tokens.summary or "")
        return
    if table and name == "axolotl oasst":
        expected = expected.split(".*")[0]
    with pytest.raises(UserError, match=expected) as caught:
        prepared(tmp_path, record, table=table)
    where = "a.parquet, row 1: " if table else "a.jsonl, line 1: "
    assert where in str(caught.value)
    assert "NoneType" not in str(caught.value)


# -- what a template does not print ------------------------------------------------------------------------------------

LOOKS = message(A, "Let me see.", tool_calls=[CALL])


@pytest.mark.parametrize(
    ("record", "template", "field"),
    [
        (talk(*turns("weather in Oslo?"), LOOKS), TEMPLATE, "tool_calls"),
        (
            talk(*turns("Rain?"), message(A, "", tool_calls=[CALL, AS_JSON])),
            TOOLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
            "tool_calls",
        ),
        (talk(*turns("weather Tells it.", "A"), tools=[TOOL]), TEMPLATE, "tools"),
        (talk(message("system", "Shout."), *turns("a", "A")), NO_SYSTEM, "messages.content"),
        (talk(*shares("a", "A"), system="Shout."), NO_SYSTEM, "system"),
        (  # gpt-oss's template leaves out text next to a call, where an answer follows
            talk(*turns("Rain?"), LOOKS),
            TOOLS.replace("{{ m.content }}{% for", "{% if not m.tool_calls %}{{ m.content }}{% endif %}{% for"),
            "messages.content",
        ),
    ],
)
def test_what_a_template_drops_is_named(record: dict[str, Any], template: str, field: str, tmp_path: Path) -> None:
    _, tokens = prepared(tmp_path, record, template=template)
    assert f"'{field}' in 1 (first: " in tokens.summary


def test_other_text_that_no_row_holds_is_named_and_counted(tmp_path: Path) -> None:
    plain = talk(*turns("a", "A"), id="x1", source="somewhere", conversation_id="7")
    thinks = talk(*turns("a"), message(A, "A", reasoning_content="Hm, why?"), id="x2")
    more = talk(*turns("a", "A"), category="letters", extra={"notes": ["", "Look\nhere."]})
    twice = talk(message("system", "Be brief."), *turns("a", "A"), system="Shout.")
    _, tokens = prepared(tmp_path, plain, thinks, thinks, more, twice, template=TEMPLATE)
    assert "text that is missing from the rows: " in tokens.summary
    for told in (
        "'messages.reasoning_content' in 2 (first: ",
        "a.jsonl, line 2)",
        "'category' in 1 (first: ",
        "'extra.notes' in 1",
        "'system' in 1 (first: ",
    ):
        assert told in tokens.summary
    assert all(f"'{name}'" not in tokens.summary for name in ("id", "source", "conversation_id", "messages.content"))
    _, tokens = prepared(tmp_path, {"question": "a", "answer": "A", "hint": "It is a letter."}, table=True)
    assert "'hint' in 1 (first: " in tokens.summary


def test_moved_and_stripped_text_is_not_lost_and_empty_answers_are_counted(tmp_path: Path) -> None:
    """A template may put reasoning before the answer, strip lines and quote text as JSON."""
    moves = (
        "{% for m in messages %}<{{ m.role }}>{% set parts = m.content.split('</think>') %}"
        "{% if parts[1:] %}(thought: {{ parts[0][7:].strip() }}){{ parts[1].strip() }}"
        "{% else %}{{ m.content | tojson }}{% endif %}<end>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    moved = talk(*turns('"Why"?\nÄ', "<think>\nHm. \n</think>\n\n Because. "))
    _, tokens = prepared(tmp_path, moved, template=moves)
    assert "missing from the rows" not in tokens.summary
    unlearned = talk(*turns("a"), message(A, "", weight=0), *turns("c", "A"))
    records = (unlearned, talk(*turns("a", " ", "b", "")), talk(*turns("a", "")))
    _, tokens = prepared(tmp_path, *records, template=TEMPLATE)
    assert "; 3 of the answers to train on are empty" in tokens.summary
    _, tokens = prepared(tmp_path, {"prompt": "a", "completion": ""}, {"prompt": "a", "completion": "b"})
    assert "; 1 of the answers to train on are empty" in tokens.summary
