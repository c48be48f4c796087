"""Chat templates that trl ships with a variant for training, tokenizers for them, and conversations."""

from __future__ import annotations

import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sample_chats import chat_tokenizer, message

_PACKAGE = find_spec("trl")
assert _PACKAGE is not None
assert _PACKAGE.submodule_search_locations is not None
FOLDER = Path(_PACKAGE.submodule_search_locations[0]) / "chat_templates"
_OF_IMAGES = ("vl", "llava", "idefics", "smolvlm", "diffusion")
NAMES = [
    name
    for path in sorted(FOLDER.glob("*_training.jinja"))
    if not any(kind in (name := path.name.removesuffix("_training.jinja")) for kind in _OF_IMAGES)
]
DEEPSEEK_ASSISTANT = "<\uff5cAssistant\uff5c>"
_DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
# end-of-text of the published tokenizers
_EOS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "cohere2": "<|END_OF_TURN_TOKEN|>",
    "deepseek_r1_distill": _DEEPSEEK_END,
    "deepseekv3": _DEEPSEEK_END,
    "gemma": "<eos>",
    "gemma3": "<eos>",
    **dict.fromkeys(("gemma4", "gemma4_v5"), "<eos>"),
    "glm4moe": "<|endoftext|>",
    "gptoss": "<|return|>",
    "llama3": "<|end_of_text|>",
    "muse_glimmer": "<|end_of_text|>",
    "phi3": "<|endoftext|>",
    "phi3_5": "<|endoftext|>",
}
_TOKEN = re.compile(
    r"<[|\uff5c][^<>\s'{}]+?[|\uff5c]>|<(?:start|end)_of_turn>|<\|\w+>|<\w+\|>|</?think>|\[gMASK\]|<sop>"
)


def template(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def tokenizer_of(name: str, *, variant: bool = False) -> Any:
    """Return a tokenizer with a published template, or its variant for training, and the special tokens in it."""
    text = template(name)
    tokens = sorted(set(_TOKEN.findall(text)))
    return chat_tokenizer(
        template(f"{name}_training") if variant else text, eos=_EOS.get(name, "<|im_end|>"), special=tokens
    )


_user, _answer = partial(message, "user"), partial(message, "assistant")


def _call(room: str = "7", number: int = 5, arguments: Any = None) -> dict[str, Any]:
    function = {"name": "room_temperature", "arguments": arguments or {"room": room}}
    return {"id": f"call1234{number}", "type": "function", "function": function}


def _result(text: str, number: int = 5) -> dict[str, Any]:
    return {"role": "tool", "name": "room_temperature", "tool_call_id": f"call1234{number}", "content": text}


_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "room_temperature",
            "description": "Reads a thermometer",
            "parameters": {"type": "object", "properties": {"room": {"type": "string"}}, "required": ["room"]},
        },
    }
]
_ASKED, _LOOKS, _READ, _TOLD = (
    _user("How warm is room 7?"),
    _answer("", tool_calls=[_call()]),
    _result("19"),
    _answer("Nineteen degrees."),
)
_SYSTEM = {"role": "system", "content": "Be brief."}
_WITHOUT_TOOLS = {
    "single": [_ASKED, _TOLD],
    "system": [_SYSTEM, _ASKED, _TOLD],
    "multi": [_ASKED, _TOLD, _user("And outside?"), _answer("Four degrees.")],
    "the same answer twice": [_user("Yes or no?"), _answer("No"), _user("No?"), _answer("No")],
    "reasoning": [_user("2+2?"), _answer("4", reasoning_content="Two and two make four.")],
    "reasoning, two answers": [
        *(_user("2+2?"), _answer("4", reasoning_content="Two and two make 4.")),
        *(_user("3+3?"), _answer("6", reasoning_content="Three and three make 6.")),
    ],
    "reasoning in the text": [_user("2+2?"), _answer("<think>\nTwo and two make four.\n</think>\n\n4")],
    "reasoning in the text, two answers": [
        *(_user("2+2?"), _answer("<think>\nTwo and two make four.\n</think>\n\n4")),
        *(_user("3+3?"), _answer("<think>\nThat is six.\n</think>\n\n6")),
    ],
    "an empty answer": [_user("Hi"), _answer(""), _user("Hello?"), _answer("Yes.")],
    "two answers in a row": [_user("Hi"), _answer("One moment."), _answer("Here it is.")],
    "an answer first": [_answer("Welcome!"), _user("Hi"), _answer("Yes.")],
    "white space": [_user("Hi "), _answer("  Yes. \n"), _user(" ok\n"), _answer("Fine\n\n")],
    "a system prompt later": [_user("Hi"), _answer("Hello."), _SYSTEM, _user("How are you?"), _answer("Well.")],
    "unicode": [_user("Wie spät? 🕓"), _answer("C'est 4 h — «четыре» 四時 👍🏽.\u200d\n```py\nprint('<b>')\n```")],
    "long": [one for n in range(9) for one in (_user(f"Question {n}? " * 9), _answer(f"<p>{n}.</p> " * 30 + "."))],
    "ends in the text": [
        *(_user("What ends a turn?"), _answer("<|im_end|> or </s> or <|end|> or <end_of_turn> or <|eot_id|>")),
        *(_user("Sure?"), _answer("Yes <|im_end|>")),
    ],
    "a call without tools": [_ASKED, _LOOKS, _READ, _TOLD],
    "answers not to learn": [
        *(_user("a?"), _answer("A one."), _user("b?"), _answer("B two.", weight=0), _user("c?"), _answer("C three.")),
        *(_user("d?"), _answer("D four.", train=False), _user("e?"), _answer("E five.")),
    ],
}
_WITH_TOOLS = {
    "a call": [_ASKED, _LOOKS, _READ, _TOLD],
    "a call with text": [_ASKED, _LOOKS | {"content": "Let me look."}, _READ, _TOLD],
    "a call, then a question": [_ASKED, _LOOKS, _READ, _TOLD, _user("Thanks"), _answer("Welcome.")],
    "a call with arguments as text": [
        *(_ASKED, _answer("", tool_calls=[_call(arguments='{"room": "7"}')]), _READ, _TOLD),
    ],
    "two calls": [
        _user("Rooms 7 and 8?"),
        *(_answer("", tool_calls=[_call(), _call("8", 6)]), _READ, _result("21", 6), _answer("19 and 21.")),
    ],
    "two calls in a row": [
        *(_user("Rooms 7 and 8?"), _LOOKS, _READ, _answer("", tool_calls=[_call("8")]), _result("21")),
        _answer("19 and 21."),
    ],
    "a call last": [_ASKED, _LOOKS],
    "tools that are not used": [_SYSTEM, _user("How are you?"), _answer("Fine.")],
    "a call with reasoning": [
        *(_ASKED, _LOOKS | {"reasoning_content": "I must look."}, _READ),
        _TOLD | {"reasoning_content": "It says 19."},
    ],
}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    **{name: {"messages": messages} for name, messages in _WITHOUT_TOOLS.items()},
    **{name: {"messages": messages, "tools": _TOOLS} for name, messages in _WITH_TOOLS.items()},
}
