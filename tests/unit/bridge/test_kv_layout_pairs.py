"""L0 of the equality ladder: layout -> wire -> layout is bit-exact for every ordered pair of layouts, whatever the page sizes, head shards,
dtype, ranges and memory order on each side, and touches nothing else. Cases 1, 3, 4, 5 and 10.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pddbridge import kv_convert
from pddbridge.engine import KVBlock
from pddbridge.kv_convert import KVPool, read_block, read_blocks, write_blocks
from pddbridge.kv_layout import KVLayout, shard_heads
from pddbridge.kv_layout_catalogue import GQA_LAYOUTS, MLA_LAYOUTS, with_scales
from pddbridge.kv_shards import read_shards, write_shards
from pddbridge.kv_spec import KV_DTYPES, HeadRange, KVSpec, LayerRange, TokenRange
from tests.support.kv import bits, canary_pool, fill_slowly, random_planes, same_pools
from tests.support.movers import moved_by as moved_by

PAGE_SIZES = (1, 8, 12, 16, 32, 128)
SHARDS = (1, 2, 3, 4, 8)
HEADS = (1, 2, 3, 4, 6, 8, 12, 24)
# Layers of their own; all layers of a page together, as some engines allocate them; every axis in reverse, dim slowest.
MEMORY = ("own", "layers in pages", "reversed")


@dataclass(frozen=True)
class Side:
    page_size: int
    num_shards: int
    memory: str
    scattered: bool


@dataclass(frozen=True)
class Case:
    source: Side
    target: Side
    num_heads: int
    head_dim: int
    num_layers: int
    dtype: str
    tokens: TokenRange
    layers: LayerRange
    heads: HeadRange
    seed: int


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[str, ...], max_heads: int = 24) -> Case:
    source, target = (
        Side(draw(st.sampled_from(PAGE_SIZES)), draw(st.sampled_from(SHARDS)), draw(st.sampled_from(MEMORY)), draw(st.booleans()))
        for _ in range(2)
    )
    fitting = [h for h in HEADS if h <= max_heads and all(h % s.num_shards == 0 or s.num_shards % h == 0 for s in (source, target))]
    num_heads, num_layers = draw(st.sampled_from(fitting)), draw(st.integers(1, 3))
    start, layer, head = draw(st.integers(0, 140)), draw(st.integers(0, num_layers - 1)), draw(st.integers(0, num_heads - 1))
    return Case(
        source,
        target,
        num_heads,
        draw(st.sampled_from((2, 5, 64))),
        num_layers,
        draw(st.sampled_from(dtypes)),
        TokenRange(start, start + draw(st.integers(0, 300))),
        LayerRange(layer, draw(st.integers(layer + 1, num_layers))),
        HeadRange(head, draw(st.integers(head + 1, num_heads))),
        draw(st.integers(0, 2**16)),
    )


ONE_SHARD = Side(4, 1, "own", True)
SQUARE = Case(ONE_SHARD, ONE_SHARD, 4, 5, 2, "float32", TokenRange(3, 21), LayerRange(0, 2), HeadRange(0, 4), 1)
TWO_HEADS = Case(
    Side(16, 1, "own", False),
    Side(12, 4, "layers in pages", True),
    2,
    2,
    2,
    "bfloat16",
    TokenRange(5, 47),
    LayerRange(0, 2),
    HeadRange(0, 2),
    2,
)
ONE_TOKEN = Case(
    Side(8, 3, "own", True),
    Side(12, 1, "reversed", True),
    3,
    5,
    2,
    "float8_e4m3fn",
    TokenRange(12, 13),
    LayerRange(1, 2),
    HeadRange(1, 3),
    3,
)
NOTHING = replace(SQUARE, tokens=TokenRange(16, 16), dtype="float16", seed=4)
PAGES_OF_ONE = Case(
    Side(1, 1, "own", True), Side(32, 2, "own", False), 2, 2, 1, "float8_e5m2", TokenRange(1, 68), LayerRange(0, 1), HeadRange(0, 1), 5
)


def pools_of(make: Callable[[int, str], KVLayout], spec: KVSpec, side: Side, num_pages: int) -> list[KVPool]:
    """One canary pool per shard. Latent planes have one head, which every shard holds."""
    layout = make(side.page_size, spec.dtype)
    if layout.fused and len(spec.groups[0].planes) > 2:
        layout = with_scales(layout, spec)
    num_heads = spec.groups[0].planes[0].num_heads
    pools = []
    for shard in range(side.num_shards):
        pool = canary_pool(replace(layout, heads=shard_heads(num_heads, shard, side.num_shards)), spec, num_pages)
        pools.append(pool if side.memory == "own" else KVPool(pool.layout, spec, in_memory(pool, side.memory)))
    return pools


def in_memory(pool: KVPool, memory: str) -> tuple[tuple[np.ndarray, ...], ...]:
    """The pool's arrays as views of another order of memory."""
    arrays: list[list[np.ndarray]] = [[] for _ in pool.arrays]
    for which in range(len(pool.arrays[0])):
        layers = [layer[which] for layer in pool.arrays]
        if memory == "layers in pages":
            stacked = np.stack(layers, axis=1)
            views = [stacked[:, i] for i in range(len(layers))]
        elif pool.layout.packed is None:
            views = [np.asfortranarray(layer) for layer in layers]
        else:  # pack must stay inside its axis
            views = [layer.swapaxes(0, 1).copy().swapaxes(0, 1) if pool.layout.packed != "slot" else layer for layer in layers]
        for kept, view in zip(arrays, views, strict=True):
            kept.append(view)
    return tuple(tuple(layer) for layer in arrays)


