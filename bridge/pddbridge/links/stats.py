"""What a link measures of itself for the policies: goodput, round trip, what is queued. No clock: the time is an argument."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Final

_WINDOW_S: Final = 0.1
MEMORY_S: Final = 2.0
_ROUND_TRIP_WEIGHT: Final = 1 / 8  # as TCP's smoothed round-trip time, RFC 6298


@dataclass(frozen=True)
class LinkStats:
    """To one receiver. ``goodput_bytes_per_s``: KV, as stored, acknowledged after placing, while frames were in flight; smoothed over about
    2 s of traffic. ``wire_bytes_per_s``: the same of payloads as sent, smaller where they are coded. ``round_trip_s``: of handshakes and
    pings on an idle connection, smoothed. All None until measured. ``queued_bytes``: KV pushed and not acknowledged, now.
    ``num_transfers``: open now. ``delivered_bytes``, ``delivered_wire_bytes``: since the start, as the rates.
    """

    goodput_bytes_per_s: float | None
    wire_bytes_per_s: float | None
    round_trip_s: float | None
    queued_bytes: int
    num_transfers: int
    num_connections: int
    delivered_bytes: int
    delivered_wire_bytes: int


@dataclass(frozen=True)
class SenderCounters:
    """Since the start. ``bytes_sent``: KV as stored, acknowledged after placing or found to be there. ``wire_bytes_sent``: the payloads
    that carried it. ``frames_resent``: after a break. ``codecs_declined``: transfers whose codec the receiver does not take. ``num_open``:
    transfers that have not ended, now. Within a site: ``frames_in_place``, made in a slot; ``frames_copied``, copied into one.
    """

    bytes_sent: int = 0
    wire_bytes_sent: int = 0
    frames_resent: int = 0
    connections_opened: int = 0
    codecs_declined: int = 0
    num_open: int = 0
    frames_in_place: int = 0
    frames_copied: int = 0

    def __add__(self, other: SenderCounters) -> SenderCounters:
        return SenderCounters(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


class GoodputMeter:
    """Bytes per second while something is in flight. A busy time shorter than a tenth of a second counts only until there is better: it
    measures the round trip more than the link.
    """

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self._provisional = True
        self._since_s: float | None = None
        self._bytes = 0

    def started(self, now_s: float) -> None:
        """A frame is in flight. No effect while another is."""
        if self._since_s is None:
            self._since_s = now_s
            self._bytes = 0

    def delivered(self, num_bytes: int, now_s: float, all_delivered: bool) -> None:
        """``num_bytes`` were acknowledged; ``all_delivered``: nothing is in flight any more."""
        if self._since_s is None:
            return
        self._bytes += num_bytes
        took_s = now_s - self._since_s
        if took_s >= _WINDOW_S:
            self._fold(self._bytes / took_s, took_s)
            self._since_s, self._bytes = now_s, 0
        elif all_delivered and self._provisional and took_s > 0:
            self.bytes_per_s = self._bytes / took_s
        if all_delivered:
            self._since_s = None

    def _fold(self, bytes_per_s: float, took_s: float) -> None:
        if self.bytes_per_s is None or self._provisional:
            self.bytes_per_s, self._provisional = bytes_per_s, False
        else:
            self.bytes_per_s += (bytes_per_s - self.bytes_per_s) * (1 - math.exp(-took_s / MEMORY_S))


class RoundTrip:
    """Smoothed round-trip time."""

    def __init__(self) -> None:
        self.smoothed_s: float | None = None

    def measured(self, round_trip_s: float) -> None:
        if self.smoothed_s is None:
            self.smoothed_s = round_trip_s
        else:
            self.smoothed_s += (round_trip_s - self.smoothed_s) * _ROUND_TRIP_WEIGHT
