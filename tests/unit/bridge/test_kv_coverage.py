"""What is taken of a transfer, against one bool per cell."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pddbridge.kv_coverage import Coverage, Rectangle
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange

LAYERS = 3
TOKENS = TokenRange(5, 12)


def ranges(start: int, stop: int) -> st.SearchStrategy[tuple[int, int]]:
    """Not empty, within."""
    return st.tuples(st.integers(start, stop - 1), st.integers(start + 1, stop)).map(lambda pair: (min(pair), max(pair))).filter(len_of)


def len_of(pair: tuple[int, int]) -> int:
    return pair[1] - pair[0]


@st.composite
def shards(draw: st.DrawFn) -> tuple[int, HeadRange, list[tuple[int, LayerRange, TokenRange, HeadRange]]]:
    """All heads of a plane, a shard of them, and rectangles in it: bytes that are full, that are not, and several of them."""
    num_heads = draw(st.sampled_from([1, 2, 3, 7, 8, 9, 16, 20]))
    shard = HeadRange(*draw(ranges(0, num_heads)))
    rectangle = st.tuples(
        st.integers(0, 1),
        ranges(0, LAYERS).map(lambda pair: LayerRange(*pair)),
        ranges(TOKENS.start, TOKENS.stop).map(lambda pair: TokenRange(*pair)),
        ranges(shard.start, shard.stop).map(lambda pair: HeadRange(*pair)),
    )
    return num_heads, shard, draw(st.lists(rectangle, max_size=8))


def cells_of(model: np.ndarray, shard: HeadRange, rectangle: Rectangle) -> np.ndarray:
    _, plane, layers, tokens, heads = rectangle
    return model[
        plane,
        tokens.start - TOKENS.start : tokens.stop - TOKENS.start,
        layers.start : layers.stop,
        heads.start - shard.start : heads.stop - shard.start,
    ]


@given(shards())
def test_it_knows_every_cell(drawn: tuple[int, HeadRange, list[tuple[int, LayerRange, TokenRange, HeadRange]]]) -> None:
    num_heads, shard, rectangles = drawn
    coverage = Coverage(KVSpec.gqa(LAYERS, num_heads, 8, "float32"), TOKENS, shard)
    model = np.zeros((2, len(TOKENS), LAYERS, len(shard)), np.bool_)
    for plane, layers, tokens, heads in rectangles:
        rectangle = (0, plane, layers, tokens, heads)
        cells = cells_of(model, shard, rectangle)
        assert coverage.any_taken(*rectangle) == cells.any()
        free = np.zeros_like(model)
        for part in coverage.free_within(*rectangle):
            cells_of(free, shard, part)[...] = True
        assert np.array_equal(cells_of(free, shard, rectangle), ~cells)
        assert free.sum() == (~cells).sum()
        if not coverage.take(*rectangle):
            assert cells.any()
            coverage.mark(*rectangle)
        cells[...] = True
        assert coverage.num_free == (~model).sum()
    taken = np.zeros(model.shape, np.int64)
    for part in coverage.taken():
        cells_of(taken, shard, part)[...] += 1
    assert np.array_equal(taken, model.astype(np.int64)), "disjoint, and all of it"


def test_what_lies_outside_is_marked_as_far_as_it_lies_inside() -> None:
    coverage = Coverage(KVSpec.gqa(LAYERS, 12, 8, "float32"), TOKENS, HeadRange(3, 12))
    coverage.mark(0, 0, LayerRange(0, LAYERS), TokenRange(0, 7), HeadRange(0, 4))
    assert list(coverage.taken()) == [(0, 0, LayerRange(0, LAYERS), TokenRange(5, 7), HeadRange(3, 4))]
    coverage.mark(0, 0, LayerRange(0, LAYERS), TokenRange(0, 5), HeadRange(0, 12))
    coverage.mark(0, 0, LayerRange(0, LAYERS), TokenRange(5, 12), HeadRange(0, 3))
    assert coverage.num_free == 2 * LAYERS * 7 * 9 - LAYERS * 2


def test_whole_chunks_come_back_as_one_rectangle_per_plane() -> None:
    spec = KVSpec.gqa(LAYERS, 10, 8, "float32")
    coverage = Coverage(spec, TOKENS)
    for plane in (0, 1):
        for start in (5, 7):
            assert coverage.take(0, plane, LayerRange(0, LAYERS), TokenRange(start, start + 2), HeadRange(0, 10))
    whole = (LayerRange(0, LAYERS), TokenRange(5, 9), HeadRange(0, 10))
    assert list(coverage.taken()) == [(0, 0, *whole), (0, 1, *whole)]


def test_a_cell_is_taken_once() -> None:
    coverage = Coverage(KVSpec.gqa(LAYERS, 9, 8, "float32"), TOKENS)
    assert coverage.take(0, 0, LayerRange(0, 1), TokenRange(5, 6), HeadRange(7, 9))
    free = coverage.num_free
    assert not coverage.take(0, 0, LayerRange(0, 1), TokenRange(5, 6), HeadRange(0, 9))
    assert coverage.num_free == free
    assert coverage.take(0, 0, LayerRange(0, 1), TokenRange(5, 6), HeadRange(0, 7))
    assert not coverage.any_taken(0, 0, LayerRange(1, 2), TokenRange(5, 6), HeadRange(0, 9))


def test_heads_that_the_plane_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="has 4 heads"):
        Coverage(KVSpec.gqa(LAYERS, 4, 8, "float32"), TOKENS, HeadRange(2, 5))
