"""What one client saw of its request: tokens with the times they came at, and how it ended. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# finished: with a reason · error: an error with a status · broken: the connection to the coordinator broke · cancelled: by us · silent:
# the stream ended as if all were well, without a reason · hung: no end in time
End = Literal["finished", "error", "broken", "cancelled", "silent", "hung"]


@dataclass
class Outcome:
    """Times are monotonic. ``arrivals``: (time, tokens so far) · ``code``: of an error, as pdd.errors.Code names it; the HTTP status where
    the body named none · ``num_ends``: finish reasons and errors that came, and a break after one of them: must be one · ``usage_tokens``:
    completion tokens that the service counted.
    """

    number: int
    started_s: float = 0.0
    ended_s: float = 0.0
    end: End = "hung"
    ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    text: str = ""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    finish_reason: str | None = None
    code: str | None = None
    message: str = ""
    num_ends: int = 0
    usage_tokens: int | None = None
    timeline: dict[str, object] = field(default_factory=dict)

    def arrived(self, now_s: float, ids: list[int], origin: str) -> None:
        self.ids += ids
        self.origins += [origin] * len(ids)
        if ids:
            self.arrivals.append((now_s, len(self.ids)))

    def alive(self, at_s: float) -> bool:
        return self.started_s <= at_s < self.ended_s
