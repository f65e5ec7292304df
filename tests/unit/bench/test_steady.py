"""`pdd bench steady`: how growth, lateness and idleness are read and judged; the watch itself on a loop that blocks."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from pdd.bench.steady import Plan, Row, judge
from pdd.bench.steady_traffic import Conversation, Sizes
from pdd.bench.steady_watch import LagCounts, growth, held, lag_of
from pdd.loop_lag import BOUNDS_S, INTERVAL_S, LagHistogram, watch_loop
from pddbridge.rpc.gen import worker_pb2

GOOD = Row("main-0", 100, 101, 0, 0.01, 0.01, 0.05, 0, 0.01)


async def watched(block_s: float) -> LagHistogram:
    """A loop that is blocked once for ``block_s``."""
    seen = LagHistogram()
    watching = asyncio.create_task(watch_loop(seen.observe))
    await asyncio.sleep(2 * INTERVAL_S)
    time.sleep(block_s)
    await asyncio.sleep(3 * INTERVAL_S)
    watching.cancel()
    return seen


async def test_a_blocked_loop_is_late_as_often_as_it_missed() -> None:
    late = LagCounts(tuple((await watched(8 * INTERVAL_S)).counts))
    beyond = sum(count for bound, count in zip((*BOUNDS_S, float("inf")), late.counts, strict=True) if bound > INTERVAL_S)
    assert beyond >= 5  # eight wake-ups were missed, and not one long one
    assert late.quantile_s(1.0) >= 6 * INTERVAL_S


def test_quantiles_are_upper_bounds_of_buckets() -> None:
    seen = LagHistogram()
    for lag_s in [0.0004] * 98 + [0.0011, 3.0]:
        seen.observe(lag_s)
    counts = LagCounts(tuple(seen.counts))
    assert [counts.quantile_s(share) for share in (0.5, 0.98, 0.99)] == [0.001, 0.001, 0.002]
    assert counts.quantile_s(1.0) == float("inf")
    assert sum(counts.since(counts).counts) == 0


def test_the_metrics_page_gives_back_what_was_observed() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("pdd:event_loop_lag_seconds", "late", buckets=BOUNDS_S, registry=registry)
    seen = LagHistogram()
    for lag_s in (0.0, 0.001, 0.004, 0.02, 0.021, 7.0):
        histogram.observe(lag_s)
        seen.observe(lag_s)
    assert lag_of(generate_latest(registry).decode()) == LagCounts(tuple(seen.counts))
    with pytest.raises(ValueError, match="event_loop_lag"):
        lag_of("")


def test_growth_is_of_medians() -> None:
    assert growth([100, 100, 100, 100, 110, 110, 110]) == pytest.approx(0.1)
    assert growth([100, 100, 900, 100, 5, 100, 100]) == 0


@pytest.mark.parametrize(
    ("change", "word"),
    [({"compilations": 1}, "compilations"), ({"growth": 0.03}, "grew"), ({"lag_p99_s": 0.03}, "event loop"), ({"idle_cpu": 0.05}, "idle")],
)
def test_every_figure_is_judged(change: dict[str, float], word: str) -> None:
    assert judge([GOOD], Plan()) == []
    [fault] = judge([GOOD, replace(GOOD, **change)], Plan())  # type: ignore[arg-type]
    assert word in fault


def test_a_ledger_that_holds_something_is_not_idle() -> None:
    idle = {"total_pages": 5, "free_pages": 3, "cached_pages": 2}
    assert held(worker_pb2.LedgerReply(**idle)) == ""
    assert "num_requests 1" in held(worker_pb2.LedgerReply(**idle, num_requests=1))
    assert "add up" in held(worker_pb2.LedgerReply(**idle | {"free_pages": 2}))


def test_every_kind_of_request_is_asked_and_keeps_to_its_sizes() -> None:
    sizes = Sizes(words=9, prompt_tokens=60, answer_tokens=8, vocab_size=300)
    asked = [Conversation(random.Random(seed), sizes) for seed in range(4)]
    kinds = set()
    for _ in range(60):
        for conversation in asked:
            kind, _, body, read = conversation.next()
            kinds.add(kind)
            assert isinstance(body["max_tokens"], int)
            assert 1 <= body["max_tokens"] <= 8
            assert (read is not None) == (kind == "cancelled")
            if isinstance(prompt := body.get("prompt"), list):
                assert 1 <= len(prompt) <= 60
                assert all(150 <= token < 300 for token in prompt)
    assert kinds == {"chat", "ids", "turn", "sampled", "choices", "cancelled"}
