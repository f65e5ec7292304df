"""Which pipeline a request takes: main alone waits for its KV (direct), a relay decodes meanwhile (relay), or a relay decodes to the end
and main is left out (local). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdd.policy.lengths import LengthPrediction
from pdd.policy.link import LinkSnapshot, delaying_bytes
from pdd.policy.link_schedule import Priority
from pdd.policy.local import LocalLimits, LocalQuestion, LocalRefusal, refuse_local
from pdd.policy_config import PolicyConfig

Pipeline = Literal["direct", "relay", "local"]
# Bounded set: it labels a metric. The text of a decision carries the figures.
PipelineReason = Literal[
    "within_budget",
    "within_target",
    "relay_busy",
    "over_budget",
    "relay_first",
    "singular",
    "link_unmeasured",
    "forced",
    "main_lost",
    "no_relay",
    "relay_full",
    "relay_lost",
    "shared",
]
RelayState = Literal["available", "none", "full", "lost"]


@dataclass(frozen=True)
class PipelineSnapshot:
    """What is known when both decode workers have said what they hold.

    ``main_miss_tokens``: prompt tokens whose KV main lacks · ``goodput_bytes_s``: estimate of the link from prefill to main, None when
    nothing is known of it · ``rtt_s``: round trip to main · ``relay``: "none" configured, "full", "lost" (unreachable) or "available" ·
    ``relay_running``: requests on it, this one not counted · ``main_available``: False when main could not be reached · ``link``: from
    prefill to main as prefill last told; None: nothing was sent · ``prefill_tokens``: that prefill is predicted to compute ·
    ``prefill_s_per_token``, ``relay_s_per_token``: learned, None until they are · ``prefill_step_tokens``: of which a step has so many at
    most, and what the last one computes cannot leave sooner · ``output``: predicted, None when nothing is asked of it · ``local_open``:
    see :class:`pdd.policy.local.LocalQuota` · ``shared``: others with the same prompt run · ``ahead_bytes``: of other transfers that go
    before an urgent one of this size; None: taken from ``link`` · ``late_s``: by how much KV has come later than predicted, lately ·
    ``relayed_tokens``: that the relay has made while main had yet to answer.
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
    prefill_tokens: int = 0
    prefill_s_per_token: float | None = None
    prefill_step_tokens: int = 0
    relay_s_per_token: float | None = None
    output: LengthPrediction | None = None
    local_open: bool = False
    shared: bool = False
    ahead_bytes: float | None = None
    late_s: float = 0.0
    relayed_tokens: int = 0


@dataclass(frozen=True)
class PipelineDecision:
    """Predictions count from when prefill starts. ``predicted_kv_s``: until main has its KV; None when the link is unmeasured ·
    ``predicted_wait_s``: the part of that which is beyond prefill, that a relay would hide · ``budget_s``: what that may be;
    None where there is no bound, as the relay is full · ``predicted_relay_end_s``: until a relay's last token ·
    ``predicted_output_tokens``: of the answer, at most · ``late_s``: that was added for how late KV came lately.
    """

    pipeline: Pipeline
    reason: PipelineReason
    text: str
    predicted_kv_s: float | None
    predicted_wait_s: float | None = None
    budget_s: float | None = None
    predicted_relay_end_s: float | None = None
    predicted_output_tokens: int | None = None
    late_s: float = 0.0

    @property
    def ends_on_relay(self) -> bool:
        """Whether the relay's last token is predicted before main's KV: then main's transfer serves nothing but later requests. What has
        come late lately does not count here: put off for it, a small transfer would come later still.
        """
        if self.pipeline != "relay" or self.predicted_relay_end_s is None or self.predicted_kv_s is None:
            return False
        return self.predicted_relay_end_s < self.predicted_kv_s - self.late_s

    @property
    def push_priority(self) -> Priority:
        """Of what goes to main: a request waits for what goes to it alone; a relay's cover gives main time, and where the relay will have
        ended before, nobody waits at all.
        """
        if self.pipeline == "direct":
            return Priority.URGENT
        return Priority.BACKGROUND if self.ends_on_relay else Priority.NORMAL


# As it stands while a relay makes tokens and main has yet to answer.
RELAY_FIRST = PipelineDecision("relay", "relay_first", "main has yet to answer", None)


def predict_prefill_s(snapshot: PipelineSnapshot) -> float:
    """Seconds until the prompt's KV is computed; 0 while nothing is known of prefill's pace."""
    return snapshot.prefill_tokens * (snapshot.prefill_s_per_token or 0.0)


def predict_wait_s(snapshot: PipelineSnapshot) -> float | None:
    """Seconds from the end of prefill until main's missing KV has arrived; 0 if nothing is missing, None if nothing is known of the link.

    A round trip (connect, acknowledge), then the bytes of other transfers that go before, then its own. These leave while prefill
    computes, so prefill's time is taken off, but for what its last step computes. More to send never means less to wait.
    """
    if snapshot.main_miss_tokens == 0:
        return 0.0
    link = snapshot.link or LinkSnapshot()
    goodput_bytes_s = expected_goodput_bytes_s(snapshot.goodput_bytes_s, link)
    if not goodput_bytes_s:
        return None
    num_bytes = snapshot.main_miss_tokens * snapshot.kv_bytes_per_token
    last_bytes = min(snapshot.prefill_step_tokens, snapshot.main_miss_tokens) * snapshot.kv_bytes_per_token
    own_s = max(last_bytes / goodput_bytes_s, num_bytes / goodput_bytes_s - predict_prefill_s(snapshot))
    ahead_bytes = delaying_bytes(link, num_bytes) if snapshot.ahead_bytes is None else snapshot.ahead_bytes
    return snapshot.rtt_s + ahead_bytes / goodput_bytes_s + own_s + snapshot.late_s


