"""The export command: write the weights of a source to a directory of safetensors shards or one GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offload_trainer.errors import UserError
from offload_trainer.export.directory import write_model
from offload_trainer.export.gguf import write_gguf
from offload_trainer.export.sources import finite_weights, opened
from offload_trainer.storage.atomic_io import write_text

GGUF_DTYPES = {"fp16": "f16", "fp32": "f32", "q8_0": "q8_0"}


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    source: str
    bytes: int
    compared: int  # tensors read back and found equal to the source
    notes: tuple[str, ...] = ()


def export(
    source: Path, destination: Path, *, dtype: str, shard_bytes: int = 5 * 10**9, check: bool, mixed: bool = False
) -> Exported:
    """Write a run's newest checkpoint, a checkpoint, or a dead run's page files to `destination`.

    Args:
        source: run directory, checkpoint, or directory of page files.
        destination: a new directory, or a file name that ends in .gguf.
        dtype: fp16, bf16 or fp32; for GGUF fp16, fp32 or q8_0.
        shard_bytes: largest size of a shard.
        check: read all headers and a sample of tensors back.
        mixed: accept page files of a run that died in the middle of an update.

    Raises:
        UserError: the source is incomplete, the destination exists, space is short, or values do not fit fp16.
        TrainerError: the disk fails.
    """
    if destination.suffix == ".gguf":
        return _export_gguf(source, destination, dtype=dtype, check=check, mixed=mixed)
    with opened(source, mixed=mixed) as found:
        written = write_model(found, destination, dtype=dtype, shard_bytes=shard_bytes, check=check)
        return Exported(found.description, written.bytes, written.compared)


def _export_gguf(source: Path, destination: Path, *, dtype: str, check: bool, mixed: bool) -> Exported:
    """Write the GGUF file and its card, DESTINATION.md."""
    card = destination.with_name(f"{destination.name}.md")
    if card.exists():
        raise UserError(f"{card}: already holds something, and the card of {destination.name} goes there; name another")
    with opened(source, mixed=mixed) as found:
        written = write_gguf(
            finite_weights(found),
            destination,
            shapes=found.shapes,
            model=found.model,
            dtype=GGUF_DTYPES[dtype],
            read=found.read if check else None,
        )
        notes = "".join(f"\n{note[0].upper()}{note[1:]}.\n" for note in written.notes)
        write_text(card, found.card(dtype).replace("library_name: transformers", "library_name: gguf") + notes)
        return Exported(found.description, written.bytes, written.compared, written.notes)
