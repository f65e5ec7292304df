"""Prompt log-probabilities: from what a device computed of every scored token to records, for both engines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pddbridge.engine import ScoreRow
from pddbridge.sampling_params import TokenRecord


def score_records(
    rows: Sequence[ScoreRow], logprobs: np.ndarray, top_logprobs: np.ndarray, top_ids: np.ndarray
) -> tuple[tuple[TokenRecord, ...], ...]:
    """One tuple of records per row. ``logprobs`` [n] f32 of the tokens that follow, rows back to back; ``top_logprobs`` [n, K] f32 and
    ``top_ids`` [n, K], K at least what any row asks for, in any order. Most likely first, lowest id first among equals.

    Raises ValueError when a value is not a number: a broken model.
    """
    if np.isnan(logprobs).any() or np.isnan(top_logprobs).any():
        raise ValueError("scores: a log-probability is not a number")
    result: list[tuple[TokenRecord, ...]] = []
    at = 0
    for row in rows:
        records = []
        for token_id in row.next_ids.tolist():
            order = np.lexsort((top_ids[at], -top_logprobs[at]))[: row.num_logprobs]
            top = tuple(zip(top_ids[at][order].tolist(), top_logprobs[at][order].tolist(), strict=True))
            records.append(TokenRecord(token_id, float(logprobs[at]), top))
            at += 1
        result.append(tuple(records))
    return tuple(result)


def score_offsets(row_starts: np.ndarray, rows: Sequence[ScoreRow]) -> np.ndarray:
    """Which of a step's new tokens are scored: i64 [n], rows back to back."""
    return np.concatenate([np.arange(len(row.next_ids)) + row_starts[row.row] for row in rows] or [np.zeros(0)]).astype(np.int64)


def next_ids(rows: Sequence[ScoreRow]) -> np.ndarray:
    """The tokens that follow the scored ones: i32 [n]."""
    return np.concatenate([row.next_ids for row in rows] or [np.zeros(0, np.int32)]).astype(np.int32)