def predict_kv_s(snapshot: PipelineSnapshot) -> float | None:
    """Seconds from the start of prefill until main's missing KV has arrived."""
    return _from_start_s(snapshot, predict_wait_s(snapshot))


def _from_start_s(snapshot: PipelineSnapshot, wait_s: float | None) -> float | None:
    if wait_s is None or snapshot.main_miss_tokens == 0:
        return wait_s
    return predict_prefill_s(snapshot) + wait_s


def budget_s(snapshot: PipelineSnapshot, policy: PolicyConfig) -> tuple[float, float | None]:
    """What main's KV may take beyond prefill, on an idle relay and on this one: the relay's rows are dearer the fewer are left. None: it
    has none left, and no wait is worth one.
    """
    idle_s = policy.direct_budget_s
    if policy.ttft_target_s is not None:
        idle_s = max(idle_s, policy.ttft_target_s - predict_prefill_s(snapshot))
    load = relay_load(snapshot)
    return idle_s, idle_s * (1.0 + policy.relay_load_weight * load / (1.0 - load)) if load < 1.0 else None


def relay_load(snapshot: PipelineSnapshot) -> float:
    """Share of the relay's rows that others use."""
    return min(1.0, snapshot.relay_running / snapshot.relay_capacity) if snapshot.relay_capacity else 0.0


def choose_pipeline(snapshot: PipelineSnapshot, forced: Pipeline | None, policy: PolicyConfig) -> PipelineDecision:
    """``forced``: what the launch config or the client demands. A relay that is absent or full yields direct even then: nobody queues on a
    relay. Raises ValueError when neither decode worker is there.
    """
    wait_s = predict_wait_s(snapshot)
    idle_budget_s, allowed_s = budget_s(snapshot, policy)
    kv_s = _from_start_s(snapshot, wait_s)
    miss = _miss_text(snapshot, kv_s)

    def decide(pipeline: Pipeline, reason: PipelineReason, why: str) -> PipelineDecision:
        return PipelineDecision(
            pipeline,
            reason,
            f"{why}; {miss}",
            predicted_kv_s=kv_s,
            predicted_wait_s=wait_s,
            budget_s=allowed_s,
            predicted_relay_end_s=_relay_end_s(snapshot),
            predicted_output_tokens=None if snapshot.output is None else snapshot.output.high_tokens,
            late_s=snapshot.late_s,
        )

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
    if wait_s is None:
        return decide("relay", "link_unmeasured", "nothing is known of the link yet")
    if (allowed_s is None or wait_s <= allowed_s) and snapshot.relayed_tokens:
        return decide("relay", "relay_first", f"the relay made {snapshot.relayed_tokens} tokens before main answered")
    if wait_s <= idle_budget_s:
        target = idle_budget_s > policy.direct_budget_s
        why = f"predicted wait of {wait_s:.3f} s is within {idle_budget_s:.3f} s"
        return decide("direct", "within_target" if target and wait_s > policy.direct_budget_s else "within_budget", why)
    if allowed_s is None or wait_s <= allowed_s:
        return decide("direct", "relay_busy", f"predicted wait of {wait_s:.3f} s is worth no row of a relay at {relay_load(snapshot):.0%}")
    refused = _refuse_local(snapshot, wait_s, policy)
    if refused is None:
        return decide("local", "singular", "the relay will have ended before main could begin")
    return decide("relay", "over_budget", f"predicted wait of {wait_s:.3f} s is over {allowed_s:.3f} s (not local: {refused})")


def _refuse_local(snapshot: PipelineSnapshot, wait_s: float, policy: PolicyConfig) -> LocalRefusal | None:
    if snapshot.output is None:
        return "off"
    question = LocalQuestion(
        allowed=snapshot.local_open,
        shared=snapshot.shared,
        miss_tokens=snapshot.main_miss_tokens,
        output_tokens=snapshot.output.high_tokens,
        relay_s_per_token=snapshot.relay_s_per_token,
        relay_load=relay_load(snapshot),
        wait_s=wait_s,
    )
    local = policy.local
    return refuse_local(question, LocalLimits(local.min_miss_tokens, local.max_output_tokens, local.margin, local.max_relay_load))


def expected_goodput_bytes_s(estimate: float | None, link: LinkSnapshot) -> float | None:
    """While a link is busy, what it delivers now. Otherwise the better of what it delivered last and what transfers took: a short one
    understates the former, others at the same time the latter.
    """
    if link.num_transfers > 0 and link.goodput_bytes_s:
        return link.goodput_bytes_s
    return max(estimate or 0.0, link.goodput_bytes_s or 0.0) or None


def _relay_end_s(snapshot: PipelineSnapshot) -> float | None:
    if snapshot.output is None or snapshot.relay_s_per_token is None:
        return None
    return predict_prefill_s(snapshot) + snapshot.output.high_tokens * snapshot.relay_s_per_token


def _miss_text(snapshot: PipelineSnapshot, predicted_s: float | None) -> str:
    if snapshot.main_miss_tokens == 0:
        return "main misses nothing"
    megabytes = snapshot.main_miss_tokens * snapshot.kv_bytes_per_token / 1e6
    predicted = "" if predicted_s is None else f", predicted {predicted_s:.3f} s"
    return f"main misses {snapshot.main_miss_tokens} tokens, {megabytes:.2f} MB{predicted}"
