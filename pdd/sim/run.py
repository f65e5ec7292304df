"""Run a workload through a modelled system and tell what came of it: the report of `pdd sim`, the same bytes for equal arguments."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import simpy

from pdd.sim.against import Figures
from pdd.sim.request import Outcome
from pdd.sim.spec import SystemSpec
from pdd.sim.stats import Histogram
from pdd.sim.system import System
from pdd.sim.workload import Workload, drive

Json = dict[str, object]
_COLLECT_AFTER = 20_000  # objects, some 5 MB of them


@dataclass
class Sample:
    """State at one moment. Hit rates over the alignment window; None before anything was looked up."""

    at_s: float
    relay_load: float
    num_running: int
    prefill_hit: float | None
    main_hit: float | None
    link_queued_bytes: float


@dataclass
class Report:
    """What is counted while the run goes; memory does not grow with requests. ``slo_ttft_s``: what a good request keeps."""

    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    ttft: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    gap: Histogram = field(default_factory=Histogram)
    pipelines: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    handoffs: Counter[str] = field(default_factory=Counter)
    relay_tokens: int = 0
    main_tokens: int = 0
    prompt_tokens: int = 0
    prefill_hit: int = 0
    main_hit: int = 0
    good: int = 0
    last_end_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        request = outcome.request
        self.ttft.add(outcome.ttft_s)
        self.e2e.add(outcome.e2e_s)
        self.gap.add(outcome.largest_gap_s)
        tpot_s = (outcome.e2e_s - outcome.ttft_s) / max(1, request.output_tokens - 1)
        self.tpot.add(tpot_s)
        self.pipelines[outcome.decision.pipeline] += 1
        self.reasons[outcome.decision.reason] += 1
        if outcome.handoff is not None:
            self.handoffs[outcome.handoff] += 1
        self.relay_tokens += outcome.relay_tokens
        self.main_tokens += outcome.main_tokens
        self.prompt_tokens += request.prompt.num_tokens
        self.prefill_hit += outcome.prefill_hit
        self.main_hit += outcome.main_hit
        within = self.slo_ttft_s is None or outcome.ttft_s <= self.slo_ttft_s
        self.good += within and (self.slo_tpot_s is None or tpot_s <= self.slo_tpot_s)

    @property
    def figures(self) -> Figures:
        """That live runs are compared by."""
        tokens = self.relay_tokens + self.main_tokens
        return Figures(self.ttft.quantile(0.5), self.ttft.quantile(0.9), tokens / self.last_end_s, self.e2e.quantile(0.5))


def simulate(
    spec: SystemSpec,
    workload: Workload,
    seed: int,
    slo_ttft_s: float | None = None,
    slo_tpot_s: float | None = None,
    num_samples: int = 200,
    told: Callable[[Outcome], None] = lambda outcome: None,
) -> tuple[Report, Json]:
    """Until every request has ended. ``num_samples``: of state over the run, evenly by request · ``told``: of each that ends."""
    env = simpy.Environment()
    system = System(env, spec)
    report = Report(slo_ttft_s, slo_tpot_s)
    every = max(1, workload.num_requests // num_samples)

    def ended(outcome: Outcome) -> None:
        report.add(outcome)
        told(outcome)
        report.last_end_s = env.now
        if report.ttft.num % every == 0:
            rates = system.hits.rates(env.now)
            report.samples.append(
                Sample(env.now, system.relay_load, system.num_running, rates.prefill, rates.main, system.link.queued_bytes)
            )

    drive(system, workload, seed, ended)
    with _rare_collections():
        env.run()
    return report, _figures(report, system)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A run makes many objects that go as they came, beside a few thousand that stay for a while: a collector that looks through those, and
    all that was imported, again and again took an eighth of the time.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _figures(report: Report, system: System) -> Json:
    seconds = report.last_end_s
    tokens = report.relay_tokens + report.main_tokens
    link = system.spec.link

    def busy(fleet_busy_s: list[float]) -> float:
        return _short(sum(fleet_busy_s) / (seconds * len(fleet_busy_s)))

    found: Json = {
        "num_requests": report.ttft.num,
        "simulated_s": _short(seconds),
        "requests_per_s": _short(report.ttft.num / seconds),
        "good_requests_per_s": _short(report.good / seconds),
        "output_tokens_per_s": _short(tokens / seconds),
        "ttft_s": report.ttft.summary(),
        "tpot_s": report.tpot.summary(),
        "e2e_s": report.e2e.summary(),
        "largest_gap_s": report.gap.summary(),
        "relay_share": _short(report.relay_tokens / tokens),
        "pipelines": dict(sorted(report.pipelines.items())),
        "reasons": dict(sorted(report.reasons.items())),
        "handoffs": dict(sorted(report.handoffs.items())),
        "prefill_hit_rate": _short(report.prefill_hit / report.prompt_tokens),
        "main_hit_rate": _short(report.main_hit / report.prompt_tokens),
        "link_bytes": round(system.link.sent_bytes * link.coded_share),
        "link_use": _short(system.link.sent_bytes * link.coded_share / (seconds * link.rate_bytes_s)),
        "link_bytes_without_main_cache": round(report.prompt_tokens * system.spec.kv_bytes_per_token),
        "busy": {
            "prefill": busy([worker.engine.busy_s for worker in system.prefill.workers]),
            "relay": busy([worker.engine.busy_s for worker in system.relay.workers]) if system.relay is not None else None,
            "main": busy([worker.engine.busy_s for worker in system.main.workers]),
        },
    }
    return found


def _short(value: float) -> float:
    return float(f"{value:.6g}")