def page_table(tokens: TokenRange, side: Side, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """A table for ``tokens`` in a pool with pages to spare."""
    num_pages = tokens.stop // side.page_size + 3
    return (rng.permutation(num_pages)[:-1] if side.scattered else np.arange(1, num_pages)).astype(np.int32), num_pages


def check(source_make: Callable[[int, str], KVLayout], target_make: Callable[[int, str], KVLayout], spec: KVSpec, case: Case) -> None:
    rng = np.random.default_rng(case.seed)
    planes = random_planes(spec, case.tokens.stop, case.seed)
    source_table, num_pages = page_table(case.tokens, case.source, rng)
    sources = pools_of(source_make, spec, case.source, num_pages)
    for pool in sources:
        assert pool.layout.heads is not None
        fill_slowly(pool, source_table, planes, LayerRange(0, case.num_layers), TokenRange(0, case.tokens.stop), pool.layout.heads)

    target_table, num_pages = page_table(case.tokens, case.target, rng)
    targets = pools_of(target_make, spec, case.target, num_pages)
    expected = pools_of(target_make, spec, case.target, num_pages)
    for pool in expected:
        assert pool.layout.heads is not None
        heads = overlap(pool.layout.heads, case.heads)
        if heads is not None:
            fill_slowly(pool, target_table, planes, case.layers, case.tokens, heads)

    for pool in sources:
        assert pool.layout.heads is not None
        heads = overlap(pool.layout.heads, case.heads)
        for plane, values in planes.items() if heads is not None else ():
            assert heads is not None
            block = read_block(pool, source_table, plane, case.layers, case.tokens, heads)
            want = values[
                case.layers.start : case.layers.stop, case.tokens.start : case.tokens.stop, heads.start : min(heads.stop, values.shape[2])
            ]
            assert np.array_equal(bits(block.values), bits(want))
            write_shards(targets, target_table, block)
    for target, want_pool in zip(targets, expected, strict=True):
        assert same_pools(target, want_pool)
    for block in read_shards(sources, source_table, case.tokens):
        want = planes[block.plane][:, case.tokens.start : case.tokens.stop, block.heads.start : block.heads.stop]
        assert np.array_equal(bits(block.values), bits(want))


def overlap(stored: HeadRange, wanted: HeadRange) -> HeadRange | None:
    start, stop = max(stored.start, wanted.start), min(stored.stop, wanted.stop)
    return HeadRange(start, stop) if start < stop else None


ALWAYS = (SQUARE, TWO_HEADS, ONE_TOKEN, NOTHING, PAGES_OF_ONE)
GQA_PAIRS = [(a, b) for a in GQA_LAYOUTS for b in GQA_LAYOUTS]
MLA_PAIRS = [(a, b) for a in MLA_LAYOUTS for b in MLA_LAYOUTS]


def check_gqa(source: str, target: str, max_examples: int) -> None:
    @settings(max_examples=max_examples, deadline=None)
    @given(cases(tuple(name for name in KV_DTYPES if name != "int8")))
    def drawn(case: Case) -> None:
        check(GQA_LAYOUTS[source], GQA_LAYOUTS[target], KVSpec.gqa(case.num_layers, case.num_heads, case.head_dim, case.dtype), case)

    for case in ALWAYS:
        drawn = example(case)(drawn)
    drawn()


def check_scaled(source: str, target: str, max_examples: int) -> None:
    @settings(max_examples=max_examples, deadline=None)
    @given(cases(("int8", "float8_e4m3fn")), st.sampled_from(("float32", "bfloat16")), st.booleans())
    @example(replace(SQUARE, dtype="int8"), "float32", False)
    @example(replace(TWO_HEADS, dtype="int8"), "bfloat16", True)
    @example(replace(ONE_TOKEN, dtype="int8"), "float32", False)
    @example(replace(NOTHING, dtype="int8"), "float32", True)
    def drawn(case: Case, scale_dtype: str, per_half: bool) -> None:
        scales = 2 if per_half and case.head_dim % 2 == 0 else 1
        spec = KVSpec.gqa_scaled(case.num_layers, case.num_heads, case.head_dim, case.dtype, scale_dtype, scales)
        check(GQA_LAYOUTS[source], GQA_LAYOUTS[target], spec, case)

    drawn()


def check_mla(source: str, target: str, max_examples: int) -> None:
    @settings(max_examples=max_examples, deadline=None)
    @given(cases(("float32", "bfloat16", "float8_e4m3fn"), max_heads=1), st.sampled_from(((5, 3), (512, 64), (2, 2))))
    @example(replace(SQUARE, num_heads=1, heads=HeadRange(0, 1)), (5, 3))
    @example(replace(TWO_HEADS, num_heads=1, heads=HeadRange(0, 1)), (512, 64))
    @example(replace(ONE_TOKEN, num_heads=1, heads=HeadRange(0, 1)), (5, 3))
    @example(replace(NOTHING, num_heads=1, heads=HeadRange(0, 1)), (5, 3))
    def drawn(case: Case, dims: tuple[int, int]) -> None:
        spec = KVSpec.mla(case.num_layers, *dims, case.dtype)
        pack = 4 // spec.np_dtype.itemsize
        case = replace(
            case,
            source=replace(case.source, page_size=-(-case.source.page_size // pack) * pack),
            target=replace(case.target, page_size=-(-case.target.page_size // pack) * pack),
        )
        check(MLA_LAYOUTS[source], MLA_LAYOUTS[target], spec, case)

    drawn()


@pytest.mark.parametrize(("source", "target"), GQA_PAIRS)
def test_every_pair_is_bit_exact(source: str, target: str) -> None:
    check_gqa(source, target, 2)


@pytest.mark.parametrize(("source", "target"), [(a, b) for i, (a, b) in enumerate(GQA_PAIRS) if i % 7 == 0])
def test_pairs_are_bit_exact_with_scales(source: str, target: str) -> None:
    check_scaled(source, target, 2)


@pytest.mark.parametrize(("source", "target"), MLA_PAIRS)
def test_every_pair_is_bit_exact_for_latent_planes(source: str, target: str) -> None:
    check_mla(source, target, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), GQA_PAIRS)
def test_every_pair_is_bit_exact_at_length(source: str, target: str) -> None:
    check_gqa(source, target, 40)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), GQA_PAIRS)
def test_every_pair_is_bit_exact_with_scales_at_length(source: str, target: str) -> None:
    check_scaled(source, target, 15)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), MLA_PAIRS)
