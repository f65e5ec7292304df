"""What a request asks of the sampler, and what a chosen token looks like. Frozen data, shared by every process."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """Everything that decides a token besides the tokens before it.

    ``seed`` is always set (the front door draws one when the client gave none), so a request is a pure function of itself.
    ``eos_token_ids`` is the model's stop set and is what ``ignore_eos`` switches off; ``stop_token_ids`` are the user's own.
    Both are masked while fewer than ``min_tokens`` tokens have been generated.
    ``num_logprobs``: None, no record; 0, the chosen token's only; n, also the n most likely. ``logprob_token_ids``: records have these
    instead of the most likely. ``allowed_token_ids``: nothing else may be chosen; empty, everything may. ``bad_words``: no last id of one
    is chosen where the log ends with the ids before it.

    Real numbers are rounded to float32 on construction, since that is what the wire carries and what the sampler computes in: a request
    means the same whether or not it crossed a wire. Raises ValueError naming the field for a value outside its range, so whoever builds
    one from a message has checked it (ids against the vocabulary: :func:`pddbridge.rpc.convert.check_token_ids`).
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
    allowed_token_ids: frozenset[int] = field(default_factory=frozenset)
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprob_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            object.__setattr__(self, name, _float32(name, getattr(self, name)))
        bias = tuple((token_id, _float32("logit_bias", value)) for token_id, value in self.logit_bias)
        object.__setattr__(self, "logit_bias", bias)
        _check("seed", self.seed, 0 <= self.seed < 2**64, "0 to 2**64 - 1")
        _check("max_tokens", self.max_tokens, 1 <= self.max_tokens < 2**31, "1 to 2**31 - 1")
        _check("min_tokens", self.min_tokens, 0 <= self.min_tokens < 2**31, "0 to 2**31 - 1")
        _check("temperature", self.temperature, self.temperature >= 0, "0 or more")
        _check("top_k", self.top_k, self.top_k is None or 1 <= self.top_k < 2**31, "1 to 2**31 - 1, or none")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0, up to 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1")
        _check("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "more than 0")
        _check("num_logprobs", self.num_logprobs, self.num_logprobs is None or 0 <= self.num_logprobs < 2**31, "0 to 2**31 - 1, or none")
        bias_ids = [token_id for token_id, _ in bias]
        _check("logit_bias", bias_ids, len(set(bias_ids)) == len(bias_ids), "each token id once")
        _check_ids("logit_bias", bias_ids)
        _check_ids("eos_token_ids", sorted(self.eos_token_ids))
        _check_ids("stop_token_ids", sorted(self.stop_token_ids))
        _check_ids("allowed_token_ids", sorted(self.allowed_token_ids))
        _check("bad_words", self.bad_words, all(self.bad_words), "sequences of at least one token id")
        _check_ids("bad_words", [token_id for word in self.bad_words for token_id in word])
        _check_ids("logprob_token_ids", self.logprob_token_ids)
        _check(
            "logprob_token_ids", self.logprob_token_ids, not self.logprob_token_ids or self.num_logprobs is not None, "with num_logprobs"
        )

    @property
    def stop_set(self) -> frozenset[int]:
        """Token ids that end the request: the user's own, and the model's unless ``ignore_eos``."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | self.eos_token_ids


@dataclass(frozen=True)
class TokenRecord:
    """One proposed or accepted token with the log-probabilities that were asked for (natural logarithm, values of float32)."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


_FLOAT32 = struct.Struct("<f")


def _float32(name: str, value: float) -> float:
    """``value`` as the nearest float32. Raises ValueError when that is not a finite number."""
    try:
        (rounded,) = _FLOAT32.unpack(_FLOAT32.pack(value))
    except OverflowError:
        rounded = math.inf
    _check(name, value, math.isfinite(rounded), "finite float32 numbers")
    return float(rounded)


def _check(name: str, given: object, fits: bool, allowed: str) -> None:
    if not fits:
        raise ValueError(f"{name}: given {given!r}, allowed {allowed}")


def _check_ids(name: str, ids: Sequence[int]) -> None:
    for token_id in ids:
        _check(name, token_id, 0 <= token_id < 2**31, "0 to 2**31 - 1")
