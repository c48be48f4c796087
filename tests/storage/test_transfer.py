"""Tests of transfers to and from drives, and of pinned memory: all bytes arrive, or a message says what happened."""

import errno
import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from offload_trainer.errors import TrainerError
from offload_trainer.offloading.device import CudaDevice
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.storage import host_memory, transfer
from offload_trainer.storage.host_memory import host_buffer
from offload_trainer.storage.transfer import DriveFile, Future, Transfers


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Transfers]:
    monkeypatch.setattr(transfer, "_BLOCK", 8192)
    made = Transfers()
    yield made
    made.close()


def filled(size: int, seed: int) -> torch.Tensor:
    buffer = host_buffer(size)
    generator = torch.Generator().manual_seed(seed)
    return buffer.copy_(torch.randint(256, (size,), dtype=torch.uint8, generator=generator))


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
    """Assert that a file returns what is written to it, and close it."""
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

    def __init__(self, code: int = 0) -> None:
        self.code, self.pinned, self.freed = code, set[int](), list[bool]()

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
    buffer = host_memory.host_buffer(1 << 20, pinned=True)
    view = buffer[4096:8192].view(torch.float32)
    del buffer
    gc.collect()
    assert len(runtime.pinned) == 1
    assert not runtime.freed
    del view
    gc.collect()
    assert not runtime.pinned
    assert runtime.freed == [True]


def test_a_closed_device_holds_none(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed device holds no pinned memory, although an engine refers to it until it is collected."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda place: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "set_device", lambda place: None)
    device = CudaDevice(torch.device("cpu"), staging_bytes=8192, stagings=2)
    assert len(runtime.pinned) == 2
    device.close()
    gc.collect()
    assert not runtime.pinned


def test_each_rank_pins_its_own_mapping_of_shared_memory(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of a node pins only its own part of a buffer that all of them read.

    If each pinned all outboxes of eight ranks, an embedding of 5e8 weights would take 17 GB of pinned memory a rank.
    """
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


def test_memory_that_cannot_be_pinned_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(code=2))
    with pytest.raises(TrainerError, match=r"CUDA cannot pin 8\.19 kB of host memory \(error 2\)"):
        host_memory.host_buffer(8192, pinned=True)
