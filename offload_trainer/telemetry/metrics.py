"""Records of training steps (metrics.jsonl) and evaluations (evaluations.jsonl), and how to read them."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from statistics import median
from typing import Any

from offload_trainer.common.errors import UserError
from offload_trainer.common.safe_files import Count, Flag, Kind, Number, Steps, adapter, exact_record, open_file, parsed

_PRIME = 7919  # shares no factor with the length of a stretch, so each place in a stretch is taken equally often


def _to_json(record: Any) -> str:
    """Return a record as one line, without fields that have their default. NaN and infinity become null."""
    return adapter(type(record)).dump_json(record, exclude_defaults=True).decode()  # type: ignore[arg-type]


@exact_record
class StepRecord:
    """One optimizer step. Its fields are the keys of a line of metrics.jsonl, on which readers of the file rely."""

    step: Steps  # steps done, including this one
    tokens: Count  # inputs read so far in the run by all ranks, without the padding of rows of conversations
    loss: Number | None  # mean over the step's tokens, in nats
    grad_norm: Number | None  # global, before clipping; None when the step overflowed
    lr: Number
    loss_scale: Number  # 1.0 when unused
    seconds: Number  # the whole optimizer step
    tokens_per_second: Number
    # model FLOPs utilisation (PaLM, arXiv:2204.02311), without recomputation, over all devices' peak; None if unknown
    mfu: Number | None
    # seconds; "wait" is time blocked on an overlapped update, excluded from the phase that waited
    phases: dict[str, Number]
    # bytes that the kernel counted in this step, also of an earlier step's overlapped update; None if it does not count
    nvme_read_bytes: Count | None
    nvme_written_bytes: Count | None
    host_rss_bytes: Count  # peak so far
    device_peak_bytes: Count  # peak so far
    skipped: Flag  # no update was made
    memory: dict[str, Count] = field(default_factory=dict)  # current bytes by tier: "ram", "gpu", "drives" (page files)
    allocation_retries: Count = 0  # running total: torch freed its cached blocks because the device was out of memory
    hidden: Number = 0.0  # seconds of an overlapped update that no phase waited for; 0 if unknown

    to_json = _to_json


@exact_record
class EvalRecord:
    """One validation. Its fields are the keys of a line of evaluations.jsonl."""

    step: Steps  # steps done before the validation
    validation_loss: Number | None  # mean over the validation tokens, in nats
    perplexity: Number | None

    to_json = _to_json


def read_metrics(path: Path, *, most: int | None = None) -> list[StepRecord]:
    """Return the records of a metrics.jsonl without torn lines, or no records if the file does not exist.

    `most`: return about this many and the last one, without parsing the others (75 us each). One of each stretch of
    equal length is taken, at changing places: steps may be long and short in turn.
    """
    return _read(path, StepRecord, most=most)


def read_evaluations(path: Path) -> list[EvalRecord]:
    return _read(path, EvalRecord)


def _read(path: Path, kind: type[Kind], *, most: int | None = None) -> list[Kind]:
    stride, lines, line = 1, list[bytes](), b""
    try:
        file = open(open_file(path, links=True), "rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    with file:
        for number, line in enumerate(file):
            if number == 0 and most:
                stride = -(-path.stat().st_size // (len(line) * most))
            if number % stride == number // stride * _PRIME % stride:
                lines.append(line)
    records: list[Kind] = []
    for kept in lines if lines[-1:] == [line] else [*lines, line]:
        with suppress(ValueError):  # torn by a kill
            records.append(parsed(kept, kind))
    return records


def steady(rows: Sequence[StepRecord]) -> list[StepRecord]:
    """Leave out the first two of more than four steps, during which allocators and caches fill."""
    return list(rows[2:] if len(rows) > 4 else rows)


def median_speed(rows: Sequence[StepRecord]) -> float:
    """Return tokens per second of a step of median duration, so that it agrees with the median of seconds."""
    return median(row.tokens_per_second * row.seconds for row in rows) / median(row.seconds for row in rows)


def median_phases(rows: Sequence[StepRecord]) -> dict[str, float]:
    """Return the median seconds of each phase over the steady steps. A phase missing from a step took 0 s in it."""
    counted = steady(rows)
    names = dict.fromkeys(name for row in counted for name in row.phases)
    return {name: median(row.phases.get(name, 0.0) for row in counted) for name in names}
