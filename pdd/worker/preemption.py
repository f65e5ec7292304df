"""Who loses its pages when a running request cannot grow. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from pdd.worker.request import Phase, RequestState


def choose_victim(growing: RequestState, requests: Iterable[RequestState]) -> RequestState | None:
    """Among the requests that came after ``growing``, the youngest that was computed here, else the youngest whose KV was received.

    Where none came after, ``growing`` itself waits for the older ones, so the oldest always advances. Never one whose pages a transfer
    writes or still reads. None when nobody can be taken pages from, or when only ``growing`` has any: that would free nothing for it.
    """
    candidates = [r for r in requests if r.phase is Phase.ACTIVE and r.pages and not r.has_open_transfer]
    if all(r is growing for r in candidates):
        return None
    younger = [r for r in candidates if r.order > growing.order]
    if younger:
        return max(younger, key=lambda r: (not r.from_transfer, r.order))
    return growing if growing in candidates else None
