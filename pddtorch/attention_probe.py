"""One call of the engine's attention on arrays of the host: what conformance compares with the float64 reference on the user's device."""

from __future__ import annotations

import numpy as np
import torch

from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddkernels.torch_ops import Problem, choose
from pddtorch.arrays import to_numpy, to_torch


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
) -> tuple[np.ndarray, str]:
    """The op as :mod:`pddkernels.ragged_paged_attention.reference` defines it, by the path that an engine takes for these shapes and dtypes
    on ``device``: float32 [T, heads, dim], and the path's name with what was counted as a fallback.
    """
    on = torch.device(device)
    q, k, v = (to_torch(array).to(on) for array in (queries, k_pages, v_pages))
    _, num_kv_heads, page_size, dim = k_pages.shape
    ops = choose(Problem(queries.shape[1], num_kv_heads, dim, page_size, q.dtype, k.dtype, (options.window,)), on)
    out = ops.plan(row_starts, context_lens, page_tables).attend(q, k, v, options)
    return to_numpy(out.float()), ", ".join((ops.path, *ops.fallbacks))
