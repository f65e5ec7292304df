"""The reference sampler: how logits and a request become the token at one log position. Owns the randomness of every engine.

A chosen token is a pure function of (logits, params, prompt, log): no generator is kept, neighbours in a batch cannot matter, and
whoever has the token log can go on. The steps, in this order, all in float32:

1. repetition penalty, once per distinct id of prompt and output: positive logits are divided by it, the others multiplied
   (arXiv:1909.05858, as Hugging Face and vLLM do);
2. frequency penalty times an id's count in the output, then presence penalty for every id in the output, are subtracted;
3. ``logit_bias`` is added;
4. -inf for every id outside ``allowed_token_ids`` (if there are any), for the last id of every bad word whose other ids the output ends
   with and, while ``position < min_tokens``, for every id that would end the request (``params.stop_set``);
5. temperature 0: the largest logit, lowest id on ties, ends here. Otherwise logits become ``(logit - max) / temperature``;
6. top-k keeps the k largest, lowest ids first among equals;
7. top-p keeps, of what top-k left, the smallest set of most likely tokens whose probability is >= top_p, lowest ids first among equals;
8. min-p keeps what is at least ``min_p`` times as likely as the most likely token;
9. the token is the inverse of the cumulative distribution, in vocabulary order, at ``uniform(seed, position)``.

Probabilities are float32 weights ``exp(scaled)``; their sums are float64, so a large vocabulary loses nothing to rounding. If nothing
but -inf is left (every id masked), the lowest id is chosen. Log-probabilities in records are those of the unmodified logits (vLLM's
``raw_logprobs``), float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pddbridge.sampling_params import SamplingParams, TokenRecord

_MAX = np.finfo(np.float32).max


def uniform(seed: int, position: int) -> float:
    """The one uniform number in [0, 1) of log position ``position``: first double of numpy's Philox4x64-10, ``key=seed, counter=position``.

    numpy advances the counter before its first block, so the block is that of counter ``position + 1``; the double is the block's first
    64-bit word, its upper 53 bits times 2**-53. ``seed`` in [0, 2**64), ``position`` >= 0.
    """
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def greedy_suffices(params: SamplingParams, position: int) -> bool:
    """Whether the token is the plain argmax of the logits and nothing else is asked, so an engine may choose on its device."""
    return params.temperature == 0.0 and needs_host(params, position) is None


def needs_host(params: SamplingParams, position: int) -> str | None:
    """What is asked of the token at ``position`` that takes more than its logits and one random number; None: nothing."""
    if params.num_logprobs is not None:
        return "record"
    if params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        return "penalties"
    if params.logit_bias:
        return "bias"
    if params.allowed_token_ids or params.bad_words or (position < params.min_tokens and params.stop_set):
        return "mask"
    return None


def sample(
    logits: np.ndarray,
    params: SamplingParams,
    prompt_ids: Sequence[int] | np.ndarray,
    log_ids: Sequence[int] | np.ndarray,
    position: int,
) -> TokenRecord:
    """Choose the token at log position ``position`` from ``logits`` [V] float32, which are left as they are.

    ``prompt_ids`` [n] and ``log_ids`` [position] hold ids in [0, V). Raises ValueError when the logits have no finite maximum (NaN or
    +inf: a broken model) or when ``log_ids`` is not the log before ``position``.
    """
    if len(log_ids) != position:
        raise ValueError(f"log_ids: given {len(log_ids)} ids, log position {position} needs exactly the {position} before it")
    raw = _finite(logits)
    token_id = _choose(adjust_logits(raw, params, prompt_ids, log_ids), params, position)
    return token_record(raw, token_id, params.num_logprobs, params.logprob_token_ids)


def sample_plain(logits: np.ndarray, params: SamplingParams, position: int) -> TokenRecord:
    """As :func:`sample` where :func:`needs_host` finds nothing: no history is needed, and none has to be known."""
    assert needs_host(params, position) is None, params
    return TokenRecord(_choose(_finite(logits), params, position))


def adjust_logits(
    logits: np.ndarray, params: SamplingParams, prompt_ids: Sequence[int] | np.ndarray, log_ids: Sequence[int] | np.ndarray
) -> np.ndarray:
    """Steps 1 to 4: float32 [V], a copy unless nothing changes.

    The history is rebuilt from token ids at every call, so no move of the request can lose it or apply it twice.
    """
    masked = _masked(params, log_ids)
    repeats = params.repetition_penalty != 1.0
    counts_output = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    if not (masked or repeats or counts_output or params.logit_bias or params.allowed_token_ids):
        return logits
    adjusted = logits.copy()
    # An overflow to +inf would make NaN further down; it is cut to the largest float instead.
    with np.errstate(over="ignore"):
        if repeats:
            seen = np.zeros(adjusted.size, dtype=bool)
            seen[np.asarray(prompt_ids, dtype=np.intp)] = True
            seen[np.asarray(log_ids, dtype=np.intp)] = True
            ids = np.flatnonzero(seen)
            penalty = np.float32(params.repetition_penalty)
            values = adjusted[ids]
            adjusted[ids] = np.minimum(np.where(values > 0, values / penalty, values * penalty), _MAX)
        if counts_output and len(log_ids) > 0:
            ids, counts = np.unique(np.asarray(log_ids, dtype=np.intp), return_counts=True)
            adjusted[ids] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
            adjusted[ids] -= np.float32(params.presence_penalty)
        for token_id, bias in params.logit_bias:
            adjusted[token_id] += np.float32(bias)
        np.minimum(adjusted, _MAX, out=adjusted)
    if params.allowed_token_ids:
        kept = np.fromiter(params.allowed_token_ids, dtype=np.intp)
        values = adjusted[kept]
        adjusted.fill(-np.inf)
        adjusted[kept] = values
    if masked:
        adjusted[np.fromiter(masked, dtype=np.intp)] = -np.inf
    return adjusted


def _masked(params: SamplingParams, log_ids: Sequence[int] | np.ndarray) -> set[int]:
    """Ids that may not come next, those outside ``allowed_token_ids`` apart."""
    masked = set(params.stop_set) if len(log_ids) < params.min_tokens else set[int]()
    for *before, last in params.bad_words:
        if len(before) <= len(log_ids) and list(log_ids[len(log_ids) - len(before) :]) == before:
            masked.add(last)
    return masked


def token_record(logits: np.ndarray, token_id: int, num_logprobs: int | None, instead: Sequence[int] = ()) -> TokenRecord:
    """``token_id`` with log-probabilities under unmodified ``logits`` [V] float32; the ``num_logprobs`` most likely come largest first,
    lowest id first among equals, or else the ids of ``instead``, in their order."""
    if num_logprobs is None:
        return TokenRecord(token_id)
    shifted = logits - logits.max()
    log_sum = np.log(np.exp(shifted).sum(dtype=np.float64))
    if instead:
        top = np.asarray(instead, dtype=np.intp)
    else:
        top = _largest(logits, min(num_logprobs, logits.size))
        top = top[np.argsort(-logits[top], kind="stable")]
    # Whole-float32 results, so that a record is the same before and after the wire.
    logprobs = (shifted[np.append(top, token_id)] - log_sum).astype(np.float32)
    pairs = zip(top.tolist(), logprobs[:-1].tolist(), strict=True)
    return TokenRecord(token_id, logprob=float(logprobs[-1]), top_logprobs=tuple(pairs))


def _finite(logits: np.ndarray) -> np.ndarray:
    raw = np.asarray(logits, dtype=np.float32)
    if not np.isfinite(raw.max()):
        raise ValueError(f"logits: the largest of {raw.size} is {raw.max()}, a finite number is needed")
    return raw


def _choose(adjusted: np.ndarray, params: SamplingParams, position: int) -> int:
    return int(adjusted.argmax()) if params.temperature == 0.0 else _draw(adjusted, params, uniform(params.seed, position))


def _draw(logits: np.ndarray, params: SamplingParams, u: float) -> int:
    """Steps 5 to 9 for a temperature > 0."""
    largest = logits.max()
    if largest == -np.inf:
        return 0
    ids: np.ndarray | None = None  # None: the whole vocabulary
    if params.top_k is not None and params.top_k < logits.size:
        ids = _largest(logits, params.top_k)
        logits = logits[ids]
    with np.errstate(over="ignore"):
        scaled = logits - largest
        scaled /= np.float32(params.temperature)
    weights = np.exp(scaled, out=scaled)
    if params.top_p < 1.0:
        nucleus = _nucleus(weights, params.top_p)
        weights = weights[nucleus]
        ids = nucleus if ids is None else ids[nucleus]
    if params.min_p > 0.0:
        likely = np.flatnonzero(weights >= np.float32(params.min_p))  # the most likely token weighs exactly 1
        weights = weights[likely]
        ids = likely if ids is None else ids[likely]
    cumulative = np.cumsum(weights, dtype=np.float64)
    # The first id whose cumulative weight exceeds the target has a positive weight itself. There is one: u <= 1 - 2**-53 is half an ulp or
    # more under 1, so the product rounds to less than the total.
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return index if ids is None else int(ids[index])


def _largest(values: np.ndarray, k: int) -> np.ndarray:
    """Ids of the ``k`` largest of ``values`` [V] float32, ascending; lowest ids first among equals at the border. 0 <= k <= V."""
    if k == 0:
        return np.empty(0, dtype=np.intp)
    if k == 1:
        return values.argmax(axis=0, keepdims=True)
    border = np.partition(values, values.size - k)[values.size - k]
    return _at_least(values, border, k)


def _nucleus(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Ascending ids of the smallest set of largest ``weights`` [V] float32 whose share of the sum is >= ``top_p``; lowest ids first
    among equals."""
    total = weights.sum(dtype=np.float64)
    need = total * top_p
    # All weights under this together are less than the share that may be dropped, so no member of the set is among them.
    floor = total * (1.0 - top_p) / weights.size
    candidates = np.sort(weights[weights >= np.float32(floor) * np.float32(1 - 1e-6)])[::-1]
    k = int(np.searchsorted(np.cumsum(candidates, dtype=np.float64), need, side="left")) + 1
    k = min(k, candidates.size)
    return _at_least(weights, candidates[k - 1], k)


def _at_least(values: np.ndarray, border: np.float32, k: int) -> np.ndarray:
    """Ascending ids of the ``k`` largest values, where ``border`` is the k-th largest."""
    ids = np.flatnonzero(values >= border)
    if ids.size == k:
        return ids
    above = values[ids] > border
    equal = np.flatnonzero(~above)[: k - int(above.sum())]
    keep = above
    keep[equal] = True
    return ids[keep]
