"""How many rows make a micro-batch, where only the tokens of a step are wished. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

from offload_trainer.config import TrainSection
from offload_trainer.errors import UserError

_MOST_ROWS = 64  # in a micro-batch; above, a GPU's products grow no faster


def micro_batches(section: TrainSection, *, seq_len: int, world: int) -> Iterator[TrainSection]:
    """The ways to make `train.tokens_per_step`, the largest micro-batch first; `section` itself where it is open.

    Raises UserError where no whole number of rows makes that many tokens.
    """
    tokens = section.tokens_per_step
    if tokens == "auto":
        yield section
        return
    rows, rest = divmod(tokens, seq_len * world)
    if rest or not rows:
        raise UserError(
            f"train.tokens_per_step={tokens}: not a multiple of {world} rank(s) x {seq_len} tokens in a row; take "
            f"{max(1, round(tokens / (seq_len * world))) * seq_len * world}, or another --seq-len"
        )
    for micro in range(min(rows, _MOST_ROWS), 0, -1):
        if rows % micro == 0:
            yield section.model_copy(
                update={"micro_batch": micro, "accumulate": rows // micro, "tokens_per_step": "auto"}
            )
