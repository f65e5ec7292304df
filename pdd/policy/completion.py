"""What becomes of a transfer to main whose request has ended on the relay: it goes on for its prefix alone, or is stopped. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdd.policy.link import LinkSnapshot
from pdd.policy_config import BackgroundConfig

# How often what speaks against a transfer is looked at while it runs. Workers tell of their links about as often.
POLL_S = 0.5
# Bounded set: it labels a metric.
CompletionReason = Literal["valuable", "off", "too_short", "aligned", "too_many", "too_large", "link_busy", "main_full"]


@dataclass(frozen=True)
class CompletionSnapshot:
    """``miss_tokens``: that main lacks, of ``num_bytes`` of KV · ``gap``: between the hit rates of prefill and main, None when unknown ·
    ``num_running``, ``running_bytes``: of the transfers in the background, this one not counted · ``link``: from prefill to main; None:
    nothing is known of it · ``main_running``, ``main_capacity``: requests on main, this one not counted, and its rows ·
    ``begun``: the transfer runs already; one that does not waits for an idle link.
    """

    miss_tokens: int
    num_bytes: int
    gap: float | None
    num_running: int
    running_bytes: int
    link: LinkSnapshot | None
    main_running: int
    main_capacity: int
    begun: bool


@dataclass(frozen=True)
class CompletionDecision:
    complete: bool
    reason: CompletionReason


def choose_completion(snapshot: CompletionSnapshot, config: BackgroundConfig) -> CompletionDecision:
    """Whether the transfer goes on, or is begun, in the lowest class."""
    reason: CompletionReason = "valuable"
    if config.max_transfers == 0:
        reason = "off"
    elif snapshot.miss_tokens < config.min_tokens:
        reason = "too_short"
    elif snapshot.gap is not None and snapshot.gap < config.min_gap:
        reason = "aligned"
    elif snapshot.num_running >= config.max_transfers:
        reason = "too_many"
    elif snapshot.running_bytes + snapshot.num_bytes > config.max_bytes:
        reason = "too_large"
    elif (pressed := pressing(snapshot, config)) is not None:
        reason = pressed
    return CompletionDecision(reason == "valuable", reason)


def pressing(snapshot: CompletionSnapshot, config: BackgroundConfig) -> Literal["link_busy", "main_full"] | None:
    """What speaks against a transfer in the background, now that it might run: asked again while it does."""
    if snapshot.main_running >= snapshot.main_capacity:
        return "main_full"
    link = snapshot.link
    if link is None:
        return None
    if not snapshot.begun:
        return "link_busy" if link.num_transfers > snapshot.num_running else None
    # What the background has queued itself does not count. It is not known, so all of it is taken to be queued.
    background_bytes = snapshot.running_bytes + snapshot.num_bytes
    others_bytes = max(0.0, link.queued_bytes - background_bytes)
    return "link_busy" if link.goodput_bytes_s and others_bytes > config.busy_s * link.goodput_bytes_s else None
