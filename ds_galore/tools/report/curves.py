"""Numbers by step: as they come out of logs, smoothed, and thinned for the page. Imports the standard library."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["MAX_POINTS", "Curve", "as_number", "as_step", "rounded"]

#: Points of a curve on the page.
MAX_POINTS = 2000
#: Whole numbers up to here are exact in JavaScript; a larger step is none.
MAX_STEP = 2**53


def as_number(value: object) -> float | None:
    """A number out of JSON, NaN for what is none of the finite ones; None for anything that is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def as_step(value: object) -> int | None:
    """A step out of JSON, or None for what cannot be one."""
    number = as_number(value)
    if number is None or not 0 <= number < MAX_STEP or number != int(number):
        return None
    return int(number)


def rounded(value: float | None, digits: int = 6) -> float | None:
    """For JSON, which has no NaN: six digits are more than a screen shows."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


@dataclass
class Curve:
    """Values by step, in order of steps; a value that is not finite is NaN.

    A step that is not after the last one is a resume's: it takes the place of what was logged from there on.
    """

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return iter(zip(self.steps, self.values, strict=True))

    def add(self, step: int, value: float) -> None:
        """Append a value."""
        self.cut(step)
        self.steps.append(step)
        self.values.append(value)

    def cut(self, step: int) -> None:
        """Forget what was logged at ``step`` and after it."""
        if self.steps and self.steps[-1] >= step:
            at = bisect_left(self.steps, step)
            del self.steps[at:], self.values[at:]

    def finite(self) -> Curve:
        """Without values that are not finite."""
        kept = [(step, value) for step, value in self if math.isfinite(value)]
        return Curve([step for step, _ in kept], [value for _, value in kept])

    def broken(self) -> list[int]:
        """Steps whose value is not finite."""
        return [step for step, value in self if not math.isfinite(value)]

    def smoothed(self) -> Curve:
        """Exponential means over about a fortieth of the curve, to either side, so that nothing lags; NaN stays."""
        keep = 1 - 2 / (min(max(len(self) / 40, 4.0), 250.0) + 1)
        before, after = _means(self.values, keep), _means(self.values[::-1], keep)[::-1]
        return Curve(list(self.steps), [(a + b) / 2 for a, b in zip(before, after, strict=True)])

    def thinned(self, limit: int = MAX_POINTS) -> Curve:
        """At most ``limit`` points: of each of equal stretches of points its lowest and its highest, and both ends.

        A stretch with a value that is not finite keeps its first one too, so that the gap stays visible; those may
        come on top of the limit.
        """
        if len(self) <= limit:
            return self
        stretches = max((limit - 2) // 2, 1)
        chosen = {0, len(self) - 1}
        for number in range(stretches):
            begin, end = (len(self) * each // stretches for each in (number, number + 1))
            chosen.update(_extremes(self.values, range(begin, end)))
        kept = sorted(chosen)
        return Curve([self.steps[each] for each in kept], [self.values[each] for each in kept])


def _means(values: Sequence[float], keep: float) -> list[float]:
    """Exponential means of what came before, unbiased at the beginning."""
    mean, weight, means = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        means.append(mean / weight if math.isfinite(value) else math.nan)
    return means


def _extremes(values: Sequence[float], where: range) -> Iterator[int]:
    """Indices of the lowest and highest value, and of the first that is not finite."""
    fine = [each for each in where if math.isfinite(values[each])]
    if fine:
        yield min(fine, key=values.__getitem__)
        yield max(fine, key=values.__getitem__)
    if len(fine) < len(where):
        yield next(each for each in where if not math.isfinite(values[each]))
