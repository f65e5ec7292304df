"""Multi-head latent attention in Triton, heads absorbed, for NVIDIA and AMD: made for decode, right for any row.

A key is a token's latent beside its rotated part, its value the latent again, so a block of latents is loaded once and multiplied twice.
All heads of a token read the same block: a program takes a tile of heads (and tokens, where a tile holds more than one token's heads) and
scans a range of keys; ranges are split over the device and merged as in :mod:`pddkernels.ragged_paged_attention.triton`.
"""

# Kernels' arguments are Triton's tensors or pointers, as the call has it; only compile-time constants are annotated.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pddkernels.ragged_paged_attention.triton import LOG2_E, LOWEST, MERGED_AT_ONCE, dot_dtype, load_page_ids, merge_partials, merge_warps
from pddkernels.ragged_paged_attention.triton_plan import ITEM_FIELDS, MERGE_FIELDS, Plan, Work


@triton.jit
def _scan_latents(
    acc,
    highest,
    total,
    q_latent,
    q_rope,
    latent_pages,
    rope_pages,
    table,
    positions,
    begin,
    end,
    key_end,
    scale,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Take the keys [begin, end) into the running softmax; where MASKED, those before ``key_end`` are read and each query sees those up to
    its position."""
    page_ids = load_page_ids(table, begin, begin, key_end, PAGE_SIZE, KEYS)
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        slots = (page_ids.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE)[:, None]
        at_latents = latent_pages + slots * LATENT + tl.arange(0, LATENT)[None, :]
        at_ropes = rope_pages + slots * ROPE + tl.arange(0, ROPE)[None, :]
        if MASKED:
            latents = tl.load(at_latents, mask=(keys < key_end)[:, None], other=0.0).to(DOT)
            ropes = tl.load(at_ropes, mask=(keys < key_end)[:, None], other=0.0).to(DOT)
        else:
            latents = tl.load(at_latents).to(DOT)
            ropes = tl.load(at_ropes).to(DOT)
        scores = tl.dot(q_latent, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(ropes), scores, input_precision="ieee") * (scale * LOG2_E)
        if MASKED:
            scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(DOT), latents, acc * shrink[:, None], input_precision="ieee")
        highest = new_highest
        page_ids = load_page_ids(table, start + KEYS, begin, key_end, PAGE_SIZE, KEYS)
    return acc, highest, total


@triton.jit
def attend_latents(
    q_latent,
    q_rope,
    latent_pages,
    rope_pages,
    page_tables,
    items,
    out,
    partials,
    partial_sums,
    latent_stride,
    rope_stride,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    FIELDS: tl.constexpr,
    DOT: tl.constexpr,
):
    """One program per (item, group of HEADS // GROUPS heads). ``items`` [n, FIELDS] i32: see ``triton_plan.Work`` · ``q_latent``
    [T, HEADS, LATENT], ``q_rope`` [T, HEADS, ROPE], tokens ``latent_stride`` and ``rope_stride`` values apart · ``latent_pages``
    [N, PAGE_SIZE, LATENT], ``rope_pages`` [N, PAGE_SIZE, ROPE] · ``out`` [T, HEADS, LATENT] · ``partials`` [p, GROUPS, ROWS, LATENT],
    ``partial_sums`` [p, GROUPS, ROWS, 2] float32."""
    GROUP: tl.constexpr = HEADS // GROUPS
    program = tl.program_id(0)
    group = program % GROUPS
    item = items + (program // GROUPS) * FIELDS
    table = page_tables + tl.load(item).to(tl.int64) * table_stride
    first_token = tl.load(item + 1).to(tl.int64)
    num_tokens = tl.load(item + 2)
    first_position = tl.load(item + 3)
    key_begin = tl.load(item + 4)
    key_end = tl.load(item + 5)
    partial = tl.load(item + 6).to(tl.int64)
    is_split = tl.load(item + 7) != 0

    rows = tl.arange(0, ROWS)
    tokens = rows // GROUP
    heads = group * GROUP + rows % GROUP
    valid = tokens < num_tokens
    positions = first_position + tokens
    latent_dims = tl.arange(0, LATENT)[None, :]
    rope_dims = tl.arange(0, ROPE)[None, :]
    token = (first_token + tokens)[:, None]
    at_latent = q_latent + token * latent_stride + heads[:, None] * LATENT + latent_dims
    at_rope = q_rope + token * rope_stride + heads[:, None] * ROPE + rope_dims
    queries = tl.load(at_latent, mask=valid[:, None], other=0.0).to(DOT)
    turned = tl.load(at_rope, mask=valid[:, None], other=0.0).to(DOT)

    acc = tl.zeros((ROWS, LATENT), tl.float32)
    highest = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    inner_end = tl.maximum(key_begin, tl.minimum(key_end, first_position + 1) // KEYS * KEYS)
    acc, highest, total = _scan_latents(
        acc, highest, total, queries, turned, latent_pages, rope_pages, table, positions, key_begin, inner_end, key_end, scale,
        LATENT, ROPE, PAGE_SIZE, KEYS, False, DOT,
    )  # fmt: skip
    acc, highest, total = _scan_latents(
        acc, highest, total, queries, turned, latent_pages, rope_pages, table, positions, inner_end, key_end, key_end, scale,
        LATENT, ROPE, PAGE_SIZE, KEYS, True, DOT,
    )  # fmt: skip

    if is_split:
        at = (partial * GROUPS + group) * ROWS + rows
        tl.store(partials + at[:, None] * LATENT + latent_dims, acc, mask=valid[:, None])
        tl.store(partial_sums + at * 2, highest, mask=valid)
        tl.store(partial_sums + at * 2 + 1, total, mask=valid)
    else:
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        at_out = (token * HEADS + heads[:, None]) * LATENT + latent_dims
        tl.store(out + at_out, result.to(out.dtype.element_ty), mask=valid[:, None])


def mla_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    plan: Plan,
    scale: float,
) -> torch.Tensor:
    """The op as :mod:`pddkernels.mla_decode.reference` defines it, for a batch planned by ``triton_plan.plan_mla``: [T, heads, latent] in
    the queries' dtype.

    ``q_latent`` [T, heads, latent], ``q_rope`` [T, heads, rope], heads back to back, tokens any distance apart · ``latent_pages``
    [N, page_size, latent], ``rope_pages`` [N, page_size, rope], contiguous, the new tokens' KV already stored. All on the plan's device.

    Raises ValueError for a shape that is not the plan's.
    """
    geometry = plan.geometry
    given = (q_latent.shape[1], q_latent.shape[2], latent_pages.shape[2], latent_pages.shape[1])
    planned = (geometry.num_heads, geometry.head_dim, geometry.head_dim, geometry.page_size)
    if given != planned or q_rope.shape[2] != rope_pages.shape[2]:
        raise ValueError(f"(heads, latent, latent of pages, page_size): given {given}, planned for {planned}; rope dims must agree")
    if not (latent_pages.is_contiguous() and rope_pages.is_contiguous() and q_latent.stride(-1) == q_rope.stride(-1) == 1):
        raise ValueError("q_latent, q_rope: values of a head must be next to one another; pages must be contiguous")
    if q_latent.stride(1) != q_latent.shape[2] or q_rope.stride(1) != q_rope.shape[2]:
        raise ValueError("q_latent, q_rope: heads of a token must be next to one another")
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    for work in plan.works[None]:
        if len(work.items):
            _launch(work, plan, q_latent, q_rope, latent_pages, rope_pages, scale, out)
    return out


def _launch(
    work: Work,
    plan: Plan,
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    geometry, tile = plan.geometry, work.tile
    heads, groups, latent = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
    partials = torch.empty((work.num_partials, groups, tile.rows, latent), dtype=torch.float32, device=out.device)
    partial_sums = torch.empty((work.num_partials, groups, tile.rows, 2), dtype=torch.float32, device=out.device)
    attend_latents[(len(work.items) * groups,)](
        q_latent, q_rope, latent_pages, rope_pages, plan.page_tables, work.items, out, partials, partial_sums,
        q_latent.stride(0), q_rope.stride(0), plan.page_tables.stride(0), scale,
        HEADS=heads, GROUPS=groups, LATENT=latent, ROPE=rope_pages.shape[2], PAGE_SIZE=geometry.page_size,
        ROWS=tile.rows, KEYS=tile.keys, FIELDS=ITEM_FIELDS, DOT=dot_dtype(q_latent.dtype, latent_pages.dtype),
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    if len(work.merges):
        merge_partials[(len(work.merges) * groups * tile.rows,)](
            partials, partial_sums, partial_sums, work.merges, out,
            HEADS=heads, KV_HEADS=groups, DIM=latent, PADDED_DIM=latent, ROWS=tile.rows, FIELDS=MERGE_FIELDS,
            AT_ONCE=MERGED_AT_ONCE, HAS_SINKS=False,
            num_warps=merge_warps(geometry), num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
