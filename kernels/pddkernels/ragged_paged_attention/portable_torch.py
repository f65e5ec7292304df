"""Ragged paged attention in plain PyTorch operations, for any device. Two phases: a plan, once per step, and attention, once per layer.

Rows with one new token (decode) are gathered into padded groups and attended by two batched products in which the query heads of a
KV head are the rows of a matrix: grouped-query attention without a copy per query head. Rows with more new tokens (prefill chunks,
extends) go one by one through ``scaled_dot_product_attention``, a block of queries at a time, with a causal mask aligned to the end
of the row's KV; with a soft cap or sinks, which that call does not know, through the products it consists of.

A plan holds, per sliding window that the model's layers have, only the pages that the window reaches.

Slots that a row may not see can hold anything, NaN included: scores there are overwritten, values there are zeroed or cut away.
Scores and softmax are float32; the weighted sum is in the wider of query and KV dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from pddkernels.kv_pages.portable_torch import gather_pages
from pddkernels.ragged_paged_attention.options import AttentionOptions

# Values of one plane that a decode group gathers at most (one row may exceed it): beyond it the copies leave the CPU's caches.
GROUP_VALUES = 1 << 19
# A row shorter than this share of its group's longest row starts a group of its own: padding costs as much as tokens.
MIN_FILL = 0.5
# Queries of a chunk that share one call: a block of queries need not see the keys after it, so smaller blocks skip more of the triangle.
QUERY_BLOCK = 256


@dataclass(frozen=True)
class DecodeGroup:
    """G rows of one new token, padded to S slots: the longest row's KV, from the start of the first page in its window.

    ``tokens`` [G] i64: the rows' places in the batch, None if the group is the whole batch, in order · ``page_heads``
    [G * kv_heads * P] i64: see ``gather_pages`` · ``hidden`` [G, 1, S] bool: slots past a row's KV or before its window, None if there
    are none · ``dead`` [n] i64: the same slots among all gathered [G * kv_heads * P * page_size].
    """

    num_rows: int
    tokens: torch.Tensor | None
    page_heads: torch.Tensor
    num_slots: int
    hidden: torch.Tensor | None
    dead: torch.Tensor | None


@dataclass(frozen=True)
class QueryBlock:
    """Queries ``[start, stop)`` of the batch, which see gathered slots from ``first_slot`` on. ``mask``: additive [queries, slots]."""

    start: int
    stop: int
    first_slot: int
    mask: torch.Tensor


@dataclass(frozen=True)
class ChunkRow:
    """A row with several new tokens. ``page_heads`` [kv_heads * P] i64: see ``gather_pages``."""

    page_heads: torch.Tensor
    blocks: tuple[QueryBlock, ...]


@dataclass(frozen=True)
class WindowPlan:
    """A step as layers of one window see it."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[ChunkRow, ...]


@dataclass(frozen=True)
class AttentionPlan:
    """Everything about a step that is the same for all layers of a window, on the device. ``by_window``: None for no window."""

    by_window: Mapping[int | None, WindowPlan]


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
    windows: Iterable[int | None] = (None,),
    decodes: bool = True,
) -> AttentionPlan:
    """Plan one ragged batch: ``row_starts`` [R+1], ``context_lens`` [R], ``page_tables`` [R, P] as in the engine contract (numpy, integer).

    ``mask_dtype``: the wider of the queries' and the pages' dtype · ``windows``: of all layers that will use the plan ·
    ``decodes``: whether rows with one new token are planned, too; without them the plan is for :func:`attend_chunks`.
    """

    def plan(window: int | None) -> WindowPlan:
        return _plan_window(
            row_starts,
            context_lens.astype(np.int64),
            page_tables,
            window,
            num_kv_heads=num_kv_heads,
            page_size=page_size,
            head_dim=head_dim,
            mask_dtype=mask_dtype,
            device=device,
            decodes=decodes,
        )

    return AttentionPlan({window: plan(window) for window in windows})


