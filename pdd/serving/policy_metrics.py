"""Prometheus metrics of what was decided and what came of it."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdd.policy.outcomes import DecisionRecord
from pdd.serving.learned import Learned

_TARGET_BUCKETS_S = (-5.0, -2.0, -1.0, -0.5, -0.2, -0.1, 0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class PolicyMetrics:
    """Labels are from bounded sets. Gauges read ``learned`` when they are asked for."""

    def __init__(self, registry: CollectorRegistry, learned: Learned) -> None:
        r = registry
        self.output_predictions = Counter(
            "pdd:output_length_predictions", "Answers by whether they were as short as predicted", ["within"], registry=r
        )
        self.targets = Counter("pdd:ttft_target", "First tokens by whether they met the target", ["pipeline", "met"], registry=r)
        self.target_error_s = Histogram(
            "pdd:ttft_over_target_seconds", "Time to first token less its target", buckets=_TARGET_BUCKETS_S, registry=r
        )
        self.ended_on = Counter("pdd:requests_ended_on", "Finished requests by who proposed the last token", ["pipeline", "on"], registry=r)
        self.transfer_ends = Counter(
            "pdd:main_transfers_unneeded", "Transfers to main that their request ended without", ["end", "reason"], registry=r
        )
        self.saved_bytes = Counter("pdd:wan_kv_saved_bytes", "KV that main lacked and that was never sent", registry=r)
        self.redecisions = Counter("pdd:pipeline_redecisions", "Pipelines that were changed after all", ["reason"], registry=r)
        self.background = Counter("pdd:background_transfers", "Transfers in the background that ended", ["outcome"], registry=r)
        self.background_bytes = Counter("pdd:background_kv_bytes", "KV that they brought to main", registry=r)
        self.background_running = Gauge("pdd:background_transfers_running", "Transfers in the background now", registry=r)
        rate = Gauge("pdd:prefix_hit_rate", "Share of prompt tokens found, over the latest requests", ["role"], registry=r)
        rate.labels("prefill").set_function(lambda: _or_nan(learned.hits.rates(time.monotonic()).prefill))
        rate.labels("main").set_function(lambda: _or_nan(learned.hits.rates(time.monotonic()).main))
        gap = Gauge("pdd:prefix_hit_rate_gap", "Prefill's hit rate less main's: how far main's cache is behind", registry=r)
        gap.set_function(lambda: _or_nan(learned.hits.rates(time.monotonic()).gap))
        share = Gauge("pdd:local_share", "Share of the latest requests that were finished on the relay by plan", registry=r)
        share.set_function(lambda: learned.quota.share)

    def ended(self, record: DecisionRecord) -> None:
        """A request is over, whatever its outcome."""
        if record.within_output is not None:
            self.output_predictions.labels(_yes(record.within_output)).inc()
        if record.ttft_target_s is not None and record.ttft_s is not None:
            self.targets.labels(record.pipeline, _yes(record.within_target is True)).inc()
            self.target_error_s.observe(record.ttft_s - record.ttft_target_s)
        if record.outcome in ("stop", "length") and record.pipeline and record.ended_on:
            self.ended_on.labels(record.pipeline, record.ended_on).inc()
        if record.transfer != "none":
            self.transfer_ends.labels(record.transfer, record.transfer_reason).inc()
        self.saved_bytes.inc(record.wan_kv_saved_bytes)
        if record.redecision:
            self.redecisions.labels(record.redecision).inc()


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
