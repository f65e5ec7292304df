"""What happens to a request when one of its holders is lost: who goes on from the log. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# awaiting: its prompt KV comes from prefill · ready: it has the KV, or computes it itself
HolderState = Literal["none", "awaiting", "ready"]


@dataclass(frozen=True)
class FailoverSnapshot:
    """State after the loss. ``prefill_alive``: prefill still sends."""

    main: HolderState
    relay: HolderState
    prefill_alive: bool


@dataclass(frozen=True)
class Failover:
    """``source``: who proposes the next tokens: "relay" (later main, when it is there), "main" (from the log as it stands), or "nobody".
    ``recompute``: a worker must be attached anew and compute prompt KV for main's part.
    """

    source: Literal["relay", "main", "nobody"]
    recompute: bool


def plan_failover(snapshot: FailoverSnapshot, main_died: bool) -> Failover:
    """``main_died``: the loss is main's own process or connection. A living relay then simply goes on, and nothing is recomputed."""

    def usable(state: HolderState) -> bool:
        return state == "ready" or (state == "awaiting" and snapshot.prefill_alive)

    relay = usable(snapshot.relay)
    main = usable(snapshot.main)
    if relay:
        return Failover("relay", recompute=not main and not main_died)
    if main:
        return Failover("main", recompute=False)
    return Failover("nobody", recompute=True)
