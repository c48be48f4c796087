"""Conversion of a tokenizer to GGUF metadata; a tokenizer is refused if llama.cpp would split text differently.

Names and splitting rules follow https://github.com/ggml-org/llama.cpp (src/llama-vocab.cpp).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_trainer.errors import UserError
from offload_trainer.export.gguf_pieces import is_pieces, kind_of, scores, space_before
from offload_trainer.safe_files import file_bytes, read_back

if TYPE_CHECKING:  # gguf is an extra, so functions import it when they need it
    import gguf

Config = dict[str, Any]
ELSEWHERE = "export a directory instead and try llama.cpp's own convert_hf_to_gguf.py on it"

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBER| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _words(number: str) -> dict[str, Any]:
    regex = _WORDS.replace("NUMBER", number)
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


@dataclass(frozen=True)
class Splitting:
    """The rules by which one of llama.cpp's pre-tokenizers splits text.

    llama.cpp has no normalizers: every GGUF file of a Qwen model omits its NFC normalization.
    """

    steps: list[dict[str, Any]]
    whole_words: bool = False  # words of the vocabulary are used before any merge
    normalizers: tuple[object, ...] = (None,)


SPLITTINGS = {
    "gpt-2": Splitting([_BYTES | {"use_regex": True}]),
    "llama-bpe": Splitting([_words(r"\p{N}{1,3}"), _BYTES], whole_words=True),
    "qwen2": Splitting([_words(r"\p{N}"), _BYTES], normalizers=(None, {"type": "NFC"})),
}


def add_tokenizer(writer: gguf.GGUFWriter, model: Path, *, config: Config) -> list[str]:
    """Add the tokenizer of `model` to the metadata, and return notes on what llama.cpp does differently.

    This reads the tokenizer's files, because transformers' AutoTokenizer replaces parts of a tokenizer that does not
    belong to the model's family.
    """
    import gguf

    file, settings = model / "tokenizer.json", model / "tokenizer_config.json"
    if not file.exists():
        raise UserError(f"{model}: no tokenizer.json, so its tokenizer is none that llama.cpp is known to share")
    fix = "Put the tokenizer's own file there"
    content = read_back(file, dict[str, Any], links=True, fix=fix)
    named = read_back(settings, dict[str, Any], links=True, fix=fix) if settings.exists() else {}
    tokens = _tokens(content, rows=config["vocab_size"])
    notes = (_add_pieces if is_pieces(content) else _add_bytes)(writer, content, tokens)
    special = _special_tokens(named, tokens, config=config)
    starts, ends = _added_around(file, special)
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([gguf.TokenType[kind] for _, kind in tokens])
    special |= _other_ends(model, special["eos"], config=config)
    for role, number in special.items():
        getattr(writer, f"add_{role}_token_id")(number)
    writer.add_add_bos_token(starts)
    writer.add_add_eos_token(ends)
    template = model / "chat_template.jinja"
    chat = file_bytes(template, links=True).decode() if template.exists() else named.get("chat_template")
    if chat:
        writer.add_chat_template(chat)
    return notes


def _add_bytes(writer: gguf.GGUFWriter, content: dict[str, Any], tokens: list[tuple[str, str]]) -> list[str]:
    """Add a byte-level BPE tokenizer: its pre-tokenizer and merges."""
    splitting = _splitting(content)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]])
    return []


def _add_pieces(writer: gguf.GGUFWriter, content: dict[str, Any], tokens: list[tuple[str, str]]) -> list[str]:
    """Add a SentencePiece BPE tokenizer: the leading space, scores and token types."""
    space, note = space_before(content)
    held = scores(content, rows=len(tokens))
    unknown = content["model"].get("unk_token")
    tokens[:] = [(text, kind_of(text, kind, unknown=unknown)) for text, kind in tokens]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_add_space_prefix(space)
    writer.add_token_scores(held)
    return [note] if note else []


def _other_ends(model: Path, end: int, *, config: Config) -> dict[str, int]:
    """Return the tokens other than end-of-text that end a generation, by llama.cpp's names for their roles.

    transformers reads them from generation_config.json, or from config.json without it. It allows any number, a GGUF
    file at most three in total.
    """
    path = model / "generation_config.json"
    told = read_back(path, dict[str, Any], links=True, fix="Correct it") if path.exists() else config
    given = told.get("eos_token_id")
    numbers = [number for number in (given if isinstance(given, list) else [given]) if isinstance(number, int)]
    # The model cannot produce tokens that its vocabulary has no row for.
    others = [number for number in dict.fromkeys(numbers) if number != end and 0 <= number < config["vocab_size"]]
    roles = ("eom", "eot")
    if len(others) > len(roles):
        raise UserError(
            f"{path}: eos_token_id is {numbers}, and a GGUF file names at most three tokens that end a text; "
            f"{ELSEWHERE}"
        )
    return dict(zip(roles, others, strict=False))


def _splitting(content: dict[str, Any]) -> str:
    """Return llama.cpp's name for the pre-tokenizer of a tokenizer.json. Raises UserError if it has no equivalent."""
    model, pre = content["model"], content.get("pre_tokenizer") or {}
    plain = {
        "type": "BPE",
        "byte_fallback": False,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
    }
    odd = [f"model.{key} is {model.get(key)!r}" for key, value in plain.items() if (model.get(key) or value) != value]
    steps = [
        {key: value for key, value in step.items() if key != "trim_offsets"}  # ids do not depend on it
        for step in pre.get("pretokenizers", [pre])
    ]
    for name, known in SPLITTINGS.items():
        ours = (bool(model.get("ignore_merges")), steps) == (known.whole_words, known.steps)
        if not odd and ours and content.get("normalizer") in known.normalizers:
            return name
    shown = {
        "normalizer": content.get("normalizer"),
        "pre_tokenizer": steps,
        "ignore_merges": model.get("ignore_merges"),
    }
    raise UserError(
        "the tokenizer is none whose splitting of text llama.cpp is known to share "
        f"(byte-level BPE as {', '.join(SPLITTINGS)}, or SentencePiece's): "
        f"{'; '.join(odd) or json.dumps(shown)}; {ELSEWHERE}"
    )