def _plan_window(
    row_starts: np.ndarray,
    context_lens: np.ndarray,
    page_tables: np.ndarray,
    window: int | None,
    *,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    mask_dtype: torch.dtype,
    device: torch.device,
    decodes: bool,
) -> WindowPlan:
    news = np.diff(row_starts)
    # From here on slots count from the start of each row's first page: the one that holds the first key its first new token sees.
    lowest = np.zeros_like(context_lens) if window is None else np.maximum(context_lens - window + 1, 0)
    first_pages = lowest // page_size
    spans = np.stack((lowest, context_lens + news), axis=1) - (first_pages * page_size)[:, None]
    groups = tuple(
        _plan_group(rows, row_starts, spans, first_pages, page_tables, num_kv_heads, page_size, device)
        for rows in _decode_groups(np.flatnonzero((news == 1) & decodes), spans[:, 1], num_kv_heads * head_dim)
    )
    chunks = []
    for row in np.flatnonzero(news > 1):
        first_page, context_len, row_start = int(first_pages[row]), int(context_lens[row]), int(row_starts[row])
        pages = page_tables[row : row + 1, first_page : first_page - (-int(spans[row, 1]) // page_size)]
        blocks = []
        for begin, end in _blocks(int(news[row])):
            first_key = 0 if window is None else max(0, context_len + begin - window + 1)
            mask = _mask(context_len + begin - first_key, end - begin, window, mask_dtype, device)
            blocks.append(QueryBlock(row_start + begin, row_start + end, first_key - first_page * page_size, mask))
        chunks.append(ChunkRow(_to_device(_page_heads(pages, num_kv_heads), device), tuple(blocks)))
    return WindowPlan(groups, tuple(chunks))


def ragged_paged_attention(
    queries: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    plan: AttentionPlan,
    options: AttentionOptions,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The op as :mod:`pddkernels.ragged_paged_attention.reference` defines it, for a planned batch: [T, heads, dim] in the queries' dtype.

    ``queries`` [T, heads, dim] · ``k_pages``, ``v_pages`` [N, kv_heads, page_size, dim], the new tokens' KV already stored ·
    ``sinks`` [heads] float32. Raises KeyError if ``options.window`` was not planned.
    """
    dtype = torch.promote_types(queries.dtype, k_pages.dtype)
    step = plan.by_window[options.window]
    if len(step.groups) == 1 and step.groups[0].tokens is None:
        return _attend_group(queries, k_pages, v_pages, step.groups[0], options, sinks, dtype)
    out = torch.empty_like(queries)
    for group in step.groups:
        attended = _attend_group(queries.index_select(0, group.tokens), k_pages, v_pages, group, options, sinks, dtype)
        out.index_copy_(0, group.tokens, attended)
    attend_chunks(queries, k_pages, v_pages, plan, options, sinks, out)
    return out


def attend_chunks(
    queries: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    plan: AttentionPlan,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Attention of the planned rows with several new tokens, into their places of ``out`` [T, heads, dim]."""
    dtype = torch.promote_types(queries.dtype, k_pages.dtype)
    for chunk in plan.by_window[options.window].chunks:
        _attend_chunk(queries, k_pages, v_pages, chunk, options, sinks, dtype, out)


def _attend_group(
    queries: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    group: DecodeGroup,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
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
    scores = torch.bmm(q.float().mul(options.scale), k.float().transpose(1, 2))
    if options.soft_cap is not None:
        scores.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
    if group.hidden is not None:
        scores.view(num_rows, -1, num_slots).masked_fill_(group.hidden, float("-inf"))
    weights = _softmax(scores.view(num_rows, num_kv_heads, -1, num_slots), sinks).view(scores.shape).to(dtype)
    return torch.bmm(weights, v.to(dtype)).view(num_rows, -1, dim).to(queries.dtype)


def _attend_chunk(
    queries: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    chunk: ChunkRow,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
    dtype: torch.dtype,
    out: torch.Tensor,
) -> None:
    num_kv_heads, dim = k_pages.shape[1], k_pages.shape[3]
    group = queries.shape[1] // num_kv_heads

    def spread(pages: torch.Tensor) -> torch.Tensor:
        """[kv_heads, group, P * page_size, dim]: a view per query head."""
        return gather_pages(pages, chunk.page_heads).view(num_kv_heads, 1, -1, dim).to(dtype).expand(-1, group, -1, -1)

    k, v = spread(k_pages), spread(v_pages)
    for block in chunk.blocks:
        num_queries, num_slots = block.mask.shape
        q = queries[block.start : block.stop].to(dtype).view(num_queries, num_kv_heads, group, dim).permute(1, 2, 0, 3)
        # Cuts off what lies past the row's KV, and before the window of the block's first query.
        seen = slice(block.first_slot, block.first_slot + num_slots)
        if options.soft_cap is None and sinks is None:
            attended = F.scaled_dot_product_attention(q, k[:, :, seen], v[:, :, seen], attn_mask=block.mask, scale=options.scale)
        else:
            attended = _attend_block(q, k[:, 0, seen], v[:, 0, seen], block.mask, options, sinks)
        out[block.start : block.stop].view(num_queries, num_kv_heads, group, dim).copy_(attended.permute(2, 0, 1, 3))


def _attend_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, options: AttentionOptions, sinks: torch.Tensor | None
) -> torch.Tensor:
    """``q`` [kv_heads, group, queries, dim], ``k``, ``v`` [kv_heads, slots, dim], additive ``mask`` [queries, slots] -> as ``q``."""
    num_kv_heads, group, num_queries, dim = q.shape
    scores = torch.bmm(q.reshape(num_kv_heads, -1, dim).float().mul(options.scale), k.float().transpose(1, 2))
    if options.soft_cap is not None:
        scores.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
    scores = scores.view(num_kv_heads, group, num_queries, -1).add_(mask)
    weights = _softmax(scores.flatten(1, 2).view(1, num_kv_heads, group * num_queries, -1), sinks, num_queries)
    return torch.bmm(weights[0].to(v.dtype), v).view(q.shape)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None, num_queries: int = 1) -> torch.Tensor:
    """Over the last axis of ``scores`` [rows, kv_heads, group * num_queries, slots] float32, with ``sinks`` [heads] as one more logit."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.float().view(1, scores.shape[1], -1, 1).repeat_interleave(num_queries, 2).expand(len(scores), -1, -1, -1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


def _plan_group(
    rows: np.ndarray,
    row_starts: np.ndarray,
    spans: np.ndarray,
    first_pages: np.ndarray,
    page_tables: np.ndarray,
    num_kv_heads: int,
    page_size: int,
    device: torch.device,
) -> DecodeGroup:
    """``spans`` [R, 2]: first slot that a row sees, and the one past its last, from the start of its page ``first_pages`` [R]."""
    lows, highs = spans[rows, :1], spans[rows, 1:]
    num_slots = int(highs.max())
    num_pages = -(-num_slots // page_size)
    hidden = dead = None
    if highs.min() < num_slots or lows.max() > 0:
        slots = np.arange(num_pages * page_size)
        unseen = ((slots >= highs) & (slots < num_slots)) | (slots < lows)
        hidden = _to_device(unseen[:, None, :num_slots], device)
        dead = _to_device(np.flatnonzero(np.repeat(unseen, num_kv_heads, axis=0)), device)
    # Entries past a row's own pages are not to be read: page 0 stands in, and all of its gathered slots are dead.
    used = np.arange(num_pages) * page_size < highs
    columns = np.where(used, first_pages[rows, None] + np.arange(num_pages), 0)
    index = _page_heads(np.where(used, page_tables[rows[:, None], columns], 0), num_kv_heads)
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


def _mask(before: int, num_queries: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Additive [num_queries, before + num_queries]: query i sees keys up to ``before + i``, the last ``window`` of them."""
    mask = torch.zeros(num_queries, before + num_queries, dtype=dtype, device=device)
    tail = torch.full((num_queries, num_queries), float("-inf"), dtype=dtype, device=device)
    mask[:, before:] = tail.triu_(1)
    if window is not None:
        mask += torch.full_like(mask, float("-inf")).tril_(before - window)
    return mask


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
