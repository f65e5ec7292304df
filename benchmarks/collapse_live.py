"""Relay-to-the-end collapses, and PDD's rule does not: the same agents' sessions on two live deployments, one that finishes every request
on the relay (``policy.pipeline: local``), one that decides by itself (``auto``). The live counterpart of ``pdd sim --collapse``.

``python benchmarks/collapse_live.py --json FILE --plot FILE``. Relay load, hit rates and requests in progress are read from the
coordinators' /metrics twice a second. What is finished on the relay leaves main's cache behind prefill's: with all rows taken the next
requests go to main directly, which then lacks everything they share with their past, and wait for it to cross the link.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from pdd.bench.serve.client import Record, Target
from pdd.bench.serve.load import LoadPlan, run_load
from pdd.bench.serve.sessions import Session, arrivals, num_requests, with_arrivals
from pdd.bench.serve.synthetic import Agents, agent_sessions
from pdd.bench.stats import Percentiles, percentiles
from pdd.config import LaunchConfig, load
from pdd.launch.local import Deployment
from pdd.launch.serve import StartProgress, end_on_signal
from pdd.models import resolve
from pddbridge.checkpoint import open_checkpoint

Arm = Literal["local", "auto"]
ARMS: dict[Arm, str] = {"local": "finished on the relay", "auto": "PDD"}
# Contexts of a few hundred tokens, of which a turn adds a few: hits as of agents at full size, on a machine of two cores.
AGENTS = Agents(
    num_sessions=0, turns=8, first_tokens=400, added_median=20, added_sigma=1.0, output_median=50, output_sigma=0.5, wait_s=1.5,
    max_context_tokens=2000,
)  # fmt: skip
EVERY_S = 0.5


@dataclass(frozen=True)
class Sample:
    """``relay_load``: share of the relay's rows in use · hit rates over the latest requests, None before there were any."""

    at_s: float
    relay_load: float
    prefill_hit: float | None
    main_hit: float | None
    num_running: int


@dataclass(frozen=True)
class ArmReport:
    """``relay_full_share``: of the samples, those with no free relay row · ``decisions``: requests by pipeline and reason · ``main_miss``:
    prompt tokens that crossed to main, per request · ``hit_gap``: prefill's hit rate less main's, at the end · seconds at the client.
    """

    requests: int
    failed: int
    duration_s: float
    mean_relay_load: float
    relay_full_share: float
    relay_share: float
    decisions: dict[str, int]
    main_miss: float
    hit_gap: float | None
    ttft_s: Percentiles
    e2e_s: Percentiles
    samples: tuple[Sample, ...]


def arm_config(config: LaunchConfig, arm: Arm, relay_rows: int) -> LaunchConfig:
    """``config`` on free ports, with few relay rows and the arm's rule."""
    raw = config.model_dump(mode="json")
    raw["serving"].update(http_port=None, grpc_port=None)
    raw["policy"]["pipeline"] = arm
    for worker in raw["workers"]:
        if worker["role"] == "relay":
            worker["max_rows"] = relay_rows
    return LaunchConfig.model_validate(raw)


async def measure(url: str, model: str, sessions: Sequence[Session], rows: Mapping[str, int]) -> ArmReport:
    """All sessions through one deployment. ``rows``: of each relay worker."""
    samples: list[Sample] = []
    watching = asyncio.create_task(_watch(f"{url}/metrics", rows, samples))
    target = Target(url, "/v1/completions", "openai", model, speaks_pdd=True)
    try:
        run = await run_load(target, sessions, LoadPlan(cache_salt="collapse"), lambda record: None)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return report(run.records, run.duration_s, samples)


def report(records: Sequence[Record], duration_s: float, samples: Sequence[Sample]) -> ArmReport:
    """Raises ValueError when nothing ended well or nothing was sampled."""
    good = [record for record in records if not record.error]
    if not good or not samples:
        raise ValueError(f"{len(records)} requests, {len(good)} of them good, {len(samples)} samples: nothing to report")
    relayed, made = (sum(int(r.timeline.get(name) or 0) for r in good for name in names) for names in (_RELAYED, _MADE))
    known = [s for s in samples if s.prefill_hit is not None and s.main_hit is not None]
    return ArmReport(
        requests=len(records),
        failed=len(records) - len(good),
        duration_s=round(duration_s, 1),
        mean_relay_load=round(sum(s.relay_load for s in samples) / len(samples), 3),
        relay_full_share=round(sum(s.relay_load >= 1 for s in samples) / len(samples), 3),
        relay_share=round(relayed / made, 3),
        decisions=dict(Counter(f"{r.timeline.get('pipeline')}, {r.timeline.get('decision')}" for r in good)),
        main_miss=round(sum(int(r.timeline.get("wan_kv_tokens") or 0) for r in good) / len(good), 1),
        hit_gap=round((known[-1].prefill_hit or 0.0) - (known[-1].main_hit or 0.0), 3) if known else None,
        ttft_s=percentiles([record.ttft_s for record in good]),
        e2e_s=percentiles([record.e2e_s for record in good]),
        samples=tuple(samples),
    )