def _added_around(file: Path, special: Mapping[str, int]) -> tuple[bool, bool]:
    """Return whether the tokenizer adds its begin-of-text before a text, and whether its end-of-text after it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    plain, full = (tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True))
    for starts, ends in itertools.product((False, True), repeat=2):
        if full == [special.get("bos")] * starts + plain + [special["eos"]] * ends:
            return starts, ends
    raise UserError(
        f"the tokenizer makes {full} of a text that is {plain}; llama.cpp adds a bos_token and an eos_token only"
    )


def _tokens(content: dict[str, Any], *, rows: int) -> list[tuple[str, str]]:
    """Return (text, type) of every row of the embedding.

    Rows without a token get the names that llama.cpp's converter uses.
    """
    tokens = {number: (text, "NORMAL") for text, number in content["model"]["vocab"].items()}
    for added in content.get("added_tokens") or []:
        text = added["content"]
        if added["single_word"] or added["lstrip"] or added["rstrip"]:
            raise UserError(f"the token {text!r} takes in what is around it, which llama.cpp's do not; {ELSEWHERE}")
        control = added["special"] or (text.startswith("<|") and text.endswith("|>"))
        tokens[added["id"]] = (text, "CONTROL" if control else "USER_DEFINED")
    if max(tokens) >= rows:
        raise UserError(f"the tokenizer has ids up to {max(tokens)} and the model {rows} rows; use the model's own")
    return [tokens.get(number, (f"[PAD{number}]", "UNUSED")) for number in range(rows)]


def _special_tokens(named: dict[str, Any], tokens: list[tuple[str, str]], *, config: Config) -> dict[str, int]:
    """Return special token ids by role, as named by tokenizer_config.json or else config.json.

    Raises UserError if no token ends a text.
    """
    ids = {text: number for number, (text, _) in enumerate(tokens)}
    special = {}
    for role in ("bos", "eos", "unk", "pad"):
        name, numbers = named.get(f"{role}_token"), config.get(f"{role}_token_id")
        text = name["content"] if isinstance(name, dict) else name or ""
        number = ids.get(text, numbers[0] if isinstance(numbers, list) else numbers)
        if number is not None and 0 <= number < len(tokens):
            special[role] = number
    if "eos" not in special:  # llama.cpp would otherwise end texts at id 11
        raise UserError("neither the tokenizer nor config.json names an end of text; give the tokenizer an eos_token")
    return special
