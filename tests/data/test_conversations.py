"""Tests of conversations: token ids, the tokens that are trained on, compared with transformers, and their rows."""

import json
import random
import re
from collections import Counter
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_chats import TEMPLATE, chat_tokenizer, lines, message, prepared, run_data, token_spec, turns

from offload_trainer.common.errors import UserError
from offload_trainer.data import loss_mask
from offload_trainer.data.documents import example_of
from offload_trainer.data.loss_mask import AnswerEncoder, Encoded, training_variant
from offload_trainer.data.packing import RowEncoder
from offload_trainer.data.rows import IGNORED, RowReader, first_row, padding_of
from offload_trainer.data.tokenfile import BEGINS, IDS, NOT_LEARNED, TokenFile, write_tokens

MARKED = (
    "{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}<end>{% endgeneration %}{% else %}{{ message.content }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# A turn's end is followed by a line end, as in ChatML.
LINES = TEMPLATE.replace("<end>", "<end>\n")
# An answer is rendered in another place than its message, too.
TWICE = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}" + TEMPLATE

TALK = [
    message("system", "Be brief."),
    message("user", "One?"),
    message("assistant", "Uno é.\n\nSì."),
    message("user", "Two? Uno"),
    message("assistant", " due "),
]


# -- templates that trl ships with a variant for training, tokenizers for them, and conversations ----------------------

FOLDER = Path(find_spec("trl").submodule_search_locations[0]) / "chat_templates"
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
_TOOL = {"type": "function", "function": _FUNCTION}
_SYSTEM, _READ = message("system", "Be brief."), _result("19")
_ASKED, _TOLD = turns("How warm is room 7?", "Nineteen degrees.")
_TWO_ROOMS, _BOTH_TOLD = turns("Rooms 7 and 8?", "19 and 21.")
_SUM, _SIX = turns("2+2?", "4"), turns("3+3?", "6")
_THOUGHT = "<think>\nTwo and two make four.\n</think>\n\n4"
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
    "a call, then a question": [_ASKED, _call(), _READ, _TOLD, *turns("Thanks", "Welcome.")],
    "a call with arguments as text": [_ASKED, _call(arguments='{"room": "7"}'), _READ, _TOLD],
    "two calls": [_TWO_ROOMS, _both(_call(), _call("8", 6)), _READ, _result("21", 6), _BOTH_TOLD],
    "two calls in a row": [_TWO_ROOMS, _call(), _READ, _call("8"), _result("21"), _BOTH_TOLD],
    "a call last": [_ASKED, _call()],
    "tools that are not used": [_SYSTEM, *turns("How are you?", "Fine.")],
    "a call with reasoning": [
        *(_ASKED, _call(reasoning_content="I must look."), _READ, _TOLD | {"reasoning_content": "It says 19."}),
    ],
}
CONVERSATIONS: dict[str, dict[str, Any]] = {name: {"messages": messages} for name, messages in _WITHOUT_TOOLS.items()}
CONVERSATIONS |= {name: {"messages": messages, "tools": [_TOOL]} for name, messages in _WITH_TOOLS.items()}


def encoded(
    record: dict[str, Any],
    *,
    form: str = "chat",
    template: str = TEMPLATE,
    tokenizer: Any = None,
    everything: bool = False,
) -> Encoded:
    encoder = AnswerEncoder(tokenizer or chat_tokenizer(template), everything=everything)
    return next(encoder.encode([example_of(record, form=form, where="here, line 1")]))


