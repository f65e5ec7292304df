"""When a process is started again."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.policy.restarts import RestartLimits, restart_wait_s

LIMITS = RestartLimits(most=5, window_s=100.0, first_s=1.0, longest_s=3.0)


def test_the_first_is_at_once_later_ones_wait_and_the_window_forgets() -> None:
    assert [restart_wait_s([0.0] * made, LIMITS, 50.0) for made in range(6)] == [0.0, 1.0, 2.0, 3.0, 3.0, None]
    assert restart_wait_s([0.0] * 5, LIMITS, 100.0) == 0.0
    assert restart_wait_s([0.0, 0.0, 60.0], LIMITS, 100.0) == 1.0


@settings(max_examples=40)
@given(
    st.builds(RestartLimits, most=st.integers(0, 6), window_s=st.floats(1, 100), first_s=st.floats(0.1, 9), longest_s=st.floats(0.1, 99)),
    st.floats(0, 1),
)
def test_no_window_sees_more_than_allowed_however_fast_it_dies(limits: RestartLimits, lives_s: float) -> None:
    now, restarts = 0.0, list[float]()
    for _ in range(30):
        wait_s = restart_wait_s(restarts, limits, now)
        if wait_s is None:
            break
        assert 0.0 <= wait_s <= max(limits.longest_s, limits.first_s)
        now += wait_s
        restarts.append(now)
        now += lives_s
    for begin in restarts:
        assert sum(begin <= at < begin + limits.window_s for at in restarts) <= limits.most
