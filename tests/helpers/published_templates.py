"""Chat templates that trl ships with a variant for training, tokenizers for them, and conversations."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sample_chats import chat_tokenizer, message, turns

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
# End-of-text of the published tokenizers, of the others <|im_end|>
_EOS = {
    **dict.fromkeys(("cohere", "cohere2"), "<|END_OF_TURN_TOKEN|>"),
    **dict.fromkeys(("deepseek_r1_distill", "deepseekv3"), "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    **dict.fromkeys(("gemma", "gemma3", "gemma4", "gemma4_v5"), "<eos>"),
    **dict.fromkeys(("glm4moe", "phi3", "phi3_5"), "<|endoftext|>"),
    **dict.fromkeys(("llama3", "muse_glimmer"), "<|end_of_text|>"),
    "gptoss": "<|return|>",
}
_TOKEN = re.compile(
    r"<[|\uff5c][^<>\s'{}]+?[|\uff5c]>|<(?:start|end)_of_turn>|<\|\w+>|<\w+\|>|</?think>|\[gMASK\]|<sop>"
)


def template(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def tokenizer_of(name: str, *, variant: bool = False) -> Any:
    """Return a tokenizer with a published template, or its variant for training, and the special tokens in it."""
    text = template(name)
    given = template(f"{name}_training") if variant else text
    return chat_tokenizer(given, eos=_EOS.get(name, "<|im_end|>"), special=sorted(set(_TOKEN.findall(text))))


def _call(room: str = "7", number: int = 5, arguments: Any = None, **more: Any) -> dict[str, Any]:
    """Return an answer that asks for the temperature of a room."""
    function = {"name": "room_temperature", "arguments": arguments or {"room": room}}
    calls = [{"id": f"call1234{number}", "type": "function", "function": function}]
    return message("assistant", "", tool_calls=calls) | more


def _result(text: str, number: int = 5) -> dict[str, Any]:
    return message("tool", text, name="room_temperature", tool_call_id=f"call1234{number}")


def _both(call: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return call | {"tool_calls": call["tool_calls"] + other["tool_calls"]}


_PARAMETERS = {"type": "object", "properties": {"room": {"type": "string"}}, "required": ["room"]}
_FUNCTION = {"name": "room_temperature", "description": "Reads a thermometer", "parameters": _PARAMETERS}
_SYSTEM, _READ = message("system", "Be brief."), _result("19")
_ASKED, _TOLD = turns("How warm is room 7?", "Nineteen degrees.")
_TWO_ROOMS, _BOTH_TOLD = turns("Rooms 7 and 8?", "19 and 21.")
_SUM, _SIX = turns("2+2?", "4"), turns("3+3?", "6")
_THOUGHT = "<think>\nTwo and two make four.\n</think>\n\n4"
_THANKED = turns("Thanks", "Welcome.")
_UNLEARNED = turns("a?", "A one.", "b?", "B two.", "c?", "C three.", "d?", "D four.", "e?", "E five.")
_UNLEARNED[3]["weight"], _UNLEARNED[7]["train"] = 0, False
_ENDS = "<|im_end|> or </s> or <|end|> or <end_of_turn> or <|eot_id|>"
_WITHOUT_TOOLS = {
    "single": [_ASKED, _TOLD],
    "system": [_SYSTEM, _ASKED, _TOLD],
    "multi": [_ASKED, _TOLD, *turns("And outside?", "Four degrees.")],
    "the same answer twice": turns("Yes or no?", "No", "No?", "No"),
    "reasoning": [_SUM[0], _SUM[1] | {"reasoning_content": "Two and two make four."}],
    "reasoning, two answers": [
        *(_SUM[0], _SUM[1] | {"reasoning_content": "Two and two make 4."}),
        *(_SIX[0], _SIX[1] | {"reasoning_content": "Three and three make 6."}),
    ],
    "reasoning in the text": turns("2+2?", _THOUGHT),
    "reasoning in the text, two answers": turns("2+2?", _THOUGHT, "3+3?", "<think>\nThat is six.\n</think>\n\n6"),
    "an empty answer": turns("Hi", "", "Hello?", "Yes."),
    "two answers in a row": [*turns("Hi", "One moment."), message("assistant", "Here it is.")],
    "an answer first": [message("assistant", "Welcome!"), *turns("Hi", "Yes.")],
    "white space": turns("Hi ", "  Yes. \n", " ok\n", "Fine\n\n"),
    "a system prompt later": [*turns("Hi", "Hello."), _SYSTEM, *turns("How are you?", "Well.")],
    "unicode": turns("Wie spät? 🕓", "C'est 4 h — «четыре» 四時 👍🏽.\u200d\n```py\nprint('<b>')\n```"),
    "long": turns(*(text for n in range(9) for text in (f"Question {n}? " * 9, f"<p>{n}.</p> " * 30 + "."))),
    "ends in the text": turns("What ends a turn?", _ENDS, "Sure?", "Yes <|im_end|>"),
    "a call without tools": [_ASKED, _call(), _READ, _TOLD],
    "answers not to learn": _UNLEARNED,
}
_WITH_TOOLS = {
    "a call": [_ASKED, _call(), _READ, _TOLD],
    "a call with text": [_ASKED, _call(content="Let me look."), _READ, _TOLD],
    "a call, then a question": [_ASKED, _call(), _READ, _TOLD, *_THANKED],
    "a call with arguments as text": [_ASKED, _call(arguments='{"room": "7"}'), _READ, _TOLD],
    "two calls": [_TWO_ROOMS, _both(_call(), _call("8", 6)), _READ, _result("21", 6), _BOTH_TOLD],
    "two calls in a row": [_TWO_ROOMS, _call(), _READ, _call("8"), _result("21"), _BOTH_TOLD],
    "a call last": [_ASKED, _call()],
    "tools that are not used": [_SYSTEM, *turns("How are you?", "Fine.")],
    "a call with reasoning": [
        *(_ASKED, _call(reasoning_content="I must look."), _READ, _TOLD | {"reasoning_content": "It says 19."}),
    ],
}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    **{name: {"messages": messages} for name, messages in _WITHOUT_TOOLS.items()},
    **{
        name: {"messages": messages, "tools": [{"type": "function", "function": _FUNCTION}]}
        for name, messages in _WITH_TOOLS.items()
    },
}
