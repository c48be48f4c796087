"""Conversion of SentencePiece BPE tokenizers (Llama 2's, Mistral's) to the token scores that llama.cpp needs.

llama.cpp (src/llama-vocab.cpp, `llm_tokenizer_spm_session`) starts with a text's characters. It repeatedly joins the
two neighbours that make the token with the highest score, the leftmost of equals; what is then no token is written as
bytes. A tokenizer.json has no scores but an ordered list of merges, and scores only define such an order. A token's
score is therefore minus the position of its first merge. This requires that the merges are all pairs of tokens that
make a token.

The results differ where a token can be made of two overlapping pairs at the same time ("xx", "x", "xx"): transformers
takes the pair whose merge comes first, llama.cpp and SentencePiece the leftmost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from offload_trainer.errors import UserError

_SPACE = "▁"  # U+2581, which represents a space in a token
_REPLACED = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREPENDED = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, _REPLACED]}
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
FIRST_ONLY = (
    "llama.cpp puts a space before a text that begins with one and before what follows a special token, as of a chat; "
    "this tokenizer does not"
)


def is_pieces(content: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json is a SentencePiece BPE, which writes unknown characters as bytes."""
    return content["model"]["type"] == "BPE" and bool(content["model"].get("byte_fallback"))


def space_before(content: Mapping[str, Any]) -> tuple[bool, str | None]:
    """Return whether the tokenizer prepends a space to a text, and a note if llama.cpp does that differently.

    Raises UserError for a tokenizer.json that changes text in any other way.
    """
    normalizer, pre = content.get("normalizer"), content.get("pre_tokenizer")
    if pre is None and normalizer == _PREPENDED:
        return True, None
    if pre is None and normalizer == _REPLACED:
        return False, None
    if normalizer is None and pre and {**pre, "prepend_scheme": None} == _metaspace(pre):
        scheme = pre.get("prepend_scheme", "always")
        return scheme != "never", None if scheme == "never" else FIRST_ONLY
    raise UserError(
        f"the tokenizer is of SentencePiece's kind, and does what llama.cpp's does not: normalizer {normalizer}, "
        f"pre_tokenizer {pre}"
    )


def _metaspace(pre: Mapping[str, Any]) -> dict[str, Any]:
    older = {"add_prefix_space": True} if "add_prefix_space" in pre else {}
    return {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": None, "split": False, **older}


def scores(content: Mapping[str, Any], *, rows: int) -> list[float]:
    """Return the score of each token; it is 0 for tokens that no merge produces.

    Raises UserError if llama.cpp would join other pairs than this tokenizer, or in another order.
    """
    model = content["model"]
    odd = [name for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout") if model.get(name)]
    if odd or model.get("ignore_merges"):
        raise UserError(f"llama.cpp knows no {', '.join(odd) or 'ignore_merges'} of a SentencePiece tokenizer")
    vocabulary: dict[str, int] = model["vocab"]  # added tokens are cut out of a text before any merge
    _refuse_gaps(vocabulary)
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    if set(pairs) != (joined := set(_pairs(vocabulary))):
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


def _pairs(vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield all pairs of tokens whose concatenation is a token."""
    for text in vocabulary:
        for cut in range(1, len(text)):
            if text[:cut] in vocabulary and text[cut:] in vocabulary:
                yield text[:cut], text[cut:]


def kind_of(text: str, kind: str, *, unknown: str | None) -> str:
    """Return llama.cpp's type of a token: in SentencePiece, bytes and the unknown token have separate types.

    Raises UserError for an added token that contains the space symbol.
    """
    if kind == "USER_DEFINED" and _SPACE in text:
        raise UserError(f"the added token {text!r} holds SentencePiece's sign of a space, which stays one in llama.cpp")
    if text == unknown:
        return "UNKNOWN"
    return "BYTE" if kind == "NORMAL" and _BYTE.fullmatch(text) else kind
