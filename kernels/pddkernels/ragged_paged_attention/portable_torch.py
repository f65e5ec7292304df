"""Ragged paged attention in plain PyTorch operations, for any device. Two phases: a plan, once per step, and attention, once per layer.

Rows with one new token (decode) are gathered into padded groups and attended by two batched products in which the query heads of a
KV head are the rows of a matrix: grouped-query attention without a copy per query head. Rows with more new tokens (prefill chunks,
extends) go one by one through ``scaled_dot_product_attention``, a block of queries at a time, with a causal mask aligned to the end
of the row's KV.

Slots that a row may not see can hold anything, NaN included: scores there are overwritten, values there are zeroed or cut away.
Scores and softmax are float32; the weighted sum is in the wider of query and KV dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from pddkernels.kv_pages.portable_torch import gather_pages

# Values of one plane that a decode group gathers at most (one row may exceed it): beyond it the copies leave the CPU's caches.
GROUP_VALUES = 1 << 19
# A row shorter than this share of its group's longest row starts a group of its own: padding costs as much as tokens.
MIN_FILL = 0.5
# Queries of a chunk that share one call: a block of queries need not see the keys after it, so smaller blocks skip more of the triangle.
QUERY_BLOCK = 256


@dataclass(frozen=True)
class DecodeGroup:
    """G rows of one new token, padded to S slots, the longest row's KV.

    ``tokens`` [G] i64: the rows' places in the batch, None if the group is the whole batch, in order · ``page_heads``
    [G * kv_heads * P] i64: see ``gather_pages`` · ``hidden`` [G, 1, S] bool: slots past a row's KV, None if there are none ·
    ``dead`` [n] i64: the same slots among all gathered [G * kv_heads * P * page_size].
    """

    num_rows: int
    tokens: torch.Tensor | None
    page_heads: torch.Tensor
    num_slots: int
    hidden: torch.Tensor | None
    dead: torch.Tensor | None


@dataclass(frozen=True)
class ChunkRow:
    """A row with several new tokens: ``[start, stop)`` of the batch. ``masks``: per query block an additive mask [queries, keys]."""

    start: int
    stop: int
    page_heads: torch.Tensor
    masks: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class AttentionPlan:
    """Everything about a step that is the same for all layers, on the device."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[ChunkRow, ...]


