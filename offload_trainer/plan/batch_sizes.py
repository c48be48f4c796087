"""Split `train.tokens_per_step` into micro-batch size and gradient accumulation steps. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

from offload_trainer.config import TrainSection
from offload_trainer.errors import UserError

_MOST_ROWS = 64  # rows per micro-batch; larger micro-batches do not make matrix products faster


def micro_batches(section: TrainSection, *, seq_len: int, world: int) -> Iterator[TrainSection]:
    """Yield each split of `train.tokens_per_step`, largest micro-batch first; if it is `auto`, yield `section` itself.

    Raises:
        UserError: the tokens are not a multiple of ranks x row length.
    """
    tokens = section.tokens_per_step
    if tokens == "auto":
        yield section
        return
    rows, rest = divmod(tokens, seq_len * world)
    if rest or not rows:
        raise UserError(
            f"train.tokens_per_step={tokens}: not a multiple of {world} rank(s) x {seq_len} tokens in a row; use "
            f"{max(1, round(tokens / (seq_len * world))) * seq_len * world}, or another --seq-len"
        )
    for micro in range(min(rows, _MOST_ROWS), 0, -1):
        if rows % micro == 0:
            yield section.model_copy(
                update={
                    "micro_batch_size": micro,
                    "gradient_accumulation_steps": rows // micro,
                    "tokens_per_step": "auto",
                }
            )
