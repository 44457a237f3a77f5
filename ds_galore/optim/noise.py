"""Random numbers that are a function of a key and a position: the same for every number of ranks and every device.

What a rank draws for its slice is what a single process would have drawn there, so nothing random is ever stored or
sent, and a resumed run draws the same. Counters go through the mixer of SplitMix64 (Steele, Lea and Flood, *Fast
splittable pseudorandom number generators*, OOPSLA 2014). Imports torch alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["gaussian", "key_of", "round_to_bf16", "signs", "uniform"]

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def key_of(*numbers: int) -> int:
    """A key of 64 bits from integers, such as a seed, a parameter's number, and a step."""
    key = 0
    for number in numbers:
        key = (key + (number & _MASK) + 1) * _GOLDEN & _MASK
        key = (key ^ key >> 30) * _FIRST & _MASK
        key = (key ^ key >> 27) * _SECOND & _MASK
        key ^= key >> 31
    return key


def _words(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """``(count,)`` int64 of random bits: those of the counters from ``first`` on."""
    words = torch.arange(first, first + count, dtype=torch.int64, device=device)
    words.mul_(_signed(_GOLDEN)).add_(_signed(key))
    words.bitwise_xor_((words >> 30).bitwise_and_(2**34 - 1)).mul_(_signed(_FIRST))
    words.bitwise_xor_((words >> 27).bitwise_and_(2**37 - 1)).mul_(_signed(_SECOND))
    return words.bitwise_xor_((words >> 31).bitwise_and_(2**33 - 1))


def _lanes(key: int, first: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``(count,)`` integers of a smaller ``dtype``: the parts of the words, of which positions share one."""
    lanes = 8 // dtype.itemsize
    begin, end = first // lanes, -(-(first + count) // lanes)
    return _words(key, begin, end - begin, device).view(dtype)[first - begin * lanes :][:count]


def uniform(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """``(count,)`` float32 in ``[0, 1)``, multiples of 2^-16: those at the positions from ``first`` on."""
    return (_lanes(key, first, count, torch.int16, device).float() + 2.0**15).mul_(2.0**-16)


def signs(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """``(count,)`` int8, each 1 or -1: those at the positions from ``first`` on."""
    return _lanes(key, first, count, torch.int8, device).bitwise_and_(1).mul_(2).sub_(1)


def gaussian(key: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """``(rows, columns)`` float32 of the standard normal distribution (Box and Muller's transform)."""
    count = rows * columns
    pairs = _lanes(key, 0, 2 * -(-count // 2), torch.int32, device).view(-1, 2).float()
    # Not 0, of which there is no logarithm: float32 has no half at 2^31 to be added to it.
    radius = pairs[:, 0].add(2.0**31).clamp_(min=0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
    angle = pairs[:, 1].mul(math.pi * 2.0**-31)
    out = torch.stack([angle.cos(), angle.sin()], dim=1).mul_(radius.unsqueeze(1))
    return out.view(-1)[:count].view(rows, columns)


def round_to_bf16(values: Tensor, key: int, first: int) -> Tensor:
    """Round float32 to bfloat16 stochastically: up or down with the probability that keeps the mean.

    Parameters
    ----------
    values
        Of any shape, float32. Those that are not finite are rounded to the nearest.
    key, first
        Of the noise: the element at position ``i``, row-major, takes that of ``first + i``.
    """
    flat = values.contiguous().view(-1)
    noise = _lanes(key, first, flat.numel(), torch.int16, values.device).to(torch.int32).bitwise_and_(0xFFFF)
    # The low half of the bits is what bfloat16 drops: noise below carries into the upper half as often as it should.
    rounded = noise.add_(flat.view(torch.int32)).bitwise_and_(-0x10000).view(torch.float32)
    # Adding to the bits of a NaN may overflow to a number, and to those of the largest numbers, give an infinity.
    rounded = torch.where(torch.isfinite(flat) & torch.isfinite(rounded), rounded, flat)
    return rounded.to(torch.bfloat16).view(values.shape)
