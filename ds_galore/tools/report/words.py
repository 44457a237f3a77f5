"""Numbers in words, for people. Imports the standard library."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["NOTHING", "count", "number", "signed_percent", "size", "steps", "unit"]

#: Where there is nothing to tell.
NOTHING = "\N{EN DASH}"


def unit(largest: float) -> tuple[float, str]:
    """The unit of bytes, in powers of 1000 as disks are sold, in which a number is short."""
    for power, name in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if largest >= 10**power:
            return 10.0**power, name
    return 1.0, "B"


def size(number: float | None) -> str:
    """Bytes with their unit."""
    if number is None:
        return NOTHING
    divisor, name = unit(number)
    return f"{number / divisor:.0f} {name}" if name == "B" else f"{number / divisor:.3g} {name}"


def count(number: int, one: str, many: str | None = None) -> str:
    """A number of things."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def number(value: float | None, digits: int | None = None) -> str:
    """A number with some significant digits, or as a whole one."""
    if value is None:
        return NOTHING
    if digits is None or abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def signed_percent(change: float) -> str:
    """A change, with a true minus sign."""
    return f"{change:+.0%}".replace("-", "\N{MINUS SIGN}")


def steps(several: Sequence[int], one: str = "step") -> str:
    """Some steps: each, or how many they are and where."""
    several = sorted(set(several))
    if len(several) == 1:
        return f"{one} {several[0]:,}"
    if len(several) <= 4:
        return f"{one}s {', '.join(f'{step:,}' for step in several)}"
    return f"{len(several):,} {one}s from {several[0]:,} to {several[-1]:,}"
