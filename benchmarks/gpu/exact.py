"""Attention in float64 from the definition, in plain operations on the device, block by block: what kernels are held against where the
numpy reference would take hours. The two are compared in tests.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from benchmarks.gpu.batches import places
from pddkernels.ragged_paged_attention.options import AttentionOptions

_SCORE_VALUES: Final = 1 << 27  # 1 GiB of them at once


def attention(
    queries: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    row_starts: np.ndarray,
    context_lens: np.ndarray,
    page_tables: np.ndarray,
    options: AttentionOptions,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`pddkernels.ragged_paged_attention.reference.ragged_paged_attention`: float64 [T, heads, dim of v]. Keys and values may have
    different sizes.
    """
    num_tokens, num_heads, _ = queries.shape
    out = torch.empty((num_tokens, num_heads, v_pages.shape[-1]), dtype=torch.float64, device=queries.device)
    for row, context_len in enumerate(context_lens.tolist()):
        start, stop = int(row_starts[row]), int(row_starts[row + 1])
        if start == stop:
            continue
        lowest = 0 if options.window is None else max(0, context_len - options.window + 1)
        pages, slots = places(page_tables[row], np.arange(lowest, context_len + stop - start), queries.device)
        keys, values = k_pages[pages, :, slots].double(), v_pages[pages, :, slots].double()
        block = max(1, _SCORE_VALUES // (num_heads * len(keys)))
        for first in range(start, stop, block):
            last = min(stop, first + block)
            position = context_len + first - start - lowest  # of the block's first query, among the keys
            out[first:last] = _block(queries[first:last].double(), keys, values, position, options, sinks)
    return out


def _block(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: int,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    num_tokens, num_heads, dim = queries.shape
    num_kv_heads = keys.shape[1]
    grouped = queries.view(num_tokens, num_kv_heads, -1, dim)
    scores = torch.einsum("thgd,khd->thgk", grouped, keys).mul_(options.scale)
    if options.soft_cap is not None:
        scores = scores.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
    of_queries = torch.arange(position, position + num_tokens, device=keys.device)[:, None]
    of_keys = torch.arange(len(keys), device=keys.device)[None]
    hidden = of_keys > of_queries
    if options.window is not None:
        hidden |= of_keys <= of_queries - options.window
    scores.masked_fill_(hidden[:, None, None], float("-inf"))
    if sinks is not None:
        extra = sinks.double().view(1, num_kv_heads, -1, 1).expand(num_tokens, -1, -1, 1)
        scores = torch.cat((scores, extra), -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("thgk,khd->thgd", weights, values).reshape(num_tokens, num_heads, -1)
