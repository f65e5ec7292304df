"""A step on its way to the device: every index that is the same for all layers, built once on the host and copied once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pddbridge.engine import Step
from pddbridge.scoring import score_offsets
from pddkernels.torch_ops import StepKernels, TorchOps, to_device


@dataclass(frozen=True)
class Batch:
    """``token_ids``, ``positions`` [T] i64 · ``kernels``: where KV goes and who attends to what · ``sample_tokens`` [S] i64: whose logits
    are wanted: the last new token of each sampling row, then the scored tokens.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kernels: StepKernels
    sample_tokens: torch.Tensor


def make_batch(step: Step, ops: TorchOps, device: torch.device, fed: torch.Tensor | None = None) -> Batch:
    """``step`` must have passed :func:`pddbridge.engine_checks.check_step`. ``fed`` [T] i64 on the device: its tokens, if it has none."""
    last = np.array([step.row_starts[sample.row + 1] - 1 for sample in step.samples], np.int64)
    sample_tokens = np.concatenate((last, score_offsets(step.row_starts, step.scores)))
    token_ids = to_device(step.token_ids.astype(np.int64), device) if fed is None else fed
    positions, samples = to_device(_positions(step), device), to_device(sample_tokens, device)
    return Batch(token_ids, positions, ops.plan(step.row_starts, step.context_lens, step.page_tables), samples)


def _positions(step: Step) -> np.ndarray:
    """int64 [T]: new token i of row r stands at ``context_lens[r] + i``."""
    first = (step.context_lens - step.row_starts[:-1]).astype(np.int64)
    return np.arange(step.row_starts[-1], dtype=np.int64) + np.repeat(first, np.diff(step.row_starts))
