"""Which pipeline a request takes: main alone waits for its KV (direct), or a relay decodes meanwhile (relay). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdd.policy.link import LinkSnapshot, delaying_bytes

Pipeline = Literal["direct", "relay"]
# Bounded set: it labels a metric. The text of a decision carries the figures.
PipelineReason = Literal[
    "within_budget", "over_budget", "link_unmeasured", "forced", "main_lost", "no_relay", "relay_full", "relay_lost", "shared"
]
RelayState = Literal["available", "none", "full", "lost"]


@dataclass(frozen=True)
class PipelineSnapshot:
    """What is known when both decode workers have said what they hold.

    ``main_miss_tokens``: prompt tokens whose KV main lacks · ``goodput_bytes_s``: estimate of the link from prefill to main, None when
    nothing is known of it · ``rtt_s``: round trip to main · ``relay``: "none" configured, "full", "lost" (unreachable) or "available" ·
    ``main_available``: False when main could not be reached · ``link``: from prefill to main as prefill last told; None: nothing was sent.
    """

    main_miss_tokens: int
    kv_bytes_per_token: int
    goodput_bytes_s: float | None
    rtt_s: float
    relay: RelayState
    relay_running: int
    relay_capacity: int
    main_available: bool = True
    link: LinkSnapshot | None = None


@dataclass(frozen=True)
class PipelineDecision:
    """``predicted_kv_s``: until main has its KV, counted from when prefill starts to send; None when the link is unmeasured."""

    pipeline: Pipeline
    reason: PipelineReason
    text: str
    predicted_kv_s: float | None


def predict_kv_s(snapshot: PipelineSnapshot) -> float | None:
    """Seconds until main's missing KV has arrived: a round trip (connect, acknowledge) plus bytes over goodput, those of other transfers
    that go before it included; 0 if nothing is missing. The link's own measure of its goodput counts where there is no other.
    """
    if snapshot.main_miss_tokens == 0:
        return 0.0
    link = snapshot.link or LinkSnapshot()
    goodput_bytes_s = snapshot.goodput_bytes_s or link.goodput_bytes_s
    if not goodput_bytes_s:
        return None
    num_bytes = snapshot.main_miss_tokens * snapshot.kv_bytes_per_token
    return snapshot.rtt_s + (num_bytes + delaying_bytes(link, num_bytes)) / goodput_bytes_s


def choose_pipeline(snapshot: PipelineSnapshot, forced: Pipeline | None, direct_budget_s: float) -> PipelineDecision:
    """``forced``: what the launch config or the client demands. A relay that is absent or full yields direct even then: nobody queues on a
    relay. Raises ValueError when neither decode worker is there.
    """
    predicted_s = predict_kv_s(snapshot)
    miss = _miss_text(snapshot, predicted_s)

    def decide(pipeline: Pipeline, reason: PipelineReason, why: str) -> PipelineDecision:
        return PipelineDecision(pipeline, reason, f"{why}; {miss}", predicted_s)

    if not snapshot.main_available:
        if snapshot.relay != "available":
            raise ValueError(f"choose_pipeline: main is not available and relay is {snapshot.relay!r}")
        return decide("relay", "main_lost", "main cannot be reached")
    if snapshot.relay == "full":
        return decide("direct", "relay_full", f"relay runs {snapshot.relay_running} of {snapshot.relay_capacity} requests")
    if snapshot.relay == "lost" and forced != "direct":
        return decide("direct", "relay_lost", "relay cannot be reached")
    if snapshot.relay == "none" and forced != "direct":
        return decide("direct", "no_relay", "there is no relay")
    if forced is not None:
        return decide(forced, "forced", f"{forced} was asked for")
    if predicted_s is None:
        return decide("relay", "link_unmeasured", "nothing is known of the link yet")
    if predicted_s <= direct_budget_s:
        return decide("direct", "within_budget", f"predicted wait is within {direct_budget_s:g} s")
    return decide("relay", "over_budget", f"predicted wait is over {direct_budget_s:g} s")


def _miss_text(snapshot: PipelineSnapshot, predicted_s: float | None) -> str:
    if snapshot.main_miss_tokens == 0:
        return "main misses nothing"
    megabytes = snapshot.main_miss_tokens * snapshot.kv_bytes_per_token / 1e6
    predicted = "" if predicted_s is None else f", predicted {predicted_s:.3f} s"
    return f"main misses {snapshot.main_miss_tokens} tokens, {megabytes:.2f} MB{predicted}"
