"""What was decided for every request and what came of it: the latest are kept, all are counted."""

from __future__ import annotations

import json
import logging
from collections import deque
from dataclasses import asdict

from pdd.policy.outcomes import DecisionRecord
from pdd.serving.learned import Learned, account
from pdd.serving.policy_metrics import PolicyMetrics
from pdd.serving.request import GenerationRequest
from pdd.serving.timeline import TimelineRecorder

_log = logging.getLogger(__name__)


class DecisionLog:
    """One line per request at level DEBUG, too."""

    def __init__(self, num_kept: int, ttft_target_s: float | None, learned: Learned, metrics: PolicyMetrics) -> None:
        self._latest: deque[DecisionRecord] = deque(maxlen=num_kept)
        self._ttft_target_s = ttft_target_s
        self._learned = learned
        self._metrics = metrics

    @property
    def latest(self) -> tuple[DecisionRecord, ...]:
        """Oldest first."""
        return tuple(self._latest)

    def ended(self, request: GenerationRequest, timeline: TimelineRecorder, outcome: str) -> None:
        """``outcome``: "stop", "length", "cancelled" or an error code in lower case."""
        if timeline.decision is None:
            return  # it ended before anything was decided
        record = _record(request.request_id, timeline, outcome, self._ttft_target_s)
        if outcome in ("stop", "length"):
            self._learned.lengths.observe(account(request.tenant), record.output_tokens, cut=outcome == "length")
        self._metrics.ended(record)
        self._latest.append(record)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("decision %s", json.dumps(asdict(record)))


def _record(request_id: str, timeline: TimelineRecorder, outcome: str, ttft_target_s: float | None) -> DecisionRecord:
    decision = timeline.decision
    assert decision is not None
    return DecisionRecord(
        request_id=request_id,
        pipeline=decision.pipeline,
        reason=decision.reason,
        text=decision.text,
        predicted_kv_s=decision.predicted_kv_s,
        predicted_wait_s=decision.predicted_wait_s,
        budget_s=decision.budget_s,
        predicted_relay_end_s=decision.predicted_relay_end_s,
        predicted_output_tokens=decision.predicted_output_tokens,
        ttft_target_s=ttft_target_s,
        outcome=outcome,
        kv_s=timeline.kv_s,
        ttft_s=timeline.ttft_s,
        e2e_s=timeline.now_s(),
        output_tokens=sum(timeline.tokens.values()),
        relay_tokens=timeline.tokens["relay"],
        handoff=timeline.handoff,
        ended_on=timeline.ended_on or "",
        transfer=timeline.transfer,
        transfer_reason=timeline.transfer_reason,
        wan_kv_bytes=timeline.wan_kv_bytes,
        wan_kv_saved_bytes=timeline.wan_kv_saved_bytes,
        redecision=timeline.redecision,
        fallbacks=timeline.fallbacks,
        handoff_reason=timeline.handoff_reason,
        handoff_predicted_gap_s=timeline.handoff_predicted_gap_s,
        handoff_gap_s=timeline.handoff_gap_s,
    )
