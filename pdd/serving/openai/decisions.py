"""A decision with its outcome as JSON, for whoever looks into a deployment."""

from __future__ import annotations

from dataclasses import asdict

from pdd.policy.outcomes import DecisionRecord

Json = dict[str, object]


def decision_body(record: DecisionRecord) -> Json:
    """The record's fields, and what predictions were off by."""
    derived: Json = {"kv_error_s": record.kv_error_s, "within_output": record.within_output, "within_target": record.within_target}
    return {**asdict(record), **derived}