def learned(found: Encoded, *, tokenizer: Any = None) -> list[str]:
    """Return the spans of text that are trained on."""
    tokenizer = tokenizer or chat_tokenizer()
    runs = groupby(zip(*found, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([id_ for id_, _ in run]) for counted, run in runs if counted]


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
@pytest.mark.parametrize("messages", [TALK, TALK[1:3], TALK[2:], TALK[:4]])
def test_answers_are_those_that_transformers_counts(messages: list[dict[str, Any]], template: str) -> None:
    marks = {"return_dict": True, "return_assistant_tokens_mask": True}
    expected = chat_tokenizer(MARKED).apply_chat_template(messages, **marks)
    assert sum(expected["assistant_masks"]) > 5
    found = Encoded(expected["input_ids"], [bool(mask) for mask in expected["assistant_masks"]])
    assert encoded({"messages": messages}, template=template) == found


def test_answers_that_cannot_be_proven_are_refused() -> None:
    no_end = "ends it with no token at which generation stops"
    unclear = "does not show where it begins and ends"
    for template, reason in ((TWICE, unclear), *((TEMPLATE.replace("<end>", end), no_end) for end in ("", "\n"))):
        with pytest.raises(UserError, match=f"here, line 1: .* {reason}.*give data.chat_template=FILE"):
            encoded({"messages": TALK}, template=template)
        assert all(encoded({"messages": TALK}, template=template, everything=True).counted)
    # A template that refuses the search is not said to refuse the conversation.
    strict = "{% if messages[-1].content not in ('Hi?', 'No') %}{{ raise_exception('x') }}{% endif %}" + TEMPLATE
    with pytest.raises(UserError, match=r"message 2 is an answer .* cannot be proven: .*or data.train_on=all"):
        encoded({"messages": turns("Hi?", "No")}, template=strict)


# Each template without generation marks: what is learned of `TALK`.
ANSWERS = ["Uno é.\n\nSì.<end>", " due <end>"]
HEADED = "{% for m in messages %}<{{ m.role }}>"
UNMARKED = {
    "a line end behind each turn": (LINES, ANSWERS),
    "thoughts of the last answer alone": (
        LINES.replace("}}>{{", "}}>{% if message.role == 'assistant' and loop.last %}(so)\n{% endif %}{{"),
        [ANSWERS[0], "(so)\n" + ANSWERS[1]],
    ),
    "the number of messages first": ("{{ messages | length }}" + TEMPLATE, ANSWERS),
    "no generation prompt": (TEMPLATE.partition("{% if add")[0], ANSWERS),
    "end-of-text behind the conversation": (TEMPLATE.replace("{% endif %}", "{% else %}<pad>{% endif %}"), ANSWERS),
    "a generation prompt that opens a thinking block": (
        TEMPLATE.replace("<assistant>{% endif", "<assistant>(so)\n{% endif"),
        ANSWERS,
    ),
    "an empty thinking block before each answer": (
        HEADED + "{% if m.role == 'assistant' %}(so)\n{% endif %}{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
        ["(so)\n" + answer for answer in ANSWERS],
    ),
    "the prompt opens the thinking block, which the last answer closes": (
        HEADED + "{% if m.role == 'assistant' and loop.last %}(so)(on){% endif %}{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>(so){% endif %}",
        [ANSWERS[0], "(on)" + ANSWERS[1]],
    ),
    "white space stripped": (TEMPLATE.replace("message.content", "message.content.strip()"), [ANSWERS[0], "due<end>"]),
    "answers quoted": (
        TEMPLATE.replace("message.content", "message.content | tojson"),
        ['"Uno é.\\n\\nSì."<end>', '" due "<end>'],
    ),
}


@pytest.mark.parametrize("name", UNMARKED)
def test_answers_without_marks(name: str) -> None:
    template, expected = UNMARKED[name]
    found = encoded({"messages": TALK}, template=template)
    assert learned(found) == expected
    whole = encoded({"messages": TALK}, template=template, everything=True)
    assert found.ids == whole.ids


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_answers_with_the_end_of_a_turn_in_them_and_those_that_are_not_to_be_learned(template: str) -> None:
    talk = [*turns("a<end>", "b<end>"), message("assistant", "<end>c")]
    assert learned(encoded({"messages": talk}, template=template)) == ["b<end><end>", "<end>c<end>"]
    first = [message("assistant", "no", weight=0) if n == 2 else one for n, one in enumerate(TALK)]
    for form, record in (("chat", {"messages": first}), ("pairs", {"prompt": TALK[:4], "completion": TALK[4:]})):
        assert learned(encoded(record, form=form, template=template)) == [" due <end>"]


# -- generation marks, and the templates that trl knows ----------------------------------------------------------------

_LACKS = "{% if messages[0].role != 'system' %}{{ raise_exception('a system message is needed') }}{% endif %}"
_SHORT = "{% if messages | length < 4 %}{{ raise_exception('a longer conversation is needed') }}{% endif %}"
_STRICT = "{% if messages[0].content != 'Be brief.' %}{{ raise_exception('another system message') }}{% endif %}"
_LAST = MARKED.replace("}}<end>{% endg", "}}{{ '<pad>' if loop.index == 5 else '<end>' }}{% endg")
_NO_END = "of the answers to train on have no token that ends them"
# Each template with generation marks: what is learned of `TALK`, whether <end> ends generation, what is reported.
MARKS = {
    "a question without a system message is refused": (_LACKS + MARKED, ANSWERS, True, ""),
    "only the system message of the conversation is accepted": (_STRICT + MARKED, ANSWERS, False, ""),
    "short conversations are refused": (_SHORT + MARKED, ANSWERS, False, ""),
    "a last answer that ends otherwise": (_LAST, [ANSWERS[0], " due "], True, f"1 {_NO_END}"),
    "two marks of each answer, and none of its end": (
        MARKED.replace("{% generation %}", "{% generation %}(so){% endgeneration %}|{% generation %}").replace(
            "<end>{% endgeneration %}", "{% endgeneration %}<end>"
        ),
        ["(so)", "Uno é.\n\nSì.", "(so)", " due "],
        False,
        f"2 {_NO_END}",
    ),
}


@pytest.mark.parametrize("name", MARKS)
def test_the_ends_of_marked_answers(name: str) -> None:
    """An end is cut off only if it is known how the template ends answers, and a last answer without it is counted."""
    template, expected, ends, told = MARKS[name]
    tokenizer = chat_tokenizer(template, eos="<eos>")
    encoder = AnswerEncoder(tokenizer, everything=False)
    (found,) = encoder.encode([example_of({"messages": TALK}, form="chat", where="here, line 1")])
    assert learned(found, tokenizer=tokenizer) == expected
    assert ("<end>" in tokenizer.convert_ids_to_tokens(encoder.end_ids)) == ends
    assert [line[: len(told)] for line in encoder.told()] == [told] * bool(told)


def test_the_template_of_tools_ends_answers_in_its_own_token() -> None:
    tokenizer = chat_tokenizer("", eos="<eos>", special=["<stop>"])
    tokenizer.chat_template = {"default": MARKED, "tool_use": "{{ tools }}" + MARKED.replace("<end>", "<stop>")}
    encoder = AnswerEncoder(tokenizer, everything=False)
    record = {"messages": TALK, "tools": CONVERSATIONS["a call"]["tools"]}
    (found,) = encoder.encode([example_of(record, form="chat", where="here, line 1")])
    assert learned(found, tokenizer=tokenizer) == [answer.replace("<end>", "<stop>") for answer in ANSWERS]
    assert tokenizer.convert_ids_to_tokens(encoder.end_ids) == ["<eos>", "<end>", "<stop>"]
    assert encoder.told() == []


def test_an_answer_not_to_learn_beside_a_call_without_text() -> None:
    """The call keeps no text, which gpt-oss's template would refuse next to its reasoning."""
    conversation = CONVERSATIONS["a call with reasoning"]
    *talk, last = conversation["messages"]
    messages = [*talk, last | {"weight": 0}]
    tokenizer = tokenizer_of("gptoss")
    texts = learned(encoded(conversation | {"messages": messages}, tokenizer=tokenizer), tokenizer=tokenizer)
    assert "room_temperature" in "".join(texts)
    assert last["content"] not in "".join(texts)


def test_several_marks_of_one_answer() -> None:
    """Reasoning and text are marked separately; which marks are of an answer not to learn is found by rendering."""
    marked = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
        "{% if m.get('why') %}{% generation %}({{ m.why }}){% endgeneration %}|{% endif %}"
        "{% generation %}{{ m.content }}<end>{% endgeneration %}{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
    )
    talk = [message("user", "a"), message("assistant", "b", why="B"), message("user", "c"), message("assistant", "d")]
    assert learned(encoded({"messages": talk}, template=marked)) == ["(B)", "b<end>", "d<end>"]
    talk[3]["weight"] = 0
    assert learned(encoded({"messages": talk}, template=marked)) == ["(B)", "b<end>"]
    talk[1]["weight"] = talk[3].pop("weight")
    assert learned(encoded({"messages": talk}, template=marked)) == ["d<end>"]
    once = "{{ messages[1].content }}{% generation %}{{ messages[-1].content }}{% endgeneration %}" + TEMPLATE
    with pytest.raises(UserError, match="here, line 1: message 2 is not to be learned, and it cannot be told which"):
        encoded({"messages": [talk[0], talk[1] | {"weight": 0}, talk[2]]}, template=once)


