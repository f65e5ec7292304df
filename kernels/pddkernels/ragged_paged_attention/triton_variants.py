"""What of this op is compiled ahead of time: kernel by kernel with the arguments of real models, for chips that need not be here.

Imports Triton, so whoever compiles for another chip does it in a process where kernels are not interpreted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import triton.language as tl
from triton.compiler import ASTSource

from pddkernels.ragged_paged_attention import triton as kernels
from pddkernels.ragged_paged_attention.triton_plan import ITEM_FIELDS, MERGE_FIELDS
from pddkernels.ragged_paged_attention.triton_tiles import SM90, Geometry, Gpu, Tile, tiles_for
from pddkernels.shapes import MODEL_SHAPES

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

PAGE_SIZE: Final = 16
_DTYPES: Final = {"bf16": (tl.bfloat16, 2), "fp16": (tl.float16, 2), "fp32": (tl.float32, 4)}


@dataclass(frozen=True)
class KernelVariant:
    """One compilation. ``signature``: type per argument, "constexpr" for those in ``constexprs`` · ``is_product``: whether its products
    belong on tensor cores, and its loads of keys in 16 bytes.
    """

    name: str
    fn: JITFunction
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int
    num_stages: int
    is_product: bool

    def source(self) -> ASTSource:
        """For ``triton.compile(variant.source(), target=..., options=variant.options)``. Pointers and strides are told to be multiples of
        16, as Triton finds them to be at run time: pages and rows of values are."""
        strides = {"query_stride", "table_stride", "token_stride", "layer_stride", "value_stride"}
        aligned = [i for i, (name, kind) in enumerate(self.signature.items()) if kind.startswith("*") or name in strides]
        return ASTSource(self.fn, self.signature, self.constexprs, {(i,): [["tt.divisibility", 16]] for i in aligned})

    @property
    def options(self) -> dict[str, int | bool]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


def variants(
    gpu: Gpu = SM90, dtypes: Iterable[str] = ("bf16", "fp32"), names: Iterable[str] = tuple(MODEL_SHAPES)
) -> tuple[KernelVariant, ...]:
    """Both kernels, in both tile heights, for the models of :mod:`pddkernels.shapes` named; equal ones once. ``gpu`` chooses the tiles."""
    unique: dict[str, KernelVariant] = {}
    for model in names:
        shape = MODEL_SHAPES[model]
        for dtype in dtypes:
            geometry = Geometry(shape.num_heads, shape.num_kv_heads, shape.head_dim, PAGE_SIZE, _DTYPES[dtype][1])
            tiles = tiles_for(geometry, gpu)
            for height, tile in (("few", tiles.few), ("many", tiles.many)):
                for window in dict.fromkeys(window is not None for window in shape.windows):
                    variant = _attend(geometry, tile, height, dtype, window, shape.soft_cap is not None, shape.sinks)
                    unique.setdefault(variant.name, variant)
                variant = _merge(geometry, tile, height, dtype, shape.sinks)
                unique.setdefault(variant.name, variant)
    return tuple(unique.values())


def _attend(geometry: Geometry, tile: Tile, height: str, dtype: str, window: bool, cap: bool, sinks: bool) -> KernelVariant:
    marks = "".join(mark for mark, is_there in ((" window", window), (" cap", cap), (" sinks", sinks)) if is_there)
    arrays = {
        "queries": f"*{dtype}",
        "k_pages": f"*{dtype}",
        "v_pages": f"*{dtype}",
        "sinks": "*fp32",
        "page_tables": "*i32",
        "items": "*i32",
    }
    results = {"out": f"*{dtype}", "partials": "*fp32", "partial_sums": "*fp32"}
    scalars = {"query_stride": "i32", "table_stride": "i32", "scale": "fp32", "soft_cap": "fp32", "window": "i32"}
    constexprs: dict[str, object] = {
        **_sizes(geometry),
        "PAGE_SIZE": geometry.page_size,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "FIELDS": ITEM_FIELDS,
        "HAS_SINKS": sinks,
        "HAS_CAP": cap,
        "HAS_WINDOW": window,
        "DOT": _DTYPES[dtype][0],
    }
    return _variant(f"attend {height}", geometry, dtype, marks, kernels.attend_tiles, {**arrays, **results, **scalars}, constexprs, tile)


def _merge(geometry: Geometry, tile: Tile, height: str, dtype: str, sinks: bool) -> KernelVariant:
    arrays = {"partials": "*fp32", "partial_sums": "*fp32", "sinks": "*fp32", "merges": "*i32", "out": f"*{dtype}"}
    constexprs: dict[str, object] = {
        **_sizes(geometry),
        "ROWS": tile.rows,
        "FIELDS": MERGE_FIELDS,
        "AT_ONCE": kernels.MERGED_AT_ONCE,
        "HAS_SINKS": sinks,
    }
    marks = " sinks" if sinks else ""
    return _variant(f"merge {height}", geometry, dtype, marks, kernels.merge_partials, arrays, constexprs, None)


def _sizes(geometry: Geometry) -> dict[str, object]:
    return {
        "HEADS": geometry.num_heads,
        "KV_HEADS": geometry.num_kv_heads,
        "DIM": geometry.head_dim,
        "PADDED_DIM": geometry.padded_dim,
    }


def _variant(
    what: str,
    geometry: Geometry,
    dtype: str,
    marks: str,
    fn: JITFunction,
    signature: dict[str, str],
    constexprs: dict[str, object],
    tile: Tile | None,
) -> KernelVariant:
    name = f"ragged_paged_attention {what} {geometry.num_heads}/{geometry.num_kv_heads}x{geometry.head_dim} {dtype}{marks}"
    signature = {**signature, **dict.fromkeys(constexprs, "constexpr")}
    num_warps, num_stages = (kernels.merge_warps(geometry), 1) if tile is None else (tile.num_warps, tile.num_stages)
    return KernelVariant(name, fn, signature, constexprs, num_warps, num_stages, is_product=tile is not None)