_RELAYED = ("relay_tokens",)
_MADE = ("relay_tokens", "main_tokens")


async def _watch(url: str, rows: Mapping[str, int], samples: list[Sample]) -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with httpx.AsyncClient(trust_env=False, timeout=10.0) as http:
        while True:
            samples.append(sample((await http.get(url)).text, loop.time() - began_s, rows))
            await asyncio.sleep(EVERY_S)


def sample(metrics: str, at_s: float, rows: Mapping[str, int]) -> Sample:
    """What a coordinator's /metrics say."""
    found = {
        (s.name, s.labels.get("worker") or s.labels.get("role") or ""): s.value
        for family in text_string_to_metric_families(metrics)
        for s in family.samples
    }

    def rate(role: str) -> float | None:
        value = found.get(("pdd:prefix_hit_rate", role), math.nan)
        return None if math.isnan(value) else round(value, 4)

    held = sum(found[("pdd:worker_streams", name)] for name in rows)
    running = int(found[("pdd:num_requests_running", "")])
    return Sample(round(at_s, 2), round(held / sum(rows.values()), 3), rate("prefill"), rate("main"), running)


def read_reports(file: Path) -> dict[Arm, ArmReport]:
    """Of an earlier run; none where there is no file."""
    if not file.exists():
        return {}
    raw = json.loads(file.read_text(encoding="utf-8"))
    return {arm: ArmReport(**{**raw[arm], "samples": tuple(Sample(**one) for one in raw[arm]["samples"])}) for arm in ARMS if arm in raw}


def save_plot(reports: Mapping[Arm, ArmReport], path: Path) -> None:
    """A column per arm."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(3, len(reports), figsize=(4.2 * len(reports), 6), layout="constrained", sharey="row", squeeze=False)
    for column, (arm, one) in enumerate(reports.items()):
        times = [s.at_s for s in one.samples]
        axes[0, column].plot(times, [s.relay_load for s in one.samples], color="#d1495b", linewidth=0.8)
        axes[0, column].set_ylim(0, 1.05)
        axes[0, column].set_title(ARMS[arm], fontsize=9)
        for role, color in (("prefill", "#c9a227"), ("main", "#2e86ab")):
            axes[1, column].plot(times, [getattr(s, f"{role}_hit") or math.nan for s in one.samples], color=color, label=role)
        axes[1, column].legend(fontsize=8)
        axes[2, column].plot(times, [s.num_running for s in one.samples], color="#555555", linewidth=0.8)
        axes[2, column].set_xlabel("seconds")
    for row, label in enumerate(("share of relay rows in use", "prefix hit rate", "requests in progress")):
        axes[row, 0].set_ylabel(label, fontsize=9)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/local.yaml"))
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "pdd")
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--rate", type=float, default=0.5, help="sessions that begin per second")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="the others are taken from the JSON as it is")
    parser.add_argument("--relay-rows", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None)
    given = parser.parse_args()
    end_on_signal()
    config = load(given.config)
    vocab_size = open_checkpoint(resolve(config.model, given.cache_dir)).spec.vocab_size
    params = Agents(**{**asdict(AGENTS), "num_sessions": given.sessions})
    sessions = with_arrivals(agent_sessions(params, vocab_size, given.seed), arrivals(given.sessions, given.rate, 1.0, given.seed))
    console = Console()
    console.print(f"{num_requests(sessions)} requests of {len(sessions)} sessions")
    reports = read_reports(given.json) if given.json is not None and len(given.arms) < len(ARMS) else {}
    for arm in given.arms:
        launch = arm_config(config, arm, given.relay_rows)
        rows = {worker.name: worker.max_rows for worker in launch.workers if worker.role == "relay"}
        with Deployment(launch, given.cache_dir) as deployment:
            deployment.start(StartProgress(console))
            reports[arm] = asyncio.run(measure(deployment.http_url, config.model, sessions, rows))
        console.print(ARMS[arm], {**asdict(reports[arm]), "samples": len(reports[arm].samples)})
        if given.json is not None:  # after each: what an arm showed is not lost with the next
            given.json.write_text(json.dumps({name: asdict(one) for name, one in reports.items()}, indent=1) + "\n", encoding="utf-8")
    if given.plot is not None:
        save_plot(reports, given.plot)


if __name__ == "__main__":
    main()
