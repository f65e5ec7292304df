"""What a layout declares: the shapes that known engines have, and everything that is no layout or cannot hold a model's planes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pddbridge.engine import KVBlock
from pddbridge.kv_convert import KVPool, read_block, read_blocks, write_block
from pddbridge.kv_layout import Axis, KVLayout, head_major, interleaved_heads, shard_heads, token_major
from pddbridge.kv_layout_catalogue import (
    GQA_LAYOUTS,
    MLA_LAYOUTS,
    tpu_mla,
    tpu_ragged,
    tpu_ragged_dim64,
    tpu_ragged_packed,
    vllm_mla,
    vllm_nhd,
    with_scales,
)
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from tests.support.kv import random_planes

GQA = KVSpec.gqa(2, 3, 64, "bfloat16")
MLA = KVSpec.mla(2, 512, 64, "bfloat16")


def shapes(layout: KVLayout, spec: KVSpec, num_pages: int = 7) -> list[tuple[int, ...]]:
    return [stored.shape for stored in layout.arrays(spec, spec.groups[0], num_pages)]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("interleaved_heads", [(7, 16, 6, 64)]),
        ("head_major", [(7, 3, 16, 64)] * 2),
        ("token_major", [(7, 16, 3, 64)] * 2),
        ("vllm_nhd", [(2, 7, 16, 3, 64)]),
        ("vllm_hnd", [(2, 7, 3, 16, 64)]),
        ("vllm_paged_nhd", [(7, 2, 16, 3, 64)]),
        ("vllm_paged_hnd", [(7, 2, 3, 16, 64)]),
        ("tpu_ragged", [(7, 16, 6, 128)]),
        ("tpu_ragged_packed", [(7, 16, 3, 2, 128)]),
        ("tpu_ragged_dim64", [(7, 16, 2, 2, 128)]),
    ],
)
def test_shapes_are_those_of_the_engines(name: str, want: list[tuple[int, ...]]) -> None:
    assert shapes(GQA_LAYOUTS[name](16, "bfloat16"), GQA) == want


def test_packs_follow_the_dtype() -> None:
    for dtype, packed, dim64 in (
        ("float32", (7, 16, 6, 1, 128), (7, 16, 3, 1, 128)),
        ("float16", (7, 16, 3, 2, 128), (7, 16, 2, 2, 128)),
        ("float8_e5m2", (7, 16, 2, 4, 128), (7, 16, 1, 4, 128)),
    ):
        spec = KVSpec.gqa(2, 3, 64, dtype)
        assert shapes(tpu_ragged_packed(16, dtype), spec) == [packed]
        assert shapes(tpu_ragged_dim64(16, dtype), spec) == [dim64]


def test_latent_shapes_are_those_of_the_engines() -> None:
    assert shapes(vllm_mla(16, "bfloat16"), MLA) == [(7, 16, 576)]
    assert shapes(tpu_mla(16, "bfloat16"), MLA) == [(7, 8, 2, 640)]
    assert shapes(token_major(16, "bfloat16"), MLA) == [(7, 16, 1, 512), (7, 16, 1, 64)]
    assert set(MLA_LAYOUTS) == {"head_major", "token_major", "vllm_mla", "tpu_mla"}


def test_a_shard_has_the_shape_of_its_heads() -> None:
    spec = KVSpec.gqa(1, 8, 128, "bfloat16")
    for num_shards, heads in ((1, 8), (2, 4), (8, 1), (16, 1)):
        layout = replace(vllm_nhd(16, "bfloat16"), heads=shard_heads(8, num_shards - 1, num_shards))
        assert shapes(layout, spec) == [(2, 7, 16, heads, 128)]


def test_scales_have_arrays_and_a_dtype_of_their_own() -> None:
    spec = KVSpec.gqa_scaled(1, 3, 64, "int8", scales_per_head=2)
    split = token_major(16, "int8").arrays(spec, spec.groups[0], 7)
    assert [(a.shape, a.dtype) for a in split] == [((7, 16, 3, 64), "int8")] * 2 + [((7, 16, 3, 2), "float32")] * 2
    fused = with_scales(vllm_nhd(16, "int8"), spec).arrays(spec, spec.groups[0], 7)
    assert [(a.planes, a.shape, a.dtype) for a in fused] == [
        ((0, 1), (2, 7, 16, 3, 64), "int8"),
        ((2, 3), (2, 7, 16, 3, 2), "float32"),
    ]
    pool = KVPool.zeros(with_scales(vllm_nhd(16, "int8"), spec), spec, 7)
    assert [array.dtype for array in pool.arrays[0]] == [np.int8, np.float32]


@pytest.mark.parametrize(
    ("axes", "changes", "match"),
    [
        (("pack", "page", "slot", "head", "dim"), {}, "pack must come right after"),
        (("page", "pack", "slot", "head", "dim"), {}, "pack must come right after"),
        (("page", "slot", "head", "dim", "pack"), {}, "pack must come right after"),
        (("page", "slot", "head", "dim"), {"pack": 2}, "axes has no pack"),
        (("page", "slot", "pack", "head", "dim"), {"pack": 3}, "multiple of pack=3"),
        (("page", "slot", "head", "pack", "dim"), {"pack": 0}, "pack: given 0"),
        (("page", "slot", "head", "dim"), {"page_size": 0}, "page_size: given 0"),
        (("page", "slot", "head", "dim"), {"dim_multiple": 0}, "dim_multiple: given 0"),
        (("page", "slot", "head", "dim"), {"dtype": "float64"}, "dtype: given 'float64'"),
        (("page", "slot", "head", "dim"), {"plane_sets": (("k",), ("v",))}, "fuse no planes"),
    ],
)
def test_what_is_no_layout_is_refused(axes: tuple[Axis, ...], changes: dict[str, object], match: str) -> None:
    given: dict[str, object] = {"page_size": 8, "dtype": "float32", **changes}
    with pytest.raises(ValueError, match=match):
        KVLayout("wrong", 1, axes, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "spec", "match"),
    [
        (interleaved_heads(16, "bfloat16"), MLA, "fuses planes that differ"),
        (vllm_nhd(16, "bfloat16"), MLA, "fuses planes that differ"),
        (vllm_mla(16, "bfloat16"), GQA, "has no axis for the 3 heads"),
        (tpu_mla(16, "bfloat16"), GQA, "has no axis for the 3 heads"),
        (vllm_nhd(16, "int8"), KVSpec.gqa_scaled(2, 3, 64, "int8"), "fuses planes that differ"),
        (replace(vllm_nhd(16, "bfloat16"), plane_sets=(("k",),)), GQA, r"must name each plane of \['k', 'v'\] once"),
        (replace(vllm_nhd(16, "bfloat16"), plane_sets=(("k", "v"), ("v",))), GQA, "once"),
        (replace(head_major(16, "bfloat16"), heads=HeadRange(2, 4)), GQA, "has 3 heads"),
    ],
)
def test_a_layout_that_cannot_hold_the_planes_is_refused(layout: KVLayout, spec: KVSpec, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        KVPool.zeros(layout, spec, 4)


def test_each_fused_array_of_its_own_set() -> None:
    """V before K, or each in an array of its own: the declared order decides."""
    spec = KVSpec.gqa(1, 2, 3, "float32")
    array = np.arange(2 * 2 * 4 * 2 * 3, dtype=np.float32).reshape(2, 2, 4, 2, 3)
    swapped = KVPool(replace(vllm_nhd(4, "float32"), plane_sets=(("v", "k"),)), spec, ((array,),))
    where = (np.array([1]), LayerRange(0, 1), TokenRange(0, 4), HeadRange(0, 2))
    for plane, index in (("v", 0), ("k", 1)):
        read = read_block(swapped, where[0], plane, *where[1:]).values[0]
        assert np.array_equal(read, array[index, 1])


def test_arrays_whose_memory_the_layout_does_not_describe_are_refused() -> None:
    spec = KVSpec.gqa(1, 2, 64, "bfloat16")
    layout = tpu_ragged_packed(8, "bfloat16")
    (stored,) = layout.arrays(spec, spec.groups[0], 3)
    good = np.zeros(stored.shape, spec.np_dtype)
    KVPool(layout, spec, ((good,),))
    with pytest.raises(ValueError, match="pack must lie inside plane_head"):
        KVPool(layout, spec, ((np.zeros((3, 8, 2, 2, 128), spec.np_dtype).swapaxes(2, 3),),))
    with pytest.raises(ValueError, match="must not be negative"):
        KVPool(tpu_ragged(8, "bfloat16"), spec, ((np.zeros((3, 8, 4, 128), spec.np_dtype)[::-1],),))


def test_a_pool_reads_what_the_engine_writes_later() -> None:
    """The arrays are lent, not copied."""
    pool = KVPool.zeros(tpu_ragged_packed(8, "bfloat16"), GQA, 3)
    planes = random_planes(GQA, 8, 5)
    pool.arrays[1][0].reshape(3, 8, 6, 128)[2, :, 1::2, :64] = planes["v"][1]
    read = read_block(pool, np.array([2]), "v", LayerRange(1, 2), TokenRange(0, 8), HeadRange(0, 3)).values
    assert read.tobytes() == planes["v"][1].tobytes()


def test_the_readmes_example_runs() -> None:
    """The example under "Layouts", on pages that name their own place."""
    readme = (Path(__file__).parents[3] / "bridge" / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python layout\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    making, reading = example.split("for block in")
    names: dict[str, object] = {
        "KVLayout": KVLayout,
        "KVPool": KVPool,
        "KVSpec": KVSpec,
        "TokenRange": TokenRange,
        "np": np,
        "read_blocks": read_blocks,
        "shard_heads": shard_heads,
        "write_block": write_block,
    }
    exec(making, names)
    arrays = names["arrays"]
    assert isinstance(arrays, tuple)
    for layer, (array,) in enumerate(arrays):
        array[...] = np.random.default_rng(layer).integers(-99, 99, array.shape)
    before = [array.copy() for (array,) in arrays]
    exec("for block in" + reading, names)
    for (array,), old in zip(arrays, before, strict=True):
        for token in range(12):
            source, target, slot = (7, 0, 3)[token // 4], (1, 2, 4)[token // 4], token % 4
            want = old[source] if 2 <= token < 11 else old[target]
            assert np.array_equal(array[target, :, :, slot], want[:, :, slot])
    block = names["block"]
    assert isinstance(block, KVBlock)
    assert block.heads == HeadRange(2, 4)
