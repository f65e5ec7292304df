"""What one request of a mix was and how it went, as its client saw it: a row of the JSON, and the gaps where relay and main change over."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from pdd.bench.mix import Kind, MixRequest
from pdd.launch.ask import Answer, Piece


@dataclass(frozen=True)
class Asked:
    """``late_s``: how long after its arrival the request was sent."""

    request: MixRequest
    answer: Answer
    late_s: float


@dataclass(frozen=True)
class RequestRow:
    """Seconds at the client, from sending it. ``handoff_itl_s``: see :func:`handoff_gap_s`; None: nothing was handed over ·
    ``timeline``: as the coordinator reported it, its clock starting when it had read the request.
    """

    kind: Kind
    arrival_s: float
    late_s: float
    prompt_tokens: int
    hit_tokens: int
    output_tokens: int
    ttft_s: float
    e2e_s: float
    max_itl_s: float
    handoff_itl_s: float | None
    timeline: dict[str, str | int | float | None]


def request_row(asked: Asked) -> RequestRow:
    """Of an answer that came in two pieces at least."""
    request, pieces = asked.request, asked.answer.pieces
    gap_s = handoff_gap_s(asked.answer)
    return RequestRow(
        kind=request.kind,
        arrival_s=round(request.arrival_s, 4),
        late_s=round(asked.late_s, 4),
        prompt_tokens=len(request.prompt_ids),
        hit_tokens=request.hit_tokens,
        output_tokens=sum(piece.num_tokens for piece in pieces),
        ttft_s=round(pieces[0].at_s, 4),
        e2e_s=round(pieces[-1].at_s, 4),
        max_itl_s=round(max(b.at_s - a.at_s for a, b in pairwise(pieces)), 4),
        handoff_itl_s=None if gap_s is None else round(gap_s, 4),
        timeline=asked.answer.timeline,
    )


def handoff_gap_s(answer: Answer) -> float | None:
    """The largest gap from a relayed piece to the main piece right after it; None when there is no such pair."""
    return max((b.at_s - a.at_s for a, b in pairwise(answer.pieces) if _changes(a, b)), default=None)


def ordinary_gaps_s(answer: Answer) -> list[float]:
    """All gaps but those where the maker changes."""
    return [b.at_s - a.at_s for a, b in pairwise(answer.pieces) if a.origin == b.origin]


def _changes(before: Piece, after: Piece) -> bool:
    return (before.origin, after.origin) == ("relay", "main")
