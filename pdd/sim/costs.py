"""What a step costs on an engine: fitted to runs of the real one (`pdd profile`), or taken from a chip's data sheet (`pdd plan`)."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import MISSING, dataclass, field, fields
from itertools import pairwise


@dataclass(frozen=True)
class EngineCost:
    """Seconds. A prefill step of m new tokens costs ``prefill_s + prefill_token_s * m`` and, for every row of it with n new tokens behind c
    others, ``prefill_pair_s * n * (c + n / 2)``: the products are linear in tokens, attention in pairs of them. ``prefill_steps``: what
    the former is by m as measured, a straight line between two of them; then the line is not asked. An engine that pads its steps to a few
    sizes has stairs there. A decode step of n rows with k tokens of context in all costs ``step_s + row_s * n + context_s * k``. Ingesting
    m log tokens costs a step and ``extend_token_s`` each.
    """

    prefill_s: float
    prefill_token_s: float
    prefill_pair_s: float
    step_s: float
    row_s: float
    context_s: float
    extend_token_s: float
    prefill_steps: tuple[tuple[int, float], ...] = ()
    _sizes: tuple[int, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        sizes = tuple(tokens for tokens, _ in self.prefill_steps)
        if len(sizes) == 1 or any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(f"prefill_steps: given {sizes} tokens, allowed are none, or two and more in ascending order")
        object.__setattr__(self, "_sizes", sizes)

    def prefill_step(self, new_tokens: int) -> float:
        """Of a step of so many new tokens over all its rows, attention aside."""
        if not self._sizes:
            return self.prefill_s + self.prefill_token_s * new_tokens
        index = min(max(1, bisect_left(self._sizes, new_tokens)), len(self._sizes) - 1)
        (from_tokens, from_s), (to_tokens, to_s) = self.prefill_steps[index - 1], self.prefill_steps[index]
        if new_tokens <= from_tokens:
            return from_s  # the smallest there is
        return from_s + (to_s - from_s) * (new_tokens - from_tokens) / (to_tokens - from_tokens)

    def attention(self, new_tokens: int, tokens_before: int) -> float:
        """What a row adds to its prefill step."""
        return self.prefill_pair_s * new_tokens * (tokens_before + new_tokens / 2)

    def prefill(self, miss_tokens: int, cached_tokens: int, step_tokens: int | None = None) -> float:
        """Of one prompt, alone on the engine, in steps of ``step_tokens``; None: in one."""
        if not miss_tokens:
            return 0.0
        full_steps = 0 if step_tokens is None else math.ceil(miss_tokens / step_tokens) - 1
        last_tokens = miss_tokens - full_steps * (step_tokens or 0)
        full_s = full_steps * self.prefill_step(step_tokens) if step_tokens else 0.0
        return full_s + self.prefill_step(last_tokens) + self.attention(miss_tokens, cached_tokens)

    def step(self, num_rows: int, context_tokens: float) -> float:
        """Of one decode step."""
        return self.step_s + self.row_s * num_rows + self.context_s * context_tokens

    def extend(self, tokens: int) -> float:
        """That the row's own hand-over takes, beside its neighbours' step."""
        return self.step_s + self.extend_token_s * tokens


# That a cost must be given by.
REQUIRED_COSTS = tuple(field.name for field in fields(EngineCost) if field.default is MISSING and field.init)
