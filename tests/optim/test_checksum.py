"""Tests of the checksum of state: zlib's polynomial gives the same value in every implementation."""

from __future__ import annotations

import zlib

import pytest
import torch

from offload_trainer.optim.kernel_api import TorchKernel
from offload_trainer.optim.native_adam import NativeKernel, sum_with, zlib_sum

SIZES = [*range(1, 400), 4095, 4096, 4097, 70_001, 1 << 20]


def random_bytes(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


def test_the_compiled_checksum_equals_zlibs() -> None:
    kernel = NativeKernel()
    computed = [kernel.page_sum(random_bytes(size)) for size in SIZES]
    if set(computed) == {-1}:
        assert sum_with(kernel) is zlib_sum
        pytest.skip("this CPU has no carry-less multiplication")
    assert sum_with(kernel) == kernel.page_sum
    assert computed == [zlib_sum(random_bytes(size)) for size in SIZES]
    unaligned = random_bytes(5000)[3:4003]
    assert kernel.page_sum(unaligned) == zlib_sum(unaligned)


def test_the_checksum_is_a_crc_32_with_0_for_zeros() -> None:
    """Without zlib's inversions a CRC is linear: it differs from zlib's by the CRC of as many zeros."""
    for size in (1, 77, 4096):
        data = random_bytes(size)
        assert zlib_sum(data) == zlib.crc32(data.numpy().tobytes()) ^ zlib.crc32(bytes(size))
        assert zlib_sum(torch.zeros(size, dtype=torch.uint8)) == 0


def test_without_the_native_kernel_zlib_is_used() -> None:
    assert sum_with(TorchKernel()) is zlib_sum
