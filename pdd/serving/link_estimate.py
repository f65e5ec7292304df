"""What each route between sites delivers, measured from transfers that completed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Link = tuple[str, str]  # from site, to site

# An old view has lost half its weight after the link was busy for this long.
HALF_LIFE_S = 10.0
# A rate that a launch config declares weighs as much as this long a transfer.
DECLARED_S = 1.0
_SHORTEST_S = 1e-3


@dataclass(frozen=True)
class TransferSample:
    """One completed transfer. Times are on one clock, in seconds. ``prefilled_s``: when the sender had computed everything, None when
    unknown · ``last_chunk_bytes``: KV that was computed in the sender's last step and so cannot have left before ``prefilled_s`` ·
    ``rtt_s``: round trip of the route, which is no part of its rate.
    """

    num_bytes: int
    started_s: float
    prefilled_s: float | None
    completed_s: float
    last_chunk_bytes: int
    rtt_s: float


def busy_s(sample: TransferSample) -> float:
    """Seconds the link needs for ``num_bytes``: the smaller of two upper bounds. Everything over the whole time is tight when the link is
    the bottleneck, the last chunk over the time after prefill is tight when prefill is.
    """
    whole = max(sample.completed_s - sample.started_s - sample.rtt_s, _SHORTEST_S)
    if sample.prefilled_s is None or not 0 < sample.last_chunk_bytes <= sample.num_bytes:
        return whole
    tail = max(sample.completed_s - sample.prefilled_s - sample.rtt_s, _SHORTEST_S)
    return min(whole, tail * sample.num_bytes / sample.last_chunk_bytes)


class LinkEstimate:
    """Goodput per link: bytes over busy seconds, both decaying. So short transfers weigh little and slow ones their due."""

    def __init__(self, declared: Mapping[Link, float]) -> None:
        """``declared``: bytes per second that the launch config states, believed until transfers say otherwise."""
        self._sums = {link: (rate * DECLARED_S, DECLARED_S) for link, rate in declared.items()}

    def goodput_bytes_s(self, link: Link) -> float | None:
        """None when nothing is known of ``link``."""
        if link not in self._sums:
            return None
        num_bytes, seconds = self._sums[link]
        return num_bytes / seconds

    def observe(self, link: Link, sample: TransferSample) -> None:
        """Transfers of nothing say nothing and are ignored."""
        if sample.num_bytes <= 0:
            return
        busy = busy_s(sample)
        kept = 0.5 ** (busy / HALF_LIFE_S)
        num_bytes, seconds = self._sums.get(link, (0.0, 0.0))
        self._sums[link] = (num_bytes * kept + sample.num_bytes, seconds * kept + busy)
