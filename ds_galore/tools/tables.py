"""Tables of the planner: the GaLore paper's, 8-bit states beside AdamW's, and from how many ranks projectors weigh.

Sizes are bytes. Imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ds_galore.tools.formats import BF16
from ds_galore.tools.llamas import FAMILY
from ds_galore.tools.memory import Kept, ParameterPlan, plan_memory, shards_projectors
from ds_galore.tools.optimizers import OPTIMIZERS, Optimizer

__all__ = ["PAPER", "crossover_table", "eight_bit_table", "paper_row", "paper_table"]

#: The GaLore paper's table 2: rank, and G of bf16 weights and optimizer states with full-rank AdamW and with GaLore.
PAPER = {"60M": (128, 0.36, 0.24), "130M": (256, 0.76, 0.52), "350M": (256, 2.06, 1.22), "1B": (512, 7.80, 4.38)}
#: Its setting of a Llama 7B.
RANK_7B = 1024
#: Numbers of ranks in the table of 8-bit states, of which the first is for its savings.
WORLD_SIZES = (1, 8, 64)
#: Ranks up to which a crossover is looked for.
MOST_RANKS = 1024


def paper_table() -> list[dict[str, Any]]:
    """The GaLore paper's table 2 beside the same by shapes, in bytes: everything bf16, one rank, no gradients."""
    rows = []
    for name, (rank, full, galore) in PAPER.items():
        plans, low = FAMILY[name].plans(None), FAMILY[name].plans(rank)
        sizes = [_weights_and_states(each) for each in (plans, low)]
        for label, size, paper in (("full-rank", sizes[0], full), ("GaLore", sizes[1], galore)):
            rows.append(
                {
                    "model": name,
                    "method": label,
                    "rank": rank if label == "GaLore" else None,
                    "bytes": size,
                    "gib": size / 2**30,
                    "paper_g": paper,
                    "difference": size / 2**30 / paper - 1,
                }
            )
    return rows


def _weights_and_states(plans: Sequence[ParameterPlan]) -> int:
    kept = Kept(projected=BF16, unprojected=BF16, projectors=BF16)
    plan = plan_memory(plans, world_size=1, weight_bytes=2, stage=0, kept=kept)
    return plan.weights + plan.moments + plan.projectors


def paper_row(parameters: int, shapes: Iterable[int]) -> str | None:
    """The name in the paper's table of a model with these numbers of elements, if it is one of its models."""
    numels = sorted(shapes)
    for name in PAPER:
        if FAMILY[name].parameters == parameters and sorted(p.numel for p in FAMILY[name].plans(None)) == numels:
            return name
    return None


# ---------------------------------------------------------------------- 8-bit states


def _named(name: str, moments: str, projectors: str = "fp32", unprojected: str | None = None) -> Optimizer:
    own = OPTIMIZERS[name]
    return replace(own, moment_dtype=moments, projector_dtype=projectors, unprojected_moment_dtype=unprojected)


#: The rows: an optimizer, and its rank where it projects. The first is what the others are compared with on one rank.
_ROWS: tuple[tuple[Optimizer, int | None], ...] = (
    (_named("adamw", "bf16"), None),
    (_named("adamw", "fp32"), None),
    (_named("adamw_8bit", "8bit"), None),
    (_named("galore_adamw", "fp32"), RANK_7B),
    (_named("galore_adamw", "bf16", "bf16"), RANK_7B),
    (_named("galore_adamw_8bit", "8bit", "bf16", "fp32"), RANK_7B),
    (_named("galore_adamw_8bit", "8bit", "bf16"), RANK_7B),
    (_named("galore_adamw_8bit", "8bit", "int8"), RANK_7B),
    (_named("galore_adamw_8bit", "8bit", "int4"), RANK_7B),
    (replace(_named("galore_adamw_8bit", "8bit"), refresh="random"), RANK_7B),
    (_named("galore_adafactor", "fp32", "bf16"), RANK_7B),
    (_named("galore_adafactor", "fp32", "int8"), RANK_7B),
    (_named("fira_adamw", "fp32"), RANK_7B),
    (_named("fira_adamw", "8bit", "int8"), RANK_7B),
    (_named("apollo_adamw", "fp32"), RANK_7B),
    (_named("apollo_adamw", "8bit"), RANK_7B),
    (_named("apollo_adamw", "fp32"), 1),
    (_named("apollo_adamw", "8bit"), 1),
)