def plan_attention(
    row_starts: np.ndarray,
    context_lens: np.ndarray,
    page_tables: np.ndarray,
    *,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    mask_dtype: torch.dtype,
    device: torch.device,
) -> AttentionPlan:
    """Plan one ragged batch: ``row_starts`` [R+1], ``context_lens`` [R], ``page_tables`` [R, P] as in the engine contract (numpy, integer).

    ``mask_dtype``: the wider of the queries' and the pages' dtype.
    """
    news = np.diff(row_starts)
    kv_lens = context_lens.astype(np.int64) + news
    groups = tuple(
        _plan_group(rows, row_starts, kv_lens, page_tables, num_kv_heads, page_size, device)
        for rows in _decode_groups(np.flatnonzero(news == 1), kv_lens, num_kv_heads * head_dim)
    )
    chunks = []
    for row in np.flatnonzero(news > 1):
        pages = page_tables[row : row + 1, : -(-int(kv_lens[row]) // page_size)]
        masks = tuple(_causal_mask(begin, end, int(context_lens[row]), mask_dtype, device) for begin, end in _blocks(int(news[row])))
        index = _to_device(_page_heads(pages, num_kv_heads), device)
        chunks.append(ChunkRow(int(row_starts[row]), int(row_starts[row + 1]), index, masks))
    return AttentionPlan(groups, tuple(chunks))


def ragged_paged_attention(
    queries: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """``softmax(scale * q k^T) v`` for a planned batch: [T, heads, dim] in the queries' dtype.

    ``queries`` [T, heads, dim] · ``k_pages``, ``v_pages`` [N, kv_heads, page_size, dim], the new tokens' KV already stored.
    """
    dtype = torch.promote_types(queries.dtype, k_pages.dtype)
    if len(plan.groups) == 1 and plan.groups[0].tokens is None:
        return _attend_group(queries, k_pages, v_pages, plan.groups[0], scale, dtype)
    out = torch.empty_like(queries)
    for group in plan.groups:
        out.index_copy_(0, group.tokens, _attend_group(queries.index_select(0, group.tokens), k_pages, v_pages, group, scale, dtype))
    for chunk in plan.chunks:
        _attend_chunk(queries, k_pages, v_pages, chunk, scale, dtype, out)
    return out


def _attend_group(
    queries: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    group: DecodeGroup,
    scale: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[G, heads, dim] for the group's ``queries`` [G, heads, dim]."""
    num_rows, num_slots = group.num_rows, group.num_slots
    num_kv_heads, dim = k_pages.shape[1], k_pages.shape[3]
    q = queries.reshape(num_rows * num_kv_heads, -1, dim)
    k = gather_pages(k_pages, group.page_heads).view(num_rows * num_kv_heads, -1, dim)[:, :num_slots]
    v = gather_pages(v_pages, group.page_heads)
    if group.dead is not None:
        v.view(-1, dim).index_fill_(0, group.dead, 0)
    v = v.view(num_rows * num_kv_heads, -1, dim)[:, :num_slots]
    # float32 scores: in bfloat16 a score of 16 would be off by 0.06, its weight by 6 %.
    scores = torch.bmm(q.float().mul(scale), k.float().transpose(1, 2))
    if group.hidden is not None:
        scores.view(num_rows, -1, num_slots).masked_fill_(group.hidden, float("-inf"))
    weights = scores.softmax(-1).to(dtype)
    return torch.bmm(weights, v.to(dtype)).view(num_rows, -1, dim).to(queries.dtype)


def _attend_chunk(
    queries: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    chunk: ChunkRow,
    scale: float,
    dtype: torch.dtype,
    out: torch.Tensor,
) -> None:
    num_kv_heads, dim = k_pages.shape[1], k_pages.shape[3]
    group = queries.shape[1] // num_kv_heads

    def spread(pages: torch.Tensor) -> torch.Tensor:
        """[kv_heads, group, P * page_size, dim]: a view per query head."""
        return gather_pages(pages, chunk.page_heads).view(num_kv_heads, 1, -1, dim).to(dtype).expand(-1, group, -1, -1)

    k, v = spread(k_pages), spread(v_pages)
    for (begin, end), mask in zip(_blocks(chunk.stop - chunk.start), chunk.masks, strict=True):
        block = slice(chunk.start + begin, chunk.start + end)
        q = queries[block].to(dtype).view(end - begin, num_kv_heads, group, dim).permute(1, 2, 0, 3)
        num_keys = mask.shape[1]  # cuts off what lies past the row's KV
        attended = F.scaled_dot_product_attention(q, k[:, :, :num_keys], v[:, :, :num_keys], attn_mask=mask, scale=scale)
        out[block].view(end - begin, num_kv_heads, group, dim).copy_(attended.permute(2, 0, 1, 3))


def _plan_group(
    rows: np.ndarray,
    row_starts: np.ndarray,
    kv_lens: np.ndarray,
    page_tables: np.ndarray,
    num_kv_heads: int,
    page_size: int,
    device: torch.device,
) -> DecodeGroup:
    lens = kv_lens[rows]
    num_slots = int(lens.max())
    num_pages = -(-num_slots // page_size)
    hidden = dead = None
    if lens.min() < num_slots:
        slots = np.arange(num_pages * page_size)
        past = (slots >= lens[:, None]) & (slots < num_slots)
        hidden = _to_device(past[:, None, :num_slots], device)
        dead = _to_device(np.flatnonzero(np.repeat(past, num_kv_heads, axis=0)), device)
    # Entries past a row's own pages are not to be read: page 0 stands in, and all of its gathered slots are dead.
    used = np.arange(num_pages) * page_size < lens[:, None]
    index = _page_heads(np.where(used, page_tables[rows, :num_pages], 0), num_kv_heads)
    tokens = None if len(rows) == row_starts[-1] else _to_device(row_starts[rows].astype(np.int64), device)
    return DecodeGroup(len(rows), tokens, _to_device(index, device), num_slots, hidden, dead)


def _page_heads(pages: np.ndarray, num_kv_heads: int) -> np.ndarray:
    """[rows, P] page ids -> int64 [rows * kv_heads * P] for ``gather_pages``: a head's pages follow one another."""
    return (pages.astype(np.int64)[:, None, :] * num_kv_heads + np.arange(num_kv_heads)[None, :, None]).reshape(-1)


def _decode_groups(rows: np.ndarray, kv_lens: np.ndarray, values_per_token: int) -> list[np.ndarray]:
    """Decode rows, sorted by length and cut where a group would gather too much or pad too much; within a group in batch order."""
    if not rows.size:
        return []
    ordered = rows[np.argsort(-kv_lens[rows], kind="stable")]
    groups, first = [], 0
    for i in range(1, len(ordered)):
        longest = int(kv_lens[ordered[first]])
        full = (i - first + 1) * longest * values_per_token > GROUP_VALUES
        if full or kv_lens[ordered[i]] < MIN_FILL * longest:
            groups.append(np.sort(ordered[first:i]))
            first = i
    groups.append(np.sort(ordered[first:]))
    return groups


def _blocks(num_queries: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + QUERY_BLOCK, num_queries)) for begin in range(0, num_queries, QUERY_BLOCK)]


def _causal_mask(begin: int, end: int, context_len: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Additive [end - begin, context_len + end]: query ``begin + i`` sees keys up to ``context_len + begin + i``."""
    mask = torch.zeros(end - begin, context_len + end, dtype=dtype, device=device)
    tail = torch.full((end - begin, end - begin), float("-inf"), dtype=dtype, device=device)
    mask[:, context_len + begin :] = tail.triu_(1)
    return mask


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
