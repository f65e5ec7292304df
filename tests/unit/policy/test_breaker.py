"""The circuit breaker of a worker: when it opens, for how long, and how few requests a broken worker sees."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.policy.breaker import Breaker, BreakerLimits, abandoned, allows, backoff_s, began, failed, succeeded

LIMITS = BreakerLimits(failures=3, first_s=1.0, factor=2.0, longest_s=8.0)
ANY_LIMITS = st.builds(
    BreakerLimits, failures=st.integers(1, 5), first_s=st.floats(0.1, 5), factor=st.floats(1, 10), longest_s=st.floats(0.1, 60)
)


def test_it_opens_after_failures_in_a_row_and_waits_longer_each_time() -> None:
    breaker = Breaker()
    for now in (0.0, 1.0):
        breaker = failed(breaker, LIMITS, now)
        assert allows(breaker, LIMITS, now)
    breaker = failed(breaker, LIMITS, 2.0)
    waits = []
    now = 2.0
    for _ in range(6):
        assert breaker.state == "open"
        assert not allows(breaker, LIMITS, now)
        waits.append(breaker.until - now)
        now = breaker.until
        assert allows(breaker, LIMITS, now)
        breaker = began(breaker, now)
        assert not allows(breaker, LIMITS, now), "one trial at a time"
        breaker = failed(breaker, LIMITS, now)
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert succeeded(began(breaker, breaker.until)) == Breaker()


def test_a_success_between_failures_starts_the_count_anew() -> None:
    breaker = failed(failed(Breaker(), LIMITS, 0.0), LIMITS, 0.0)
    breaker = failed(failed(succeeded(breaker), LIMITS, 0.0), LIMITS, 0.0)
    assert breaker.state == "closed"


def test_news_of_requests_from_before_changes_nothing_while_it_is_open() -> None:
    breaker = Breaker("open", 3, 1, until=10.0)
    assert failed(breaker, LIMITS, 9.0) == breaker
    assert succeeded(breaker) == breaker


def test_a_trial_that_says_nothing_does_not_lock_the_worker_out() -> None:
    trial = began(Breaker("open", 3, 2, until=10.0), 10.0)
    left = abandoned(trial, 11.0)
    assert allows(left, LIMITS, 11.0)
    assert left.openings == 2, "it has not earned a shorter wait"
    assert not allows(trial, LIMITS, 17.9)
    assert allows(trial, LIMITS, 18.0)


@settings(max_examples=50)
@given(ANY_LIMITS, st.lists(st.tuples(st.sampled_from(["fail", "succeed", "abandon", "wait"]), st.floats(0, 20)), max_size=30))
def test_a_worker_that_only_fails_sees_few_requests(limits: BreakerLimits, history: list[tuple[str, float]]) -> None:
    """Whatever happened before: from now on a worker that fails at once gets at most `failures` requests and then one per back-off."""
    breaker, now = Breaker(), 0.0
    for what, wait_s in history:
        now += wait_s
        if what == "wait" or not allows(breaker, limits, now):
            continue
        breaker = began(breaker, now)
        breaker = failed(breaker, limits, now) if what == "fail" else succeeded(breaker) if what == "succeed" else abandoned(breaker, now)
        assert breaker.state in ("closed", "open")
        if breaker.state == "open":
            assert breaker.until - now <= limits.longest_s + 1e-9
    seen, first = [], now
    while now < first + 30.0 and len(seen) < 2000:
        if allows(breaker, limits, now):
            breaker = failed(began(breaker, now), limits, now)
            seen.append(now)
        now += 0.1
    shortest = min(limits.first_s, limits.longest_s)
    assert len(seen) <= limits.failures + 1 + 30.0 / shortest


@given(ANY_LIMITS, st.integers(1, 10_000))
def test_the_back_off_is_bounded_and_never_shrinks(limits: BreakerLimits, openings: int) -> None:
    assert backoff_s(limits, openings) <= backoff_s(limits, openings + 1) <= limits.longest_s
