"""Multi-head latent attention in plain PyTorch operations, for any device, planned once per step by
:func:`pddkernels.ragged_paged_attention.portable_torch.plan_attention` with one KV head of latent + rope values.

All heads share the keys, so the heads of a decode row, and all heads and queries of a block of a longer row, are the rows of one matrix.
Slots that a row may not see can hold anything, NaN included. Scores and softmax are float32; the weighted sum is in the wider of query
and KV dtype.
"""

from __future__ import annotations

import torch

from pddkernels.kv_pages.portable_torch import gather_pages
from pddkernels.ragged_paged_attention.portable_torch import AttentionPlan, ChunkRow, DecodeGroup


def mla_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
) -> torch.Tensor:
    """The op as :mod:`pddkernels.mla_decode.reference` defines it, for a batch planned without a window: [T, heads, latent] in the queries'
    dtype.

    ``q_latent`` [T, heads, latent] · ``q_rope`` [T, heads, rope] · ``latent_pages`` [N, page_size, latent], ``rope_pages``
    [N, page_size, rope], the new tokens' KV already stored.
    """
    step = plan.by_window[None]
    out = torch.empty_like(q_latent)
    for group in step.groups:
        tokens = torch.arange(len(q_latent), device=q_latent.device) if group.tokens is None else group.tokens
        out.index_copy_(0, tokens, _attend_group(q_latent[tokens], q_rope[tokens], latent_pages, rope_pages, group, scale))
    for chunk in step.chunks:
        _attend_chunk(q_latent, q_rope, latent_pages, rope_pages, chunk, scale, out)
    return out


def _attend_group(
    q_latent: torch.Tensor, q_rope: torch.Tensor, latent_pages: torch.Tensor, rope_pages: torch.Tensor, group: DecodeGroup, scale: float
) -> torch.Tensor:
    latent, rope = _gather(latent_pages, group.page_heads, group.num_rows), _gather(rope_pages, group.page_heads, group.num_rows)
    if group.dead is not None:
        latent.view(-1, latent.shape[-1]).index_fill_(0, group.dead, 0)
    latent, rope = latent[:, : group.num_slots], rope[:, : group.num_slots]
    scores = _scores(q_latent, q_rope, latent, rope, scale)
    if group.hidden is not None:
        scores.masked_fill_(group.hidden, float("-inf"))
    return _weighted(scores, latent, q_latent.dtype)


def _attend_chunk(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_pages: torch.Tensor,
    rope_pages: torch.Tensor,
    chunk: ChunkRow,
    scale: float,
    out: torch.Tensor,
) -> None:
    latent, rope = _gather(latent_pages, chunk.page_heads, 1), _gather(rope_pages, chunk.page_heads, 1)
    num_heads = q_latent.shape[1]
    for block in chunk.blocks:
        num_queries, num_slots = block.mask.shape
        tokens = slice(block.start, block.stop)
        seen, seen_rope = latent[:, :num_slots], rope[:, :num_slots]  # cuts off what lies past the row's KV
        scores = _scores(q_latent[tokens].flatten(0, 1)[None], q_rope[tokens].flatten(0, 1)[None], seen, seen_rope, scale)
        scores.view(num_queries, num_heads, num_slots).add_(block.mask[:, None])
        out[tokens] = _weighted(scores, seen, out.dtype).view(num_queries, num_heads, -1)


def _gather(pages: torch.Tensor, page_ids: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[num_rows, P * page_size, dim], a copy."""
    return gather_pages(pages.unsqueeze(1), page_ids).view(num_rows, -1, pages.shape[-1])


def _scores(q_latent: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, scale: float) -> torch.Tensor:
    """float32 [B, M, S] of ``q_latent`` [B, M, latent], ``q_rope`` [B, M, rope], ``latent`` [B, S, latent], ``rope`` [B, S, rope]."""
    scores = torch.bmm(q_latent.float(), latent.float().transpose(1, 2))
    return scores.baddbmm_(q_rope.float(), rope.float().transpose(1, 2)).mul_(scale)


def _weighted(scores: torch.Tensor, latent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.promote_types(dtype, latent.dtype)
    return torch.bmm(scores.softmax(-1).to(wide), latent.to(wide)).to(dtype)
