"""Sampling options of `sample` and `chat`: their defaults, and parsing from the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass

from offload_trainer.errors import UserError
from offload_trainer.units import shown


@dataclass(frozen=True)
class SamplingOptions:
    """Options with which `sample` and `chat` generate text."""

    tokens: int = 100  # largest number of generated tokens
    temperature: float = 0.8  # 0: greedy decoding
    seed: int = 0


def draw_of(words: list[str], command: str, **given: str | None) -> SamplingOptions:
    """Parse the options from their texts, None for those that were not given.

    `words`: the remaining words, which must be one SOURCE. Raises UserError for mistakes.
    """
    if len(words) != 1 or words[0].startswith("-"):
        told = ", ".join(map(shown, words)) or "nothing"
        raise UserError(f"{command} needs one SOURCE; got {told}. `offload-train {command} --help` says more")
    wish = SamplingOptions()
    tokens = _number(given, "tokens", wish.tokens, least=1)
    seed = _number(given, "seed", wish.seed, least=0)
    return SamplingOptions(tokens, _temperature(given.get("temperature"), wish.temperature), seed)


def _number(given: dict[str, str | None], name: str, otherwise: int, *, least: int) -> int:
    text = given.get(name)
    if text is None:
        return otherwise
    if not text.isdecimal() or int(text) < least:
        raise UserError(f"--{name} {shown(text)}: it should be a whole number, at least {least}")
    return int(text)


def _temperature(text: str | None, otherwise: float) -> float:
    try:
        found = otherwise if text is None else float(text)
    except ValueError:
        found = -1.0
    if not (found >= 0 and math.isfinite(found)):
        raise UserError(f"--temperature {shown(str(text))}: it should be a number, at least 0")
    return found
