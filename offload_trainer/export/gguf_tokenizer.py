"""Conversion of a tokenizer to GGUF metadata; a tokenizer is refused if llama.cpp would split text differently.

Names and splitting rules follow https://github.com/ggml-org/llama.cpp (src/llama-vocab.cpp). A tokenizer is either a
byte-level BPE (GPT-2's, Llama 3's, Qwen's) or a SentencePiece BPE (Llama 2's, Mistral's), of which a file holds scores.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_trainer.errors import UserError
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


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path, *, config: Config) -> list[str]:
    """Add the tokenizer in `directory` to the metadata, and return notes on what llama.cpp does differently.

    This reads the tokenizer's files, because transformers' AutoTokenizer replaces parts of a tokenizer that does not
    belong to the model's family.
    """
    import gguf

    file, settings = directory / "tokenizer.json", directory / "tokenizer_config.json"
    if not file.exists():
        raise UserError(f"{directory}: no tokenizer.json, so its tokenizer is none that llama.cpp is known to share")
    fix = "Put the tokenizer's own file there"
    content = read_back(file, dict[str, Any], links=True, fix=fix)
    named = read_back(settings, dict[str, Any], links=True, fix=fix) if settings.exists() else {}
    tokens = _tokens(content, rows=config["vocab_size"])
    model = content["model"]
    if model["type"] == "BPE" and model.get("byte_fallback"):
        notes = _add_pieces(writer, content, tokens)
    else:
        notes = []
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_splitting(content))
        writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    special = _special_tokens(named, tokens, config=config)
    starts, ends = _added_around(file, special)
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([gguf.TokenType[kind] for _, kind in tokens])
    special |= _other_ends(directory, special["eos"], config=config)
    for role, number in special.items():
        getattr(writer, f"add_{role}_token_id")(number)
    writer.add_add_bos_token(starts)
    writer.add_add_eos_token(ends)
    template = directory / "chat_template.jinja"
    chat = file_bytes(template, links=True).decode() if template.exists() else named.get("chat_template")
    if chat:
        writer.add_chat_template(chat)
    return notes


def _other_ends(directory: Path, end: int, *, config: Config) -> dict[str, int]:
    """Return the tokens other than end-of-text that end a generation, by llama.cpp's names for their roles.

    transformers reads them from generation_config.json, or from config.json without it. It allows any number, a GGUF
    file at most three in total.
    """
    path = directory / "generation_config.json"
    generation = read_back(path, dict[str, Any], links=True, fix="Correct it") if path.exists() else config
    given = generation.get("eos_token_id")
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


# -- SentencePiece ----------------------------------------------------------------------------------------------------
#
# llama.cpp (src/llama-vocab.cpp, `llm_tokenizer_spm_session`) starts with a text's characters. It repeatedly joins the
# two neighbours that make the token with the highest score, the leftmost of equals; what is then no token is written as
# bytes. A tokenizer.json has no scores but an ordered list of merges, and scores only define such an order. A token's
# score is therefore minus the position of its first merge. This requires that the merges are all pairs of tokens that
# make a token.
#
# The results differ where a token can be made of two overlapping pairs at the same time ("xx", "x", "xx"): transformers
# takes the pair whose merge comes first, llama.cpp and SentencePiece the leftmost.

_SPACE = "▁"  # U+2581, which represents a space in a token
_REPLACED = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREPENDED = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, _REPLACED]}
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
FIRST_ONLY = (
    "llama.cpp puts a space before a text that begins with one and before what follows a special token, as of a chat; "
    "this tokenizer does not"
)


def _add_pieces(writer: gguf.GGUFWriter, content: dict[str, Any], tokens: list[tuple[str, str]]) -> list[str]:
    """Add a SentencePiece BPE tokenizer: the leading space, scores and token types. Return notes as `add_tokenizer`."""
    space, note = _space_before(content)
    scores = _scores(content["model"], rows=len(tokens))
    for number, (text, kind) in enumerate(tokens):
        if kind == "USER_DEFINED" and _SPACE in text:
            raise UserError(
                f"the added token {text!r} holds SentencePiece's sign of a space, which stays one in llama.cpp"
            )
        if text == content["model"].get("unk_token"):
            tokens[number] = text, "UNKNOWN"
        elif kind == "NORMAL" and _BYTE.fullmatch(text):
            tokens[number] = text, "BYTE"
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_add_space_prefix(space)
    writer.add_token_scores(scores)
    return [note] if note else []


def _space_before(content: Mapping[str, Any]) -> tuple[bool, str | None]:
    """Return whether the tokenizer prepends a space to a text, and a note if llama.cpp does that differently.

    Raises UserError for a tokenizer.json that changes text in any other way.
    """
    normalizer, pre = content.get("normalizer"), content.get("pre_tokenizer")
    if pre is None and normalizer == _PREPENDED:
        return True, None
    if pre is None and normalizer == _REPLACED:
        return False, None
    older = {"add_prefix_space": True} if "add_prefix_space" in (pre or {}) else {}
    metaspace = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": None, "split": False, **older}
    if normalizer is None and pre and {**pre, "prepend_scheme": None} == metaspace:
        scheme = pre.get("prepend_scheme", "always")
        return scheme != "never", None if scheme == "never" else FIRST_ONLY
    raise UserError(
        f"the tokenizer is of SentencePiece's kind, and does what llama.cpp's does not: normalizer {normalizer}, "
        f"pre_tokenizer {pre}"
    )


def _scores(model: Mapping[str, Any], *, rows: int) -> list[float]:
    """Return the score of each token; it is 0 for tokens that no merge produces.

    Raises UserError if llama.cpp would join other pairs than this tokenizer, or in another order.
    """
    odd = [name for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout") if model.get(name)]
    if odd or model.get("ignore_merges"):
        raise UserError(f"llama.cpp knows no {', '.join(odd) or 'ignore_merges'} of a SentencePiece tokenizer")
    vocabulary: dict[str, int] = model["vocab"]  # added tokens are cut out of a text before any merge
    _refuse_gaps(vocabulary)
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    cuts = ((text[:cut], text[cut:]) for text in vocabulary for cut in range(1, len(text)))
    joined = {(left, right) for left, right in cuts if left in vocabulary and right in vocabulary}
    if set(pairs) != joined:
        one = sorted(set(pairs) ^ joined)[0]
        raise UserError(
            f"the tokenizer's merges are not those of its tokens, by which llama.cpp joins them: {one[0]!r} and "
            f"{one[1]!r} are joined in one of the two only ({len(set(pairs) ^ joined)} such pairs)"
        )
    found, last = [0.0] * rows, ""
    for place, (left, right) in enumerate(pairs):
        number = vocabulary[left + right]
        if found[number] and last != left + right:
            raise UserError(f"merges that make {left + right!r} do not follow each other, and llama.cpp has one score")
        found[number], last = found[number] or -float(place + 1), left + right
    return found


def _refuse_gaps(vocabulary: Mapping[str, int]) -> None:
    """Raise UserError if some character or byte of a text could not be encoded."""
    if len(held := {text for text in vocabulary if _BYTE.fullmatch(text)}) != 256:
        raise UserError(f"the tokenizer falls back to bytes, and has tokens for {len(held)} of 256")
    known = {letter for text in vocabulary for letter in text} | set(vocabulary)
    for text in vocabulary:
        for pair in ((text[:1], text[1:]), (text[:-1], text[-1:])):
            if known.issuperset(pair) and not vocabulary.keys() >= set(pair):
                raise UserError(f"llama.cpp joins {pair[0]!r} and {pair[1]!r}, of which one is no token, to {text!r}")
