"""Counts and costs from runs that are made up: every sum is known."""

from __future__ import annotations

import pytest

from pdd.chaos.expected import Expected
from pdd.chaos.injector import Strike
from pdd.chaos.judge import Verdict
from pdd.chaos.outcome import End, Outcome
from pdd.chaos.plan import ChaosFault, ChaosPlan, FaultKind, Moment, draw_plan
from pdd.chaos.report import fault_rows, passed, summary, troubles
from pdd.chaos.run import Judged, SeedResult
from pdd.chaos.watch import Idle

WELL, AT_REST = Verdict(), Idle(0.5)
PLAN: ChaosPlan = draw_plan(0, 3, ("lean",))


def judged(number: int, started_s: float, times: list[float], end: End = "finished", verdict: Verdict = WELL) -> Judged:
    outcome = Outcome(number, started_s, times[-1], end, ids=list(range(len(times))), origins=["main"] * len(times))
    outcome.arrivals = [(at_s, count + 1) for count, at_s in enumerate(times)]
    ask = next(ask for ask in draw_plan(1, 20, ("lean",)).asks if ask.door == "grpc")
    return Judged(ask, outcome, Expected((), "", "length"), verdict, tie=False)


def strike(kind: FaultKind, victim: str, at_s: float, over_s: float) -> Strike:
    return Strike(ChaosFault(kind, victim, Moment(at_s=0.0), 0.0), at_s, over_s)


def result(requests: list[Judged], strikes: list[Strike], idle: Idle = AT_REST, died: tuple[str, ...] = ()) -> SeedResult:
    return SeedResult(PLAN, tuple(requests), tuple(strikes), (), idle, (), died, 1.0)


QUIET = judged(0, 0.0, [1.0, 1.1, 1.2, 1.3])
STREAMING = judged(1, 10.0, [11.0, 11.1, 12.0, 12.1])
WAITING = judged(2, 10.9, [13.0, 13.1])
FAILED = judged(3, 11.0, [11.2], end="error")
KILLED = strike("kill", "main-0", 11.15, 20.0)


def test_what_a_fault_cost_those_that_lived_through_it() -> None:
    (row,) = fault_rows([result([QUIET, STREAMING, WAITING, FAILED], [KILLED])])
    assert (row.fault, row.happened, row.alive, row.continued, row.failed) == ("kill main", 1, 3, 2, 1)
    # From 11.1 to 12.0 less the usual 0.1; from 10.9 to 13.0 less the usual 1.0 to the first token.
    assert row.median_added_s == pytest.approx((0.8 + 1.1) / 2)
    assert row.largest_added_s == pytest.approx(1.1)


def test_sums() -> None:
    bad = judged(4, 50.0, [51.0], verdict=Verdict("duplicated", "token 3 came again"))
    found = summary([result([QUIET, STREAMING, WAITING, FAILED], [KILLED]), result([bad], [])], [], "pdd chaos")
    assert (found["requests"], found["finished"], found["duplicated"], found["lost"]) == (5, 4, 1, 0)
    assert (found["alive_when_something_died"], found["continued"]) == (3, 2)
    assert not passed(found)
    assert passed(summary([result([QUIET], [])], [], "pdd chaos"))


@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        (result([QUIET], [], idle=Idle(None, 3, "main-0: 3 pinned pages")), "leaked_pages"),
        (result([QUIET], [], idle=Idle(None, 0, "main-0: 1 requests")), "not_idle"),
        (result([QUIET], [], died=("main-0: Killed",)), "died"),
        (result([judged(1, 0.0, [1.0], verdict=Verdict("lost", "hung"))], []), "lost"),
    ],
)
def test_each_trouble_is_told_and_fails_the_run(broken: SeedResult, kind: str) -> None:
    (trouble,) = troubles([broken])
    assert trouble.kind == kind
    assert not passed(summary([broken], [], "pdd chaos"))


def test_what_is_left_at_the_end_counts() -> None:
    found = summary([result([QUIET], [])], ["process 7 python"], "pdd chaos")
    assert found["orphans"] == 1
    assert not passed(found)
