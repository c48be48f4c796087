"""The number of text bytes that each token stands for, used to report the loss in bits per byte."""

from __future__ import annotations

import json
import re

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

_ONE_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # SentencePiece's tokens for single bytes that no other token covers


class TokenBytes:
    """UTF-8 bytes per token id in running text; each id is examined when it first occurs.

    End-of-text counts 0 bytes. The tokens of a byte-level tokenizer show their bytes. For other tokenizers, a token
    counts the bytes that it adds to the decoded text before it, so a word's leading space counts with the word.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added = {id_: str(token) for id_, token in tokenizer.added_tokens_decoder.items()}
        self._alphabet = frozenset(ByteLevel.alphabet()) if _is_byte_level(tokenizer) else frozenset()
        self._before = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        self._known: dict[int, int | None] = {}

    def of(self, ids: torch.Tensor) -> int | None:
        """Return the bytes of all `ids` together.

        Returns None if the text of one is not known (an unknown word, an invalid id).
        """
        found, counts = ids.unique(return_counts=True)
        total = 0
        for id_, count in zip(found.tolist(), counts.tolist(), strict=True):
            if id_ not in self._known:
                self._known[id_] = self._count(id_)
            size = self._known[id_]
            if size is None:
                return None
            total += size * count
        return total

    def _count(self, id_: int) -> int | None:
        tokenizer = self._tokenizer
        if id_ == tokenizer.eos_token_id:
            return 0
        if id_ == tokenizer.unk_token_id:
            return None
        token = tokenizer.convert_ids_to_tokens(id_)
        if token is None:
            return None
        if not self._alphabet and _ONE_BYTE.fullmatch(token):
            return 1
        if id_ in self._added:
            return len(self._added[id_].encode())
        if self._alphabet:
            return sum(1 if letter in self._alphabet else len(letter.encode()) for letter in token)
        return self._decoded([*self._before, id_]) - self._decoded(self._before)

    def _decoded(self, ids: list[int]) -> int:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return len(text.encode())


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether each letter of a token stands for a byte (GPT-2's way), judged by the tokenizer's decoder."""
    if not tokenizer.is_fast:
        return hasattr(tokenizer, "byte_decoder")
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
    return any(step["type"] == "ByteLevel" for step in decoder.get("decoders", [decoder]) if "type" in step)
