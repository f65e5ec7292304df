"""How the log moves from relay to main: the next chunk to ingest, when main decodes along, when to seal, when to commit. Pure.

Which of the modes it is, is :mod:`pdd.policy.handoff_choice`'s decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdd.policy.handoff_choice import HandoffMode

# The relay may stop when this share of a gap that does not show would be left: the next delay may be longer than those that were measured,
# by most of an ITL before it shows. A relay that runs on for one token more is cheap next to that.
SURE = 0.4
# covered: what the reader has yet to see outlasts main's delay · bounded: main is as slow as the relay or slower, and long enough is enough
SealCause = Literal["one_shot", "catch_up", "covered", "bounded"]


@dataclass(frozen=True)
class OverlapRules:
    """``max_tokens``: of the relay while main decodes too; then it is sealed if main's delay is at most ``max_gap_s``, a gap taken into the
    bargain; beyond, the relay goes on, for the stall would be longer · ``pace``: a gap of up to so many times the ITL is none.
    """

    max_tokens: int
    max_gap_s: float
    pace: float


@dataclass(frozen=True)
class HandoffSnapshot:
    """``log_tokens``: accepted so far · ``sent_tokens``: log prefix that main was given · ``ingesting``: main has yet to confirm the last
    chunk · ``relay_proposes``: the relay may still propose (alive, not sealed) · ``seal_sent``: it was asked to stop ·
    ``relay_stops_by_itself``: it was opened with a limit, so it seals without being asked ·
    ``behind_before``: how far behind main was when the last chunk was sent, None before the first.

    Of an overlap: ``overlap_tokens``: accepted from the relay since main decodes too, None before · ``main_delay_s``: from the
    acceptance of a token to main's proposal of the next, as measured on positions the relay was first with; None until main has proposed ·
    ``usual_delay_s``: what that rarely exceeded in earlier overlaps, None until there were any · ``cover_s``: for how long the reader is
    supplied with what is accepted · ``relay_itl_s``: the median of its latest gaps · ``steady_itl_s``: see :func:`reader_interval_s`; None
    until measured.
    """

    log_tokens: int
    sent_tokens: int
    ingesting: bool
    relay_proposes: bool
    seal_sent: bool
    relay_stops_by_itself: bool
    behind_before: int | None
    overlap_tokens: int | None = None
    main_delay_s: float | None = None
    usual_delay_s: float | None = None
    cover_s: float = 0.0
    relay_itl_s: float | None = None
    steady_itl_s: float | None = None


@dataclass(frozen=True)
class IngestChunk:
    """Give main ``log[position : position + num_tokens]``; it does not decode yet."""

    position: int
    num_tokens: int


@dataclass(frozen=True)
class SealRelay:
    """Ask the relay to stop after its step in flight."""

    cause: SealCause


@dataclass(frozen=True)
class Commit:
    """Give main ``log[position:]`` and let it decode: the relay has stopped."""

    position: int


@dataclass(frozen=True)
class Overlap:
    """Give main ``log[position:]`` and let it decode, or decode on, while the relay decodes too."""

    position: int


@dataclass(frozen=True)
class Wait:
    """Nothing to do until the next event."""


HandoffAction = IngestChunk | SealRelay | Commit | Overlap | Wait


def next_action(mode: HandoffMode, catch_up_chunk: int, overlap: OverlapRules, snapshot: HandoffSnapshot) -> HandoffAction:
    """The next thing to do once main's prompt KV is complete. Call again after every event and after every action that is not Wait.

    One-shot: seal, then commit everything. Catch-up: while more than a chunk is behind, ingest a chunk and let the relay run on; one chunk
    in flight at a time, so that main's neighbours see at most that much. A round that brought main no nearer ends the catching up: the
    relay is faster and would run on for ever. After the seal nobody is waited for but main: what is left goes at once, in chunks.
    Overlap: catch up likewise, then let main decode and give it what the relay is first with, until main is first (which is not decided
    here: its token is accepted) or the relay may stop.
    """
    if snapshot.overlap_tokens is not None:
        return _next_in_overlap(overlap, snapshot, snapshot.overlap_tokens)
    behind = snapshot.log_tokens - snapshot.sent_tokens
    no_nearer = snapshot.behind_before is not None and behind >= snapshot.behind_before
    may_seal = snapshot.relay_proposes and not (snapshot.seal_sent or snapshot.relay_stops_by_itself)
    if mode != "one_shot" and behind > catch_up_chunk:
        if snapshot.ingesting and snapshot.relay_proposes:
            return Wait()
        if no_nearer and may_seal:
            return SealRelay("catch_up") if mode == "catch_up" else Overlap(snapshot.sent_tokens)
        return IngestChunk(snapshot.sent_tokens, catch_up_chunk)
    if not snapshot.relay_proposes:
        return Commit(snapshot.sent_tokens)
    if snapshot.ingesting or not may_seal:
        return Wait()
    if mode == "overlap":
        return Overlap(snapshot.sent_tokens)
    return SealRelay(mode)


def reader_interval_s(pace: float, relay_itl_s: float | None, steady_itl_s: float | None) -> float:
    """How far apart tokens go to the reader while both decode, which is also the gap that shows no handoff.

    ``relay_itl_s``: as it is now · ``steady_itl_s``: of the slower of both workers, over all requests and some thousand tokens: what the
    reader gets as a rule. The interval is a little more than the relay's ITL, so that something is held back, but no less than the steady
    one and a little more than it at most: where the relay is slow for a moment its gaps are seen, and one as long again would be, too.
    """
    if relay_itl_s is None:
        return steady_itl_s or 0.0
    if steady_itl_s is None:
        return pace * relay_itl_s
    return min(max(pace * relay_itl_s, steady_itl_s), pace * steady_itl_s)


def _next_in_overlap(rules: OverlapRules, snapshot: HandoffSnapshot, overlap_tokens: int) -> HandoffAction:
    if snapshot.log_tokens > snapshot.sent_tokens:
        return Overlap(snapshot.sent_tokens)
    if not snapshot.relay_proposes or snapshot.seal_sent or snapshot.main_delay_s is None:
        return Wait()
    delay_s = max(snapshot.main_delay_s, snapshot.usual_delay_s or 0.0)
    if delay_s - snapshot.cover_s <= SURE * reader_interval_s(rules.pace, snapshot.relay_itl_s, snapshot.steady_itl_s):
        return SealRelay("covered")
    if overlap_tokens >= rules.max_tokens and snapshot.main_delay_s <= rules.max_gap_s:
        return SealRelay("bounded")
    return Wait()
