"""What each route between sites delivers, measured from transfers that completed."""

from __future__ import annotations

from dataclasses import dataclass

# Weight of a new sample. Requests are seconds apart and links drift over minutes: a handful of samples replace an old view.
SAMPLE_WEIGHT = 0.3


@dataclass(frozen=True)
class TransferSample:
    """One completed transfer. Times are on one clock, in seconds. ``prefilled_s``: when the sender had computed everything, None when
    unknown · ``last_chunk_bytes``: KV that was computed in the sender's last step and so cannot have left before ``prefilled_s``.
    """

    num_bytes: int
    started_s: float
    prefilled_s: float | None
    completed_s: float
    last_chunk_bytes: int


def sample_goodput_bytes_s(sample: TransferSample) -> float:
    """The larger of two lower bounds of the link's rate: everything over the whole time, which is tight when the link is the bottleneck,
    and the last chunk over the time after prefill, which is tight when prefill is.
    """
    whole = sample.num_bytes / max(sample.completed_s - sample.started_s, 1e-6)
    if sample.prefilled_s is None or sample.completed_s <= sample.prefilled_s:
        return whole
    tail = min(sample.last_chunk_bytes, sample.num_bytes) / max(sample.completed_s - sample.prefilled_s, 1e-3)
    return max(whole, tail)


class LinkEstimate:
    """Goodput per (from site, to site), an exponentially weighted mean. ``declared``: a launch config's rates, used until a sample comes."""

    def __init__(self, declared: dict[tuple[str, str], float] | None = None) -> None:
        self._goodput: dict[tuple[str, str], float] = dict(declared or {})
        self._measured: set[tuple[str, str]] = set()

    def goodput_bytes_s(self, route: tuple[str, str]) -> float | None:
        """None when nothing is known of ``route``."""
        return self._goodput.get(route)

    def observe(self, route: tuple[str, str], sample: TransferSample) -> None:
        """Transfers of nothing say nothing and are ignored."""
        if sample.num_bytes <= 0:
            return
        rate = sample_goodput_bytes_s(sample)
        if route in self._measured:
            rate = SAMPLE_WEIGHT * rate + (1 - SAMPLE_WEIGHT) * self._goodput[route]
        self._measured.add(route)
        self._goodput[route] = rate
