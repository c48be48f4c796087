"""Sample text from a model that only offers `next_logits`: simple and slow, to see how training goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def sample_text(
    next_logits: Callable[[torch.Tensor], torch.Tensor],
    tokenizer: Any,
    *,
    prompt: str,
    tokens: int,
    context: int,
    seed: int,
    temperature: float = 0.8,
    top: int = 50,
) -> str:
    """Return `prompt` and up to `tokens` sampled tokens; the same seed gives the same text.

    `next_logits` maps int64 [1, length] to fp32 [1, vocabulary]. Tokens are drawn from the `top` most likely ones, and
    only from ids that the tokenizer knows.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    if ids.numel() == 0:
        ids = torch.zeros((1, 1), dtype=torch.int64)
    for _ in range(tokens):
        logits = next_logits(ids[:, -context:])[0, : len(tokenizer)] / temperature
        values, places = logits.topk(min(top, logits.numel()))
        drawn = places[torch.multinomial(values.softmax(-1), 1, generator=generator)]
        if int(drawn) == tokenizer.eos_token_id:
            break
        ids = torch.cat([ids, drawn[None]], dim=1)
    return tokenizer.decode(ids[0])
