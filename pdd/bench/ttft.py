"""`pdd bench ttft`: the same prompts through a same-site split, a cross-site split and PDD, in one run over the same worker processes.

Requests of the modes take turns, so that a drifting machine hurts all alike, and each request has a prefix cache of its own (a salt), so
that main decode is cold. Times are taken at the client, from sending the request. With many requests at a time: :mod:`pdd.bench.ttft_mix`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from pdd.bench.modes import LABELS, MODES, Mode, own_ports, start_modes
from pdd.bench.plans import check_least
from pdd.bench.stats import Percentiles, percentiles
from pdd.config import LaunchConfig
from pdd.launch.ask import Answer, ask
from pdd.launch.local import Deployment
from pdd.launch.serve import StartProgress
from pdd.models import resolve
from pddbridge.checkpoint import open_checkpoint


@dataclass(frozen=True)
class Plan:
    """``num_requests`` per mode, prompts of ``input_len`` random token ids, ``output_len`` tokens each. Raises ValueError."""

    num_requests: int
    input_len: int
    output_len: int
    seed: int

    def __post_init__(self) -> None:
        check_least(self, {"num_requests": 1, "input_len": 1, "output_len": 2})


@dataclass(frozen=True)
class Outcome:
    """One mode's figures. Seconds at the client; bytes summed over requests. ``wan_kv_bytes``: KV, as stored, that crossed
    the emulated link; ``wan_kv_wire_bytes``: the payloads that carried it, as the link's codec made them.
    """

    ttft_s: Percentiles
    second_token_s: Percentiles
    max_itl_s: Percentiles
    tpot_s: Percentiles
    e2e_s: Percentiles
    relay_share: float
    wan_kv_bytes: int
    wan_kv_wire_bytes: int
    kv_bytes_to_main: int
    kv_bytes_saved: int
    num_requests: int


def run(config: LaunchConfig, cache_dir: Path, plan: Plan, console: Console, json_file: Path | None) -> dict[Mode, Outcome]:
    """Launch, measure, end everything; writes ``json_file`` when given. Raises StartError, AskError, ValueError."""
    vocab_size = open_checkpoint(resolve(config.model, cache_dir)).spec.vocab_size
    prompts = _prompts(plan, vocab_size)
    answers: dict[Mode, list[Answer]] = {mode: [] for mode in MODES}
    with Deployment(own_ports(config), cache_dir) as deployment:
        urls = start_modes(deployment, StartProgress(console))
        for index, prompt in enumerate(prompts):
            for mode in MODES:
                answer = ask(urls[mode], _body(config.model, prompt, plan.output_len, f"{plan.seed}-{index}-{mode}"))
                if index > 0:  # the first round only warms connections
                    answers[mode].append(answer)
            console.print(f"request {index}/{plan.num_requests}", end="\r")
    results = {mode: outcome(mode, answers[mode]) for mode in MODES}
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps({mode: asdict(outcome) for mode, outcome in results.items()}, indent=1) + "\n", encoding="utf-8")
    return results


def with_link_rate(config: LaunchConfig, rate_mbit_s: float) -> LaunchConfig:
    """The same launch over an emulated link of another rate. Raises ValueError when the config emulates no link or the rate is not one."""
    if all(link.emulate is None for link in config.links):
        raise ValueError("links: none is emulated, so its rate cannot be set")
    raw = config.model_dump(mode="json")
    for link in raw["links"]:
        if link["emulate"] is not None:
            link["emulate"]["rate_mbit_s"] = rate_mbit_s
    return LaunchConfig.model_validate(raw)


def _prompts(plan: Plan, vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(plan.seed)
    # Ids from the upper half: no special tokens there in any vocabulary we know.
    return rng.integers(vocab_size // 2, vocab_size, size=(plan.num_requests + 1, plan.input_len)).tolist()


def _body(model: str, prompt: list[int], output_len: int, salt: str) -> dict[str, object]:
    sampling = {"max_tokens": output_len, "ignore_eos": True, "temperature": 0}
    return {"model": model, "prompt": prompt, "cache_salt": salt, **sampling}


def outcome(mode: Mode, answers: list[Answer]) -> Outcome:
    times = [[piece.at_s for piece in answer.pieces if piece.num_tokens] for answer in answers]
    if any(len(t) < 2 for t in times):
        raise ValueError(f"{mode}: an answer came in fewer than two pieces, no inter-token latency can be measured")
    moved = sum(int(a.timeline["wan_kv_bytes"] or 0) for a in answers)
    moved_tokens = sum(int(a.timeline["wan_kv_tokens"] or 0) for a in answers)
    hits = sum(int(a.timeline["main_hit_tokens"] or 0) for a in answers)
    total = sum(a.tokens_by("relay") + a.tokens_by("main") for a in answers)
    return Outcome(
        ttft_s=percentiles([t[0] for t in times]),
        second_token_s=percentiles([t[1] for t in times]),
        max_itl_s=percentiles([max(b - a for a, b in pairwise(t)) for t in times]),
        tpot_s=percentiles([(t[-1] - t[0]) / (len(t) - 1) for t in times]),
        e2e_s=percentiles([t[-1] for t in times]),
        relay_share=round(sum(a.tokens_by("relay") for a in answers) / total, 4),
        wan_kv_bytes=0 if mode == "same_site" else moved,
        wan_kv_wire_bytes=0 if mode == "same_site" else sum(int(a.timeline["wan_kv_wire_bytes"] or 0) for a in answers),
        kv_bytes_to_main=moved,
        kv_bytes_saved=hits * (moved // moved_tokens) if moved_tokens else 0,
        num_requests=len(answers),
    )


def show(results: dict[Mode, Outcome], console: Console) -> None:
    """A table of the modes side by side, and PDD against the two splits."""
    table = Table(title="seconds at the client, P50 / P90 / P99")
    for column in ("", "TTFT", "second token", "largest ITL", "E2E", "relay share", "WAN KV, MB (on the wire)"):
        table.add_column(column)
    for mode, o in results.items():
        cells = [" / ".join(f"{v:.2f}" for v in p.values()) for p in (o.ttft_s, o.second_token_s, o.max_itl_s, o.e2e_s)]
        table.add_row(LABELS[mode], *cells, f"{o.relay_share:.1%}", f"{o.wan_kv_bytes / 1e6:.1f} ({o.wan_kv_wire_bytes / 1e6:.1f})")
    console.print(table)
    same, cross, pdd = (results[mode].ttft_s["p50"] for mode in MODES)
    console.print(f"TTFT P50: cross-site is {cross / same:.2f} x same-site; PDD is {pdd / same:.2f} x same-site,", end=" ")
    console.print(f"{1 - pdd / cross:.1%} below cross-site")


def save_plot(results: Mapping[Mode, Outcome], path: Path) -> None:
    """Bars of TTFT, largest ITL and E2E per mode with P90 and P99 marks."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    for axis, field, title in zip(
        axes, ("ttft_s", "max_itl_s", "e2e_s"), ("time to first token", "largest gap", "end to end"), strict=True
    ):
        for x, (mode, outcome) in enumerate(results.items()):
            p: Percentiles = getattr(outcome, field)
            axis.bar(x, p["p50"], width=0.6, color={"same_site": "#9aa5b1", "cross_site": "#d1495b", "pdd": "#2e86ab"}[mode])
            axis.scatter([x, x], [p["p90"], p["p99"]], marker="_", color="black", s=120)
            axis.annotate(f"{p['p50']:.2f}", (x, p["p50"]), ha="center", va="bottom", fontsize=8)
        axis.set_xticks(range(len(results)), [LABELS[mode] for mode in results], fontsize=8)
        axis.set_title(f"{title}, s (P50; marks: P90, P99)", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
