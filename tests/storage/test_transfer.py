"""Tests of what is written to drives: transfers, pinned memory, parts of files, torn records, and no invalid values."""

import errno
import gc
import json
import os
import random
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from engine_bench import batches, engine, model_directory, train
from safetensors.torch import load_file, save_file
from small_architectures import ARCHITECTURES, reference
from synthetic_checkpoints import checkpoint_of

from offload_trainer.common.errors import TrainerError, UserError
from offload_trainer.config import ModelSection
from offload_trainer.model.loader import resolve_model
from offload_trainer.offloading.device import CudaDevice
from offload_trainer.offloading.pages.manifest import Record, read_record
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.plan.tiered.state_formats import is_signed
from offload_trainer.run.checkpoint import Checkpoints, RunRecord, TrainState, complete_checkpoints, read_manifest
from offload_trainer.run.export import export
from offload_trainer.storage import host_memory, transfer
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.tensorfile import Piece, PlacedWriter, TensorEntry, describe_invalid_values, file_of
from offload_trainer.storage.transfer import DriveFile, Future, Transfers


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Transfers]:
    monkeypatch.setattr(transfer, "_BLOCK", 8192)
    made = Transfers()
    yield made
    made.close()


def filled(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return host_buffer(size).copy_(torch.randint(256, (size,), dtype=torch.uint8, generator=generator))


def test_many_concurrent_transfers_are_complete(transfers: Transfers, drive: Path) -> None:
    """A new file has its blocks, and holds zeros."""
    file, blank = DriveFile(drive / "many", 40 * 20480), filled(8192, 1)
    transfers.read(file, 0, blank).wait()
    assert not blank.any()
    written = [filled(20480, seed) for seed in range(40)]
    for future in [transfers.write(file, number * 20480, data) for number, data in enumerate(written)]:
        future.wait()
    read = [host_buffer(20480) for _ in written]
    for future in [transfers.read(file, number * 20480, data) for number, data in enumerate(read)]:
        future.wait()
    assert all(map(torch.equal, read, written))
    assert (drive / "many").stat().st_blocks * 512 >= file.size
    file.close()


def assert_kept(file: DriveFile) -> None:
    data, back = filled(8192, 3), host_buffer(8192)
    file.write(data.numpy().data, 0)
    file.read(back.numpy().data, 0)
    assert torch.equal(back, data)
    file.close()


@pytest.mark.parametrize("way", ["preadv", "pwritev"])
def test_partial_transfers_continue_and_errors_are_reported(
    way: str, transfers: Transfers, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, data = DriveFile(drive / f"partial-{way}", 16384), filled(16384, 2)
    real = getattr(os, way)
    monkeypatch.setattr(os, way, lambda fd, views, offset: real(fd, [views[0][:4096]], offset))
    transfers.write(file, 0, data).wait()
    back = host_buffer(16384)
    transfers.read(file, 0, back).wait()
    assert torch.equal(back, data)

    monkeypatch.setattr(os, way, Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    future = (transfers.read if way == "preadv" else transfers.write)(file, 8192, data[:4096])
    with pytest.raises(TrainerError, match=r"4096 bytes at 8192 could not be \w+: Input/output error"):
        future.wait()
    file.close()


def test_a_full_disk_is_refused_at_the_start_with_the_numbers(tmp_path: Path) -> None:
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "none", tmp_path]).returncode:
        pytest.skip("cannot mount a small filesystem here")
    try:
        with pytest.raises(TrainerError, match=r"state: 10 MB cannot be set aside there: No space left"):
            DriveFile(tmp_path / "state", 10_000_000)
        assert_kept(DriveFile(tmp_path / "small", 8192))  # tmpfs works, with or without O_DIRECT
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_without_direct_io_the_same_bytes(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "O_DIRECT", -1, raising=False)  # flags that no filesystem accepts
    file = DriveFile(drive / "cached", 8192)
    assert not file.direct
    assert_kept(file)


def test_futures_complete_in_any_order() -> None:
    messages: list[object] = []
    future = Future(parts=2)
    future.then(messages.append)
    future.finish_part()
    assert messages == []
    error = TrainerError("broken")
    future.finish_part(error)
    future.then(messages.append)
    assert messages == [error, error]
    transfer.together([]).wait()
    with pytest.raises(TrainerError, match="broken"):
        future.wait()


class Runtime:
    """A recorder of the two cudart calls: the addresses that are pinned, and whether each was mapped when unpinned."""

    def __init__(self) -> None:
        self.code, self.pinned, self.freed = 0, set[int](), list[bool]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.pinned.add(address)
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.pinned.remove(address)
        spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
        self.freed.append(any(int(start, 16) <= address < int(end, 16) for start, end in spans))
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_memory_is_unpinned_with_its_last_view_before_it_is_unmapped(runtime: Runtime) -> None:
    """Memory that cannot be pinned is an error."""
    buffer = host_memory.host_buffer(1 << 20, pinned=True)
    view = buffer[4096:8192].view(torch.float32)
    del buffer
    gc.collect()
    assert len(runtime.pinned) == 1
    assert not runtime.freed
    del view
    gc.collect()
    assert (runtime.pinned, runtime.freed) == (set(), [True])
    runtime.code = 2
    with pytest.raises(TrainerError, match=r"CUDA cannot pin 8\.19 kB of host memory \(error 2\)"):
        host_memory.host_buffer(8192, pinned=True)


def test_a_closed_device_holds_no_pinned_memory(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine refers to it until it is collected."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda place: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "set_device", lambda place: None)
    device = CudaDevice(torch.device("cpu"), staging_bytes=8192, stagings=2)
    assert len(runtime.pinned) == 2
    device.close()
    gc.collect()
    assert not runtime.pinned


def test_each_rank_pins_its_own_mapping_of_shared_memory(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """If each pinned all outboxes of 8 ranks, an embedding of 5e8 weights would take 17 GB of pinned memory a rank."""
    node = Node()
    node.rank, node.world, node.local_ranks = 1, 3, range(3)
    memory = host_memory.host_buffer(1 << 20)
    monkeypatch.setattr(node, "memory", lambda size, pinned=False: memory[: 0 if pinned else size])
    found = node.memory_of_each(5000, pinned=True)
    assert {rank: part.numel() for rank, part in found.items()} == {0: 5000, 1: 5000, 2: 5000}
    assert runtime.pinned == {found[1].data_ptr()}
    pages = [{address // 4096 for address in (part.data_ptr(), part.data_ptr() + 4999)} for part in found.values()]
    assert not pages[1] & (pages[0] | pages[2])  # CUDA pins whole pages
    for rank, part in found.items():
        part.fill_(rank)
    assert [int(part.unique()) for part in found.values()] == [0, 1, 2]


# -- safetensors files that one writer or several write in parts -------------------------------------------------------

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


def test_a_file_that_cannot_be_written_or_has_gaps_is_an_error(tmp_path: Path) -> None:
    os.symlink("/dev/full", tmp_path / "x")
    writer = PlacedWriter(tmp_path / "x", ENTRIES)
    with pytest.raises(TrainerError, match=r"x: No space left on device after 0 bytes; free space"):
        writer.put("c", 0, torch.zeros(77, dtype=torch.uint8))
    with pytest.raises(TrainerError, match=r"No space left on device after \d+ bytes"):
        PlacedWriter(Path("/dev/full"), ENTRIES, whole=True)
    with pytest.raises(AssertionError, match="follows byte 8"):
        file_of([Piece(0, 8, 1), Piece(9, 3, 2)])
    writer = PlacedWriter(tmp_path / "gaps", ENTRIES, whole=True)
    writer.put("a", 0, torch.zeros(5))
    with pytest.raises(AssertionError, match=r"\d+ of \d+ bytes were written"):
        writer.close()


# -- records that are replaced atomically: if one is torn, the one before it is read -----------------------------------


def written(path: Path, *contents: bytes) -> Record:
    record = Record(path, most=5000)
    for content in contents:
        record.write(content)
    return record


def test_the_newest_record_is_read_and_the_next_follows_it(tmp_path: Path) -> None:
    path = tmp_path / "record"
    written(path).close()
    with pytest.raises(ValueError, match="neither of its two slots is whole"):
        read_record(path, most=5000)
    for count in range(1, 6):
        written(path, b"%d" % count * 700).close()
        assert read_record(path, most=5000) == b"%d" % count * 700
    assert path.stat().st_size == 2 * 8192
    written(path, b"short", b"", b"5000 bytes".ljust(5000)).close()
    assert read_record(path, most=5000) == b"5000 bytes".ljust(5000)
    for size in (1, 4096, 3 * 8192):
        path.write_bytes(b"x" * size)
        with pytest.raises(ValueError, match="bytes"):
            read_record(path, most=5000)


def test_a_record_that_is_torn_is_the_one_before(tmp_path: Path) -> None:
    path, old, new = tmp_path / "record", b"the step before", b"the step now"
    written(path, b"long ago", old).close()
    before = path.read_bytes()
    written(path, new).close()
    after = path.read_bytes()
    changed = [place for place in range(len(after)) if before[place] != after[place]]
    # a power cut may destroy a block that is being written, and no other: the slots share none
    assert 8192 <= changed[0] <= changed[-1] < 16384 == len(after)
    assert read_record(path, most=5000) == new
    for place in changed[1:]:  # bytes before `place` were written
        path.write_bytes(after[:place] + before[place:])
        assert read_record(path, most=5000) == old, place
    path.write_bytes(after)
    for place in range(8192, 8192 + 20 + len(new)):  # the slot of the third record
        path.write_bytes(after[:place] + bytes([after[place] ^ 0x55]) + after[place + 1 :])
        assert read_record(path, most=5000) == old, place
    path.write_bytes(after[8192:] + after[:8192])  # the slots exchanged
    with pytest.raises(ValueError, match=r"neither of its two slots is whole$"):
        read_record(path, most=5000)


# -- invalid values: none with NaN, infinity or a wrong sign is saved, exported or trained -----------------------------

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("field", ["master", "exp_avg_sq"])
def test_one_value_among_others_is_found_wherever_it_is(dtype: torch.dtype, field: str) -> None:
    bad = [NAN, -NAN, INF, -INF] + [-1e-4] * (field == "exp_avg_sq")
    for place in range(150):
        values = torch.full((150,), 0.5, dtype=dtype)
        assert describe_invalid_values(values, signed=is_signed(field)) is None
        values[place] = bad[place % len(bad)]
        told = describe_invalid_values(values, signed=is_signed(field))
        assert told is not None
        assert told.startswith("1 of 150")
    assert describe_invalid_values(torch.full((150,), -0.0, dtype=dtype), signed=is_signed(field)) is None
    assert describe_invalid_values(torch.empty(0, dtype=dtype), signed=is_signed(field)) is None
    negative = describe_invalid_values(torch.full((3,), -1.0, dtype=dtype), signed=is_signed(field))
    assert (negative is None) == (field == "master")


def save(checkpoints: Checkpoints, made: Any, step: int) -> None:
    checkpoints.save(made, TrainState(step=step, tokens=0, data_position=0))
    checkpoints.synchronize()


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("optim.moment_dtype=fp32", "master", NAN),
        ("optim.moment_dtype=fp32", "master", INF),
        ("optim.moment_dtype=fp32", "exp_avg_sq", -1e-3),
        ("optim.moment_dtype=bf16", "exp_avg", -INF),
        ("optim.moment_dtype=8bit", "exp_avg_scales", NAN),
        ("optim.moment_dtype=8bit", "exp_avg_sq_scales", -1.0),
        ("--dtype bf16 optim.master_dtype=bf16", "master", NAN),
        ("--dtype bf16 optim.master_dtype=bf16", "master", INF),
        ("model.freeze=[ln_f]", "fixed", NAN),
    ],
)
def test_no_checkpoint_with_nan_is_saved_or_resumed(words: str, field: str, value: float, tmp_path: Path) -> None:
    model = model_directory(tmp_path / "model", "gpt2", n_layer=1)
    (tmp_path / "run/model").mkdir(parents=True)
    record = RunRecord(identity={}, layout={}, run={}, model=tmp_path / "run/model")
    root = tmp_path / "run/checkpoints"
    weight = "transformer.ln_f.weight" if field == "fixed" else "transformer.h.0.mlp.c_fc.weight"
    with engine(model, "--engine", "tiered", *words.split()) as made:
        train(made, batches(2))
        with Checkpoints(root, record=record, keep=1, need_bytes=10, say=print) as checkpoints:
            save(checkpoints, made, 2)
            good = root / "step-00000002"
            made.load(good)
            state, store = made.offloaded.state, made.offloaded.store
            unit, place = state.places[weight]
            if field == "fixed":
                state.weights.put(unit.index, place.start, torch.tensor([value]))
            else:
                ((number, at, _),) = store.touched(unit.index, place.start, 1)
                store.fields(number, store.in_memory(number))[field][at.start // store.format.fields[field].per] = value
            with pytest.raises(TrainerError, match=rf"{weight}: of {field}, 1 of .*the older ones are untouched") as no:
                save(checkpoints, made, 3)
        assert not isinstance(no.value, UserError)
        assert [path.name for path in root.iterdir()] == [good.name]
        read_manifest(good)
        file = good / f"{field}.safetensors"
        held = load_file(file)
        held[weight].view(-1)[-1] = value
        save_file(held, file, metadata={"format": "pt"})
        with pytest.raises(UserError, match=rf"{field}\.safetensors: {weight}: 1 of .* no run can resume from it"):
            made.load(good)


def test_no_export_holds_a_nan(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "model", "gpt2", n_layer=1)
    with engine(model, "--engine", "plain", "--dtype", "fp32") as made:
        run = checkpoint_of(made, model, tmp_path / "run")
    checkpoint = complete_checkpoints(run / "checkpoints")[0]
    held = load_file(checkpoint / "master.safetensors")
    held["transformer.wte.weight"][7] = NAN
    held["transformer.ln_f.bias"][0] = -INF
    save_file(held, checkpoint / "master.safetensors", metadata={"format": "pt"})
    told = json.loads((checkpoint / "MANIFEST.json").read_text())
    data = (checkpoint / "master.safetensors").read_bytes()
    told["files"]["master.safetensors"] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    (checkpoint / "MANIFEST.json").write_text(json.dumps(told))
    before = set(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"2 weights cannot be used: .*wte\.weight \(72 of 15192") as refused:
        export(run, tmp_path / "out", dtype="fp16", check=False)
    assert "ln_f.bias (1 of 72 values are NaN or infinite)" in str(refused.value)
    assert "bf16" not in str(refused.value)
    assert set(tmp_path.iterdir()) == before


def test_no_training_begins_from_a_nan(tmp_path: Path) -> None:
    made = reference(ARCHITECTURES["llama, untied"])
    with torch.no_grad():
        made.lm_head.weight[3, 1] = NAN
    made.save_pretrained(tmp_path)
    source = resolve_model(ModelSection(name=str(tmp_path), attention="eager"), seed=0)
    with pytest.raises(UserError, match=r"lm_head\.weight: 1 of .* no training can begin"):
        dict(source.weights())