def test_every_pair_is_bit_exact_for_latent_planes_at_length(source: str, target: str) -> None:
    check_mla(source, target, 40)


@pytest.mark.parametrize("name", GQA_LAYOUTS)
def test_reading_into_given_memory_is_the_same_and_wrong_memory_is_refused(name: str) -> None:
    spec = KVSpec.gqa(2, 3, 4, "bfloat16")
    tokens = TokenRange(5, 40)
    planes = random_planes(spec, tokens.stop, 3)
    table = np.array([3, 1, 4])
    pool = canary_pool(GQA_LAYOUTS[name](16, "bfloat16"), spec, 5)
    fill_slowly(pool, table, planes, LayerRange(0, 2), TokenRange(0, 40), HeadRange(0, 3))
    out = np.zeros((2, 2, 35, 3, 4), spec.np_dtype)
    blocks = read_blocks(pool, table, tokens, out=list(out))
    for i, block in enumerate(blocks):
        assert np.shares_memory(block.values, out[i])
        assert np.array_equal(bits(out[i]), bits(planes[block.plane][:, 5:40]))
    one = np.zeros((1, 35, 2, 4), spec.np_dtype)
    assert read_block(pool, table, "v", LayerRange(1, 2), tokens, HeadRange(1, 3), out=one).values is one
    assert np.array_equal(bits(one), bits(planes["v"][1:, 5:40, 1:]))
    frozen = one.copy()
    frozen.flags.writeable = False
    for wrong in (one[:, :34], one.astype(np.float16), np.zeros((1, 35, 4, 2), spec.np_dtype).swapaxes(2, 3), frozen):
        with pytest.raises(ValueError, match="out: given"):
            read_block(pool, table, "v", LayerRange(1, 2), tokens, HeadRange(1, 3), out=wrong)


