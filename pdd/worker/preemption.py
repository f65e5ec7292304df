"""Who loses its pages when a running request cannot grow. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from pdd.worker.request import Phase, RequestState


def choose_victim(growing: RequestState, requests: Iterable[RequestState]) -> RequestState | None:
    """The youngest request that was computed here, else the youngest whose KV was received; it may be ``growing`` itself.

    Never one whose pages a transfer writes or still reads, and never ``growing`` alone: preempting the only holder would free nothing
    for it. None when there is nobody.
    """
    candidates = [r for r in requests if r.phase is Phase.ACTIVE and r.pages and not r.has_open_transfer]
    if all(r is growing for r in candidates):
        return None
    return max(candidates, key=lambda r: (not r.from_transfer, r.order))
