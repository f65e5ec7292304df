"""From records to the keys of `vllm bench serve`'s JSON, and what only PDD can tell beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pdd.bench.serve.client import Record
from pdd.bench.serve.load import Run

METRICS = ("ttft", "tpot", "itl", "e2el")
Json = dict[str, object]


@dataclass(frozen=True)
class Asked:
    """``metrics``: of which percentiles are told · ``goodput_ms``: limits that a good request keeps, by metric; empty: no goodput."""

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    percentiles: tuple[float, ...] = (99.0,)
    goodput_ms: Mapping[str, float] | None = None


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """From ``ttft:200``, milliseconds. Raises ValueError naming the pair."""
    limits = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            limits[name] = float(value)
        except ValueError as error:
            raise ValueError(f"goodput: given {pair!r}, allowed METRIC:MILLISECONDS") from error
        if name not in ("ttft", "tpot", "e2el") or limits[name] <= 0:
            raise ValueError(f"goodput: given {pair!r}, allowed ttft, tpot or e2el and a time above 0")
    return limits


def figures(run: Run, asked: Asked) -> Json:
    """Milliseconds in ``*_ms``, tokens and requests per second. Failed requests count in ``failed`` alone."""
    good = [record for record in run.records if not record.error]
    output = sum(record.output_tokens for record in good)
    prompt = sum(record.prompt_tokens for record in good)
    found: Json = {
        "duration": run.duration_s,
        "completed": len(good),
        "failed": len(run.records) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(good) / run.duration_s,
        "request_goodput": None,
        "output_throughput": output / run.duration_s,
        "total_token_throughput": (prompt + output) / run.duration_s,
        "max_output_tokens_per_s": _busiest_second(good),
        "max_concurrent_requests": run.max_concurrent,
    }
    if asked.goodput_ms:
        kept = sum(_keeps(record, asked.goodput_ms) for record in good)
        found["request_goodput"] = kept / run.duration_s
    for metric in METRICS:
        values = [value * 1000.0 for record in good for value in _values(record, metric)]
        found |= _statistics(metric, values, asked)
    return found


def pdd_figures(run: Run) -> Json | None:
    """Seconds; None when no endpoint told a timeline. ``wan_kv_bytes_saved``: KV of prompt tokens that main had already."""
    told = [record for record in run.records if record.timeline and not record.error]
    if not told:
        return None

    def total(key: str) -> int:
        return sum(int(record.timeline.get(key) or 0) for record in told)

    moved, moved_tokens = total("wan_kv_bytes"), total("wan_kv_tokens")
    relay, main = total("relay_tokens"), total("main_tokens")
    prompt = sum(record.prompt_tokens for record in told)
    gaps = [max(record.itls_s) for record in told if record.itls_s]
    return {
        "relay_share": relay / (relay + main) if relay + main else 0.0,
        "wan_kv_bytes": moved,
        "wan_kv_wire_bytes": total("wan_kv_wire_bytes"),
        "wan_kv_bytes_saved": total("main_hit_tokens") * moved // moved_tokens if moved_tokens else 0,
        "main_hit_rate": total("main_hit_tokens") / prompt if prompt else 0.0,
        "cached_rate": sum(record.cached_tokens for record in told) / prompt if prompt else 0.0,
        "pipelines": dict(Counter(str(record.timeline.get("pipeline")) for record in told)),
        "handoffs": dict(Counter(str(record.timeline["handoff"]) for record in told if record.timeline.get("handoff"))),
        "fallbacks": total("fallbacks"),
        "second_token_s": _percentiles([record.pieces[1][0] for record in told if len(record.pieces) > 1]),
        "largest_itl_s": _percentiles(gaps),
    }


def detailed(run: Run) -> Json:
    """The lists that `--save-detailed` adds, one entry per request."""
    return {
        "input_lens": [record.prompt_tokens for record in run.records],
        "output_lens": [record.output_tokens for record in run.records],
        "ttfts": [record.ttft_s if record.pieces else 0.0 for record in run.records],
        "itls": [record.itls_s for record in run.records],
        "start_times": [record.start_s for record in run.records],
        "generated_texts": [record.text for record in run.records],
        "errors": [record.error for record in run.records],
        "sessions": [record.session for record in run.records],
        "timelines": [record.timeline for record in run.records],
    }


def _values(record: Record, metric: str) -> list[float]:
    if metric == "ttft":
        return [record.ttft_s]
    if metric == "itl":
        return record.itls_s
    if metric == "e2el":
        return [record.e2e_s]
    return [_tpot_s(record)] if record.output_tokens > 1 else []


def _tpot_s(record: Record) -> float:
    return (record.e2e_s - record.ttft_s) / (record.output_tokens - 1)


def _keeps(record: Record, limits_ms: Mapping[str, float]) -> bool:
    return all(value * 1000.0 <= limit for metric, limit in limits_ms.items() for value in _values(record, metric))


def _statistics(metric: str, values: Sequence[float], asked: Asked) -> Json:
    if not values:
        return {f"{kind}_{metric}_ms": None for kind in ("mean", "median", "std")}
    array = np.asarray(values, dtype=np.float64)
    found: Json = {
        f"mean_{metric}_ms": float(array.mean()),
        f"median_{metric}_ms": float(np.median(array)),
        f"std_{metric}_ms": float(array.std()),
    }
    if metric in asked.metrics:
        for percentile in asked.percentiles:
            found[f"p{percentile:g}_{metric}_ms"] = float(np.percentile(array, percentile))
    return found


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {f"p{p}": round(float(np.percentile(np.asarray(values), p)), 4) for p in (50, 90, 99)}


def _busiest_second(records: Sequence[Record]) -> float:
    """Most tokens that came within one second of the run's clock."""
    seconds: Counter[int] = Counter()
    for record in records:
        for at_s, tokens in record.pieces:
            seconds[int(record.start_s + at_s)] += tokens
    return float(max(seconds.values(), default=0))
