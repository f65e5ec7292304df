"""The reference sampler against an independent brute force in float64, and what the issue's users reported of samplers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pddbridge.sampling import adjust_logits, greedy_suffices, sample, uniform
from pddbridge.sampling_params import SamplingParams

# Values far apart compared with float32 rounding, with exact ties among them; so a float64 brute force decides alike.
TIE_VALUES = st.sampled_from([-4.0, -2.0, -1.0, 0.0, 0.5, 1.0, 2.0, 3.0])


def brute_force_logits(logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], log: Sequence[int]) -> list[float]:
    """Steps 1 to 4, one id at a time."""
    out = [float(x) for x in logits]
    for token_id in set(prompt) | set(log):
        out[token_id] = out[token_id] / params.repetition_penalty if out[token_id] > 0 else out[token_id] * params.repetition_penalty
    for token_id in set(log):
        out[token_id] -= params.frequency_penalty * list(log).count(token_id)
        out[token_id] -= params.presence_penalty
    for token_id, bias in params.logit_bias:
        out[token_id] += bias
    if len(log) < params.min_tokens:
        for token_id in params.stop_set:
            out[token_id] = -math.inf
    return out


def brute_force_distribution(adjusted: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """Steps 5 to 8 for a temperature > 0: id -> probability, in float64, by sorting everything."""
    best = max(adjusted)
    ranked = sorted(range(len(adjusted)), key=lambda i: (-adjusted[i], i))
    if params.top_k is not None:
        ranked = ranked[: params.top_k]
    weight = {i: math.exp((adjusted[i] - best) / params.temperature) for i in ranked}
    total = sum(weight.values())
    if params.top_p < 1:
        mass, kept = 0.0, []
        for i in ranked:
            kept.append(i)
            mass += weight[i]
            if mass >= params.top_p * total:
                break
        ranked = kept
    ranked = [i for i in ranked if weight[i] >= params.min_p]
    total = sum(weight[i] for i in ranked)
    return {i: weight[i] / total for i in ranked}


def brute_force_draw(distribution: dict[int, float], u: float) -> tuple[int, float]:
    """The drawn id, and how far ``u`` is from the nearest border between ids with different outcomes."""
    cumulative, borders = 0.0, []
    drawn = None
    for token_id in sorted(distribution):
        cumulative += distribution[token_id]
        borders.append(cumulative)
        if drawn is None and u < cumulative:
            drawn = token_id
    assert drawn is not None or u > 1 - 1e-9
    return (max(distribution) if drawn is None else drawn), min(abs(u - b) for b in borders)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, SamplingParams, list[int], list[int]]:
    vocab = draw(st.integers(1, 24))
    ids = st.integers(0, vocab - 1)
    values = st.one_of(TIE_VALUES, st.floats(-12, 12, width=16))
    logits = np.array(draw(st.lists(values, min_size=vocab, max_size=vocab)), dtype=np.float32)
    log = draw(st.lists(ids, max_size=6))
    params = SamplingParams(
        seed=draw(st.integers(0, 2**64 - 1)),
        max_tokens=100,
        temperature=draw(st.sampled_from([0.25, 0.7, 1.0, 2.0])),
        top_k=draw(st.one_of(st.none(), st.integers(1, vocab + 2))),
        top_p=draw(st.sampled_from([1.0, 0.97, 0.9, 0.55, 0.3, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.07, 0.33])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.25, 0.75])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -0.5])),
        logit_bias=tuple(draw(st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 2.25, 100.0]), max_size=2)).items()),
        min_tokens=draw(st.integers(0, 8)),
        ignore_eos=draw(st.booleans()),
        eos_token_ids=draw(st.frozensets(ids, max_size=2)),
        stop_token_ids=draw(st.frozensets(ids, max_size=1)),
    )
    return logits, params, draw(st.lists(ids, min_size=1, max_size=6)), log


@given(cases())
@settings(max_examples=600, deadline=None)
def test_adjusted_logits_and_draw_equal_brute_force(case: tuple[np.ndarray, SamplingParams, list[int], list[int]]) -> None:
    logits, params, prompt, log = case
    before = logits.copy()
    expected = brute_force_logits(logits, params, prompt, log)
    adjusted = adjust_logits(logits, params, prompt, log)
    np.testing.assert_allclose(adjusted, np.array(expected), rtol=1e-5, atol=1e-5)
    greedy = sample(logits, replace(params, temperature=0.0), prompt, log, len(log)).token_id
    assert greedy == int(np.argmax(adjusted))
    record = sample(logits, params, prompt, log, len(log))
    np.testing.assert_array_equal(logits, before)
    if max(expected) == -math.inf:
        assert record.token_id == 0
        return
    # The sampler's own adjusted logits go in, so that ties are ties in both; rounding may move only draws next to a border.
    distribution = brute_force_distribution(adjusted.astype(float).tolist(), params)
    drawn, distance = brute_force_draw(distribution, uniform(params.seed, len(log)))
    near_mass_border = any(
        abs(mass - params.top_p) < 1e-5
        for mass in np.cumsum(
            sorted(brute_force_distribution(adjusted.astype(float).tolist(), replace(params, top_p=1.0, min_p=0.0)).values())[::-1]
        )
    )
    near_min_p = any(abs(math.exp((x - max(adjusted)) / params.temperature) - params.min_p) < 1e-5 for x in adjusted.astype(float))
    if distance > 1e-5 and not near_mass_border and not near_min_p:
        assert record.token_id == drawn


def test_ties_keep_the_lowest_ids() -> None:
    logits = np.array([1, 3, 3, 3, 0, 3], dtype=np.float32)
    params = SamplingParams(seed=0, max_tokens=10_000)
    draws = {key: {_at(logits, replace(params, **value), p) for p in range(300)} for key, value in _TIED.items()}
    assert draws == {"top_k": {1, 2}, "top_p": {1, 2}, "both": {1, 2, 3}}
    assert _at(logits, replace(params, temperature=0.0), 0) == 1


_TIED: dict[str, dict[str, float | int]] = {"top_k": {"top_k": 2}, "top_p": {"top_p": 0.4}, "both": {"top_k": 4, "top_p": 0.7}}


def test_top_p_is_the_smallest_set_that_reaches_the_mass() -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8: exactly 3/4 needs two ids, a little more needs three; mass is of what top-k left."""
    logits = np.log(np.array([0.125, 0.25, 0.5, 0.125])).astype(np.float32)
    params = SamplingParams(seed=3, max_tokens=10_000)
    for top_p, top_k, expected in [
        (0.745, None, {1, 2}),
        (0.755, None, {0, 1, 2}),
        (0.875, None, {0, 1, 2}),
        (0.74, 3, {1, 2}),
        (0.87, 3, {0, 1, 2}),
    ]:
        seen = {_at(logits, replace(params, top_p=top_p, top_k=top_k), p) for p in range(300)}
        assert seen == expected, (top_p, top_k)


