"""Tests of pinned host memory: it is unregistered before it is unmapped, when its last user is gone."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from offload_trainer.errors import TrainerError
from offload_trainer.offloading.device import CudaDevice
from offload_trainer.offloading.ranks.node_comm import Node
from offload_trainer.storage import host_memory


def is_mapped(address: int) -> bool:
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


class Runtime:
    """A recorder of the two cudart calls."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.pinned, self.freed = code, set[int](), list[tuple[int, bool]]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.pinned.add(address)
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.pinned.remove(address)
        self.freed.append((address, is_mapped(address)))
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
    assert [mapped for _, mapped in runtime.freed] == [True]


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
    node.rank, node.world, node.nodes = 1, 3, (range(3),)
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
