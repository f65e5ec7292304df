"""The layouts of known engines by name. An engine attached to the bridge picks the one it has, or declares a :class:`KVLayout` of its own.

Shapes are of one layer. Sources: vLLM's attention backends (``get_kv_cache_shape`` and ``get_kv_cache_stride_order``), JAX's
``pallas.ops.tpu.ragged_paged_attention`` and tpu-inference's ``ragged_paged_attention`` v3 and ``mla`` kernels (``get_kv_cache_shape``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from pddbridge.kv_layout import Axis, KVLayout, head_major, interleaved_heads, token_major
from pddbridge.kv_spec import KV_DTYPES, SCALE_SUFFIX, KVSpec

# Lanes of a TPU's vector register: the last axis is padded to a multiple.
_TPU_LANES: Final = 128


def vllm_nhd(page_size: int, dtype: str) -> KVLayout:
    """FlashAttention of vLLM, NHD: [2, pages, page_size, heads, dim]."""
    return KVLayout("vllm_nhd", 1, ("plane", "page", "slot", "head", "dim"), page_size, dtype)


def vllm_hnd(page_size: int, dtype: str) -> KVLayout:
    """The same with physical order HND: [2, pages, heads, page_size, dim]."""
    return KVLayout("vllm_hnd", 1, ("plane", "page", "head", "slot", "dim"), page_size, dtype)


def vllm_paged_nhd(page_size: int, dtype: str) -> KVLayout:
    """FlashInfer and later backends of vLLM, NHD: [pages, 2, page_size, heads, dim]."""
    return KVLayout("vllm_paged_nhd", 1, ("page", "plane", "slot", "head", "dim"), page_size, dtype)


def vllm_paged_hnd(page_size: int, dtype: str) -> KVLayout:
    """The same with physical order HND: [pages, 2, heads, page_size, dim]."""
    return KVLayout("vllm_paged_hnd", 1, ("page", "plane", "head", "slot", "dim"), page_size, dtype)


def vllm_mla(page_size: int, dtype: str) -> KVLayout:
    """Latent attention of vLLM: [pages, page_size, latent + rope]."""
    return KVLayout("vllm_mla", 1, ("page", "slot", "plane_dim"), page_size, dtype)


def tpu_ragged(page_size: int, dtype: str) -> KVLayout:
    """JAX's ragged paged attention: [pages, page_size, heads * 2, dim padded to 128], K and V of a head side by side."""
    return replace(interleaved_heads(page_size, dtype), name="tpu_ragged", dim_multiple=_TPU_LANES)


def tpu_ragged_packed(page_size: int, dtype: str) -> KVLayout:
    """tpu-inference's v3: [pages, page_size, ceil(heads * 2 / pack), pack, dim padded to 128]; pack values share 32 bits."""
    axes: tuple[Axis, ...] = ("page", "slot", "plane_head", "pack", "dim")
    return KVLayout("tpu_ragged_packed", 1, axes, page_size, dtype, dim_multiple=_TPU_LANES, pack=_values_per_word(dtype))


def tpu_ragged_dim64(page_size: int, dtype: str) -> KVLayout:
    """tpu-inference's v3 for a head_dim of 64: [pages, page_size, ceil(heads / pack), pack, 64 + 64], K of a head and then its V."""
    axes: tuple[Axis, ...] = ("page", "slot", "head", "pack", "plane_dim")
    return KVLayout("tpu_ragged_dim64", 1, axes, page_size, dtype, pack=_values_per_word(dtype))


def tpu_mla(page_size: int, dtype: str) -> KVLayout:
    """tpu-inference's latent attention: [pages, page_size / pack, pack, latent and rope each padded to 128].

    Raises ValueError unless ``page_size`` is a multiple of pack.
    """
    axes: tuple[Axis, ...] = ("page", "slot", "pack", "plane_dim")
    return KVLayout("tpu_mla", 1, axes, page_size, dtype, dim_multiple=_TPU_LANES, pack=_values_per_word(dtype))


GQA_LAYOUTS: Final[dict[str, Callable[[int, str], KVLayout]]] = {
    "interleaved_heads": interleaved_heads,
    "head_major": head_major,
    "token_major": token_major,
    "vllm_nhd": vllm_nhd,
    "vllm_hnd": vllm_hnd,
    "vllm_paged_nhd": vllm_paged_nhd,
    "vllm_paged_hnd": vllm_paged_hnd,
    "tpu_ragged": tpu_ragged,
    "tpu_ragged_packed": tpu_ragged_packed,
    "tpu_ragged_dim64": tpu_ragged_dim64,
}
# Those that can hold a latent beside a rope part: token_major and head_major keep them apart.
MLA_LAYOUTS: Final[dict[str, Callable[[int, str], KVLayout]]] = {
    "head_major": head_major,
    "token_major": token_major,
    "vllm_mla": vllm_mla,
    "tpu_mla": tpu_mla,
}


def with_scales(layout: KVLayout, spec: KVSpec) -> KVLayout:
    """``layout`` for a :meth:`KVSpec.gqa_scaled`: where it fuses planes, values share one array and scales another of the same axes."""
    if not layout.fused:
        return layout
    names = [plane.name for plane in spec.groups[0].planes]
    scales = tuple(name for name in names if name.endswith(SCALE_SUFFIX))
    return replace(layout, plane_sets=(tuple(name for name in names if name not in scales), scales))


def _values_per_word(dtype: str) -> int:
    return 4 // KV_DTYPES[dtype].itemsize