@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0])
def test_nucleus_of_a_large_vocabulary_equals_sorting_it_all(scale: float) -> None:
    """The shortcut that sorts only candidates must not lose a member; large V, flat and peaked, p near both ends."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, scale, 4099).astype(np.float32)
    for top_p in (0.001, 0.5, 0.9, 0.999, 0.9999999):
        params = SamplingParams(seed=1, max_tokens=10_000, top_p=top_p)
        weights = np.exp(logits - logits.max())
        order = np.argsort(-weights, kind="stable")
        need = params.top_p * weights.sum(dtype=np.float64)
        kept = np.sort(order[: int(np.searchsorted(np.cumsum(weights[order], dtype=np.float64), need)) + 1])
        cumulative = np.cumsum(weights[kept], dtype=np.float64)
        for position in range(40):
            target = uniform(params.seed, position) * cumulative[-1]
            assert _at(logits, params, position) == kept[np.searchsorted(cumulative, target, side="right")]


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20,000 positions; 11 degrees of freedom, 31.26 is the 0.1 % quantile. A fixed seed: passes always or never."""
    rng = np.random.default_rng(11)
    logits = rng.normal(0, 1.5, 12).astype(np.float32)
    params = SamplingParams(seed=2026, max_tokens=100_000, temperature=0.8)
    num = 20_000
    log = np.zeros(num, dtype=np.int32)
    counts = np.bincount([sample(logits, params, [0], log[:p], p).token_id for p in range(num)], minlength=12)
    expected = num * np.exp(logits / 0.8, dtype=np.float64) / np.exp(logits / 0.8, dtype=np.float64).sum()
    assert float(((counts - expected) ** 2 / expected).sum()) < 31.26


