"""The export command: write the weights of a source to a directory of safetensors shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offload_trainer.export.directory import write_model
from offload_trainer.export.sources import opened


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    source: str
    bytes: int
    compared: int  # tensors read back and found equal to the source


def export(
    source: Path, destination: Path, *, dtype: str, shard_bytes: int = 5 * 10**9, check: bool, mixed: bool = False
) -> Exported:
    """Write a run's newest checkpoint, a checkpoint, or a dead run's page files to `destination`.

    Args:
        source: run directory, checkpoint, or directory of page files.
        destination: a new directory.
        dtype: fp16, bf16 or fp32.
        shard_bytes: largest size of a shard.
        check: read all headers and a sample of tensors back.
        mixed: accept page files of a run that died in the middle of an update.

    Raises:
        UserError: the source is incomplete, the destination exists, space is short, or values do not fit fp16.
        TrainerError: the disk fails.
    """
    with opened(source, mixed=mixed) as found:
        written = write_model(found, destination, dtype=dtype, shard_bytes=shard_bytes, check=check)
        return Exported(found.description, written.bytes, written.compared)
