"""`pdd bench serve` behind its options: a dataset, arrivals, one target or the three modes of a launch config, figures, files."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pdd.bench.serve.client import Backend, Target
from pdd.bench.serve.figures import Asked, Json, detailed, figures, pdd_figures
from pdd.bench.serve.load import LoadPlan, Run, run_load
from pdd.bench.serve.sessions import Session, num_requests


@dataclass(frozen=True)
class Subject:
    """One target of the run. ``label`` names it in tables and files."""

    label: str
    target: Target


@dataclass(frozen=True)
class Measured:
    label: str
    run: Run
    figures: Json
    pdd: Json | None


@dataclass(frozen=True)
class Told:
    """What the JSON says of the run beside its figures, as the options gave it. ``lengths``: the rule by which a trace was scaled."""

    backend: Backend
    model: str
    tokenizer: str | None
    dataset: str
    request_rate: float | None
    burstiness: float
    max_concurrency: int | None
    seed: int
    label: str | None
    lengths: str | None = None


def measure(
    subjects: Sequence[Subject], sessions: Sequence[Session], plan: LoadPlan, asked: Asked, warmups: int, console: Console, salt: str
) -> list[Measured]:
    """The same sessions at the same times to each subject, one subject after another, each with prefixes of its own."""
    measured = []
    for subject in subjects:
        own = replace(plan, cache_salt=f"{salt}-{subject.label}") if subject.target.speaks_pdd else plan
        if warmups:
            warm = [replace(session, start_s=0.0, turns=session.turns[:1]) for session in sessions[:warmups]]
            asyncio.run(
                run_load(subject.target, warm, replace(own, cache_salt=own.cache_salt and f"{own.cache_salt}-warm"), lambda record: None)
            )
        run = _with_bar(subject, sessions, own, console)
        for error in sorted({record.error for record in run.records if record.error})[:5]:
            console.print(f"{subject.label}: failed: {error}", soft_wrap=True)
        measured.append(Measured(subject.label, run, figures(run, asked), pdd_figures(run)))
    return measured


def _with_bar(subject: Subject, sessions: Sequence[Session], plan: LoadPlan, console: Console) -> Run:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(subject.label, total=num_requests(sessions))
        return asyncio.run(run_load(subject.target, sessions, plan, lambda record: bars.advance(bar)))


def result(measured: Measured, told: Told, with_details: bool) -> Json:
    """One subject's JSON, with the keys of `vllm bench serve`; what only PDD tells is under ``pdd``."""
    found: Json = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": told.backend,
        "endpoint_type": told.backend,
        "label": told.label or measured.label,
        "model_id": told.model,
        "tokenizer_id": told.tokenizer,
        "dataset": told.dataset,
        "lengths": told.lengths,
        "num_prompts": len(measured.run.records),
        "request_rate": "inf" if told.request_rate is None else told.request_rate,
        "burstiness": told.burstiness,
        "max_concurrency": told.max_concurrency,
        "seed": told.seed,
        **measured.figures,
        "largest_late_s": measured.run.largest_late_s,
        "invented_answers": measured.run.invented_answers,
    }
    if measured.pdd is not None:
        found["pdd"] = measured.pdd
    return found | detailed(measured.run) if with_details else found


def save(results: Mapping[str, Json], path: Path) -> None:
    """One subject: its object alone, as `vllm bench serve` writes it. Several: by label."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = next(iter(results.values())) if len(results) == 1 else dict(results)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def show(measured: Sequence[Measured], console: Console) -> None:
    """A column per subject."""
    table = Table(title="load, per target")
    table.add_column("")
    for one in measured:
        table.add_column(one.label, justify="right")
    for name, key, digits in _ROWS:
        values = [one.figures.get(key) for one in measured]
        if any(value is not None for value in values):
            table.add_row(name, *("" if not isinstance(value, int | float) else f"{value:.{digits}f}" for value in values))
    percentiles = sorted({key for one in measured for key in one.figures if key.startswith("p") and key.endswith("_ms")})
    for key in percentiles:
        table.add_row(
            key.replace("_", " "), *(f"{value:.1f}" if isinstance(value := one.figures.get(key), float) else "" for one in measured)
        )
    if any(one.pdd for one in measured):
        for name, key in (("relay share", "relay_share"), ("main's hit rate", "main_hit_rate")):
            table.add_row(name, *(f"{value:.1%}" if isinstance(value := (one.pdd or {}).get(key), float) else "" for one in measured))
        table.add_row(
            "KV over the link, MB",
            *(f"{value / 1e6:.1f}" if isinstance(value := (one.pdd or {}).get("wan_kv_bytes"), int) else "" for one in measured),
        )
    console.print(table)


_ROWS = (
    ("successful requests", "completed", 0),
    ("failed requests", "failed", 0),
    ("duration, s", "duration", 2),
    ("input tokens", "total_input_tokens", 0),
    ("generated tokens", "total_output_tokens", 0),
    ("requests/s", "request_throughput", 3),
    ("requests/s within goodput limits", "request_goodput", 3),
    ("output tokens/s", "output_throughput", 1),
    ("all tokens/s", "total_token_throughput", 1),
    ("most output tokens in a second", "max_output_tokens_per_s", 0),
    ("mean TTFT, ms", "mean_ttft_ms", 1),
    ("median TTFT, ms", "median_ttft_ms", 1),
    ("mean TPOT, ms", "mean_tpot_ms", 1),
    ("median TPOT, ms", "median_tpot_ms", 1),
    ("mean ITL, ms", "mean_itl_ms", 1),
    ("median ITL, ms", "median_itl_ms", 1),
    ("mean E2E, ms", "mean_e2el_ms", 1),
    ("median E2E, ms", "median_e2el_ms", 1),
)
