"""The memory table's arithmetic, by hand."""

from __future__ import annotations

from ds_galore.tools.formats import BF16
from ds_galore.tools.memory import Kept, MemoryPlan, ParameterPlan, plan_memory

MATRIX = ParameterPlan("m", 10 * 6, columns=6, rank=2, side="right")
LEFT = ParameterPlan("l", 10 * 6, columns=6, rank=2, side="left")
VECTOR = ParameterPlan("v", 7)


def test_one_rank_holds_everything():
    plan = plan_memory([MATRIX, VECTOR], world_size=1)
    assert plan == MemoryPlan(4 * 67, 4 * 67, 4 * 67, 8 * (10 * 2 + 7), 4 * 6 * 2)
    assert (plan.total, plan.optimizer) == (4 * 67 * 3 + 8 * 27 + 48, 8 * 27 + 48)
    left = plan_memory([LEFT], world_size=1)
    assert (left.moments, left.projectors) == (8 * 6 * 2, 4 * 10 * 2)


def test_16_bit_weights_have_a_master_copy():
    plan = plan_memory([VECTOR], world_size=1, weight_bytes=2)
    assert (plan.weights, plan.master_weights, plan.gradients) == (14, 28, 14)
    assert plan_memory([VECTOR], world_size=1, weight_bytes=2, gradient_bytes=4).gradients == 28
    assert plan_memory([VECTOR], world_size=1, weight_bytes=2, master_bytes=0).master_weights == 0


def test_partitions_are_padded_and_count_the_rows_they_touch():
    # 60 elements over 4 ranks: 15 each, two and a half rows of 6; the second rank touches rows 2, 3 and 4.
    moments = [plan_memory([MATRIX], world_size=4, rank=rank).moments for rank in range(4)]
    assert moments == [8 * 2 * 3, 8 * 2 * 3, 8 * 2 * 3, 8 * 2 * 3]
    sharded = plan_memory([MATRIX], world_size=4, rank=0, sharded=True, kept=Kept(projectors=BF16))
    assert sharded.projectors == 2 * 2 * 2  # two of six rows, padded to equal parts
    assert plan_memory([VECTOR], world_size=4, rank=3).moments == 8 * 1
    assert plan_memory([VECTOR], world_size=4, rank=3).weights == 4 * 2


def test_ranks_without_data_hold_padding_only():
    assert plan_memory([ParameterPlan("p", 2, 2, 1, "right")], world_size=4, rank=3) == MemoryPlan(4, 4, 4, 0, 8)


def test_without_partitioning_every_rank_holds_everything():
    whole = plan_memory([MATRIX], world_size=1, master_bytes=0)
    assert plan_memory([MATRIX], world_size=4, rank=3, stage=0) == whole
