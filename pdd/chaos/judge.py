"""Whether a request came through: what its client saw, beside what it should have got and what went wrong meanwhile. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pdd.chaos.expected import Expected
from pdd.chaos.injector import COORDINATOR, Strike
from pdd.chaos.outcome import Outcome
from pdd.chaos.shapes import ShapeName

# lost: no end, an end that hides that something is missing, or tokens left out · duplicated: a token came twice · wrong_tokens: any other
# difference · unexplained: an honest error that nothing explains · ended_twice: more than one end
Fault = Literal["lost", "duplicated", "wrong_tokens", "unexplained", "ended_twice"]
# How far back or ahead a repeated or a missing piece is looked for.
_REACH: Final = 64
# A client's end may come so much after the fault that caused it was over: the service notices silence within seconds.
_NOTICE_S: Final = 8.0


@dataclass(frozen=True)
class Verdict:
    """``fault`` None: it came through. ``why``: one line."""

    fault: Fault | None = None
    why: str = ""


def judge(outcome: Outcome, expected: Expected, released_text: str, strikes: Sequence[Strike], shape: ShapeName) -> Verdict:
    """``released_text``: what the tokens that came release while the answer may go on (see ExpectedAnswers.text_of)."""
    if outcome.end in ("hung", "silent"):
        return Verdict("lost", f"{outcome.end} after {len(outcome.ids)} of {len(expected.ids)} tokens")
    disturbed = [strike for strike in strikes if strike.disturbs(outcome.started_s - _NOTICE_S, outcome.ended_s)]
    coordinator_died = any(strike.fault.victim == COORDINATOR and strike.fault.kind == "kill" for strike in disturbed)
    if outcome.num_ends > 1 and not coordinator_died:
        return Verdict("ended_twice", f"{outcome.num_ends} ends: {outcome.finish_reason}, {outcome.code} {outcome.message}")
    wrong = _compare(outcome.ids, expected.ids, whole=outcome.end == "finished")
    if wrong.fault is not None:
        return wrong
    if outcome.end == "finished":
        return _finished_well(outcome, expected)
    if outcome.text != released_text:
        return Verdict("wrong_tokens", f"text ends in {outcome.text[-20:]!r}, that of its tokens in {released_text[-20:]!r}")
    if outcome.end == "broken" and not coordinator_died:
        return Verdict("lost", f"the connection broke and the coordinator lives: {outcome.message}")
    if outcome.end == "error" and not _explained(outcome, disturbed, shape):
        return Verdict("unexplained", f"{outcome.code}: {outcome.message}")
    return Verdict()


def _finished_well(outcome: Outcome, expected: Expected) -> Verdict:
    if outcome.text != expected.text:
        return Verdict("wrong_tokens", f"text has {len(outcome.text)} characters, must have {len(expected.text)}")
    if outcome.finish_reason != expected.finish_reason:
        return Verdict("wrong_tokens", f"finish reason {outcome.finish_reason!r}, must be {expected.finish_reason!r}")
    if outcome.usage_tokens is not None and outcome.usage_tokens != len(expected.ids):
        return Verdict("wrong_tokens", f"usage counts {outcome.usage_tokens} tokens of {len(expected.ids)}")
    return Verdict()


def _explained(outcome: Outcome, disturbed: Sequence[Strike], shape: ShapeName) -> bool:
    """A request that is refused for want of memory, or one that something happened to."""
    return bool(disturbed) or (shape == "tight" and outcome.code in ("RESOURCE_EXHAUSTED", "RATE_LIMIT_ERROR"))


def _compare(got: Sequence[int], want: Sequence[int], *, whole: bool) -> Verdict:
    """``whole``: not only the beginning of ``want`` is due."""
    size = min(len(got), len(want))
    parting = next((i for i in range(size) if got[i] != want[i]), size)
    if parting == len(got) and (parting == len(want) or not whole):
        return Verdict()
    if parting == len(got):
        return Verdict("lost", f"finished after {len(got)} of {len(want)} tokens")
    if parting == len(want):
        return Verdict(
            "duplicated" if tuple(got[parting:]) == tuple(want[-(len(got) - parting) :]) else "wrong_tokens", "goes on after the end"
        )
    rest = tuple(got[parting : parting + 4])
    for shift in range(1, _REACH):
        if shift <= parting and rest == tuple(want[parting - shift : parting - shift + len(rest)]):
            return Verdict("duplicated", f"at token {parting} the last {shift} came again")
        if rest == tuple(want[parting + shift : parting + shift + len(rest)]):
            return Verdict("lost", f"at token {parting} {shift} tokens are missing")
    return Verdict("wrong_tokens", f"token {parting} is {got[parting]}, must be {want[parting]}")
