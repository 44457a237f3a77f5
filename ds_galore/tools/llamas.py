"""The shapes of Llamas, for models of which only the size is known. Imports neither torch nor DeepSpeed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_galore.errors import ConfigError
from ds_galore.tools.memory import ParameterPlan
from ds_galore.tools.optimizers import Optimizer

__all__ = ["FAMILY", "Llama", "assumed"]


@dataclass(frozen=True)
class Llama:
    """The shapes of a Llama with untied embeddings, and full attention.

    Parameters
    ----------
    hidden, intermediate, layers, vocabulary
        As in its ``config.json``.
    """

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int = 32000

    def plans(self, rank: int | None, proj_type: str = "std") -> list[ParameterPlan]:
        """Its parameters; matrices of attention and MLP projected to ``rank`` where it is given, as ``proj_type``."""
        square, wide = (self.hidden, self.hidden), (self.intermediate, self.hidden)
        layer = [square] * 4 + [wide] * 2 + [(self.hidden, self.intermediate)]
        found = [ParameterPlan("embeddings and head", self.vocabulary * self.hidden, self.hidden)] * 2
        for _ in range(self.layers):
            found += [_projected("matrix", rows, columns, rank, proj_type) for rows, columns in layer]
            found += [ParameterPlan("norm", self.hidden)] * 2
        return [*found, ParameterPlan("norm", self.hidden)]

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(plan.numel for plan in self.plans(None))


def _projected(name: str, rows: int, columns: int, rank: int | None, proj_type: str) -> ParameterPlan:
    if rank is None or rank >= min(rows, columns):
        return ParameterPlan(name, rows * columns, columns)
    side = proj_type
    if proj_type in ("std", "reverse_std"):
        side = "right" if (rows >= columns) == (proj_type == "std") else "left"
    return ParameterPlan(name, rows * columns, columns, rank, side)


#: The GaLore paper's models (its table 5, and galore's configs for 1B and 7B).
FAMILY = {
    "60M": Llama(512, 1376, 8),
    "130M": Llama(768, 2048, 12),
    "350M": Llama(1024, 2736, 24),
    "1B": Llama(2048, 5461, 24),
    "7B": Llama(4096, 11008, 32),
}


def assumed(
    parameters: int, optimizer: Optimizer, rank: int | None, proj_type: str = "std"
) -> tuple[list[ParameterPlan], float, list[str]]:
    """Plans for a number of parameters alone, the scale of their counts, and what is assumed.

    Raises
    ------
    ConfigError
        If the rank is too large for all matrices.
    """
    if not optimizer.low_rank and not optimizer.factored:
        return [ParameterPlan("all", parameters)], 1.0, []
    name = min(FAMILY, key=lambda each: abs(math.log(FAMILY[each].parameters / parameters)))
    found = FAMILY[name].plans(rank if optimizer.low_rank else None, proj_type)
    if optimizer.low_rank and not any(plan.side for plan in found):
        raise ConfigError(f"rank is {rank}: no matrix of a Llama {name} is larger; set a smaller one")
    scale = parameters / FAMILY[name].parameters
    text = f"shapes are those of a Llama {name} ({FAMILY[name].parameters:,} parameters), counts scaled by {scale:.3g}"
    how = f", matrices of attention and MLP projected as {proj_type} does" if optimizer.low_rank else ""
    if how and proj_type in ("right", "left"):
        how = f", matrices of attention and MLP projected from the {proj_type}"
    return found, scale, [f"{text}{how}; --model-config gives the model's own"]
