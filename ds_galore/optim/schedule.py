"""When a matrix's basis is refreshed, as a function of its state: the same on all ranks, and the same after a resume.

Imports its neighbours.
"""

from __future__ import annotations

from ds_galore.optim.matrices import Matrix, State
from ds_galore.parameters import LowRankParameters

__all__ = ["is_due", "is_turn", "pass_turn", "set_gap", "starts_at_random"]


def is_turn(matrix: Matrix, state: State) -> bool:
    """Whether it is the matrix's turn: every ``gap`` steps, from its phase on."""
    step: int = state["step"]
    return step > 0 and (step - matrix.phase) % matrix.gap == 0


def is_due(matrix: Matrix, state: State) -> bool:
    """Whether the basis is refreshed in this step: it is missing, or it is the matrix's turn and not let pass."""
    if not state["has_basis"]:
        return True
    return is_turn(matrix, state) and state.get("turns_left", 1) <= 1


def starts_at_random(matrix: Matrix, parameters: LowRankParameters) -> bool:
    """Whether a matrix without a basis gets a random one, until its first turn."""
    return parameters.first_basis == "random" and matrix.phase > 0


def pass_turn(state: State) -> None:
    """Count a turn on which the basis stays."""
    state["turns_left"] -= 1


def set_gap(state: State, *, stable: bool, largest: int) -> None:
    """After a refresh: twice as many turns until the next one if the basis was stable, else the very next one."""
    state["gap_factor"] = min(2 * state["gap_factor"], largest) if stable else 1
    state["turns_left"] = state["gap_factor"]
