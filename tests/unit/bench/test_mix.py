"""The skewed mix: shares and sizes are those that were asked for, and equal arguments give equal traffic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.bench.mix import SkewedMix, skewed
from pdd.bench.mix_requests import handoff_gap_s, ordinary_gaps_s
from pdd.launch.ask import Answer, Piece

_VOCABULARY = 300


def test_the_shares_are_exact_and_the_sizes_as_stated() -> None:
    params = SkewedMix()
    mix = skewed(params, _VOCABULARY, seed=7)
    by_kind = {kind: [r for r in mix.requests if r.kind == kind] for kind in ("high", "low", "singular")}
    assert {kind: len(requests) for kind, requests in by_kind.items()} == {"high": 48, "low": 10, "singular": 2}
    assert all(r.hit_tokens == 600 and r.miss_tokens == 18 for r in by_kind["high"])
    assert all(r.hit_tokens == 120 and 200 <= r.miss_tokens <= 400 for r in by_kind["low"])
    assert all(r.hit_tokens == 0 and r.miss_tokens == 3000 and r.output_tokens == 4 for r in by_kind["singular"])
    assert mix.miss_tokens == sum(r.miss_tokens for r in mix.requests)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 50), st.floats(0.1, 10))
def test_what_a_request_hits_is_the_beginning_of_a_primer(seed: int, num_requests: int, rate: float) -> None:
    params = SkewedMix(num_requests, rate, num_sessions=3, prefix_tokens=40, singular_every=7, singular_tokens=90)
    mix = skewed(params, _VOCABULARY, seed)
    assert mix == skewed(params, _VOCABULARY, seed)
    assert mix != skewed(params, _VOCABULARY, seed + 1)
    assert [r.arrival_s for r in mix.requests] == sorted(r.arrival_s for r in mix.requests)
    for request in mix.requests:
        hit = request.prompt_ids[: request.hit_tokens]
        assert any(primer[: len(hit)] == hit for primer in mix.primers)
        assert all(_VOCABULARY // 2 <= token < _VOCABULARY for token in request.prompt_ids)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rate_per_s": 0.0}, "rate_per_s: given 0.0"),
        ({"high_share": 1.5}, "high_share: given 1.5"),
        ({"high_share": 1.0}, "more than all requests"),
        ({"num_requests": 1}, "num_requests: given 1"),
        ({"output_tokens": (1, 5)}, "output_tokens: given 1"),
    ],
)
def test_a_mix_that_cannot_be_is_refused_by_name(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        skewed(replace(SkewedMix(), **changed), _VOCABULARY, 0)  # type: ignore[arg-type]


def test_the_gap_at_handoff_is_the_one_where_the_maker_changes() -> None:
    pieces = tuple(Piece("", origin, (1,), at) for origin, at in (("relay", 0.0), ("relay", 0.9), ("main", 1.1), ("main", 2.5)))
    assert handoff_gap_s(Answer(pieces, {}, {}, "length")) == pytest.approx(0.2)
    assert ordinary_gaps_s(Answer(pieces, {}, {}, "length")) == pytest.approx([0.9, 1.4])
    assert handoff_gap_s(Answer(pieces[:2], {}, {}, "length")) is None
