"""Tests of masters in 16 bits and moments in 16 and 8: the values of codes, and unbiased rounding."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offload_trainer.optim import moments
from offload_trainer.optim.moments import Bits, Noise, StoredField, random_bits
from offload_trainer.optim.state_files import StoredKind
from offload_trainer.plan.tiered.state_formats import MOMENTS


def values(n: int, *, signed: bool) -> torch.Tensor:
    """Return fp32[n] with blocks of normal values, of many magnitudes, of zeros, and with infinities and NaN."""
    random = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=random)
    x[n // 2 :] *= torch.empty(n - n // 2).uniform_(-30, 3, generator=random).exp()
    x[512:768] = 0.0
    x[1024:1030] = float("inf")
    x[1300:1301] = float("nan")
    x[1536:1792] *= 1e-38  # subnormal
    return x if signed else x.abs()


def encoded(
    x: torch.Tensor, *, signed: bool, noise: Bits | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, absmax = torch.empty(x.numel(), dtype=torch.uint8), torch.empty(-(-x.numel() // 256))
    stored = StoredField(signed, codes, absmax)
    stored.write(x, noise=noise)
    return codes, absmax, stored.read()


def shares(*, signed: bool) -> torch.Tensor:
    """Return the shares of a block's greatest magnitude that codes stand for, ascending (fp64)."""
    roots, greatest = (range(-127, 128), 127) if signed else ([0, *range(2, 257)], 256)
    return (torch.tensor(roots).double() / greatest) ** 3


@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_code_is_found(signed: bool) -> None:
    x, table = values(20_013, signed=signed), shares(signed=signed)
    x[1024:1536] = 0.5  # blocks that are not finite have a test of their own
    codes, scales, back = encoded(x, signed=signed)
    greatest = torch.nn.functional.pad(x.abs(), (0, -len(x) % 256)).view(-1, 256).amax(1)
    assert torch.equal(scales, greatest)
    each = greatest.double().repeat_interleave(256)[: len(x)]
    numbers = codes.view(torch.int8).long() + 127 if signed else codes.long()
    assert torch.allclose(back.double(), table[numbers] * each, rtol=3e-7, atol=1e-44)
    off = (x[:, None] - table * each[:, None]).abs()
    nearest = off.min(dim=1).values if signed else off[:, 1:].min(dim=1).values.where(x > 0, 0.0)
    assert (off.gather(1, numbers[:, None])[:, 0] <= nearest + 1e-6 * x.abs() + 1e-45).all()


@pytest.mark.parametrize("noise", [None, Noise(1, 2).bits("exp_avg_sq", 3, 2**32 - 1000)])
def test_blocks_that_are_zero_or_not_finite(noise: Bits | None) -> None:
    """A block that is not finite decodes to NaN, and one of zeros to zeros."""
    x = values(70_001, signed=noise is None)
    codes, _, back = encoded(x, signed=noise is None, noise=noise)
    assert back[1024:1536].isnan().all()
    assert (back[512:768] == 0).all()
    assert noise is None or torch.equal(codes == 0, ~x.isfinite() | (x == 0) | back.isnan())


@pytest.mark.parametrize("signed", [True, False])
def test_codes_change_exactly_at_bounds_and_codes(signed: bool) -> None:
    """They change at bounds if they are rounded to nearest, and at codes stochastically."""
    table = shares(signed=signed)
    ends = ((table[1:] + table[:-1]) / 2 if signed else table[1:]).float().view(torch.int32)
    near = (ends[:, None] + torch.arange(-2, 3, dtype=torch.int32)).view(torch.float32).sort(dim=1).values.view(-1)
    x = torch.ones(near.numel(), 256)  # the block's largest value keeps its scale unchanged
    x[:, 7] = near.clamp(max=1.0)
    for noise in [None] if signed else [Noise(1, step).bits("exp_avg_sq", 0, 0) for step in range(5)]:
        codes = encoded(x.view(-1), signed=signed, noise=noise)[0].view(-1, 256)[:, 7].view(-1, 5)
        for column, first in ((0, -127), (4, -126)) if signed else ((2, 1),):
            assert torch.equal(codes[:, column], torch.arange(first, first + len(codes)).to(torch.uint8))


