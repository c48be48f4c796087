"""Tests of safetensors files written in parts by one writer or several: their tensors, and the sums of the whole."""

import os
import random
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offload_trainer.errors import TrainerError
from offload_trainer.storage.tensorfile import PlacedWriter, TensorEntry, file_of

ENTRIES = [
    TensorEntry("a", torch.float32, (300, 7)),
    TensorEntry("b", torch.bfloat16, (1001,)),
    TensorEntry("none", torch.float32, (0, 4)),
    TensorEntry("c", torch.uint8, (77,)),
]


def test_several_writers_make_the_file_of_one(tmp_path: Path, seed: int) -> None:
    """safetensors reads what one writer has written, and several make the same file in any order and division."""
    torch.manual_seed(1)
    tensors = {entry.name: torch.randint(0, 200, entry.shape).to(entry.dtype) for entry in ENTRIES}
    alone = PlacedWriter(tmp_path / "alone", ENTRIES, whole=True)
    for name, tensor in tensors.items():
        alone.put(name, 0, tensor.t().contiguous().t() if tensor.dim() == 2 else tensor)  # not contiguous
    expected = file_of(alone.close())
    data = (tmp_path / "alone").read_bytes()
    assert (expected.bytes, expected.crc32) == (len(data), zlib.crc32(data))
    loaded = load_file(tmp_path / "alone")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    header = PlacedWriter.make(tmp_path / "parts", ENTRIES)
    writers = [PlacedWriter(tmp_path / "parts", ENTRIES) for _ in range(3)]
    parts = [(e.name, start, min(61, e.numel - start)) for e in ENTRIES for start in range(0, e.numel, 61)]
    random.Random(seed).shuffle(parts)
    for number, (name, start, count) in enumerate(parts):
        writers[number % 3].put(name, start, tensors[name].view(-1)[start : start + count])
    assert file_of([header, *(piece for writer in writers for piece in writer.close())]) == expected
    assert (tmp_path / "parts").read_bytes() == data


def test_a_full_disk_is_reported_with_the_file(tmp_path: Path) -> None:
    os.symlink("/dev/full", tmp_path / "x")
    writer = PlacedWriter(tmp_path / "x", ENTRIES)
    with pytest.raises(TrainerError, match=r"x: No space left on device after 0 bytes; free space"):
        writer.put("c", 0, torch.zeros(77, dtype=torch.uint8))
    with pytest.raises(TrainerError, match=r"No space left on device after \d+ bytes"):
        PlacedWriter(Path("/dev/full"), ENTRIES, whole=True)
