"""Blocks, pools and page tables: what is cut, told apart and refused. Cases 4 and 5. Every pair of layouts: test_kv_layout_pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pddbridge.engine import KVBlock
from pddbridge.kv_block import split_block
from pddbridge.kv_convert import KVPool, read_block, read_blocks, write_block
from pddbridge.kv_layout import KVLayout, head_major, interleaved_heads, shard_heads, token_major
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from tests.support.kv import canary_pool, coded_planes, fill_slowly, same_pools
from tests.support.movers import moved_by as moved_by


@given(st.integers(1, 4), st.integers(0, 9), st.integers(1, 4), st.integers(8, 400))
@settings(max_examples=60, deadline=None)
def test_split_parts_are_small_contiguous_and_whole(num_layers: int, num_tokens: int, num_heads: int, max_bytes: int) -> None:
    values = np.arange(num_layers * num_tokens * num_heads * 4, dtype=np.float16).reshape(num_layers, num_tokens, num_heads, 4)
    block = KVBlock("k", LayerRange(2, 2 + num_layers), TokenRange(7, 7 + num_tokens), HeadRange(1, 1 + num_heads), values)
    parts = list(split_block(block, max_bytes))
    again = np.full_like(values, -1)
    for part in parts:
        assert 0 < part.values.nbytes <= max_bytes
        assert part.values.flags.c_contiguous
        assert np.shares_memory(part.values, values)
        where = again[
            part.layers.start - 2 : part.layers.stop - 2,
            part.tokens.start - 7 : part.tokens.stop - 7,
            part.heads.start - 1 : part.heads.stop - 1,
        ]
        assert (where == -1).all()
        where[...] = part.values
    assert np.array_equal(again, values)


def test_split_refuses_a_head_larger_than_a_part() -> None:
    block = KVBlock("k", LayerRange(0, 1), TokenRange(0, 1), HeadRange(0, 1), np.zeros((1, 1, 1, 8), np.float32))
    with pytest.raises(ValueError, match="32 bytes, max_bytes is 31"):
        list(split_block(block, 31))


def test_cases_4_and_5_equal_shapes_are_read_by_their_tags() -> None:
    """Cases 4 and 5: two KV heads, two planes, pages of two: five readings of one array [3, 2, 2, 2, 5], told apart by axis names."""
    spec = KVSpec.gqa(1, 2, 5, "float32")
    array = np.arange(3 * 2 * 2 * 2 * 5, dtype=np.float32).reshape(3, 2, 2, 2, 5)
    table = np.array([2, 0], np.int32)
    read = {}
    for axes in (
        ("page", "plane", "slot", "head", "dim"),
        ("page", "plane", "head", "slot", "dim"),
        ("page", "slot", "plane", "head", "dim"),
        ("page", "head", "plane", "slot", "dim"),
        ("page", "slot", "head", "plane", "dim"),
    ):
        pool = KVPool(KVLayout("fused", 1, axes, 2, "float32"), spec, ((array,),))
        for p, name in enumerate("kv"):
            values = read_block(pool, table, name, LayerRange(0, 1), TokenRange(0, 4), HeadRange(0, 2)).values
            for token in range(4):
                for head in range(2):
                    index = {"page": int(table[token // 2]), "plane": p, "slot": token % 2, "head": head}
                    assert np.array_equal(values[0, token, head], array[tuple(index[a] for a in axes[:-1])])
            read[axes, name] = values.tobytes()
    assert len(set(read.values())) == len(read)


def test_fused_and_separate_with_four_rows_are_read_by_their_tags() -> None:
    """[pages, slot, 4, dim] is two interleaved heads of K and V, or four heads of one plane."""
    array = np.arange(2 * 3 * 4 * 2, dtype=np.float32).reshape(2, 3, 4, 2)
    table = np.array([1, 0], np.int32)
    fused = KVPool(interleaved_heads(3, "float32"), KVSpec.gqa(1, 2, 2, "float32"), ((array,),))
    split = KVPool(token_major(3, "float32"), KVSpec.gqa(1, 4, 2, "float32"), ((array, array),))
    k, v = read_blocks(fused, table, TokenRange(0, 1))
    assert np.array_equal(k.values[0, 0], array[1, 0, [0, 2]])
    assert np.array_equal(v.values[0, 0], array[1, 0, [1, 3]])
    assert np.array_equal(read_blocks(split, table, TokenRange(0, 1))[0].values[0, 0], array[1, 0])


@pytest.mark.parametrize(
    "axes",
    [
        (),
        ("page", "slot", "head"),
        ("page", "slot", "head", "plane_head", "dim"),
        ("page", "slot", "head", "dim", "plane_dim"),
        ("page", "slot", "head", "head", "dim"),
        ("page", "slot", "plane", "dim"),
        ("page", "slot", "plane_head", "plane", "dim"),
    ],
)
def test_a_layout_without_its_tags_is_refused(axes: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"KVLayout\.axes"):
        KVLayout("untold", 1, axes, 8, "float32")  # type: ignore[arg-type]


def test_a_pool_must_be_what_its_layout_says() -> None:
    spec = KVSpec.gqa(2, 2, 4, "float32")
    good = KVPool.zeros(head_major(8, "float32"), spec, 3)
    with pytest.raises(ValueError, match="says"):
        KVPool(token_major(8, "float32"), spec, good.arrays)
    with pytest.raises(ValueError, match="1 layers"):
        KVPool(good.layout, spec, good.arrays[:1])
    with pytest.raises(ValueError, match="dtype"):
        KVPool(head_major(8, "bfloat16"), spec, good.arrays)
    with pytest.raises(ValueError, match="dtype"):
        KVPool(good.layout, spec, tuple(tuple(a.astype(np.float16) for a in arrays) for arrays in good.arrays))


@pytest.mark.parametrize(
    ("table", "tokens", "match"),
    [
        ([0, 1], TokenRange(0, 17), "page table holds 2"),
        ([0, 3], TokenRange(0, 16), r"\[0, 3\)"),
        ([-1, 1], TokenRange(0, 8), r"\[0, 3\)"),
        ([1, 1], TokenRange(0, 9), "named twice"),
        ([0.0, 1.0], TokenRange(0, 8), "integer"),
    ],
)
def test_a_wrong_page_table_is_refused(table: list[float], tokens: TokenRange, match: str) -> None:
    spec = KVSpec.gqa(1, 2, 4, "float32")
    pool = canary_pool(head_major(8, "float32"), spec, 3)
    before = canary_pool(pool.layout, spec, 3)
    block = KVBlock("k", LayerRange(0, 1), tokens, HeadRange(0, 2), np.zeros((1, len(tokens), 2, 4), np.float32))
    with pytest.raises(ValueError, match=match):
        write_block(pool, np.array(table), block)
    assert same_pools(pool, before)


def test_a_wrong_block_is_refused() -> None:
    spec = KVSpec.gqa(2, 3, 4, "float32")
    pool = canary_pool(head_major(8, "float32"), spec, 3)
    table = np.arange(3)
    good = np.zeros((2, 5, 3, 4), np.float32)
    for plane, layers, heads, values, match in (
        ("q", LayerRange(0, 2), HeadRange(0, 3), good, "plane: given 'q'"),
        ("k", LayerRange(1, 3), HeadRange(0, 3), good, "layers"),
        ("k", LayerRange(0, 2), HeadRange(1, 4), good, "3 heads"),
        ("k", LayerRange(0, 2), HeadRange(0, 3), good[:, :4], "say"),
        ("k", LayerRange(0, 2), HeadRange(0, 3), good.astype(np.float16), "say"),
        ("k", LayerRange(0, 2), HeadRange(0, 3), np.zeros((2, 3, 5, 4), np.float32).swapaxes(1, 2), "contiguous"),
    ):
        with pytest.raises(ValueError, match=match):
            write_block(pool, table, KVBlock(plane, layers, TokenRange(0, 5), heads, values))
    assert same_pools(pool, canary_pool(pool.layout, spec, 3))


@pytest.mark.parametrize(("num_heads", "num_shards"), [(2, 1), (2, 2), (2, 4), (8, 4), (3, 3), (1, 8), (6, 3)])
def test_shards_cover_all_heads_in_order(num_heads: int, num_shards: int) -> None:
    ranges = [shard_heads(num_heads, shard, num_shards) for shard in range(num_shards)]
    heads = [head for r in ranges for head in range(r.start, r.stop)]
    copies = max(1, num_shards // num_heads)
    assert heads == [head for head in range(num_heads) for _ in range(copies)]


def test_uneven_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="divide"):
        shard_heads(3, 0, 2)
    with pytest.raises(ValueError, match="shard"):
        shard_heads(4, 2, 2)


def test_a_shard_stores_and_gives_only_its_heads() -> None:
    spec = KVSpec.gqa(2, 6, 3, "float32")
    planes = coded_planes(spec, 20)
    layout = KVLayout("head_major", 1, ("page", "head", "slot", "dim"), 8, "float32", heads=shard_heads(6, 1, 3))
    pool = KVPool.zeros(layout, spec, 4)
    table = np.array([3, 0, 2])
    fill_slowly(pool, table, planes, LayerRange(0, 2), TokenRange(0, 20), HeadRange(2, 4))
    for block, values in zip(read_blocks(pool, table, TokenRange(0, 20)), planes.values(), strict=True):
        assert block.heads == HeadRange(2, 4)
        assert np.array_equal(block.values, values[:, :, 2:4])
    with pytest.raises(ValueError, match="the pool stores"):
        read_block(pool, table, "k", LayerRange(0, 2), TokenRange(0, 20), HeadRange(1, 3))


def test_fresh_memory_begins_on_cache_lines_and_is_nobody_elses() -> None:
    """Whatever the sizes: with odd ones, neighbours in a pool's memory must not overlap."""
    spec = KVSpec.gqa_scaled(3, 3, 5, "int8")
    pool = KVPool.zeros(token_major(7, "int8"), spec, 3)
    arrays = [array for layer in pool.arrays for array in layer]
    for i, array in enumerate(arrays):
        assert array.ctypes.data % 64 == 0
        assert array.flags.writeable
        assert not array.view(np.uint8).any()
        array.view(np.uint8)[...] = i + 1
    for i, array in enumerate(arrays):
        assert (array.view(np.uint8) == i + 1).all()
    for block in read_blocks(pool, np.array([2, 0]), TokenRange(3, 9)):
        assert block.values.ctypes.data % 64 == 0
        assert block.values.flags.c_contiguous