@pytest.mark.parametrize("name", GQA_LAYOUTS)
def test_long_reads_go_in_turns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes that share an array are read piece by piece; pieces that do not divide the whole, and planes of unequal size, among them."""
    monkeypatch.setattr(kv_convert, "_TURN_BYTES", 100)
    spec = KVSpec.gqa_scaled(2, 3, 6, "int8")
    tokens = TokenRange(3, 45)
    planes = random_planes(spec, tokens.stop, 8)
    table = np.array([5, 2, 0, 4, 3, 1])
    pool = canary_pool(with_scales(GQA_LAYOUTS[name](8, "int8"), spec), spec, 6)
    fill_slowly(pool, table, planes, LayerRange(0, 2), TokenRange(0, tokens.stop), HeadRange(0, 3))
    for block in read_blocks(pool, table, tokens):
        assert np.array_equal(bits(block.values), bits(planes[block.plane][:, 3:45]))


def test_layers_may_differ_in_strides() -> None:
    spec = KVSpec.gqa(3, 2, 4, "float16")
    tokens = TokenRange(1, 30)
    planes = random_planes(spec, tokens.stop, 9)
    table = np.array([1, 3])
    dense = canary_pool(GQA_LAYOUTS["vllm_nhd"](16, "float16"), spec, 5)
    wide = np.zeros((2, 5, 2, 16, 2, 4), np.float16)
    pool = KVPool(dense.layout, spec, (dense.arrays[0], (wide[:, :, 1],), dense.arrays[2]))
    fill_slowly(pool, table, planes, LayerRange(0, 3), TokenRange(0, 30), HeadRange(0, 2))
    blocks = read_blocks(pool, table, tokens)
    for block in blocks:
        assert np.array_equal(bits(block.values), bits(planes[block.plane][:, 1:30]))
    other = KVPool(dense.layout, spec, ((wide[:, :, 0],), dense.arrays[1], dense.arrays[2]))
    write_blocks(other, table, blocks)
    for layer in range(3):
        again = read_block(other, table, "v", LayerRange(layer, layer + 1), tokens, HeadRange(0, 2))
        assert np.array_equal(bits(again.values[0]), bits(planes["v"][layer, 1:30]))


def test_blocks_are_written_together_or_not_at_all() -> None:
    spec = KVSpec.gqa(3, 2, 4, "float16")
    planes = random_planes(spec, 20, 2)
    table = np.array([1, 3, 0])
    pool, expected = (canary_pool(GQA_LAYOUTS["interleaved_heads"](8, "float16"), spec, 5) for _ in range(2))
    blocks = []
    for plane, layers, tokens in (("k", LayerRange(0, 2), TokenRange(2, 20)), ("v", LayerRange(1, 3), TokenRange(0, 9))):
        values = planes[plane][layers.start : layers.stop, tokens.start : tokens.stop]
        blocks.append(KVBlock(plane, layers, tokens, HeadRange(0, 2), np.ascontiguousarray(values)))
        fill_slowly(expected, table, planes, layers, tokens, HeadRange(0, 2), only=plane)
    untouched = canary_pool(pool.layout, spec, 5)
    with pytest.raises(ValueError, match="C-contiguous"):
        write_blocks(pool, table, [blocks[0], replace(blocks[1], values=np.asfortranarray(blocks[1].values))])
    assert same_pools(pool, untouched)
    write_blocks(pool, table, blocks)
    assert same_pools(pool, expected)


def test_case_21_shards_are_read_in_the_order_of_their_heads_and_each_head_once() -> None:
    """Case 21, without a framework: shards in any order, replicas among them."""
    spec = KVSpec.gqa(1, 4, 2, "float32")
    planes = random_planes(spec, 9, 1)
    table = np.array([1, 0])
    heads = [HeadRange(2, 4), HeadRange(0, 2), HeadRange(2, 4), HeadRange(0, 2)]
    layout = GQA_LAYOUTS["interleaved_heads"](8, "float32")
    pools = [canary_pool(replace(layout, heads=h), spec, 2) for h in heads]
    for pool, h in zip(pools, heads, strict=True):
        fill_slowly(pool, table, planes, LayerRange(0, 1), TokenRange(0, 9), h)
    blocks = read_shards(pools, table, TokenRange(0, 9))
    assert [(b.plane, b.heads) for b in blocks] == [(p, h) for p in "kv" for h in (HeadRange(0, 2), HeadRange(2, 4))]
    for name in "kv":
        together = np.concatenate([b.values for b in blocks if b.plane == name], axis=2)
        assert np.array_equal(bits(together), bits(planes[name]))
    overlapping = [canary_pool(replace(layout, heads=h), spec, 2) for h in (HeadRange(2, 4), HeadRange(0, 3))]
    assert [b.heads for b in read_shards(overlapping, table, TokenRange(0, 9))] == [HeadRange(0, 3), HeadRange(3, 4)] * 2
    with pytest.raises(ValueError, match=r"heads \[2\] of plane 'k'"):
        read_shards([canary_pool(replace(layout, heads=h), spec, 2) for h in (HeadRange(0, 2), HeadRange(3, 4))], table, TokenRange(0, 9))
    with pytest.raises(ValueError, match=r"heads \[0, 1\] of plane 'k'"):
        write_shards([pools[0]], table, KVBlock("k", LayerRange(0, 1), TokenRange(0, 9), HeadRange(0, 4), planes["k"]))
