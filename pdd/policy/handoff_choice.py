"""Which way the log goes from relay to main, decided once per request when main has the prompt's KV. Pure.

One-shot frees the relay soonest and leaves a gap; catching up shortens the gap to a chunk; overlap leaves none and has both workers decode
for a while. So: one-shot where the relay is short of rows or the gap would not show, overlap otherwise, after catching up where a lot is
to be caught up with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HandoffMode = Literal["one_shot", "catch_up", "overlap"]
# Bounded set: it labels a metric. The text of a decision carries the figures.
HandoffReason = Literal["forced", "relay_limited", "relay_crowded", "gap_hidden", "backlog", "gap_shows", "resumed", "relay_lost"]


@dataclass(frozen=True)
class HandoffChoiceRules:
    """``catch_up_chunk``: log tokens that main ingests at once · ``crowded_share``: of the relay's rows; from there on it is short of them
    · ``crowded_gap_s``: the gap up to which a crowded relay is sealed at once · ``hidden_itls``: a gap of up to so many times the steady
    ITL does not show.
    """

    catch_up_chunk: int
    crowded_share: float
    crowded_gap_s: float
    hidden_itls: float


@dataclass(frozen=True)
class HandoffChoiceSnapshot:
    """``backlog_tokens``: of the log, all of which main lacks · ``relay_running`` of ``relay_capacity`` rows are taken, this request's
    too · ``relay_stops_by_itself``: it was opened with a limit · ``rtt_s``: round trip to main · ``main_is_alone``: it runs nothing but
    this request · ``extend_s_per_token``: what main takes per ingested token, None until measured · ``main_itl_s``: the median of its
    latest gaps · ``steady_itl_s``: of the slower of both over some thousand tokens, which is what the reader gets as a rule, however slow
    the relay may be just now; None until measured.
    """

    backlog_tokens: int
    relay_running: int
    relay_capacity: int
    relay_stops_by_itself: bool
    rtt_s: float
    main_is_alone: bool
    extend_s_per_token: float | None
    main_itl_s: float | None
    steady_itl_s: float | None


@dataclass(frozen=True)
class HandoffDecision:
    """``predicted_gap_s``: between the relay's last token and main's first if the relay were sealed now; None: main is not measured."""

    mode: HandoffMode
    reason: HandoffReason
    text: str
    predicted_gap_s: float | None


def predict_gap_s(snapshot: HandoffChoiceSnapshot) -> float | None:
    """Gap of a one-shot handoff, at worst: a round trip, the step that main has just begun for others, and what it takes for the backlog,
    which it has to read before it can propose.

    A step takes main no less than its ITL, however few its tokens.
    """
    if snapshot.main_itl_s is None and snapshot.extend_s_per_token is None:
        return None
    extend_s = snapshot.backlog_tokens * (snapshot.extend_s_per_token or 0.0)
    step_s = snapshot.main_itl_s or 0.0
    return snapshot.rtt_s + (0.0 if snapshot.main_is_alone else step_s) + max(extend_s, step_s)


def choose_handoff(forced: HandoffMode | None, snapshot: HandoffChoiceSnapshot, rules: HandoffChoiceRules) -> HandoffDecision:
    """``forced``: what the launch config or the client demands."""
    gap_s = predict_gap_s(snapshot)
    far_behind = snapshot.backlog_tokens > rules.catch_up_chunk

    def decide(mode: HandoffMode, reason: HandoffReason, why: str) -> HandoffDecision:
        predicted = "unmeasured" if gap_s is None else f"{gap_s:.3f} s"
        return HandoffDecision(mode, reason, f"{why}; {snapshot.backlog_tokens} tokens behind, one-shot gap {predicted}", gap_s)

    if forced is not None:
        return decide(forced, "forced", f"{forced} was asked for")
    if snapshot.relay_stops_by_itself:
        return decide("catch_up" if far_behind else "one_shot", "relay_limited", "the relay stops at a given length")
    if snapshot.relay_running >= rules.crowded_share * snapshot.relay_capacity:
        bearable = not far_behind if gap_s is None else gap_s <= rules.crowded_gap_s
        why = f"relay runs {snapshot.relay_running} of {snapshot.relay_capacity} requests"
        return decide("one_shot" if bearable else "catch_up", "relay_crowded", why)
    if far_behind:
        return decide("overlap", "backlog", f"more than {rules.catch_up_chunk} tokens are to be caught up with first")
    steady_s = snapshot.steady_itl_s
    if gap_s is not None and snapshot.main_itl_s is not None and steady_s is not None and gap_s <= rules.hidden_itls * steady_s:
        return decide("one_shot", "gap_hidden", f"the gap is within {rules.hidden_itls:g} ITLs of {steady_s:.3f} s")
    return decide("overlap", "gap_shows", "a gap would show")
