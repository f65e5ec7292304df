"""The one place where a client's sampling wishes become SamplingParams: defaults, ranges, token ids, seeds. Door-neutral and pure.

Real numbers are rounded to float32 here, because that is what the wire to a worker carries: coordinator and workers then hold the
same values, and a value that is zero or infinite in float32 is judged as such.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdd.errors import Code, PddError
from pddbridge.sampling_params import SamplingParams

GREEDY_BELOW = 1e-5  # vLLM's _SAMPLING_EPS: a smaller temperature means argmax
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
MAX_LOGPROBS = 20  # OpenAI's limit for top_logprobs
MAX_LOGIT_BIASES = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_TOKEN_IDS = 1024
SEED_RANGE = (-(2**63), 2**64 - 1)


@dataclass(frozen=True)
class SamplingWish:
    """What a client asked for, before defaults; None: not given. Names are the doors' public field names."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprob_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SamplingBounds:
    """What the model and the prompt leave room for. ``room_tokens``: context minus prompt, at least 1."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    room_tokens: int
    default_max_tokens: int


def refuse(field: str, given: object, allowed: str) -> PddError:
    """INVALID_ARGUMENT naming the field, what was given (shortened) and what is allowed."""
    shown = repr(given)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return PddError(Code.INVALID_ARGUMENT, f"{field}: given {shown}, allowed {allowed}", field)


def sampling_params(wish: SamplingWish, seed: int, bounds: SamplingBounds) -> SamplingParams:
    """Raises PddError(INVALID_ARGUMENT) naming the field. ``max_tokens`` is not checked against the room: the prompt check does that."""
    temperature = _real("temperature", wish.temperature, 1.0, 0.0, MAX_TEMPERATURE)
    top_p = _real("top_p", wish.top_p, 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise refuse("top_p", wish.top_p, "(0, 1]")
    max_tokens = min(bounds.default_max_tokens, bounds.room_tokens) if wish.max_tokens is None else wish.max_tokens
    if max_tokens < 1:
        raise refuse("max_tokens", max_tokens, "at least 1")
    min_tokens = wish.min_tokens or 0
    if not 0 <= min_tokens <= max_tokens:
        raise refuse("min_tokens", min_tokens, f"0 to max_tokens ({max_tokens})")
    if wish.num_logprobs is not None and not 0 <= wish.num_logprobs <= MAX_LOGPROBS:
        raise refuse("logprobs", wish.num_logprobs, f"0 to {MAX_LOGPROBS}")
    if len(wish.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise refuse("stop_token_ids", len(wish.stop_token_ids), f"at most {MAX_STOP_TOKEN_IDS}")
    if len(wish.allowed_token_ids) > bounds.vocab_size:
        raise refuse("allowed_token_ids", len(wish.allowed_token_ids), f"at most {bounds.vocab_size}, the vocabulary")
    check_token_ids("stop_token_ids", wish.stop_token_ids, bounds.vocab_size)
    check_token_ids("allowed_token_ids", wish.allowed_token_ids, bounds.vocab_size)
    check_token_ids("logprob_token_ids", wish.logprob_token_ids, bounds.vocab_size)
    if wish.logprob_token_ids and wish.num_logprobs is None:
        raise refuse("logprob_token_ids", wish.logprob_token_ids, "only together with logprobs")
    if len(wish.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
        raise refuse("logprob_token_ids", len(wish.logprob_token_ids), f"at most {MAX_LOGPROB_TOKEN_IDS}")
    return SamplingParams(
        seed=seed,
        max_tokens=max_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=_top_k(wish.top_k, bounds.vocab_size),
        top_p=top_p,
        min_p=_real("min_p", wish.min_p, 0.0, 0.0, 1.0),
        repetition_penalty=_real("repetition_penalty", wish.repetition_penalty, 1.0, 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        presence_penalty=_real("presence_penalty", wish.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=_real("frequency_penalty", wish.frequency_penalty, 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(wish.logit_bias, bounds.vocab_size),
        min_tokens=min_tokens,
        ignore_eos=wish.ignore_eos,
        eos_token_ids=bounds.eos_token_ids,
        stop_token_ids=frozenset(wish.stop_token_ids),
        num_logprobs=wish.num_logprobs,
        allowed_token_ids=frozenset(wish.allowed_token_ids),
        bad_words=wish.bad_words,
        logprob_token_ids=tuple(dict.fromkeys(wish.logprob_token_ids)),
    )


def check_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises PddError(INVALID_ARGUMENT) at the first id outside [0, vocab_size)."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise refuse(field, token_id, f"token ids 0 to {vocab_size - 1}")


def unsigned_seed(seed: int) -> int:
    """A 64-bit seed, signed or not, as the unsigned one that SamplingParams carries (two's complement)."""
    low, high = SEED_RANGE
    if not low <= seed <= high:
        raise refuse("seed", seed, "64-bit integers")
    return seed % 2**64


def choice_seed(seed: int, choice: int) -> int:
    """Seed of choice ``choice`` of a request with ``n`` > 1: choice 0 has the request's own, so that it equals the answer for n = 1;
    choice i the first 8 bytes (little-endian) of BLAKE2b over the seed (8 bytes) and i (4 bytes), both little-endian."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<QI", seed, choice), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _real(field: str, given: float | None, default: float, low: float, high: float) -> float:
    if given is None:
        return default
    # Python compares int and float exactly, so an integer beyond every float is refused before the conversion could overflow.
    if not low <= given <= high:
        raise refuse(field, given, f"{low:g} to {high:g}")
    return float(np.float32(given))


def _top_k(given: int | None, vocab_size: int) -> int | None:
    if given is None or given in (-1, 0):
        return None
    if given < -1:
        raise refuse("top_k", given, "-1 or 0 (off), or at least 1")
    return given if given < vocab_size else None


def _logit_bias(given: tuple[tuple[int, float], ...], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(given) > MAX_LOGIT_BIASES:
        raise refuse("logit_bias", len(given), f"at most {MAX_LOGIT_BIASES} entries")
    ids = [token_id for token_id, _ in given]
    check_token_ids("logit_bias", ids, vocab_size)
    if len(set(ids)) != len(ids):
        raise refuse("logit_bias", sorted(i for i in set(ids) if ids.count(i) > 1), "each token id once")
    for _, bias in given:
        if math.isnan(bias) or not -100 <= bias <= 100:
            raise refuse("logit_bias", bias, "-100 to 100")
    return tuple((token_id, float(np.float32(bias))) for token_id, bias in given)
