"""`pdd profile`: launch a config, measure it in short requests, and write the simulator's config for it with numbers fitted to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import yaml
from rich.console import Console

from pdd.bench.modes import Mode, own_ports, start_modes
from pdd.bench.profile_probes import Prober
from pdd.bench.serve.client import Target, client
from pdd.config import EmulatedLink, LaunchConfig, WorkerConfig
from pdd.launch.local import Deployment
from pdd.launch.serve import StartProgress
from pdd.models import resolve
from pdd.roles import Role
from pdd.sim.costs import REQUIRED_COSTS, EngineCost
from pdd.sim.fit import (
    Measured,
    first_overhead,
    fit_beside,
    fit_busy_link,
    fit_decode,
    fit_extend,
    fit_far,
    fit_hit,
    fit_jitter,
    fit_link_overhead,
    fit_prefill,
    fit_slowdown,
    fit_steps,
    fit_waits,
)
from pddbridge.checkpoint import open_checkpoint
from pddbridge.kv_spec import KVSpec

_TIMEOUT_S = 120.0


def profile(
    config: LaunchConfig, cache_dir: Path, console: Console, told: Callable[[str], None], json_file: Path | None = None
) -> dict[str, object]:
    """A mapping that `pdd sim --config` reads. ``json_file``: gets what it is fitted to. Raises StartError, ValueError."""
    link = _link(config)
    spec = open_checkpoint(resolve(config.model, cache_dir)).spec
    with Deployment(own_ports(config), cache_dir) as deployment:
        urls = start_modes(deployment, StartProgress(console))
        measured = asyncio.run(probe(urls, config, spec.vocab_size, lambda prober: prober.measure(told)))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(asdict(measured), indent=1) + "\n", encoding="utf-8")
    kv_bytes = KVSpec.gqa(spec.num_layers, spec.num_kv_heads, spec.head_dim, config.kv_dtype).bytes_per_token
    return sim_config(config, link, kv_bytes, measured)


def sim_config(config: LaunchConfig, link: EmulatedLink, kv_bytes_per_token: int, measured: Measured) -> dict[str, object]:
    """What was measured, fitted. The first worker of a role stands for all of it."""
    workers = {role: found for role in ("prefill", "relay", "main") if (found := _workers(config, role))}
    step_tokens = workers["prefill"][0].max_step_tokens
    rtt_s, rate_bytes_s = link.rtt_ms / 1e3, link.rate_mbit_s * 1e6 / 8
    base, token, line_pair = fit_prefill(measured.prefills, step_tokens)
    steps, pair = fit_steps(measured.prefills, step_tokens)
    costs = {"prefill": EngineCost(base, token, pair if steps else line_pair, base, 0.0, 0.0, token, steps)}
    extend = fit_extend(measured.extends) if measured.extends else token
    for role in workers:
        if role != "prefill":
            alone = [run for run in measured.decodes if run.busy == (role,)]
            costs[role] = EngineCost(base, token, line_pair, *fit_decode(alone), extend_token_s=extend)
    main_s = first_overhead(measured.main_firsts_s, costs["main"].step)
    share, link_s = fit_link_overhead(measured, costs["main"], main_s, rtt_s, rate_bytes_s, step_tokens)
    overheads = {"main_s": main_s, "link_s": link_s, "hit_s": fit_hit(measured, costs["prefill"])}
    if "relay" in workers:
        overheads["relay_s"] = first_overhead(measured.relay_firsts_s, costs["relay"].step)
    firsts = {"main": overheads["main_s"], "relay": overheads.get("relay_s", 0.0)}
    overheads["reserve_steps"], overheads["arrive_steps"] = fit_waits(measured, costs, step_tokens, firsts)
    slowdown = fit_slowdown(measured, costs, step_tokens)
    beside = fit_beside(measured, costs, step_tokens, rtt_s)
    beside_main = slowdown["prefill", "main"]["prefill"]
    beside["far"] = fit_far(measured, costs, step_tokens, beside_main, overheads["reserve_steps"])
    overheads["link_busy_s"] = fit_busy_link(measured, main_s, overheads["arrive_steps"], rtt_s, rate_bytes_s)
    return {
        "kv_bytes_per_token": kv_bytes_per_token,
        **{role: _role(found[0], len(found), costs[role]) for role, found in workers.items()},
        "link": {"rate_gbit_s": link.rate_mbit_s / 1e3, "rtt_ms": link.rtt_ms, "schedule": "shortest", "coded_share": _short(share)},
        "local_gbit_s": 10.0,
        "policy": config.policy.model_dump(mode="json"),
        "host": {
            "slowdown": [
                {"busy": list(busy), "times": {role: _short(one) for role, one in times.items()}} for busy, times in slowdown.items()
            ],
            "beside": {name: {role: _short(one) for role, one in times.items()} for name, times in beside.items()},
        },
        "overheads": {name: _short(value) for name, value in overheads.items()},
        "jitter": _short(fit_jitter(measured)),
    }


def save(found: dict[str, object], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(found, sort_keys=False), encoding="utf-8")


async def probe(
    urls: Mapping[Mode, str], config: LaunchConfig, vocab_size: int, ask: Callable[[Prober], Awaitable[Measured]], seed: int = 0
) -> Measured:
    """``ask`` of a prober for the doors of one deployment's modes. ``seed``: see :class:`Prober`. Raises ValueError."""
    path = "/v1/completions"
    targets = {mode: Target(url.removesuffix(path), path, "openai", config.model, True) for mode, url in urls.items()}
    step_tokens = _workers(config, "prefill")[0].max_step_tokens
    async with client(targets["pdd"], _TIMEOUT_S) as http:
        return await ask(Prober(http, targets, vocab_size, bool(_workers(config, "relay")), step_tokens, seed))


def _link(config: LaunchConfig) -> EmulatedLink:
    for link in config.links:
        if link.emulate is not None:
            return link.emulate
    raise ValueError("links: none is emulated, so its rate is not known")


def _workers(config: LaunchConfig, role: Role) -> list[WorkerConfig]:
    return [worker for worker in config.workers if worker.role == role]


def _role(worker: WorkerConfig, count: int, cost: EngineCost) -> dict[str, object]:
    return {
        "count": count,
        "cost": {name: _short(getattr(cost, name)) for name in REQUIRED_COSTS},
        **({"prefill_steps": {tokens: _short(seconds) for tokens, seconds in cost.prefill_steps}} if cost.prefill_steps else {}),
        "max_rows": worker.max_rows,
        "cache_tokens": worker.num_pages * worker.page_size,
        "step_tokens": worker.max_step_tokens,
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")
