"""One line of metrics.jsonl, one line of evaluations.jsonl, and the arithmetic of their numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from pydantic import with_config

from offload_trainer.safe_files import EXACT, Count, Flag, Number, Steps, parsed


@with_config(EXACT)
@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. Its fields are the keys of a line of metrics.jsonl: a contract with its readers."""

    step: Steps  # steps done, this one included
    tokens: Count  # inputs read so far in the run by all ranks, without the padding of rows of conversations
    loss: Number | None  # mean over the step's tokens, in nats
    grad_norm: Number | None  # global, before clipping; None when the step overflowed
    lr: Number
    loss_scale: Number  # 1.0 when unused
    seconds: Number  # the whole optimizer step
    tokens_per_second: Number
    mfu: Number | None  # None where the device's peak is not known
    phases: dict[str, Number]  # seconds; "wait": for an update behind the forward, apart from what waited
    # Of this step, counted by the kernel, None where it does not count. Of an update behind the forward what falls into
    # the next step, or before it, is counted there.
    nvme_read_bytes: Count | None
    nvme_written_bytes: Count | None
    host_rss_bytes: Count  # peak so far
    device_peak_bytes: Count  # peak so far
    skipped: Flag  # no update was made
    memory: dict[str, Count] = field(default_factory=dict)  # bytes now, by tier: "ram", "gpu", "drives" (page files)
    allocation_retries: Count = 0  # so far: how often the device had no memory left but what torch's cache held
    hidden: Number = 0.0  # seconds that an update behind the forward went on while nobody waited for it; 0: not told

    def to_json(self) -> str:
        """One line without its end. JSON has no NaN and no infinity: they become null."""
        optional = ("memory", "allocation_retries", "hidden")
        return _to_json(self, leave_out=[name for name in optional if not getattr(self, name)])

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The record that `to_json` wrote. Raises ValueError on anything else, such as a torn line."""
        return parsed(line, cls)


@with_config(EXACT)
@dataclass(frozen=True)
class EvalRecord:
    """One validation. Its fields are the keys of a line of evaluations.jsonl."""

    step: Steps  # steps done before it
    validation_loss: Number | None  # mean over the validation tokens, in nats
    perplexity: Number | None
    bits_per_byte: Number | None  # None where the bytes behind the tokens are not known

    def to_json(self) -> str:
        """One line without its end; NaN and infinity become null."""
        return _to_json(self)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The record that `to_json` wrote. Raises ValueError on anything else."""
        return parsed(line, cls)


def perplexity(loss: float) -> float:
    """``e ** loss`` for a mean loss in nats a token; infinite where that is beyond a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def bits_per_byte(loss: float, *, tokens: int, text_bytes: int | None) -> float | None:
    """Bits to code one byte of the text: comparable between tokenizers, which perplexity is not.

    `loss` is the mean in nats over `tokens` predicted tokens that stand for `text_bytes` bytes of UTF-8.
    None where the bytes are not known, or none.
    """
    return loss * tokens / math.log(2) / text_bytes if text_bytes else None


def tokens_per_second(tokens: int, *, seconds: float) -> float:
    """Return the speed of one step: `tokens` of all ranks, padding not counted, in `seconds` of wall clock."""
    return tokens / seconds


def mfu(flops: float, *, seconds: float, peak_flops: float | None) -> float | None:
    """Model FLOPs utilisation (PaLM, arXiv:2204.02311, appendix B): `flops` done over what was possible.

    `flops` counts forward and backward without recomputation; `peak_flops` is a second's, of all devices.
    None where the peak is not known.
    """
    return flops / seconds / peak_flops if peak_flops else None


def _to_json(record: StepRecord | EvalRecord, *, leave_out: Sequence[str] = ()) -> str:
    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(inner) for key, inner in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    told = {key: finite(value) for key, value in asdict(record).items() if key not in leave_out}
    return json.dumps(told, allow_nan=False)
