"""One call of the engine's attention on arrays of the host: what conformance compares with the float64 reference on the user's device."""

from __future__ import annotations

import numpy as np
import torch

from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddkernels.ragged_paged_attention.portable_torch import plan_attention, ragged_paged_attention
from pddtorch.arrays import to_numpy, to_torch


def path(device: str) -> str:
    """Which implementation the engine uses on ``device``."""
    return "portable"


@torch.inference_mode()
def attend(
    device: str,
    queries: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    row_starts: np.ndarray,
    context_lens: np.ndarray,
    page_tables: np.ndarray,
    options: AttentionOptions,
) -> np.ndarray:
    """The op as :mod:`pddkernels.ragged_paged_attention.reference` defines it, in the dtype of ``queries``: float32 [T, heads, dim]."""
    on = torch.device(device)
    q, k, v = (to_torch(array).to(on) for array in (queries, k_pages, v_pages))
    _, num_kv_heads, page_size, dim = k_pages.shape
    plan = plan_attention(
        row_starts,
        context_lens,
        page_tables,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_dim=dim,
        mask_dtype=torch.promote_types(q.dtype, k.dtype),
        device=on,
        windows=(options.window,),
    )
    return to_numpy(ragged_paged_attention(q, k, v, plan, options).float())
