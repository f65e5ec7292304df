"""What a request asks of the sampler, and what a chosen token looks like. Frozen data, shared by every process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """Everything that decides a token besides the tokens before it.

    ``seed`` is always set (the front door draws one when the client gave none), so a request is a pure function of itself.
    ``eos_token_ids`` is the model's stop set and is what ``ignore_eos`` switches off; ``stop_token_ids`` are the user's own.
    Both are masked while fewer than ``min_tokens`` tokens have been generated.
    ``num_logprobs``: None, no record; 0, the chosen token's only; n, also the n most likely.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    num_logprobs: int | None = None

    @property
    def stop_set(self) -> frozenset[int]:
        """Token ids that end the request: the user's own, and the model's unless ``ignore_eos``."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | self.eos_token_ids


@dataclass(frozen=True)
class TokenRecord:
    """One proposed or accepted token with the log-probabilities that were asked for (natural logarithm)."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
