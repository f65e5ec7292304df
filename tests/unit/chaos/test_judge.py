"""Every way in which an answer can be wrong is told from every other, and an honest end is not held against anybody."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdd.chaos.expected import Expected
from pdd.chaos.injector import Strike
from pdd.chaos.judge import judge
from pdd.chaos.outcome import Outcome
from pdd.chaos.plan import ChaosFault, FaultKind, Moment

IDS = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
EXPECTED = Expected(tuple(IDS), "abcdefghij", "length")


def outcome(ids: list[int], **fields: object) -> Outcome:
    text = "".join(chr(ord("a") + token - 11) for token in ids)
    found = Outcome(0, started_s=10.0, ended_s=20.0, end="finished", ids=ids, text=text, finish_reason="length", num_ends=1)
    return replace(found, **fields)  # type: ignore[arg-type]


def strike(victim: str, at_s: float, over_s: float | None, kind: FaultKind = "kill") -> Strike:
    return Strike(ChaosFault(kind, victim, Moment(at_s=0.0), 0.0), at_s, over_s)


def verdict(found: Outcome, *strikes: Strike, released: str | None = None, tight: bool = False) -> str | None:
    return judge(found, EXPECTED, found.text if released is None else released, strikes, "tight" if tight else "lean").fault


def test_the_whole_answer_is_right() -> None:
    assert verdict(outcome(IDS)) is None
    assert verdict(outcome(IDS, usage_tokens=10)) is None


@pytest.mark.parametrize(
    ("ids", "fault"),
    [
        (IDS[:9], "lost"),
        (IDS[:3] + IDS[4:], "lost"),
        (IDS[:4] + IDS[3:], "duplicated"),
        (IDS[:6] + IDS[2:], "duplicated"),
        (IDS + IDS[-1:], "duplicated"),
        ([*IDS[:4], 99, *IDS[5:]], "wrong_tokens"),
        ([*IDS, 99], "wrong_tokens"),
    ],
)
def test_tokens_that_differ(ids: list[int], fault: str) -> None:
    assert verdict(outcome(ids)) == fault
    assert verdict(outcome(ids), strike("main-0", 12.0, 15.0)) == fault, "no fault excuses a wrong token"


@pytest.mark.parametrize(
    "fields",
    [{"text": "abc"}, {"finish_reason": "stop"}, {"usage_tokens": 11}],
)
def test_what_goes_with_the_tokens_must_fit(fields: dict[str, object]) -> None:
    assert verdict(outcome(IDS, **fields)) == "wrong_tokens"


def test_an_end_that_says_nothing_is_a_loss() -> None:
    for end in ("hung", "silent"):
        assert verdict(outcome(IDS, end=end, num_ends=0), strike("coordinator", 12.0, 15.0)) == "lost"


def test_an_error_needs_a_cause() -> None:
    failed = outcome(IDS[:4], end="error", code="UNAVAILABLE", finish_reason=None)
    assert verdict(failed) == "unexplained"
    assert verdict(failed, strike("main-0", 12.0, 15.0)) is None
    assert verdict(failed, strike("main-0", 12.0, None)) is None
    assert verdict(failed, strike("main-0", 1.0, 1.5)) == "unexplained", "long over"
    assert verdict(failed, strike("main-0", 21.0, 22.0)) == "unexplained", "not yet"
    refused = outcome([], end="error", code="RESOURCE_EXHAUSTED", finish_reason=None)
    assert verdict(refused) == "unexplained"
    assert verdict(refused, tight=True) is None


def test_what_came_before_an_error_must_be_right() -> None:
    cause = strike("main-0", 12.0, 15.0)
    assert verdict(outcome([11, 13], end="error", code="UNAVAILABLE"), cause) == "lost"
    assert verdict(outcome(IDS[:4], text="abx", end="error", code="UNAVAILABLE"), cause, released="abcd") == "wrong_tokens"
    assert verdict(outcome(IDS[:4], text="ab", end="error", code="UNAVAILABLE"), cause, released="ab") is None, "the rest is held back"


def test_only_a_dead_coordinator_breaks_connections() -> None:
    broken = outcome(IDS[:4], end="broken", num_ends=0)
    assert verdict(broken, strike("main-0", 12.0, 15.0)) == "lost"
    assert verdict(broken, strike("coordinator", 12.0, 15.0)) is None
    twice = outcome(IDS, num_ends=2)
    assert verdict(twice) == "ended_twice"
    assert verdict(twice, strike("coordinator", 19.9, 25.0)) is None


def test_who_leaves_keeps_what_came() -> None:
    assert verdict(outcome(IDS[:4], end="cancelled", num_ends=0)) is None
    assert verdict(outcome([11, 99], end="cancelled", num_ends=0)) == "wrong_tokens"
