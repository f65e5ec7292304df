"""What policies know of a link between two workers, as its sending end last told. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkSnapshot:
    """``age_s`` ago. ``goodput_bytes_s``: KV, as stored, per second while frames were in flight · ``wire_bytes_s``: the payloads that
    carried it · ``round_trip_s``: on an idle connection; None each until measured · ``queued_bytes``: KV pushed and not acknowledged ·
    ``num_transfers``: whose that is.
    """

    goodput_bytes_s: float | None = None
    wire_bytes_s: float | None = None
    round_trip_s: float | None = None
    queued_bytes: int = 0
    num_transfers: int = 0
    age_s: float = 0.0


def delaying_bytes(link: LinkSnapshot, num_bytes: int) -> float:
    """KV of other transfers that crosses before the last of ``num_bytes`` more: they take turns, so at most ``num_bytes`` of each. What has
    left since the link was looked at is taken off.
    """
    left = max(0.0, link.queued_bytes - (link.goodput_bytes_s or 0.0) * link.age_s)
    return min(left, float(link.num_transfers) * num_bytes)