@pytest.mark.parametrize("noise", [None, Noise(1, 2).bits("exp_avg_sq", 0, 0)])
def test_only_zero_is_stored_as_a_second_moment_of_zero(noise: Bits | None) -> None:
    x = torch.zeros(2, 256)
    x[:, 0] = torch.tensor([1.0, 1e-38])
    x[:, 1:200] = torch.logspace(-44, -7, 199)
    x[1, 1:] *= 1e-38  # zero, or the smallest subnormal
    codes, _, back = encoded(x.view(-1), signed=False, noise=noise)
    assert torch.equal(codes == 0, x.view(-1) == 0)
    least, most = (0.45, 1.6) if noise is None else (0.29, 3.4)
    assert (back.view(2, 256) >= least * x).all()
    assert (back.view(2, 256) <= x.clamp(min=4.8e-7 * x.amax(1)[:, None]) * most).all()


@pytest.mark.parametrize("form", ["bf16", "8bit"])
def test_stochastic_rounding_is_right_on_average(form: str) -> None:
    n, steps = 4099, 200
    x, out = torch.randn(n, generator=torch.Generator().manual_seed(0)), torch.empty(n, dtype=torch.bfloat16)
    if form == "8bit":
        x = x.exp() / x.exp().max() * 0.99
        x[::256] = 1.0  # the scale of each block
        table = shares(signed=False).float()
        code = torch.bucketize(x, table, right=True).clamp(max=255)
        below, above = table[code - 1], table[code]
    else:
        top = x.view(torch.int32) >> 16
        below, above = (top << 16).view(torch.float32), (top + 1 << 16).view(torch.float32)
    share = (x - below) / (above - below)
    ups = torch.zeros(n)
    for number in range(steps):
        noise = Noise(7, number).bits("exp_avg_sq", 0, 3)
        if form == "bf16":
            moments.encode_bf16(x, out, noise=noise)
        stored = out.float() if form == "bf16" else encoded(x, signed=False, noise=noise)[2]
        up = (stored - below) / (above - below)
        assert ((up == 0) | (up == 1)).all()
        ups += up
    assert ((ups - steps * share).abs() - 5 * (steps * share * (1 - share)).sqrt()).max() < 2
    assert abs((ups / steps - share).mean()) < 5 / (4 * steps * n) ** 0.5


def test_no_two_elements_share_noise() -> None:
    """Noise is uncorrelated between fields, units, steps, seeds and distant elements, also if one is shifted."""
    n = 2**16
    one = random_bits(Noise(3, 4).bits("master", 0, 0), n)
    others = {
        **{field: Noise(3, 4).bits(field, 0, 0) for field in MOMENTS},
        "unit": Noise(3, 4).bits("master", 1, 0),
        "step": Noise(3, 5).bits("master", 0, 0),
        "seed": Noise(4, 4).bits("master", 0, 0),
        **{f"2^{place} on": Noise(3, 4).bits("master", 0, 2**place) for place in (0, 1, 8, 12, 16, 18, 20, 31, 32, 33)},
    }
    for name, bits in others.items():
        other = random_bits(bits, n)
        for place in range(16):  # the highest bit matters most
            agree = ((one ^ other) >> place & 1 == 0).float().mean()
            assert abs(float(agree) - 0.5) < 5 * 0.5 / n**0.5, (name, place)
        both = torch.fft.rfft(torch.stack([one, other]).double() - (2**16 - 1) / 2)
        shifted = torch.fft.irfft(both[0].conj() * both[1]) / (2**32 / 12) / n**0.5
        if not name.endswith("on"):
            assert shifted.abs().max() < 7, name
    even = torch.bincount(one >> 8, minlength=256).double()
    assert ((even - 256) ** 2 / 256).sum() < 256 + 6 * (2 * 256) ** 0.5


def test_a_part_of_a_saved_8_bit_moment_has_the_scales_of_its_own_blocks(tmp_path: Path) -> None:
    codes = torch.arange(600).remainder(256).to(torch.uint8)
    save_file({"w": codes}, tmp_path / "exp_avg.safetensors")
    save_file({"w": torch.tensor([1.0, 2.0, 3.0])}, tmp_path / "exp_avg_scales.safetensors")
    with ExitStack() as stack:
        held = StoredKind(tmp_path, "exp_avg", shapes={"w": (600,)}, stack=stack)
        parts = [held.in_fp32("w", start, min(256, 600 - start)) for start in (0, 256, 512)]
        assert torch.equal(torch.cat(parts), held.in_fp32("w", 0, 600))
