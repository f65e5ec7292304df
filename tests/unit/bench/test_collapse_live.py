"""The live collapse: what is read of /metrics, and what is made of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from benchmarks.collapse_live import Sample, arm_config, read_reports, report, sample
from pdd.bench.serve.client import Record
from pdd.config import load


def metrics(relay: float, main: float, running: float) -> str:
    registry = CollectorRegistry()
    streams = Gauge("pdd:worker_streams", "", ["worker"], registry=registry)
    for name, value in (("relay-0", relay), ("main-0", 9)):
        streams.labels(name).set(value)
    rate = Gauge("pdd:prefix_hit_rate", "", ["role"], registry=registry)
    for role, value in (("prefill", 0.9), ("main", main)):
        rate.labels(role).set(value)
    Gauge("pdd:num_requests_running", "", registry=registry).set(running)
    return generate_latest(registry).decode()


def test_relay_load_is_the_share_of_relay_rows() -> None:
    assert sample(metrics(2, 0.5, 7), 1.234, {"relay-0": 4}) == Sample(1.23, 0.5, 0.9, 0.5, 7)
    assert sample(metrics(4, float("nan"), 7), 2, {"relay-0": 4}) == Sample(2, 1.0, 0.9, None, 7)


def test_the_report_counts_good_requests_and_takes_the_last_gap(tmp_path: Path) -> None:
    timeline = {"pipeline": "local", "decision": "forced", "relay_tokens": 30, "main_tokens": 10, "wan_kv_tokens": 8}
    good = Record("s", 0, 0.0, 5, pieces=[(0.5, 1), (1.0, 1)], e2e_s=1.0, timeline=timeline)
    samples = [Sample(0.0, 0.0, None, None, 0), Sample(0.5, 1.0, 0.9, 0.8, 1), Sample(1.0, 1.0, 0.9, 0.6, 2)]
    made = report([good, Record("s", 1, 1.0, 5, error="broken")], 2.0, samples)
    assert (made.requests, made.failed, made.relay_share, made.main_miss, made.hit_gap) == (2, 1, 0.75, 8.0, 0.3)
    assert (made.mean_relay_load, made.relay_full_share, made.decisions) == (0.667, 0.667, {"local, forced": 1})
    kept = tmp_path / "kept.json"
    assert read_reports(kept) == {}
    kept.write_text(json.dumps({"local": dataclasses.asdict(made)}), encoding="utf-8")
    assert read_reports(kept) == {"local": made}
    with pytest.raises(ValueError, match="0 of them good"):
        report([], 1.0, samples)


def test_an_arm_is_the_config_with_its_rule() -> None:
    made = arm_config(load(Path("configs/local-skewed.yaml")), "local", 3)
    assert (made.policy.pipeline, made.serving.http_port) == ("local", None)
    assert [worker.max_rows for worker in made.workers if worker.role == "relay"] == [3]
