"""The memory table's arithmetic, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ds_galore.tools.formats import BF16, FORMATS, FP32
from ds_galore.tools.memory import Kept, MemoryPlan, ParameterPlan, plan_memory, shards_projectors

MATRIX = ParameterPlan("m", 10 * 6, columns=6, rank=2, side="right")
LEFT = ParameterPlan("l", 10 * 6, columns=6, rank=2, side="left")
VECTOR = ParameterPlan("v", 7)


def test_one_rank_holds_everything():
    plan = plan_memory([MATRIX, VECTOR], world_size=1)
    assert plan == MemoryPlan(4 * 67, 4 * 67, 4 * 67, 8 * (10 * 2 + 7), 4 * 6 * 2)
    assert (plan.total, plan.optimizer) == (4 * 67 * 3 + 8 * 27 + 48, 8 * 27 + 48)
    left = plan_memory([LEFT], world_size=1)
    assert (left.moments, left.projectors) == (8 * 6 * 2, 4 * 10 * 2)


def test_of_lowered_gradients_those_that_refresh_together_are_whole():
    kept = Kept(lowered_gap=2)
    assert plan_memory([MATRIX, MATRIX, VECTOR], world_size=1, kept=kept).gradients == 4 * (60 + 10 * 2 + 7)
    assert plan_memory([LEFT, VECTOR], world_size=1, kept=kept).gradients == 4 * 67
    assert plan_memory([MATRIX, MATRIX], world_size=1, kept=Kept(lowered_gap=1)).gradients == 4 * 120
    # 60 elements over 4 ranks, of which each touches three rows.
    assert plan_memory([MATRIX, MATRIX], world_size=4, kept=kept, gradient_bytes=2).gradients == 2 * (15 + 3 * 2)


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


# ---------------------------------------------------------------------- formats

EIGHT, INT8, INT4 = FORMATS["8bit"], FORMATS["int8"], FORMATS["int4"]


@pytest.mark.parametrize(
    ("name", "count", "width", "size"),
    [
        ("fp32", 3, 5, 60),
        ("bf16", 3, 5, 30),
        ("8bit", 3, 5, 3 * (5 + 4)),
        ("8bit", 2, 256, 2 * (256 + 4)),
        ("8bit", 2, 257, 2 * (257 + 8)),
        ("int8", 7, 1024, 7 * (1024 + 16)),
        ("int4", 3, 5, 3 * (3 + 4)),  # the last half byte of each row is empty
        ("int4", 1, 513, 257 + 12),
        ("int4", 2, 512, 2 * (256 + 8)),
        ("int4", 0, 5, 0),
    ],
)
def test_rows_are_quantised_each_for_itself(name, count, width, size):
    assert FORMATS[name].rows(count, width) == size


def test_a_stretch_has_a_scale_for_each_block_that_it_touches():
    assert EIGHT.stretch(0, 256) == 256 + 4
    assert EIGHT.stretch(255, 257) == 2 + 8
    assert EIGHT.stretch(256, 512) == 256 + 4
    assert EIGHT.stretch(300, 300) == 0
    assert FP32.stretch(255, 257) == 8
    assert BF16.stretch(255, 258) == 6


# ---------------------------------------------------------------------- a matrix of 1000 x 700


def matrix(side: str, rank: int) -> ParameterPlan:
    return ParameterPlan("m", 1000 * 700, 700, rank, side)


# Of 700,000 elements 3 ranks have 233,334: a third of 1000 rows is 333 and one that is cut, so that each touches 334.
# 8 ranks have 125 rows each. Of 700 columns they have 234 and 88, rounded up.
TOUCHED = {1: 1000, 3: 334, 8: 125}
SHARE = {1: 700, 3: 234, 8: 88}


@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize(
    ("form", "rank", "row"),
    [
        (FP32, 300, 1200),
        (BF16, 300, 600),
        (EIGHT, 300, 300 + 8),
        (EIGHT, 256, 256 + 4),
        (EIGHT, 5, 5 + 4),
    ],
)
def test_moments_are_rows_of_their_format(world_size, form, rank, row):
    kept = Kept(projected=form)
    for place in range(world_size):
        options = {"world_size": world_size, "rank": place, "kept": kept}
        assert plan_memory([matrix("right", rank)], **options).moments == 2 * TOUCHED[world_size] * row
        assert plan_memory([matrix("left", rank)], **options).moments == 2 * SHARE[world_size] * row


@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize(
    ("form", "rank", "row"),
    [
        (FP32, 300, 1200),
        (BF16, 300, 600),
        (INT8, 300, 300 + 8),
        (INT4, 300, 150 + 8),
        (INT4, 301, 151 + 8),
        (INT4, 255, 128 + 4),
    ],
)
def test_projectors_are_rows_of_theirs(world_size, form, rank, row):
    options = {"world_size": world_size, "rank": world_size - 1, "kept": Kept(projectors=form)}
    assert plan_memory([matrix("right", rank)], **options).projectors == 700 * row
    assert plan_memory([matrix("right", rank)], **options, sharded=True).projectors == SHARE[world_size] * row
    for sharded in (False, True):  # from the left they lie where the weights do
        left = plan_memory([matrix("left", rank)], **options, sharded=sharded)
        assert left.projectors == TOUCHED[world_size] * row


def test_a_projector_from_a_seed_takes_nothing():
    for side in ("right", "left"):
        plan = plan_memory([matrix(side, 300)], world_size=3, kept=Kept(projectors=None))
        assert plan.projectors == 0
        assert plan.moments == plan_memory([matrix(side, 300)], world_size=3).moments


@pytest.mark.parametrize(
    ("world_size", "place", "elements", "blocks"),
    [
        (1, 0, 10_000, 40),
        (3, 0, 3334, 14),  # elements 0 to 3334
        (3, 1, 3334, 14),  # 3334 to 6668: blocks 13 to 26
        (3, 2, 3332, 14),
        (8, 1, 1250, 6),  # 1250 to 2500: blocks 4 to 9
        (8, 7, 1250, 6),
    ],
)
def test_moments_of_what_is_not_projected(world_size, place, elements, blocks):
    plan = ParameterPlan("embedding", 10_000, 100)
    options = {"world_size": world_size, "rank": place}
    found = {form: plan_memory([plan], **options, kept=Kept(unprojected=form)).moments for form in (FP32, BF16, EIGHT)}
    assert found == {FP32: 8 * elements, BF16: 4 * elements, EIGHT: 2 * (elements + 4 * blocks)}
    hidden = plan_memory([plan], **options, kept=Kept(unprojected=EIGHT, flat=True)).moments
    assert hidden == 2 * (elements + 4 * -(-elements // 256))  # blocks begin where the rank's part does


def test_small_parameters_are_not_quantised():
    eight = Kept(projected=EIGHT, unprojected=EIGHT)
    assert plan_memory([ParameterPlan("p", 4095)], world_size=1, kept=eight).moments == 8 * 4095
    assert plan_memory([ParameterPlan("p", 4096)], world_size=1, kept=eight).moments == 2 * (4096 + 4 * 16)
    assert plan_memory([ParameterPlan("p", 4095)], world_size=8, kept=eight).moments == 8 * 512
    assert plan_memory([ParameterPlan("p", 4095)], world_size=1, kept=Kept(unprojected=BF16)).moments == 4 * 4095
    assert plan_memory([MATRIX], world_size=1, kept=eight).moments == 2 * 10 * (2 + 4)  # a low-rank one is
    flat = Kept(unprojected=EIGHT, flat=True)
    assert plan_memory([ParameterPlan("p", 1024)], world_size=4, kept=flat).moments == 2 * (256 + 4)
    assert plan_memory([ParameterPlan("p", 1024)], world_size=4, kept=flat, stage=0).moments == 8 * 1024


def test_embeddings_may_have_another_format():
    kept = Kept(projected=EIGHT, unprojected=FP32, projectors=INT4)
    plan = plan_memory([matrix("right", 300), ParameterPlan("embedding", 10_000, 100)], world_size=1, kept=kept)
    assert (plan.moments, plan.projectors) == (2 * 1000 * 308 + 8 * 10_000, 700 * 158)


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_factored_moments_are_a_row_and_a_column(world_size):
    kept = Kept(moments=0, projected=BF16, factored=FP32)
    touched, share = TOUCHED[world_size], SHARE[world_size]
    options = {"world_size": world_size, "kept": kept}
    assert plan_memory([matrix("right", 301)], **options).moments == 4 * (touched + 301)
    assert plan_memory([matrix("left", 301)], **options).moments == 4 * (share + 301)
    assert plan_memory([ParameterPlan("head", 700_000, 700)], **options).moments == 4 * (touched + 700)
    assert plan_memory([ParameterPlan("norm", 700)], **options).moments == 4 * -(-700 // world_size)
    first = {"world_size": world_size, "kept": Kept(moments=1, projected=EIGHT, unprojected=BF16, factored=FP32)}
    assert plan_memory([matrix("right", 301)], **first).moments == touched * (301 + 8) + 4 * (touched + 301)
    held = -(-700_000 // world_size)
    head = plan_memory([ParameterPlan("head", 700_000, 700)], **first).moments
    assert head == 2 * held + 4 * (touched + 700)


def test_factored_moments_of_flat_vectors_are_not():
    kept = Kept(moments=0, factored=FP32, flat=True)
    plan = ParameterPlan("head", 700_000, 700)
    assert plan_memory([plan], world_size=8, kept=kept).moments == 4 * 87_500
    assert plan_memory([plan], world_size=8, kept=kept, stage=0).moments == 4 * 1700


def test_masters_may_be_narrow():
    plan = plan_memory([MATRIX], world_size=1, weight_bytes=2, master_bytes=2, kept=Kept(projected=EIGHT))
    assert (plan.weights, plan.master_weights, plan.gradients) == (120, 120, 120)
    assert plan.moments == 2 * 10 * 6


# ---------------------------------------------------------------------- projector_storage: auto

SQUARE = ParameterPlan("s", 64 * 64, 64, 8, "right")


@pytest.mark.parametrize(
    ("kept", "least"),
    [
        (Kept(), 3),  # 2048 bytes a rank, moments 4096: no more on 2 ranks
        (Kept(projectors=BF16), 5),  # 1024
        (Kept(projected=BF16, projectors=BF16), 3),
        (Kept(projected=EIGHT, projectors=BF16), 2),  # moments 2 x 64 x (8 + 4) = 1536
        (Kept(projected=EIGHT, projectors=INT8), 3),  # 768
        (Kept(projected=EIGHT, projectors=INT4), 4),  # 64 x (4 + 4) = 512: as much as the moments on 3
        (Kept(projected=EIGHT), 2),
        (Kept(moments=1, projected=EIGHT), 2),
        (
            Kept(moments=0, factored=FP32, projectors=INT4),
            2,
        ),  # moments 4 x (64 + 8) = 288
    ],
)
def test_projectors_are_sharded_where_they_outweigh_moments(kept, least):
    assert [shards_projectors([SQUARE], kept, size) for size in range(1, 9)] == [size >= least for size in range(1, 9)]


def test_what_is_not_projected_from_the_right_shards_nothing():
    assert not shards_projectors([SQUARE], Kept(projectors=None), 1000)
    assert not shards_projectors([LEFT, VECTOR], Kept(), 1000)
    # A left projector, and moments of it or of embeddings, do not count beside those of SQUARE.
    assert not shards_projectors([SQUARE, LEFT, ParameterPlan("e", 10**6)], Kept(), 2)
    assert shards_projectors([SQUARE, LEFT, ParameterPlan("e", 10**6)], Kept(), 3)


# ---------------------------------------------------------------------- what there is

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("GaLoreAdamW", {}),
    ("GaLoreAdamW", {"moment_dtype": "bf16", "projector_dtype": "bf16", "proj_type": "left"}),
    ("GaLoreAdamW", {"moment_dtype": "8bit", "unprojected_moment_dtype": "bf16", "projector_dtype": "int4"}),
    ("GaLoreAdamW8bit", {"projector_dtype": "int8", "projector_storage": "sharded"}),
    ("GaLoreAdamW8bit", {"projector_dtype": "int4", "proj_type": "std"}),
    ("GaLoreAdamW", {"refresh": "random"}),
    ("GaLoreAdafactor", {"projector_dtype": "int8"}),
    ("GaLoreAdafactor", {"proj_type": "left", "beta1": 0.9, "moment_dtype": "8bit"}),
    ("APOLLOAdamW", {"moment_dtype": "8bit"}),
    ("APOLLOAdamW", {"rank": 1, "scaling": "tensor"}),
    ("FiraAdamW", {"projector_dtype": "bf16", "proj_type": "reverse_std"}),
]


def compare_with_plan(kind: str, settings: dict[str, Any]) -> None:
    """On every rank: the bytes of the state's tensors after a step are those that were planned."""
    import torch.distributed as dist

    from tests import jobs

    world_size = dist.get_world_size()
    params = {"lr": 1e-3, "rank": 19, **settings}
    engine = jobs.start(
        jobs.tiny_llama(hidden=68), jobs.config({"type": kind, "params": params}, micro=1, zero={"stage": 3})
    )
    jobs.train(engine, jobs.batches(1, world_size))
    optimizer = engine.basic_optimizer
    sharded = optimizer.shards_projectors(world_size)
    plan = plan_memory(
        optimizer.parameter_plans(), world_size=world_size, rank=dist.get_rank(), kept=optimizer.kept, sharded=sharded
    )
    assert optimizer.state_bytes() == {"moments": plan.moments, "projectors": plan.projectors}
    if settings.get("projector_storage", "auto") == "auto" and optimizer.kept.projectors is not None:
        assert sharded == shards_projectors(optimizer.parameter_plans(), optimizer.kept, world_size)


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_optimizers_keep_what_is_planned(pool, kind, settings):
    pool.run(3, compare_with_plan, kind, settings)