def optimizer_bytes(optimizer: Optimizer, rank: int | None, world_size: int) -> tuple[int, bool]:
    """Moments and projectors of a Llama 7B on the fullest rank, and whether its projectors are sharded.

    Parameters
    ----------
    optimizer
        With its formats.
    rank
        Of projections from the right; None for none.
    world_size
        Ranks under ZeRO-3; one alone is without ZeRO.
    """
    plans, kept = FAMILY["7B"].plans(rank, "right"), optimizer.kept()
    sharded = shards_projectors(plans, kept, world_size)
    stage = 3 if world_size > 1 else 0
    ranks = range(min(world_size, 8))  # later ranks hold a row less, at most
    sizes = [
        plan_memory(plans, world_size=world_size, rank=each, kept=kept, sharded=sharded, stage=stage) for each in ranks
    ]
    return max(plan.optimizer for plan in sizes), sharded


def eight_bit_table() -> list[dict[str, Any]]:
    """Optimizer states of a Llama 7B at the GaLore paper's rank, beside AdamW's in bf16 and in 8 bits.

    ``below_bf16_adamw`` is the share of bf16 AdamW's bytes that is saved on one rank, ``of_adamw_8bit`` the ratio to
    8-bit AdamW on as many ranks. Masters and gradients, the same for all, are not in it.
    """
    found = [[optimizer_bytes(optimizer, rank, size) for size in WORLD_SIZES] for optimizer, rank in _ROWS]
    beside = found[[optimizer.name for optimizer, _ in _ROWS].index("adamw_8bit")]
    rows = []
    for (optimizer, rank), sizes in zip(_ROWS, found, strict=True):
        kept = optimizer.kept()
        keeps = kept.moments or kept.factored is None
        rows.append(
            {
                "optimizer": optimizer.name,
                "rank": rank,
                "moments": kept.projected.name if keeps else "factored",
                "unprojected_moments": kept.unprojected.name if keeps else "factored",
                "projectors": kept.projectors.name if kept.projectors is not None else None,
                "bytes": {str(size): value for size, (value, _) in zip(WORLD_SIZES, sizes, strict=True)},
                "sharded": {str(size): shards for size, (_, shards) in zip(WORLD_SIZES, sizes, strict=True)},
                "below_bf16_adamw": 1 - sizes[0][0] / found[0][0][0],
                "of_adamw_8bit": {
                    str(size): value / other
                    for size, (value, _), (other, _) in zip(WORLD_SIZES, sizes, beside, strict=True)
                },
            }
        )
    return rows


# ---------------------------------------------------------------------- projectors and ranks

#: Low-rank optimizers, and what each is measured against.
_PAIRS: tuple[tuple[Optimizer, Optimizer], ...] = (
    (_named("galore_adamw", "fp32"), _named("adamw", "fp32")),
    (_named("galore_adamw", "fp32", "bf16"), _named("adamw", "fp32")),
    (_named("galore_adamw", "bf16", "bf16"), _named("adamw", "bf16")),
    (_named("galore_adamw_8bit", "8bit", "bf16"), _named("adamw_8bit", "8bit")),
    (_named("galore_adamw_8bit", "8bit", "int8"), _named("adamw_8bit", "8bit")),
    (_named("galore_adamw_8bit", "8bit", "int4"), _named("adamw_8bit", "8bit")),
)


def crossover_table() -> list[dict[str, Any]]:
    """From how many ranks projectors of a Llama 7B at rank 1024 are sharded, and outweigh what they save if not.

    ``sharded_from`` is where ``projector_storage: auto`` shards; ``replicated_loses_from`` and ``sharded_loses_from``
    the least number of ranks with which a rank would hold more of optimizer states than with AdamW in the same
    precision; None where there is none among 1 to 32 ranks and the powers of two up to 1024.
    """
    rows = []
    plans, plain = FAMILY["7B"].plans(RANK_7B, "right"), [ParameterPlan("all", FAMILY["7B"].parameters)]
    for low_rank, full in _PAIRS:
        kept, others = low_rank.kept(), full.kept()
        found: dict[str, int | None] = dict.fromkeys(("sharded_from", "replicated_loses_from", "sharded_loses_from"))
        doubled = [2**power for power in range(MOST_RANKS.bit_length())]
        for size in sorted({*range(1, 33), *doubled}):
            most = plan_memory(plain, world_size=size, kept=others).optimizer
            facts = {"sharded_from": shards_projectors(plans, kept, size)}
            for sharded, key in ((False, "replicated_loses_from"), (True, "sharded_loses_from")):
                facts[key] = plan_memory(plans, world_size=size, kept=kept, sharded=sharded).optimizer > most
            found.update({key: size for key, true in facts.items() if true and found[key] is None})
        rows.append(
            {
                "optimizer": low_rank.name,
                "moments": kept.projected.name,
                "projectors": kept.projectors.name if kept.projectors is not None else None,
                "beside": f"{full.name} {full.moment_dtype}",
                **found,
            }
        )
    return rows
