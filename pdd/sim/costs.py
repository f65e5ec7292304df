"""What a step costs on an engine: fitted to runs of the real one (`pdd profile`), or taken from a chip's data sheet (`pdd plan`)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineCost:
    """Seconds. A prefill step costs ``prefill_s`` and, for every row of m new tokens behind c others, ``prefill_token_s * m +
    prefill_pair_s * m * (c + m / 2)``: the products are linear in tokens, attention in pairs of them. A decode step of n rows with k tokens
    of context in all costs ``step_s + row_s * n + context_s * k``. Ingesting m log tokens costs a step and ``extend_token_s`` each.
    """

    prefill_s: float
    prefill_token_s: float
    prefill_pair_s: float
    step_s: float
    row_s: float
    context_s: float
    extend_token_s: float

    def chunk(self, new_tokens: int, tokens_before: int) -> float:
        """What a row adds to its prefill step."""
        return self.prefill_token_s * new_tokens + self.prefill_pair_s * new_tokens * (tokens_before + new_tokens / 2)

    def prefill(self, miss_tokens: int, cached_tokens: int, step_tokens: int | None = None) -> float:
        """Of one prompt, alone on the engine, in steps of ``step_tokens``; None: in one."""
        num_steps = 1 if step_tokens is None else math.ceil(miss_tokens / step_tokens)
        return self.prefill_s * num_steps + self.chunk(miss_tokens, cached_tokens)

    def step(self, num_rows: int, context_tokens: float) -> float:
        """Of one decode step."""
        return self.step_s + self.row_s * num_rows + self.context_s * context_tokens

    def extend(self, tokens: int) -> float:
        """That the row's own hand-over takes, beside its neighbours' step."""
        return self.step_s + self.extend_token_s * tokens