# numpy's Philox4x64-10 with key=seed, counter=position (which it advances once before the first block): first double.
GOLDEN = (
    (0, 0, 0.011546754286331562),
    (0, 1, 0.5023796042735054),
    (1, 0, 0.3035680343067586),
    (42, 7, 0.4074136540795371),
    (18446744073709551615, 0, 0.23494158814525556),
    (1234567890123456789, 8191, 0.010199195565458008),
)


@pytest.mark.parametrize(("seed", "position", "expected"), GOLDEN)
def test_uniform_is_philox_at_the_position(seed: int, position: int, expected: float) -> None:
    assert uniform(seed, position) == expected
    assert uniform(seed, position) == _philox_uniform(seed, position + 1)


def _philox_uniform(seed: int, counter: int) -> float:
    """Philox4x64-10 (Salmon et al., SC'11) in plain integers."""
    mask = 2**64 - 1
    c0, c1, c2, c3 = (counter >> (64 * i) & mask for i in range(4))
    k0, k1 = seed & mask, seed >> 64
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c0, 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * c2, 2**64)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return (c0 >> 11) * 2.0**-53


@given(st.lists(st.one_of(TIE_VALUES, st.floats(-30, 30, width=32)), min_size=1, max_size=40), st.integers(0, 45), st.data())
@settings(deadline=None)
def test_logprobs_are_log_softmax_of_the_raw_logits(values: list[float], num_logprobs: int, data: st.DataObject) -> None:
    logits = np.array(values, dtype=np.float32)
    bias = ((data.draw(st.integers(0, len(values) - 1)), 100.0),)
    params = SamplingParams(
        seed=1, max_tokens=5, temperature=0.3, top_k=2, repetition_penalty=1.5, logit_bias=bias, num_logprobs=num_logprobs
    )
    record = sample(logits, params, [0], [], 0)
    exact = logits.astype(np.float64)
    log_sum = math.log(sum(math.exp(x - exact.max()) for x in exact)) + exact.max()
    assert record.logprob == pytest.approx(exact[record.token_id] - log_sum, abs=1e-5)
    ranked = sorted(range(len(values)), key=lambda i: (-exact[i], i))[:num_logprobs]
    assert [token_id for token_id, _ in record.top_logprobs] == ranked
    assert [value for _, value in record.top_logprobs] == pytest.approx([exact[i] - log_sum for i in ranked], abs=1e-5)


def test_no_record_unless_asked() -> None:
    logits = np.array([0.5, 1.0, 0.25], dtype=np.float32)
    plain = sample(logits, SamplingParams(seed=1, max_tokens=5, temperature=0.0), [0], [], 0)
    assert (plain.token_id, plain.logprob, plain.top_logprobs) == (1, None, ())
    chosen = sample(logits, SamplingParams(seed=1, max_tokens=5, temperature=0.0, num_logprobs=0), [0], [], 0)
    assert chosen.logprob is not None
    assert chosen.top_logprobs == ()


def test_seeds_in_flight_together_keep_their_tokens() -> None:
    """Case 60: same prompt, different seeds, any interleaving and any worker: each position's token is its request's own."""
    logits = np.random.default_rng(0).normal(0, 1, 300).astype(np.float32)
    one, two = (SamplingParams(seed=seed, max_tokens=50) for seed in (1, 2))
    alone = [[_at(logits, params, p) for p in range(20)] for params in (one, two)]
    mixed: list[list[int]] = [[], []]
    for p in range(20):
        for index, params in ((1, two), (0, one)) if p % 2 else ((0, one), (1, two)):
            mixed[index].append(_at(logits, params, p))
    assert mixed == alone
    assert alone[0] != alone[1]


