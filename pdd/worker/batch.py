"""Planned rows -> the engine's arrays. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdd.worker.request import RequestState
from pddbridge.engine import SampleRow, ScoreRow, Step


@dataclass(frozen=True)
class BatchRow:
    """``num_tokens`` new tokens of ``request`` from ``kv_len`` on; ``samples``: their last logits choose the next token of the log."""

    request: RequestState
    num_tokens: int
    samples: bool

    @property
    def scores(self) -> bool:
        return self.request.scores_pending


def build_step(rows: Sequence[BatchRow], page_size: int) -> Step:
    """One ragged step of ``rows``, in their order; shapes and dtypes are :class:`pddbridge.engine.Step`'s.

    Every row has pages for its new tokens.
    """
    lengths = [row.num_tokens for row in rows]
    row_starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=row_starts[1:])
    num_pages = [-(-(row.request.kv_len + row.num_tokens) // page_size) for row in rows]
    page_tables = np.zeros((len(rows), max(num_pages)), dtype=np.int32)
    for r, row in enumerate(rows):
        assert len(row.request.pages) >= num_pages[r], (row.request.request_id, len(row.request.pages), num_pages[r])
        page_tables[r, : num_pages[r]] = row.request.pages[: num_pages[r]]
    return Step(
        token_ids=np.concatenate([row.request.tokens.view(row.request.kv_len, row.request.kv_len + row.num_tokens) for row in rows]),
        row_starts=row_starts,
        context_lens=np.array([row.request.kv_len for row in rows], dtype=np.int32),
        page_tables=page_tables,
        samples=tuple(_sample_row(r, row.request) for r, row in enumerate(rows) if row.samples),
        scores=tuple(_score_row(r, row) for r, row in enumerate(rows) if row.scores),
    )


def _sample_row(row: int, request: RequestState) -> SampleRow:
    prompt = request.tokens.view(0, request.prompt_len)
    log = request.tokens.view(request.prompt_len, len(request.tokens))
    return SampleRow(row, request.log_len, request.params, prompt, log)


def _score_row(number: int, row: BatchRow) -> ScoreRow:
    """The prompt tokens that follow the new ones; what follows the prompt is not known yet."""
    request = row.request
    assert request.prompt_logprobs is not None
    follows = request.tokens.view(request.kv_len + 1, min(request.kv_len + row.num_tokens + 1, request.prompt_len))
    return ScoreRow(number, follows, request.prompt_logprobs)
