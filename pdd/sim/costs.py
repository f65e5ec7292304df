"""What a step costs on an engine: fitted to runs of the real one (`pdd profile`), or taken from a chip's data sheet (`pdd plan`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineCost:
    """Seconds. A prefill of m tokens behind c cached ones costs ``prefill_s + prefill_token_s * m + prefill_pair_s * m * (c + m / 2)``: the
    products are linear in tokens, attention in pairs of them. A decode step of n rows with k tokens of context in all costs ``step_s +
    row_s * n + context_s * k``. Ingesting m log tokens costs a step and ``extend_token_s`` each.
    """

    prefill_s: float
    prefill_token_s: float
    prefill_pair_s: float
    step_s: float
    row_s: float
    context_s: float
    extend_token_s: float

    def prefill(self, miss_tokens: int, cached_tokens: int) -> float:
        """Of one prompt, alone on the engine."""
        pairs = miss_tokens * (cached_tokens + miss_tokens / 2)
        return self.prefill_s + self.prefill_token_s * miss_tokens + self.prefill_pair_s * pairs

    def step(self, num_rows: int, context_tokens: float) -> float:
        """Of one decode step."""
        return self.step_s + self.row_s * num_rows + self.context_s * context_tokens

    def extend(self, tokens: int) -> float:
        """That the row's own hand-over takes, beside its neighbours' step."""
        return self.step_s + self.extend_token_s * tokens