def test_seeded_row_does_not_feel_its_neighbours() -> None:
    """Case 68: alone, between other rows, at another row index: the same ids."""
    rng = np.random.default_rng(4)
    step_logits = rng.normal(0, 1, (12, 97)).astype(np.float32)
    seeded = SamplingParams(seed=77, max_tokens=50, temperature=0.9, top_p=0.9)

    def run(before: int, after: int) -> list[int]:
        log: list[int] = []
        for p in range(12):
            for row in range(before):
                sample(step_logits[p], SamplingParams(seed=int(rng.integers(2**63)), max_tokens=50), [row], [5] * p, p)
            log.append(sample(step_logits[p], seeded, [1, 2], log, p).token_id)
            for row in range(after):
                sample(step_logits[p], SamplingParams(seed=int(rng.integers(2**63)), max_tokens=50, temperature=0.0), [row], [5] * p, p)
        return log

    assert run(0, 0) == run(3, 0) == run(1, 4)


@pytest.mark.parametrize("handoff", range(9))
def test_penalised_logits_after_a_move_equal_the_unmoved(handoff: int) -> None:
    """Case 61: at every k the receiver has only (prompt, log), and its penalised logits are those of the process that never moved."""
    params = SamplingParams(seed=9, max_tokens=20, temperature=0.8, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    prompt = [3, 5, 3]

    def step(log: list[int]) -> np.ndarray:
        """A stand-in model: logits are a function of the tokens."""
        seed = int.from_bytes(hashlib.sha256(bytes(prompt + log)).digest()[:4], "little")
        return np.random.default_rng(seed).normal(0, 2, 31).astype(np.float32)

    reference: list[tuple[np.ndarray, int]] = []
    log: list[int] = []
    running_counts = np.zeros(31, dtype=np.float32)  # the history kept incrementally, as an engine that never moves would
    for position in range(12):
        raw = step(log).copy()
        seen = running_counts + np.bincount(prompt, minlength=31) > 0
        raw[seen] = np.where(raw[seen] > 0, raw[seen] / np.float32(1.3), raw[seen] * np.float32(1.3))
        raw -= np.float32(0.2) * running_counts + np.float32(0.4) * (running_counts > 0)
        token_id = sample(step(log), params, prompt, log, position).token_id
        reference.append((raw, token_id))
        log.append(token_id)
        running_counts[token_id] += 1
    moved = list(log[:handoff])
    for position in range(handoff, 12):
        adjusted = adjust_logits(step(moved), params, np.array(prompt, np.int32), np.array(moved, np.int32))
        np.testing.assert_allclose(adjusted, reference[position][0], rtol=1e-5, atol=1e-6)
        moved.append(sample(step(moved), params, prompt, moved, position).token_id)
    assert moved == log


def test_masking_reaches_only_what_would_end_the_request() -> None:
    """Case 67: the real stop set, under ignore_eos the user's only; the last vocabulary id stays reachable."""
    logits = np.zeros(8, dtype=np.float32)
    params = SamplingParams(seed=1, max_tokens=9, min_tokens=2, eos_token_ids=frozenset({2, 4}), stop_token_ids=frozenset({6}))
    assert np.flatnonzero(np.isinf(adjust_logits(logits, params, [0], [1]))).tolist() == [2, 4, 6]
    assert np.flatnonzero(np.isinf(adjust_logits(logits, replace(params, ignore_eos=True), [0], [1]))).tolist() == [6]
    assert not np.isinf(adjust_logits(logits, params, [0], [1, 1])).any()
    forced = replace(params, temperature=0.0, logit_bias=((7, 100.0),))
    assert sample(logits, forced, [0], [], 0).token_id == 7


def test_extremes_stay_finite_and_defined() -> None:
    logits = np.array([1.0, 2.0, -np.inf, 1.5], dtype=np.float32)
    base = SamplingParams(seed=5, max_tokens=100)
    assert _at(logits, replace(base, temperature=1e-45), 3) == 1
    assert _at(logits, replace(base, repetition_penalty=1e-44, temperature=0.5), 0, prompt=[3]) == 3
    assert _at(np.array([3e38, 3e38, 1], np.float32), replace(base, logit_bias=((1, 3e38),)), 0) == 1
    crushed = replace(base, repetition_penalty=1e-44, frequency_penalty=3e38)
    assert {sample(logits, crushed, [0], [3] * 9, 9).token_id for _ in range(3)} == {0}
    assert {_at(logits, replace(base, temperature=3e38), p) for p in range(60)} == {0, 1, 3}
    everything = replace(base, stop_token_ids=frozenset(range(4)), min_tokens=50)
    assert _at(logits, everything, 1) == 0
    assert _at(logits, replace(everything, temperature=0.0), 1) == 0
    assert [_at(np.zeros(1, np.float32), replace(base, top_p=0.1), p) for p in range(3)] == [0, 0, 0]


def test_the_largest_uniform_draws_an_id_with_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.array([0.0, 0.0, -200.0, -np.inf], dtype=np.float32)
    monkeypatch.setattr("pddbridge.sampling.uniform", lambda seed, position: 1 - 2**-53)
    assert _at(logits, SamplingParams(seed=0, max_tokens=1), 0) == 1
    monkeypatch.setattr("pddbridge.sampling.uniform", lambda seed, position: 0.0)
    assert _at(logits[::-1].copy(), SamplingParams(seed=0, max_tokens=1), 0) == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_are_refused(bad: float) -> None:
    logits = np.array([0.0, bad, 1.0], dtype=np.float32)
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="logits: the largest of 3 is"):
            sample(logits, SamplingParams(seed=1, max_tokens=1, temperature=temperature), [0], [], 0)