# Templates whose marks include the generation prompt, which is not learned here: the prompt.
_PROMPTS = {
    **dict.fromkeys(("deepseek_r1_distill", "deepseekv3"), DEEPSEEK_ASSISTANT),
    **dict.fromkeys(("gptoss", "muse_glimmer"), "<|start|>assistant"),
}
# Tokens that end some turns within the marks, though generation continues after them: they are not learned here.
_OTHER_ENDS = {"gptoss": "<|end|>", "glm4moe": "<|system|>"}
_QUICK = ("deepseek_r1_distill", "deepseekv3", "glm4moe", "gptoss", "qwen3_5_think")


def compare_with_the_variant(name: str, conversation: dict[str, Any]) -> str:
    """Compare ids and mask with those that transformers computes from trl's variant; return the reason of a refusal."""
    tokenizer, reference = tokenizer_of(name), tokenizer_of(name, variant=True)
    messages = json.loads(json.dumps(conversation["messages"]).replace(r'"{\"room\": \"7\"}"', '{"room": "7"}'))
    try:
        expected = reference.apply_chat_template(
            messages, tools=conversation.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception as error:
        first = re.escape(str(error).splitlines()[0])[:60]
        with pytest.raises(UserError, match=f"here, line 1: .*{first}"):
            encoded(conversation, tokenizer=tokenizer)
        return "refused by the template"
    encoder = AnswerEncoder(tokenizer, everything=False)
    (found,) = encoder.encode([example_of(conversation, form="chat", where="here, line 1")])
    assert tokenizer.chat_template == template(name)
    assert found.ids == expected["input_ids"]
    answers = [one for one in messages if one["role"] == "assistant"]
    kept = [one for one in answers if one.get("weight") != 0 and one.get("train") is not False]
    reference_mask = [bool(one) for one in expected["assistant_masks"]]
    assert not any(one and not other for one, other in zip(found.counted, reference_mask, strict=True))
    omitted = [one and not other for one, other in zip(reference_mask, found.counted, strict=True)]
    rest = "".join(learned(Encoded(found.ids, omitted), tokenizer=tokenizer))
    prompt, end = _PROMPTS.get(name, ""), _OTHER_ENDS.get(name, "")
    if len(kept) == len(answers):
        assert rest.replace(prompt, "").replace(end, "") == ""
        # DeepSeek has no prompt behind the result of a tool.
        used_tools = any(one["role"] == "tool" for one in messages)
        assert not prompt or rest.count(prompt) == len(answers) or (used_tools and rest.count(prompt) < len(answers))
    texts = learned(found, tokenizer=tokenizer)
    # Phi-3 marks the token behind the whole conversation too.
    assert len(texts) == len(kept)
    for text, answer in zip(texts, kept, strict=True):
        assert not re.match(rf"<\|im_start\|>|<\|?start|{DEEPSEEK_ASSISTANT}|assistant|model", text)
        assert answer["content"].rpartition("</think>")[2].strip() in text or answer.get("tool_calls")
        ended = tokenizer(text.rstrip(), add_special_tokens=False)["input_ids"][-1] in encoder.end_ids
        assert ended or (end and answer is not answers[-1])
    return "equal" if found.counted == reference_mask else "equal but for the prompt, an end, or answers not to learn"


@pytest.mark.parametrize(
    "name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_masks_are_those_of_trls_variants(name: str) -> None:
    found = {case: compare_with_the_variant(name, conversation) for case, conversation in CONVERSATIONS.items()}
    plain = "equal" if name not in _PROMPTS else "equal but for the prompt, an end, or answers not to learn"
    assert list(found.values()).count(plain) >= 12, found
    assert [case for case in ("single", "multi", "reasoning", "an empty answer") if found[case] != plain] == []


def test_the_ends_of_answers_end_generation_and_the_template_is_kept(tmp_path: Path) -> None:
    tokenizer_of("glm4moe").save_pretrained(tmp_path / "model")
    file = tmp_path / "chat.jsonl"
    file.write_text((json.dumps(CONVERSATIONS["single"]) + "\n") * 3)
    said: list[str] = []
    data = run_data(file, vocabulary=400, seq_len=96, directory=tmp_path / "model", say=said.append, validation=0.0)
    ends = data.spec.tokenizer.convert_ids_to_tokens(list(data.ends_of_answers))
    assert ends == ["<|endoftext|>", "<|user|>", "<|observation|>"]
    assert data.spec.tokenizer.chat_template == template("glm4moe")
    assert said.count("conversations are rendered with trl's training variant of the chat template") == 1
    shown = [line.strip() for line in first_row(data.tokens, data.spec.tokenizer, seq_len=96)]
    assert r"learned  '\n<think></think>\nNineteen degrees.<|user|>'" in shown


@pytest.mark.slow
def test_the_variant_is_the_one_that_trl_finds() -> None:
    from trl import get_training_chat_template

    for path in sorted(FOLDER.glob("*.jinja")):
        tokenizer = chat_tokenizer(text := path.read_text(encoding="utf-8"))
        try:
            expected = get_training_chat_template(tokenizer) or text
        except ValueError:
            expected = text
        assert training_variant(text) == expected, path.name
    assert training_variant(TEMPLATE) == TEMPLATE


def test_without_trl_the_answers_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("find_spec", "is_installed"):
        monkeypatch.setattr(loss_mask, name, lambda package: None)
    single, multi, calls = (CONVERSATIONS[name] for name in ("single", "multi", "a call, then a question"))
    with pytest.raises(UserError, match=r"at which generation stops: pip install 'trl>=.*or give data.chat_template"):
        encoded(single, tokenizer=tokenizer_of("glm4moe"))
    with pytest.raises(UserError, match=r"message 2 .* at which generation stops: pip install 'trl"):
        encoded(multi, tokenizer=tokenizer_of("gptoss"))
    for name in ("qwen3_5_think", "nemotron_3_nano", "llama3_2", "qwen3"):
        tokenizer, end = tokenizer_of(name), "<|eot_id|>" if name == "llama3_2" else "<|im_end|>"
        texts = learned(encoded(multi, tokenizer=tokenizer), tokenizer=tokenizer)
        expected = [f"Nineteen degrees.{end}", f"Four degrees.{end}"]
        assert [text.rpartition("</think>")[2].strip() for text in texts] == expected
        assert not any("assistant" in text for text in texts)
        texts = learned(encoded(calls, tokenizer=tokenizer), tokenizer=tokenizer)
        assert [("room_temperature" in text, "Nineteen" in text, "Welcome." in text) for text in texts] == [
            (n == 0, n == 1, n == 2) for n in range(3)
        ]


# Roles must alternate, except around calls of tools, as in Mistral's templates.
ALTERNATING = (
    "{% set ns = namespace(index=0) %}{% for m in messages %}{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}{{ tools }}{% for m in messages %}"
    "{% if m.role == 'user' %}<user>{{ m.content }}<s>{% elif m.role == 'tool' %}<user>{{ m.content }}<s>"
    "{% elif m.tool_calls %}(calls){% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}<end>"
    "{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "case", ["a call", "a call, then a question", "two calls", "two calls in a row", "a call last"]
)
@pytest.mark.parametrize("name", ["alternating", "gemma4", "gemma4_v5"])
def test_calls_of_tools_without_marks(name: str, case: str) -> None:
    tokenizer = chat_tokenizer(ALTERNATING) if name == "alternating" else tokenizer_of(name)
    encoder = AnswerEncoder(tokenizer, everything=False)
    (found,) = encoder.encode([example_of(CONVERSATIONS[case], form="chat", where="here, line 1")])
    arguments, before = '<|tool_call>call:room_temperature{{room:<|"|>{}<|"|>}}<tool_call|>', ""
    stop, end = "<|tool_response>", "<turn|>"
    if name == "alternating":
        arguments, before = '{{"name": "room_temperature", "arguments": {{"room": "{}"}}}}', "(calls)"
        stop = end = "<end>"
    expected = []
    for answer in (one for one in CONVERSATIONS[case]["messages"] if one["role"] == "assistant"):
        calls = [arguments.format(one["function"]["arguments"]["room"]) for one in answer.get("tool_calls", ())]
        expected.append(before + "".join(calls) + stop if calls else answer["content"] + end)
    assert learned(found, tokenizer=tokenizer) == expected
    assert {stop, end} <= set(tokenizer.convert_ids_to_tokens(encoder.end_ids))


# What a template writes for arguments: what becomes of them, given as text and as an object.
ARGUMENTS = {
    "'(' + call.function.arguments + ')'": ('({"city":"Ōsaka"})', '({"city": "Ōsaka"})'),
    "call.function.arguments": ('{"city":"Ōsaka"}', '{"city": "Ōsaka"}'),
    "call.function.arguments | tojson": ('{"city": "Ōsaka"}',) * 2,
    "call.function | tojson": ('{"name": "f", "arguments": {"city": "Ōsaka"}}',) * 2,
    "call.function.arguments.city": ("Ōsaka",) * 2,
    "call.function.arguments if call.function.arguments is string else call.function.arguments | tojson": (
        '{"city":"Ōsaka"}',
        '{"city": "Ōsaka"}',
    ),
}


@pytest.mark.parametrize("written", ARGUMENTS)
def test_arguments_have_the_form_that_the_template_prints(written: str) -> None:
    calls = "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ " + written + " }}{% endfor %}"
    template = TEMPLATE.replace("{{ message.content }}", "{{ message.content }}" + calls)
    for given, expected in zip(('{"city":"Ōsaka"}', {"city": "Ōsaka"}), ARGUMENTS[written], strict=True):
        call = {"type": "function", "function": {"name": "f", "arguments": given}}
        talk = [message("user", "a"), message("assistant", None, tool_calls=[call])]
        assert learned(encoded({"messages": talk}, template=template)) == [f"f{expected}<end>"]


# -- rows --------------------------------------------------------------------------------------------------------------

PAD = 2  # chat_tokenizer's end-of-text


def conversation(count: int, *, first: int, answer: int) -> Encoded:
    """Return `count` consecutive ids from `first`, of which the last `answer` are trained on."""
    return Encoded(list(range(first, first + count)), [n >= count - answer for n in range(count)])


def rows_of(encoder: RowEncoder, given: list[Encoded]) -> list[list[int]]:
    return [row.tolist() for one in given if (row := encoder.add(one)) is not None]


def test_each_conversation_has_its_row_and_padding_is_told_from_pad_tokens() -> None:
    """A conversation may end with the pad token, trained on or not; a full row has no padding."""
    encoder = token_spec(seq_len=6).encoder("chat")
    rows = rows_of(encoder, [conversation(4, first=20, answer=2), conversation(8, first=30, answer=4)])
    assert [[id_ & IDS for id_ in row] for row in rows] == [[20, 21, 22, 23, PAD, PAD], [30, 31, 32, 33, 34, 35]]
    learned = [[not id_ & NOT_LEARNED for id_ in row] for row in rows]
    assert learned == [[False, False, True, True, False, False], [False, False, False, False, True, True]]
    assert encoder.counts == Counter(conversations=2, tokens=12, longest=8, learned=4, cut=1, cut_off=2)
    ends = Encoded([20, 21, PAD], [False, True, False])
    given = [ends, conversation(6, first=30, answer=2), Encoded([20, PAD], [False, True])]
    assert padding_of(np.array(rows_of(encoder, given), dtype=np.uint32)).tolist() == [3, 0, 4]
    encoder = token_spec(seq_len=6, packing="on").encoder("chat")
    packed = rows_of(encoder, [ends, given[2], conversation(6, first=30, answer=6)])
    packed.append(next(encoder.encode([])).tolist())
    assert sorted(padding_of(np.array(packed, dtype=np.uint32)).tolist()) == [0, 1]


def test_packed_rows_hold_each_conversation_whole() -> None:
    draw = random.Random(1)
    encoder = token_spec(seq_len=32, packing="on").encoder("chat")
    given = [conversation(draw.randrange(2, 33), first=100 * n, answer=1) for n in range(1, 401)]
    rows, most = [], 0
    for one in given:
        row = encoder.add(one)
        rows += [] if row is None else [row]
        most = max(most, len(encoder.open_rows))
    rows += encoder.encode([])
    assert most == 64
    found, padded = [], 0
    for row in rows:
        assert len(row) == 32
        begins = [n for n in range(32) if row[n] & BEGINS]
        assert begins[0] == 0
        for part in np.split(row, begins[1:]):
            if part[-1] & IDS == PAD:
                assert part.tolist() == [PAD | NOT_LEARNED | BEGINS, *[PAD | NOT_LEARNED] * (len(part) - 1)]
                padded += len(part)
            else:
                found.append(((part & IDS).tolist(), (part & NOT_LEARNED == 0).tolist()))
    assert sorted(found) == sorted((list(one.ids), list(one.counted)) for one in given)
    assert padded / (32 * len(rows)) < 0.1


def test_conversations_of_a_packed_row_have_their_own_positions_and_targets(tmp_path: Path) -> None:
    """The first token of one, although it is trained on, is no target of the one before."""
    encoder = token_spec(seq_len=12, packing="on").encoder("chat")
    assert rows_of(encoder, [conversation(5, first=20, answer=5), conversation(4, first=30, answer=4)]) == []
    file, rows = tmp_path / "t.bin", [*encoder.encode([]), [NOT_LEARNED]]
    write_tokens(file, rows, vocabulary=300, row_length=12, packed=True)
    batch = RowReader(TokenFile.open(file), seq_len=12, rows=range(1), vocabulary=300).rows_at([0])
    assert batch.inputs.tolist() == [[*range(20, 25), *range(30, 34), *[PAD] * 3]]
    assert batch.targets.tolist() == [[*range(21, 25), IGNORED, *range(31, 34), *[IGNORED] * 4]]
    assert batch.positions is not None
    assert batch.positions.tolist() == [[*range(5), *range(4), *range(3)]]


def test_a_file_of_rows_is_for_the_settings_that_it_was_made_with(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(lines({"messages": talk} for talk in (TALK[1:3], TALK[3:], TALK[1:3])))
    settings: list[dict[str, Any]] = [{}, {"packing": "on"}, {"seq_len": 60}, {"train_on": "all"}]
    settings.append({"tokenizer": chat_tokenizer(LINES)})
    made = [prepared(file, **{"seq_len": 80} | more) for more in settings]
    apart, packed = made[:2]
    assert len({tokens.path for tokens in made}) == len({tokens.sums for tokens in made}) == 5
    assert (len(apart), len(packed)) == (3 * 80 + 1, 80 + 1)
    assert (apart.packed, packed.packed) == (False, True)
    assert packed.summary.endswith("1 rows, 26% of them padding")
    assert prepared(file, seq_len=80).path == apart.path
    for tokens, on, other in ((apart, "off", "on"), (packed, "on", "off")):
        assert prepared(tokens.path, seq_len=80, packing=on).sums == tokens.sums
        with pytest.raises(UserError, match=rf"holds conversations, .*: use data\.packing={on}, or give"):
            prepared(tokens.path, seq_len=80, packing=other)
    with pytest.raises(UserError, match=r"rows of 80, and this run uses 40: use --seq-len 80"):
        prepared(apart.path, seq_len=40)


def test_forms_are_known_by_the_keys_of_the_first_line(tmp_path: Path) -> None:
    lines = {"text": {"text": "x", "messages": TALK}, "chat": {"messages": TALK}}
    lines["alpaca"] = {"instruction": "a", "output": "b"}
    files = {name: tmp_path / f"{name}.jsonl" for name in lines}
    for name, record in lines.items():
        files[name].write_text("\n" + json.dumps(record) + "\n")
        assert token_spec().form_of([files[name]]) == name
    assert token_spec(format="chat").form_of([files["text"]]) == "chat"
    assert token_spec(format="text").form_of([files["chat"]]) == "text"
    with pytest.raises(UserError, match="here, line 1: no field 'messages', which chat has; there are: text, other"):
        encoded({"text": "x", "other": 1})
    with pytest.raises(UserError, match=r"have different formats: chat in .*chat.jsonl, alpaca in .*alpaca.jsonl"):
        token_spec().form_of([files["chat"], files["alpaca"]])
    both = tmp_path / "both.jsonl"
    both.write_text(json.dumps(lines["chat"] | lines["alpaca"]))
    with pytest.raises(UserError, match=r"line 1: it could be read as chat or as alpaca: choose one with data.format"):
        token_spec().form_of([both])
    words = tmp_path / "words.txt"
    words.write_text("x")
    with pytest.raises(UserError, match=r"data.format=chat is for lines of JSON"):
        token_spec(format="chat").form_of([words])


def test_nothing_to_learn_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": TALK[:3]}) + "\n")
    with pytest.raises(UserError, match=r"to train on within its first 12: 1 are longer, and 0 have no answer"):
        prepared(file, seq_len=12)
    file.write_text((json.dumps({"messages": TALK[:2]}) + "\n") * 3)
    with pytest.raises(UserError, match=r"0 are longer, and 3 have no answer to train on .*, or data.train_on=all"):
        prepared(file, seq_len=80)
    assert prepared(file, seq_len=80, train_on="all").summary.startswith("3 conversations")
