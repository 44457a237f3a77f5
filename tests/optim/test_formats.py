"""What moments and projectors are stored as: shapes, errors, rows that do not depend on their neighbours; noise."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_galore import APOLLOAdamW, ConfigError, GaLoreAdamW, GaLoreAdamW8bit
from ds_galore.optim import noise
from ds_galore.optim.formats import BLOCK, Dynamic, Floating, Integers, RowFormat, moment_format, projector_format

CPU = torch.device("cpu")
BF16 = Floating(torch.bfloat16)
STOCHASTIC = Floating(torch.bfloat16, stochastic=True)
FORMATS = {
    "fp32": Floating(torch.float32),
    "bf16": BF16,
    "bf16 stochastic": STOCHASTIC,
    "8bit signed": Dynamic(signed=True),
    "8bit unsigned": Dynamic(signed=False),
    "int8": Integers(8),
    "int8 stochastic": Integers(8, stochastic=True),
    "int4": Integers(4),
    "int4 stochastic": Integers(4, stochastic=True),
}
EACH = pytest.mark.parametrize("name", FORMATS)
WIDTHS = st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513]))
#: What is smaller may come out as zero: float32's denormal numbers, which some devices flush.
TINY = torch.finfo(torch.float32).tiny


def numbers(rows: int, columns: int, name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of very different sizes, also from row to row, and some zeros."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    found *= 10.0 ** (6.0 * torch.rand(rows, columns, generator=generator, dtype=torch.float64) - 3.0)
    found *= 10.0 ** torch.randint(-12, 12, (rows, 1), generator=generator)
    found[torch.rand(rows, columns, generator=generator) < 0.1] = 0.0
    return (found.abs() if "unsigned" in name else found).to(dtype)


def there_and_back(format_: RowFormat, block: Tensor, key: int = 1, first_row: int = 0) -> Tensor:
    return format_.decode(format_.encode(block, key, first_row), block.shape[1], block.dtype)


def largest(block: Tensor) -> Tensor:
    """By element, the largest magnitude of its block of 256 columns."""
    parts = [part.abs().amax(dim=1, keepdim=True).expand_as(part) for part in block.split(BLOCK, dim=1)]
    return torch.cat(parts, dim=1)


def bound(name: str, block: Tensor) -> Tensor:
    """By element, how far a decoded number may be from what it was."""
    if name == "fp32":
        return torch.zeros_like(block)
    if name.startswith("bf16"):
        return block.abs() * (2.0**-7 if "stochastic" in name else 2.0**-8)
    if name.startswith(
        "8bit"
    ):  # half of the widest gaps of the dynamic map, which has about 7 numbers a decade or more
        return largest(block) * (0.0071 if "unsigned" not in name else 0.0036) + 2.0 * TINY
    steps = largest(block) / (127 if "int8" in name else 7)
    return steps * (1.0 if "stochastic" in name else 0.5) * (1.0 + 1e-5) + TINY


@EACH
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 5), columns=WIDTHS, seed=st.integers(0, 2**16), double=st.booleans())
def test_every_format_keeps_shapes_and_bounds_and_encodes_each_row_for_itself(name, rows, columns, seed, double):
    format_ = FORMATS[name]
    block = numbers(rows, columns, name, seed=seed, dtype=torch.float64 if double else torch.float32)
    before = block.clone()
    parts = format_.encode(block, 7, 3)
    assert torch.equal(block, before)
    assert {suffix: (part.shape[1], part.dtype) for suffix, part in parts.items()} == format_.parts(columns)
    assert all(part.shape[0] == rows and part.is_contiguous() for part in parts.values())
    assert next(iter(parts)) == ""
    decoded = format_.decode(parts, columns, block.dtype)
    assert decoded.dtype == block.dtype
    assert decoded.shape == block.shape
    rounding = block.abs() * 2.0**-24  # of float64
    assert ((decoded - block).abs() <= bound(name, block) + rounding).all()
    assert torch.equal(decoded == 0, block == 0) or not name.startswith("8bit u")
    assert (decoded[block == 0] == 0).all()
    for row in range(rows):
        alone = format_.encode(block[row : row + 1], 7, 3 + row)
        for suffix, part in parts.items():
            assert torch.equal(alone[suffix], part[row : row + 1])
        assert torch.equal(format_.decode(alone, columns, block.dtype), decoded[row : row + 1])
    # Of a block of all rows, some: what a rank holds of them.
    cut = {suffix: part[1:3] for suffix, part in parts.items()}
    assert torch.equal(format_.decode(cut, columns, block.dtype), decoded[1:3])


@EACH
def test_numbers_at_the_ends_of_float32_stay_finite(name):
    huge = torch.finfo(torch.float32).max if "bf16" not in name else torch.finfo(torch.bfloat16).max
    for size in (huge, huge / 3, 1e-30, TINY, 1e-40, 1e-45):
        block = torch.tensor([[1.0, 0.3, 0.0, 1e-3, 0.5]]) * size
        if "unsigned" not in name:
            block[0, 1] *= -1.0
        decoded = there_and_back(FORMATS[name], block)
        assert torch.isfinite(decoded).all()
        assert ((decoded - block).abs() <= bound(name, block) + 2.0 * TINY).all()
    assert (there_and_back(FORMATS[name], torch.zeros(3, 300)) == 0).all()


def test_int4_puts_two_numbers_in_a_byte():
    whole = torch.arange(-7, 8.0).view(1, 15)
    parts = Integers(4).encode(whole, 0, 0)
    assert parts[""].dtype == torch.uint8
    assert parts[""].shape == (1, 8)
    assert torch.equal(Integers(4).decode(parts, 15, torch.float32), whole)
    assert parts[""][0, 0] == (-7 & 15) | (-6 & 15) << 4
    assert sum(
        part.numel() * part.element_size() for part in Integers(4).encode(torch.randn(64, 512), 0, 0).values()
    ) == (64 * (256 + 2 * 4))


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_nearest_is_nearest(name):
    block = numbers(4, 300, name, seed=5)
    decoded = there_and_back(FORMATS[name], block)
    if name == "bf16":
        assert torch.equal(decoded, block.bfloat16().float())
        return
    scale = FORMATS[name].encode(block, 0, 0)["_scale"].repeat_interleave(BLOCK, dim=1)[:, :300]
    assert ((decoded - block).abs() <= 0.5 * scale * (1.0 + 1e-5)).all()


@pytest.mark.parametrize("name", ["bf16 stochastic", "int8 stochastic", "int4 stochastic"])
def test_the_mean_of_stochastic_rounding_is_the_number(name):
    block, draws = numbers(3, 41, name, seed=2), 4000
    decoded = torch.stack([there_and_back(FORMATS[name], block, key=noise.key_of(9, draw)) for draw in range(draws)])
    error = (decoded.double().mean(dim=0) - block.double()).abs()
    # The variance is a quarter of a squared step at most; five standard deviations, and the noise's own granularity.
    assert (error <= bound(name, block) * (5 * 0.5 / draws**0.5 + 2.0**-16)).all()
    assert ((decoded - block).abs() <= bound(name, block)).all()
    distinct = [len(decoded[:, i, j].unique()) for i in range(3) for j in range(41)]
    assert max(distinct) == 2
    assert sum(distinct) > 1.5 * len(distinct)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("columns", [64, 128, 256, 512])
def test_8_bit_is_bitsandbytes(signed, columns):
    from bitsandbytes import functional

    block = torch.randn(6, columns, generator=torch.Generator().manual_seed(columns))
    block = block if signed else block.square()
    code = functional.create_dynamic_map(signed)
    size = min(columns, BLOCK)
    codes, state = functional.quantize_blockwise(block, code=code, blocksize=size)
    parts = Dynamic(signed).encode(block, 0, 0)
    assert torch.equal(parts[""], codes)
    assert torch.equal(parts["_absmax"].view(-1), state.absmax)
    expected = functional.dequantize_blockwise(codes, state)
    assert torch.equal(Dynamic(signed).decode(parts, columns, torch.float32), expected)


def test_a_second_moment_that_is_not_zero_never_becomes_zero():
    squares = 10.0 ** torch.linspace(-25, 3, 600).view(2, 300)
    squares[0, 0], squares[1, 1] = 1e3, 0.0
    decoded = there_and_back(Dynamic(signed=False), squares)
    assert torch.equal(decoded > 0, squares > 0)


def test_formats_by_name():
    assert moment_format("fp32", signed=True, compute=torch.float64) == Floating(torch.float64)
    assert moment_format("bf16", signed=True, compute=torch.float32) == STOCHASTIC
    assert moment_format("8bit", signed=False, compute=torch.float32) == Dynamic(signed=False)
    assert projector_format("bf16", stochastic=False, compute=torch.float32) == BF16
    assert projector_format("int4", stochastic=True, compute=torch.float32) == Integers(4, stochastic=True)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (GaLoreAdamW8bit, {}),
        (GaLoreAdamW, {"moment_dtype": "8bit"}),
        (APOLLOAdamW, {"unprojected_moment_dtype": "8bit"}),
    ],
)
def test_without_bitsandbytes_8_bits_are_refused_when_the_optimizer_is_built(monkeypatch, kind, values):
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    groups = [{"params": [torch.nn.Parameter(torch.randn(8, 8))], "rank": 2}]
    with pytest.raises(
        ConfigError, match=r"8-bit moments .* need bitsandbytes, which cannot be imported .*pip install"
    ):
        kind(groups, **values)
    GaLoreAdamW(groups)


# ---------------------------------------------------------------------- noise


@settings(max_examples=60, deadline=None)
@given(key=st.integers(0, 2**64 - 1), first=st.integers(0, 2**40), count=st.integers(0, 40), skip=st.integers(0, 40))
def test_noise_is_a_function_of_key_and_position(key, first, count, skip):
    whole = noise.uniform(key, first, skip + count, CPU)
    assert torch.equal(whole[skip:], noise.uniform(key, first + skip, count, CPU))
    values = torch.randn(skip + count, generator=torch.Generator().manual_seed(first))
    rounded = noise.round_to_bf16(values, key, first)
    assert torch.equal(rounded[skip:], noise.round_to_bf16(values[skip:], key, first + skip))


def test_noise_has_the_moments_of_its_distribution():
    count = 400_000
    uniform = noise.uniform(noise.key_of(1, 2), 3, count, CPU).double()
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 5 * (1 / 12 / count) ** 0.5 + 2.0**-17
    assert abs(uniform.var() - 1 / 12) < 2e-3
    histogram = uniform.mul(16).long().bincount(minlength=16).double() / count
    assert (histogram - 1 / 16).abs().max() < 2e-3
    shifted = uniform - uniform.mean()
    for lag in (1, 2, 3, 4, 8):  # positions share words, four at a time
        assert abs((shifted[lag:] * shifted[:-lag]).mean()) < 5e-4
    gaussian = noise.gaussian(noise.key_of(3), 633, 631, CPU).double().view(-1)
    assert torch.isfinite(gaussian).all()
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert abs(gaussian.pow(power).mean() - moment) < 0.05
    assert abs((gaussian[1:] * gaussian[:-1]).mean()) < 0.01
    assert abs((gaussian.abs() < 1).double().mean() - 0.6827) < 5e-3


def test_keys_give_independent_noise():
    keys = [
        noise.key_of(0),
        noise.key_of(1),
        noise.key_of(0, 0),
        noise.key_of(0, 1),
        noise.key_of(1, 0),
        noise.key_of(-1),
    ]
    assert len(set(keys)) == len(keys)
    assert (
        len({noise.key_of(seed, number, step) for seed in range(9) for number in range(9) for step in range(9)}) == 729
    )
    drawn = torch.stack([noise.gaussian(key, 100, 100, CPU).view(-1) for key in keys]).double()
    correlation = drawn @ drawn.t() / 10_000
    assert (correlation - torch.eye(len(keys))).abs().max() < 0.06


def test_a_random_basis_is_finite_whatever_bits_are_drawn(monkeypatch):
    """The smallest integers came to the logarithm of zero, once in 66 million pairs."""
    ends = [-(2**31), -(2**31) + 1, -(2**31) + 64, 0, 2**31 - 1, 2**31 - 64]
    pairs = torch.tensor([[a, b] for a in ends for b in ends], dtype=torch.int32).view(-1)
    monkeypatch.setattr(noise, "_lanes", lambda key, first, count, dtype, device: pairs[:count])
    found = noise.gaussian(0, 2, 36, CPU)
    assert torch.isfinite(found).all()
    assert found.abs().max() < 7.0


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, -1, -0x3FFFFF])
def test_what_is_not_a_number_is_not_rounded_to_one(bits):
    nan = torch.tensor([bits], dtype=torch.int32).view(torch.float32).expand(64)
    assert torch.isnan(noise.round_to_bf16(nan, 3, 0)).all()
    infinite = torch.tensor([float("inf"), -float("inf")])
    assert torch.equal(noise.round_to_bf16(infinite, 3, 0).float(), infinite)
