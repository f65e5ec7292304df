"""A step on its way to the device: every index that is the same for all layers, built once on the host and copied once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pddbridge.engine import Step
from pddkernels.kv_pages.portable_torch import new_token_rows
from pddkernels.ragged_paged_attention.portable_torch import AttentionPlan, plan_attention


@dataclass(frozen=True)
class Batch:
    """``token_ids``, ``positions`` [T] i64 · ``kv_rows`` [T * kv_heads] i64, where the new KV goes · ``sample_tokens`` [S] i64: the last
    new token of each sampling row.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_rows: torch.Tensor
    attention: AttentionPlan
    sample_tokens: torch.Tensor


def make_batch(
    step: Step,
    *,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    windows: frozenset[int | None],
    mask_dtype: torch.dtype,
    device: torch.device,
) -> Batch:
    """``step`` must have passed :func:`pddbridge.engine_checks.check_step`. ``windows``: those of the model's layers · ``mask_dtype``: the
    wider of compute and KV dtype.
    """
    positions, kv_rows = new_token_rows(step.row_starts, step.context_lens, step.page_tables, num_kv_heads, page_size)
    attention = plan_attention(
        step.row_starts,
        step.context_lens,
        step.page_tables,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_dim=head_dim,
        mask_dtype=mask_dtype,
        device=device,
        windows=windows,
    )
    sample_tokens = np.array([step.row_starts[sample.row + 1] - 1 for sample in step.samples], np.int64)
    token_ids, positions_, rows, samples = (
        torch.from_numpy(array).to(device) for array in (step.token_ids.astype(np.int64), positions, kv_rows, sample_tokens)
    )
    return Batch(token_ids, positions_, rows, attention, samples)
