"""Prompt log-probabilities on the device."""

from __future__ import annotations

import numpy as np
import torch

from pddbridge.engine import ScoreRow
from pddbridge.sampling_params import TokenRecord
from pddbridge.scoring import next_ids, score_records


def score(logits: torch.Tensor, rows: tuple[ScoreRow, ...]) -> tuple[tuple[TokenRecord, ...], ...]:
    """Records of ``rows``; ``logits`` [n, vocab] float32 of their scored tokens, back to back."""
    if not rows:
        return ()
    follows = torch.from_numpy(next_ids(rows).astype(np.int64)).to(logits.device)
    log_sums = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, follows[:, None]) - log_sums
    top, ids = logits.topk(min(max(row.num_logprobs for row in rows), logits.shape[1]), dim=-1)
    return score_records(rows, chosen[:, 0].cpu().numpy(), (top - log_sums).cpu().numpy(), ids.cpu().numpy())