def test_a_log_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="log_ids: given 1 ids, log position 2"):
        sample(np.zeros(4, np.float32), SamplingParams(seed=1, max_tokens=9), [0], [1], 2)


@given(cases())
@settings(max_examples=200, deadline=None)
def test_greedy_suffices_means_argmax(case: tuple[np.ndarray, SamplingParams, list[int], list[int]]) -> None:
    logits, params, prompt, log = case
    for candidate in (params, replace(params, temperature=0.0), SamplingParams(seed=1, max_tokens=9, temperature=0.0)):
        if greedy_suffices(candidate, len(log)):
            record = sample(logits, candidate, prompt, log, len(log))
            assert (record.token_id, record.logprob) == (int(np.argmax(logits)), None)


def test_greedy_does_not_suffice_when_anything_else_is_asked() -> None:
    greedy = SamplingParams(seed=1, max_tokens=9, temperature=0.0, min_tokens=2, eos_token_ids=frozenset({1}))
    assert greedy_suffices(greedy, 2)
    assert greedy_suffices(replace(greedy, ignore_eos=True), 0)
    assert not greedy_suffices(greedy, 1)
    changes: list[dict[str, object]] = [
        {"temperature": 0.1},
        {"num_logprobs": 0},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": ((1, 1.0),)},
    ]
    assert not any(greedy_suffices(replace(greedy, **change), 5) for change in changes)  # type: ignore[arg-type]


def _at(logits: np.ndarray, params: SamplingParams, position: int, prompt: Sequence[int] = (0,)) -> int:
    return sample(logits, params, prompt, [0] * position, position).token_id


def test_masks_hold_at_any_temperature_and_other_ids_can_be_recorded() -> None:
    logits = np.array([5.0, 4.0, 3.0, 2.0], np.float32)
    for temperature in (0.0, 1.0):
        only = SamplingParams(seed=1, max_tokens=9, temperature=temperature, allowed_token_ids=frozenset({2, 3}))
        assert {sample(logits, only, [0], [0] * position, position).token_id for position in range(9)} <= {2, 3}
        word = SamplingParams(seed=1, max_tokens=9, temperature=temperature, bad_words=((0, 1, 0), (1, 1), (3,)))
        assert not greedy_suffices(word, 2)
        masked = {log: set(np.flatnonzero(adjust_logits(logits, word, [0, 1], log) == -np.inf)) for log in ((), (0, 1), (1,), (1, 0))}
        assert masked == {(): {3}, (0, 1): {0, 1, 3}, (1,): {1, 3}, (1, 0): {3}}
    asked = SamplingParams(seed=1, max_tokens=9, temperature=0.0, num_logprobs=1, logprob_token_ids=(3, 1))
    record = sample(logits, asked, [0], [], 0)
    assert [token_id for token_id, _ in record.top_logprobs] == [3, 1]
    assert [value - record.logprob for _, value in record.top_logprobs] == pytest.approx([-3.0, -1.0], abs=1e-6)
