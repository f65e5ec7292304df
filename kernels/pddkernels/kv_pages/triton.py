"""KV pages in Triton, for NVIDIA and AMD: append a step's new tokens, pack token ranges to wire order and unpack them, one pass each.

Pages are head-major, [N, kv_heads, page_size, dim] per layer. Offsets are 64-bit: pools exceed 2**31 values.
"""

# Kernels' arguments are Triton's tensors or pointers, as the call has it; only compile-time constants are annotated.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

TOKENS_PER_PROGRAM: Final = 32  # of one head, when packing: with 128 values of two bytes a program moves 8 KiB
NUM_WARPS: Final = 4


@triton.jit
def append_tokens(
    k_pages,
    v_pages,
    keys,
    values,
    slots,
    num_tokens,
    key_stride,
    value_stride,
    KV_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """One program per token. ``keys``, ``values`` [T, KV_HEADS, DIM], tokens ``key_stride`` and ``value_stride`` values apart, rounded to
    nearest even · ``slots`` [T] i32, the first ``num_tokens`` [1] of them valid."""
    token = tl.program_id(0)
    if token < tl.load(num_tokens):
        slot = tl.load(slots + token)
        heads = tl.arange(0, PADDED_HEADS)[:, None]
        dims = tl.arange(0, PADDED_DIM)[None, :]
        live = (heads < KV_HEADS) & (dims < DIM)
        to = (((slot // PAGE_SIZE).to(tl.int64) * KV_HEADS + heads) * PAGE_SIZE + slot % PAGE_SIZE) * DIM + dims
        at = heads * DIM + dims
        k = tl.load(keys + token.to(tl.int64) * key_stride + at, mask=live, other=0.0)
        v = tl.load(values + token.to(tl.int64) * value_stride + at, mask=live, other=0.0)
        tl.store(k_pages + to, k.to(k_pages.dtype.element_ty), mask=live)
        tl.store(v_pages + to, v.to(v_pages.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["start", "num_tokens", "first_head", "num_heads"])  # else a compilation for each kind of number
def move_tokens(
    pages,
    wire,
    page_table,
    start,
    num_tokens,
    first_head,
    num_heads,
    layer_stride,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    TO_WIRE: tl.constexpr,
):
    """One program per (block of TOKENS tokens, head, layer). ``pages``: layers of [N, KV_HEADS, PAGE_SIZE, DIM], ``layer_stride`` values
    apart · ``wire`` [layers, num_tokens, num_heads, DIM] of tokens from position ``start`` and heads from ``first_head``. Bits move, no
    values: both are integers of the KV dtype's width."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    valid = tokens < num_tokens
    positions = start + tokens
    page_ids = tl.load(page_table + positions // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
    dims = tl.arange(0, PADDED_DIM)
    live = valid[:, None] & (dims < DIM)[None, :]
    in_pages = ((page_ids * KV_HEADS + first_head + head) * PAGE_SIZE + positions % PAGE_SIZE) * DIM
    at_pages = pages + layer * layer_stride + in_pages[:, None] + dims[None, :]
    at_wire = wire + (((layer * num_tokens + tokens) * num_heads + head) * DIM)[:, None] + dims[None, :]
    if TO_WIRE:
        tl.store(at_wire, tl.load(at_pages, mask=live, other=0), mask=live)
    else:
        tl.store(at_pages, tl.load(at_wire, mask=live, other=0), mask=live)


def append(
    k_pages: torch.Tensor, v_pages: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, num_tokens: torch.Tensor
) -> None:
    """Store new tokens' ``keys`` and ``values`` [T, kv_heads, dim] of any float dtype in a layer's pages [N, kv_heads, page_size, dim].

    ``slots`` [T or more] i32: page * page_size + place in the page, the first ``num_tokens`` [1] i32 of them valid: what a captured graph's
    padding has beyond is not stored. Raises ValueError for a shape or stride the kernel does not know.
    """
    _, kv_heads, page_size, dim = k_pages.shape
    for name, given in (("keys", keys), ("values", values)):
        if given.shape[1:] != (kv_heads, dim) or given.stride()[1:] != (dim, 1):
            raise ValueError(
                f"{name}: given {tuple(given.shape)}, strides {given.stride()}, allowed [T, {kv_heads}, {dim}], heads in a row"
            )
    if not (k_pages.is_contiguous() and v_pages.is_contiguous() and k_pages.shape == v_pages.shape):
        raise ValueError("k_pages, v_pages: must be contiguous and of one shape")
    append_tokens[(len(keys),)](
        k_pages, v_pages, keys, values, slots, num_tokens, keys.stride(0), values.stride(0),
        KV_HEADS=kv_heads, PADDED_HEADS=triton.next_power_of_2(kv_heads), DIM=dim, PADDED_DIM=triton.next_power_of_2(dim),
        PAGE_SIZE=page_size, num_warps=NUM_WARPS, enable_fp_fusion=True,
    )  # fmt: skip


def pack_tokens(layers: torch.Tensor, page_table: torch.Tensor, start: int, stop: int, first_head: int, num_heads: int) -> torch.Tensor:
    """Tokens [start, stop) of one plane in wire order: [layers, stop - start, num_heads, dim], bit for bit, each value moved once.

    ``layers`` [layers, N, kv_heads, page_size, dim], each layer contiguous · ``page_table`` [P] i32 on the device.
    """
    wire = torch.empty((len(layers), stop - start, num_heads, layers.shape[-1]), dtype=layers.dtype, device=layers.device)
    _move(layers, wire, page_table, start, first_head, to_wire=True)
    return wire


def unpack_tokens(layers: torch.Tensor, values: torch.Tensor, page_table: torch.Tensor, start: int, first_head: int) -> None:
    """The way back: contiguous ``values`` [layers, tokens, heads, dim] in the dtype of ``layers``, every other slot untouched."""
    _move(layers, values, page_table, start, first_head, to_wire=False)


_BITS: Final = {2: torch.int16, 4: torch.int32}


def _move(layers: torch.Tensor, wire: torch.Tensor, page_table: torch.Tensor, start: int, first_head: int, *, to_wire: bool) -> None:
    num_layers, _, kv_heads, page_size, dim = layers.shape
    _, num_tokens, num_heads, _ = wire.shape
    if wire.dtype != layers.dtype or not (layers[0].is_contiguous() and wire.is_contiguous()):
        raise ValueError(f"values: given {wire.dtype}, allowed {layers.dtype}; layers and values must be contiguous")
    if wire.numel() == 0:
        return
    bits = _BITS[layers.itemsize]
    move_tokens[(triton.cdiv(num_tokens, TOKENS_PER_PROGRAM), num_heads, num_layers)](
        layers.view(bits), wire.view(bits), page_table, start, num_tokens, first_head, num_heads, layers.stride(0),
        KV_HEADS=kv_heads, DIM=dim, PADDED_DIM=triton.next_power_of_2(dim), PAGE_SIZE=page_size, TOKENS=TOKENS_PER_PROGRAM,
        TO_WIRE=to_wire, num_warps=NUM_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
