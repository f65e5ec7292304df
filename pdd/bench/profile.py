"""`pdd profile`: short runs of the engines of a launch config, and the simulator's config for it with costs fitted to them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import yaml

from pdd.bench.engine_subject import Case, Child
from pdd.config import LaunchConfig, WorkerConfig
from pdd.models import resolve
from pdd.sim.costs import EngineCost
from pdd.sim.fit import DecodeRun, PrefillRun, fit_cost
from pddbridge.checkpoint import open_checkpoint
from pddbridge.kv_spec import KVSpec

_PROMPTS = (64, 256, 768, 1536)
_DECODES = ((1, 200), (4, 200), (8, 200), (1, 1200), (4, 1200))
_STEPS = 12
_ROUNDS = 3


def profile(config: LaunchConfig, cache_dir: Path, told: Callable[[str], None]) -> dict[str, object]:
    """A mapping that `pdd sim --config` reads. Each different engine of the config is measured alone, with its own threads; the median
    of three rounds counts. Raises ChildError, ValueError.
    """
    model_dir = resolve(config.model, cache_dir)
    spec = open_checkpoint(model_dir).spec
    costs: dict[tuple[str, str, int], EngineCost] = {}
    roles: dict[str, object] = {}
    for role in ("prefill", "relay", "main"):
        workers = [worker for worker in config.workers if worker.role == role]
        if not workers:
            continue
        worker = workers[0]
        kind = (worker.engine, worker.compute_dtype, worker.threads)
        if kind not in costs:
            told(f"measuring {worker.engine} in {worker.compute_dtype}, {worker.threads} threads")
            costs[kind] = _measure(worker, config.kv_dtype, model_dir, cache_dir)
        roles[role] = _role(worker, len(workers), costs[kind])
    link = next((link.emulate for link in config.links if link.emulate is not None), None)
    if link is None:
        raise ValueError("links: none is emulated, so its rate is not known")
    return {
        "kv_bytes_per_token": KVSpec.gqa(spec.num_layers, spec.num_kv_heads, spec.head_dim, config.kv_dtype).bytes_per_token,
        **roles,
        "link": {"rate_gbit_s": link.rate_mbit_s / 1e3, "rtt_ms": link.rtt_ms, "schedule": "shortest"},
        "local_gbit_s": 10.0,
        "policy": config.policy.model_dump(mode="json"),
        "host_cores": os.cpu_count(),
    }


def save(found: dict[str, object], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(found, sort_keys=False), encoding="utf-8")


def _role(worker: WorkerConfig, count: int, cost: EngineCost) -> dict[str, object]:
    return {
        "count": count,
        "cost": {name: float(f"{value:.6g}") for name, value in asdict(cost).items()},
        "max_rows": worker.max_rows,
        "cache_tokens": worker.num_pages * worker.page_size,
        "threads": worker.threads,
        "step_tokens": worker.max_step_tokens,
    }


def _measure(worker: WorkerConfig, kv_dtype: str, model_dir: Path, cache_dir: Path) -> EngineCost:
    sizes = ["--max-context", "2048", "--max-streams", str(max(rows for rows, _ in _DECODES))]
    where = ["--model-dir", str(model_dir), "--cache-dir", str(cache_dir)]
    dtypes = ["--dtype", worker.compute_dtype, "--kv-dtype", kv_dtype]
    child = Child(worker.engine, ["--subject", worker.engine, *dtypes, *where, "--threads", str(worker.threads), *sizes])
    try:
        child.wait_ready()
        prefills = [PrefillRun(tokens, _median(child, Case("prefill", 1, tokens, 1))) for tokens in _PROMPTS]
        decodes = [DecodeRun(rows, context, _median(child, Case("decode", rows, context, _STEPS)) / _STEPS) for rows, context in _DECODES]
    finally:
        child.close()
    return fit_cost(prefills, decodes)


def _median(child: Child, case: Case) -> float:
    child.seconds(case)  # warms caches and what is compiled for it
    return sorted(child.seconds(case) for _ in range(_ROUNDS))[_ROUNDS // 2]
