"""What refreshes did to bases, for whoever watches a run.

Imports the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Refreshed", "Watch"]


@dataclass(frozen=True)
class Refreshed:
    """A matrix whose basis was renewed.

    Parameters
    ----------
    name
        Of the parameter.
    rank
        Of the new basis.
    energy
        The share of the gradient's squared norm that the new basis captures, 0 to 1; None where bases are random.
    overlap
        ``|Q_old^T Q_new|^2 / rank``, 0 to 1: how much of the old subspace is in the new one; None for a first basis.
    """

    name: str
    rank: int
    energy: float | None
    overlap: float | None


@dataclass
class Watch:
    """Collects refreshes between two looks at it; the same on all ranks that share the matrices.

    Parameters
    ----------
    refreshed
        In the order in which they were renewed.
    seconds
        What renewing them took on this rank, waiting for the others included.
    """

    refreshed: list[Refreshed] = field(default_factory=list)
    seconds: float = 0.0

    def take(self) -> tuple[list[Refreshed], float]:
        """What has been collected; nothing is left."""
        found = self.refreshed, self.seconds
        self.refreshed, self.seconds = [], 0.0
        return found
