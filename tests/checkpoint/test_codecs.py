"""One suite for every codec: exact for any bits, safe for any damage; and what each is for."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ds_galore.checkpoint.codecs import (
    CODECS,
    LOSSLESS,
    ZSTD,
    CodecError,
    Compressor,
    Encoded,
    Reference,
    decode,
    encode,
    words,
)
from ds_galore.checkpoint.codecs.base import decompress
from ds_galore.checkpoint.codecs.lowrank import _predict
from ds_galore.checkpoint.codecs.words import (
    How,
    difference,
    join,
    join_sorted,
    ordered,
    restored,
    split,
    split_sorted,
    unordered,
)

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, 3.4028235e38, -3e38, 1.0]


def patterns(dtype: str, size: int | None = None) -> st.SearchStrategy[np.ndarray]:
    shape = st.integers(0, 70) if size is None else size
    elements = st.integers(0, 2 ** (8 * int(dtype[1])) - 1)
    if dtype == "u4":
        special = [int(np.float32(value).view(np.uint32)) for value in SPECIAL] + [0x7FC00001, 0xFFC12345]
        elements = elements | st.sampled_from(special)
    return hnp.arrays(np.dtype(dtype), shape, elements=elements)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, Reference, bool]:
    """Any bits, with any base, and for float32 perhaps factors of any kind."""
    dtype = draw(st.sampled_from(["u1", "u2", "u4", "u8"]))
    bits = draw(patterns(dtype))
    floating = draw(st.booleans()) and dtype != "u1"
    base = draw(st.one_of(st.none(), st.just(bits.copy()), patterns(dtype, bits.size)))
    if base is None or dtype != "u4" or not draw(st.booleans()):
        return bits, Reference(base=base), floating
    columns, rank = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    entry = st.floats(-1.5, 1.5, width=32) | st.just(np.nan)
    names = draw(st.sampled_from([["projector"], ["base/projector", "projector"]]))
    factors = {name: draw(hnp.arrays(np.float32, (columns, rank), elements=entry)) for name in names}
    return bits, Reference(base, factors, columns, draw(st.integers(0, 20))), floating


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("name", sorted(LOSSLESS))
@given(case=cases())
@settings(max_examples=150, deadline=None)
def test_a_codec_gives_back_the_very_bits_or_says_that_it_does_not_apply(name, case):
    bits, reference, floating = case
    encoded = CODECS[name].encode(bits, reference, floating=floating, compressor=ZSTD)
    if encoded is not None:
        assert encoded.codec == name
        assert all(part.dtype == np.uint8 for part in encoded.parts.values())
        assert np.array_equal(decode(encoded, bits.size, bits.dtype.itemsize, reference, floating=floating), bits)


@given(case=cases())
@settings(max_examples=150, deadline=None)
def test_the_smallest_encoding_is_taken_and_is_exact(case):
    bits, reference, floating = case
    encoded = encode(bits, reference, floating=floating)
    assert np.array_equal(decode(encoded, bits.size, bits.dtype.itemsize, reference, floating=floating), bits)
    assert encoded.nbytes <= bits.nbytes


@pytest.mark.parametrize("name", sorted(CODECS))
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_damage_is_told_or_harmless_and_never_more_than_was_asked_for(name, data):
    weights, reference = trained_weights(rows=6, columns=8, rank=2, steps=3)
    if name == "same":
        reference = dataclasses.replace(reference, base=weights.copy())
    encoded = CODECS[name].encode(weights, reference, floating=True, compressor=ZSTD)
    parts = {key: part.copy() for key, part in encoded.parts.items()}
    if parts:
        key = data.draw(st.sampled_from(sorted(parts)))
        kind = data.draw(st.sampled_from(["flip", "cut", "drop", "grow"]))
        if kind == "flip" and parts[key].size:
            parts[key][data.draw(st.integers(0, parts[key].size - 1))] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            parts[key] = parts[key][: data.draw(st.integers(0, max(0, parts[key].size - 1)))]
        elif kind == "drop":
            del parts[key]
        else:
            parts[key] = np.concatenate([parts[key], np.zeros(3, np.uint8)])
    params = dict(encoded.params)
    for key in list(params):
        if data.draw(st.booleans()):
            params[key] = data.draw(st.one_of(st.none(), st.integers(), st.lists(st.text(max_size=3), max_size=2)))
    try:
        found = decode(Encoded(name, params, parts), weights.size, 4, reference, floating=True)
    except CodecError:
        return
    assert found.shape == weights.shape  # the digests of the store tell what a raw part cannot


def test_an_unknown_codec_is_refused_by_name():
    with pytest.raises(CodecError, match="codec 'lz5' is not known to this version, which knows int8, lowrank, planes"):
        decode(Encoded("lz5", {}, {}), 4, 4, Reference(), floating=True)


def test_a_frame_that_claims_more_than_belongs_there_is_refused_before_it_is_decompressed():
    bits = np.zeros(10**6, np.uint32) + 7
    encoded = CODECS["planes"].encode(bits, Reference(), floating=False, compressor=ZSTD)
    assert sum(part.nbytes for part in encoded.parts.values()) < 1000
    with pytest.raises(CodecError, match="claims 1000000 bytes where 10 belong"):
        decode(encoded, 10, 4, Reference(), floating=False)


@given(patterns("u4", 30), patterns("u4", 30))
def test_the_integer_maps_are_bijections(values, base):
    assert np.array_equal(unordered(ordered(values)), values)
    assert np.array_equal(restored(difference(values, base), base), values)


def test_neighbouring_floats_are_neighbouring_integers_also_across_zero():
    floats = np.array([-2.0, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 2.0], np.float32)
    signed = ordered(floats.view(np.uint32)).view(np.int32)
    assert (np.diff(signed.astype(np.int64)) > 0).all()
    assert signed[5] - signed[2] == 3


# ---------------------------------------------------------------------- low-rank prediction


def trained_weights(
    *, rows: int, columns: int, rank: int, steps: int, decay: float = 0.0, refresh: bool = False, seed: int = 0
) -> tuple[np.ndarray, Reference]:
    """A float32 matrix after ``steps`` low-rank updates, and what it may be predicted from."""
    generator = np.random.default_rng(seed)
    weight = (generator.standard_normal((rows, columns)) * 0.05).astype(np.float32)
    base = weight.copy()
    bases = [np.linalg.qr(generator.standard_normal((columns, rank)))[0].astype(np.float32) for _ in range(2)]
    for step in range(steps):
        basis = bases[int(refresh and step >= steps // 2)]
        update = generator.standard_normal((rows, rank)).astype(np.float32) * np.float32(1e-3)
        weight = (weight * np.float32(1 - decay) - update @ basis.T).astype(np.float32)
    factors = {"base/projector": bases[0], "projector": bases[1]} if refresh else {"projector": bases[0]}
    return weight.reshape(-1).view(np.uint32), Reference(base.reshape(-1).view(np.uint32), factors, columns, 0)


@pytest.mark.parametrize(
    ("settings", "least"),
    [({}, 2.2), ({"decay": 1e-3}, 2.2), ({"refresh": True}, 1.4)],
    ids=["plain", "decay", "refresh"],
)
def test_low_rank_changes_are_predicted_far_smaller_than_any_other_codec_writes_them(settings, least):
    weights, reference = trained_weights(rows=256, columns=256, rank=32, steps=20, **settings)
    chosen = encode(weights, reference, floating=True)
    other = CODECS["planes"].encode(weights, reference, floating=True, compressor=ZSTD)
    assert chosen.codec == "lowrank"
    assert weights.nbytes / chosen.nbytes > least
    assert chosen.nbytes < 0.75 * other.nbytes


def test_a_range_that_cuts_rows_is_predicted_as_well():
    whole, reference = trained_weights(rows=200, columns=128, rank=8, steps=10)
    for start, stop in [(0, 25600), (37, 25000), (128, 256), (130, 140), (5000, 5001)]:
        part = dataclasses.replace(reference, base=reference.base[start:stop], start=start)
        encoded = CODECS["lowrank"].encode(whole[start:stop], part, floating=True, compressor=ZSTD)
        assert np.array_equal(decode(encoded, stop - start, 4, part, floating=True), whole[start:stop])
        if stop - start > 10_000:
            assert encoded.nbytes < 0.6 * 4 * (stop - start)


def test_special_values_spoil_neither_exactness_nor_their_neighbours():
    weights, reference = trained_weights(rows=128, columns=128, rank=8, steps=10)
    clean = encode(weights, reference, floating=True).nbytes
    spoiled = weights.copy()
    spoiled[5 :: 128 * 16][: len(SPECIAL)] = np.array(SPECIAL[: len(spoiled[5 :: 128 * 16])], np.float32).view(
        np.uint32
    )
    encoded = encode(spoiled, reference, floating=True)
    assert encoded.codec == "lowrank"
    assert np.array_equal(decode(encoded, spoiled.size, 4, reference, floating=True), spoiled)
    assert encoded.nbytes < clean + 8 * 128 * 4  # a value of 3e38 spoils the prediction of its row, and of no other


def test_the_prediction_does_not_depend_on_the_order_of_summation():
    _, reference = trained_weights(rows=64, columns=96, rank=24, steps=10)
    generator = np.random.default_rng(1)
    integers = np.rint(np.ldexp(reference.factors["projector"].astype(np.float64), 22))
    coefficients = generator.integers(-(2**19), 2**19, (64, 24)).astype(np.float64)
    exponents = generator.integers(-30, -20, 64)
    expected, found = np.empty_like(reference.base), np.empty_like(reference.base)
    _predict(coefficients, exponents, integers, 2**29, reference, expected)
    exact = coefficients.astype(object) @ integers.astype(object).T  # Python integers
    assert np.array_equal((coefficients @ integers.T).astype(np.int64), exact.astype(np.int64))
    for _ in range(5):
        order = generator.permutation(24)
        _predict(coefficients[:, order], exponents, integers[:, order], 2**29, reference, found)
        assert np.array_equal(found, expected)


def test_flushing_denormals_changes_no_bit():
    weights, reference = trained_weights(rows=32, columns=64, rank=4, steps=3)
    small = (weights.view(np.float32) * np.float32(1e-37)).view(np.uint32)
    tiny = dataclasses.replace(reference, base=(reference.base.view(np.float32) * np.float32(1e-37)).view(np.uint32))
    assert (np.abs(small.view(np.float32)) < 1.2e-38).mean() > 0.5
    encoded = CODECS["lowrank"].encode(small, tiny, floating=True, compressor=ZSTD)
    assert torch.set_flush_denormal(True)
    try:
        found = decode(encoded, small.size, 4, tiny, floating=True)
        again = CODECS["lowrank"].encode(small, tiny, floating=True, compressor=ZSTD)
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(found, small)
    assert np.array_equal(decode(again, small.size, 4, tiny, floating=True), small)


def test_coefficients_beyond_the_exact_range_are_refused_by_the_decoder():
    weights, reference = trained_weights(rows=8, columns=8, rank=2, steps=2)
    encoded = CODECS["lowrank"].encode(weights, reference, floating=True, compressor=ZSTD)
    huge: dict[str, Any] = {key: part for key, part in encoded.parts.items() if not key.startswith("c")}
    huge["c3r"] = np.full(8 * 2, 0x7F, np.uint8)
    widened = dataclasses.replace(reference, factors={"projector": reference.factors["projector"] * 0 + 4.0})
    with pytest.raises(CodecError, match="exceeds the range in which its prediction is exact"):
        decode(Encoded("lowrank", encoded.params, huge), weights.size, 4, widened, floating=True)


def test_unchanged_tensors_cost_nothing():
    weights, reference = trained_weights(rows=8, columns=8, rank=2, steps=0)
    assert encode(weights, reference, floating=True).nbytes == 0


@pytest.mark.parametrize("shift", [0, 12345])
@pytest.mark.parametrize("kind", ["lowrank", "planes", "same"])
def test_of_a_large_array_the_encoding_that_is_best_on_a_part_is_the_best_of_all(kind, shift):
    whole, reference = trained_weights(rows=1100, columns=512, rank=16, steps=4)
    whole = whole[shift:]
    assert reference.base is not None
    reference = dataclasses.replace(reference, base=reference.base[shift:], start=shift)
    generator = np.random.default_rng(0)
    if kind == "planes":  # changes of all the numbers that no factor explains
        whole = (reference.base.view(np.float32) * (1 + 1e-4 * generator.standard_normal(whole.size))).astype("f4")
        whole = whole.view(np.uint32)
    elif kind == "same":
        whole = reference.base.copy()
    assert whole.size >= 2**19
    best = encode(whole, reference, floating=True)
    assert best.codec == kind
    assert np.array_equal(decode(best, whole.size, 4, reference, floating=True), whole)
    for codec in LOSSLESS.values():
        other = codec.encode(whole, reference, floating=True, compressor=ZSTD)
        assert other is None or best.nbytes <= other.nbytes


def test_repetitions_are_looked_for_where_they_are_and_not_among_exponents():
    generator = np.random.default_rng(0)
    exponents = (generator.standard_normal(2**18).astype("f4").view("u4") >> 23).astype("u1")
    repeated = np.tile(generator.integers(0, 256, 5000, dtype="u1"), 60)
    mixed = np.concatenate([exponents[: 2**16], repeated[: 2**16]])
    for level in (1, 3):
        plain = zstandard.ZstdCompressor(level=level, write_checksum=True)
        ours = Compressor("zstd", level)
        sizes = {
            name: (ours.compress(data).size, len(plain.compress(data.data)))
            for name, data in (
                ("exponents", exponents),
                ("repeated", repeated),
                ("short", repeated[:20000]),
                ("one", exponents[:1]),
            )
        }
        assert sizes["exponents"][0] < 0.95 * sizes["exponents"][1]
        assert all(found <= usual for found, usual in sizes.values()), sizes
        for data in (exponents, repeated, mixed):
            frame = ours.compress(data)
            assert zstandard.get_frame_parameters(frame.data).has_checksum
            assert np.array_equal(decompress(frame, data.size), data)


def test_lz4_gives_the_same_bits_and_damage_to_it_is_told():
    weights, reference = trained_weights(rows=60, columns=64, rank=4, steps=3)
    for codec in ("lowrank", "planes"):
        encoded = CODECS[codec].encode(weights, reference, floating=True, compressor=Compressor("lz4", 1))
        assert encoded is not None
        assert any(name.endswith("l") for name in encoded.parts)
        assert np.array_equal(decode(encoded, weights.size, 4, reference, floating=True), weights)
        name = next(name for name in encoded.parts if name.endswith("l"))
        for cut in (encoded.parts[name][:-1], encoded.parts[name][:7], np.append(encoded.parts[name], np.uint8(0))):
            broken = Encoded(codec, encoded.params, {**encoded.parts, name: cut})
            with pytest.raises(CodecError):
                decode(broken, weights.size, 4, reference, floating=True)
        for position in range(0, encoded.parts[name].size, 7):
            flipped = encoded.parts[name].copy()
            flipped[position] ^= 4
            broken = Encoded(codec, encoded.params, {**encoded.parts, name: flipped})
            with contextlib.suppress(CodecError):
                assert np.array_equal(decode(broken, weights.size, 4, reference, floating=True), weights)


@given(values=hnp.arrays(np.float32, st.integers(1, 700), elements=st.floats(-1e6, 1e6, width=32)))
@settings(max_examples=100, deadline=None)
def test_int8_blocks_are_off_by_half_a_level_at_most(values):
    encoded = CODECS["int8"].encode(values.view(np.uint32), Reference(), floating=True, compressor=ZSTD)
    assert encoded is not None
    found = decode(encoded, values.size, 4, Reference(), floating=True).view(np.float32)
    again = CODECS["int8"].encode(found.view(np.uint32), Reference(), floating=True, compressor=ZSTD)
    assert again is not None
    for begin in range(0, values.size, 256):
        block, decoded = values[begin : begin + 256].astype(float), found[begin : begin + 256].astype(float)
        largest = np.abs(block).max()
        if (values >= 0).all():
            block, decoded, largest = np.sqrt(block), np.sqrt(decoded), np.sqrt(largest)
            assert ((decoded > 0) == (block > 0)).all() or largest < 2.0**-110
            assert np.abs(decoded - block).max() <= max(1.001 * largest / 255, 2.0**-110)
        else:
            assert np.abs(decoded - block).max() <= max(0.501 * largest / 127, 2.0**-110)


def test_int8_refuses_what_is_not_finite():
    for value in (np.nan, np.inf):
        bits = np.array([1.0, value], np.float32).view(np.uint32)
        assert CODECS["int8"].encode(bits, Reference(), floating=True, compressor=ZSTD) is None


# ---------------------------------------------------------------------- compiled loops


@contextlib.contextmanager
def in_numpy():
    there, words.compiled = words.compiled, None
    try:
        yield
    finally:
        words.compiled = there


@st.composite
def words_of_any_size(draw):
    """Words and a base, across blocks of the loops, at any alignment."""
    width = draw(st.sampled_from([1, 2, 4, 8]))
    numel = draw(st.integers(0, 40) | st.sampled_from([2047, 2048, 2049, 5000]))
    begin = draw(st.integers(0, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    few = draw(st.booleans())  # planes of zeros
    data = rng.integers(0, 3 if few else 256, (2, (numel + 1) * width + 8), np.uint8)
    if few:
        data[:, np.arange(data.shape[1]) % width != 0] = 0
    values, base = (each[begin : begin + numel * width].view(f"u{width}") for each in data)
    return values, base


def test_the_loops_are_compiled_where_tests_run():
    assert words.compiled is not None, "pip install --editable . compiles them; its output (-v) has the reason"


@pytest.mark.parametrize("how", list(How))
@given(case=words_of_any_size())
@settings(max_examples=100, deadline=None)
def test_compiled_loops_and_numpy_agree_bit_for_bit(how, case):
    values, base = case
    base = base if how >= How.DIFFERENCE else None
    planes = split(values, how, base)
    with in_numpy():
        expected = split(values, how, base)
        out = np.zeros_like(values)
        join(planes, out, how, base)
        assert np.array_equal(out, values)
    for plane, other in zip(planes, expected, strict=True):
        assert (plane is None) == (other is None)
        assert plane is None or np.array_equal(plane, other)
    out = np.zeros_like(values)
    join(planes, out, how, base)
    assert np.array_equal(out, values)


@given(case=words_of_any_size().filter(lambda case: case[0].itemsize == 4))
@settings(max_examples=100, deadline=None)
def test_compiled_loops_and_numpy_sort_by_exponents_alike(case):
    values, prediction = case
    planes = split_sorted(values, prediction)
    with in_numpy():
        expected = split_sorted(values, prediction)
        own = prediction.copy()
        join_sorted(planes, own)
        assert np.array_equal(own, values)
    for plane, other in zip(planes, expected, strict=True):
        assert (plane is None) == (other is None)
        assert plane is None or np.array_equal(plane, other)
    own = prediction.copy()
    join_sorted(planes, own)
    assert np.array_equal(own, values)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("name", sorted(CODECS))
@given(case=cases())
@settings(max_examples=100, deadline=None)
def test_a_codec_writes_the_same_bytes_compiled_and_in_numpy(name, case):
    bits, reference, floating = case
    encoded = CODECS[name].encode(bits, reference, floating=floating, compressor=ZSTD)
    with in_numpy():
        expected = CODECS[name].encode(bits, reference, floating=floating, compressor=ZSTD)
    if encoded is None or expected is None:
        assert encoded is expected
        return
    assert dict(encoded.params) == dict(expected.params)
    assert {key: part.tobytes() for key, part in encoded.parts.items()} == {
        key: part.tobytes() for key, part in expected.parts.items()
    }
    width = bits.dtype.itemsize
    out = np.zeros_like(bits)
    found = decode(encoded, bits.size, width, reference, floating=floating, out=out)
    assert found is out
    with in_numpy():
        other = np.zeros_like(bits)
        assert decode(encoded, bits.size, width, reference, floating=floating, out=other) is other
        assert np.array_equal(decode(encoded, bits.size, width, reference, floating=floating), found)
    assert np.array_equal(found, other)


def test_large_low_rank_differences_are_the_same_compiled_and_in_numpy():
    weights, reference = trained_weights(rows=700, columns=300, rank=8, steps=5)
    part = slice(123, weights.size - 77)  # rows at both ends that are held in part
    reference = dataclasses.replace(reference, base=reference.base[part], start=123)
    encoded = CODECS["lowrank"].encode(weights[part], reference, floating=True, compressor=ZSTD)
    with in_numpy():
        expected = CODECS["lowrank"].encode(weights[part], reference, floating=True, compressor=ZSTD)
        found = decode(encoded, encoded_size := weights[part].size, 4, reference, floating=True)
    assert {key: part.tobytes() for key, part in encoded.parts.items()} == {
        key: part.tobytes() for key, part in expected.parts.items()
    }
    assert np.array_equal(found, weights[part])
    assert np.array_equal(decode(encoded, encoded_size, 4, reference, floating=True), weights[part])


PLANES = tuple(np.zeros(4, np.uint8) for _ in range(4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c, four: c.split(four, None, 0, 3, PLANES), "words of 3 bytes"),
        (lambda c, four: c.split(four, None, 2, 4, PLANES), "how is 2, without base"),
        (lambda c, four: c.split(four, four, 0, 4, PLANES), "how is 0, with a base"),
        (lambda c, four: c.split(four, four[:3], 2, 4, PLANES), "base has 12 bytes where 16 belong"),
        (lambda c, four: c.split(four, None, 0, 4, PLANES[:3]), "3 planes of words of 4 bytes"),
        (lambda c, four: c.split(four, None, 0, 4, (*PLANES[:3], PLANES[0][:3])), "a plane has 3 bytes where 4 belong"),
        (lambda c, four: c.split(four, None, 0, 4, (*PLANES[:3], None)), "bytes-like object"),
        (lambda c, four: c.split(four, None, 0, 4, (*PLANES[:3], b"four")), "not writable"),
        (lambda c, four: c.split(np.zeros(15, np.uint8), None, 0, 4, PLANES), "values has 15 bytes"),
        (lambda c, four: c.join((None,) * 3, None, 0, 4, four), "3 planes of words of 4 bytes"),
        (lambda c, four: c.join((None, np.zeros(5, np.uint8)) * 2, None, 0, 4, four), "a plane has 5 bytes where 4"),
        (lambda c, four: c.join((None, np.zeros(4, np.uint8), 7, None), None, 0, 4, four), "bytes-like object"),
        (lambda c, four: c.join((None,) * 4, four[:1], 3, 4, four), "base has 4 bytes where 16 belong"),
        (lambda c, four: c.split_sorted(four, four[:2], PLANES), "prediction has 8 bytes where 16 belong"),
        (lambda c, four: c.join_sorted((None,) * 4, np.zeros(15, np.uint8)), "prediction has 15 bytes where 12"),
        (lambda c, four: c.predict(np.zeros(6), np.ones(2), four, 1.0, 3, 3, four), "begins in column 3 of 3"),
        (
            lambda c, four: c.predict(np.zeros(5), np.ones(2), four, 1.0, 0, 3, four),
            "product has 40 bytes where 2 rows of 3 belong",
        ),
        (lambda c, four: c.predict(np.zeros(5), np.ones(1), four, 1.0, 2, 5, four), "4 elements from column 2 on"),
        (lambda c, four: c.change(four, four, 1.0, four), "out has 16 bytes where 32 belong"),
    ],
)
def test_compiled_loops_touch_nothing_outside_of_what_they_get(call, message):
    with pytest.raises((ValueError, TypeError, BufferError), match=message):
        call(words.compiled, np.zeros(4, np.uint32))


def test_planes_that_are_kept_as_they_are_hold_no_other_memory():
    bits = np.random.default_rng(0).integers(0, 2**32, 5000, np.uint32)
    for encoded in (
        CODECS["planes"].encode(bits, Reference(), floating=True, compressor=ZSTD),
        CODECS["planes"].encode(bits, Reference(bits[::-1].copy()), floating=True, compressor=ZSTD),
    ):
        assert any(name.endswith("r") for name in encoded.parts)
        for name, part in encoded.parts.items():
            assert not name.endswith("r") or part.base is None, name


def test_a_prediction_that_changes_meanwhile_is_refused_and_nothing_is_written_outside():
    values, prediction = np.full(1000, 0xFFFFFFFF, np.uint32), np.zeros(1000, np.uint32)
    planes = tuple(prediction[250 * number : 250 * (number + 1)].view(np.uint8) for number in range(4))  # over it
    with pytest.raises(ValueError, match="the prediction was changed meanwhile"):
        words.compiled.split_sorted(values, prediction, planes)
