"""`pdd bench ttft --mix skewed`: one mix of requests through the three modes, with the same arrivals, many at a time, caches primed.

The modes run one after another and rounds begin with another mode each, so that a drifting machine hurts all alike. Each mode and round has
prefix caches of its own (a salt), filled by the mix's primers before its clock starts: prefill's, main's and, in PDD, the relay's.
Requests are sent when they arrive, whether those before them have ended or not. Times are taken at the client, from sending the request.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pdd.bench.mix import KINDS, Kind, Mix, MixRequest, SkewedMix, skewed
from pdd.bench.mix_requests import Asked, RequestRow, handoff_gap_s, ordinary_gaps_s, request_row
from pdd.bench.modes import LABELS, MODES, Mode, own_ports, start_modes
from pdd.bench.stats import Percentiles, percentiles
from pdd.bench.ttft import Outcome, outcome
from pdd.config import LaunchConfig
from pdd.launch.ask import ask
from pdd.launch.local import Deployment
from pdd.launch.serve import StartProgress
from pdd.models import resolve
from pddbridge.checkpoint import open_checkpoint
from pddbridge.kv_spec import KVSpec


@dataclass(frozen=True)
class MixOutcome(Outcome):
    """``ttft_by_kind_s``: of the mix's kinds of request · ``median_itl_s``: of all gaps between pieces · ``ordinary_itl_s``: of those that
    have nothing to do with a handoff · ``handoff_itl_s``: per handed-over request, its largest gap from a relayed piece to the main piece
    after it; None when nothing was handed over · ``largest_handoff_itl_s``: of those · ``tokens_per_s``: of output · ``pipelines``:
    requests by pipeline · ``fallbacks``: of all requests · ``requests``: each, in order of arrival.
    """

    ttft_by_kind_s: dict[Kind, Percentiles]
    median_itl_s: float
    ordinary_itl_s: Percentiles
    handoff_itl_s: Percentiles | None
    largest_handoff_itl_s: float | None
    tokens_per_s: float
    pipelines: dict[str, int]
    handoffs: dict[str, int]
    fallbacks: int
    largest_late_s: float
    requests: tuple[RequestRow, ...]


@dataclass(frozen=True)
class Plan:
    """``rounds``: times that each mode gets the mix."""

    mix: SkewedMix
    rounds: int
    seed: int


def run(
    config: LaunchConfig,
    cache_dir: Path,
    plan: Plan,
    console: Console,
    json_file: Path | None,
    between: Callable[[Mapping[Mode, str]], None] = lambda urls: None,
) -> dict[Mode, MixOutcome]:
    """Launch, measure, end everything; writes ``json_file`` when given. ``between``: is called before each mode and after the last, while
    nothing else is asked. Raises StartError, AskError, ValueError.
    """
    if plan.rounds < 1:
        raise ValueError(f"rounds: given {plan.rounds}, allowed from 1 on")
    spec = open_checkpoint(resolve(config.model, cache_dir)).spec
    mix = skewed(plan.mix, spec.vocab_size, plan.seed)
    kv_bytes_per_token = KVSpec.gqa(spec.num_layers, spec.num_kv_heads, spec.head_dim, config.kv_dtype).bytes_per_token
    for link in config.links:
        if link.emulate is not None:
            load = offered_load(mix, kv_bytes_per_token, link.emulate.rate_mbit_s)
            rate = f"the link of {link.emulate.rate_mbit_s:g} Mbit/s"
            console.print(f"main lacks KV of {mix.miss_tokens} tokens: {load:.0%} of what {rate} moves meanwhile, sent raw")
    asked: dict[Mode, list[Asked]] = {mode: [] for mode in MODES}
    took_s: dict[Mode, float] = dict.fromkeys(MODES, 0.0)
    with Deployment(own_ports(config), cache_dir) as deployment:
        urls = start_modes(deployment, StartProgress(console))
        for number in range(plan.rounds):
            for mode in MODES[number % 3 :] + MODES[: number % 3]:
                salt = f"{plan.seed}-{number}-{mode}"
                between(urls)
                prime(mix, urls, mode, config.model, salt)
                done, seconds = _replay(mix, urls[mode], config.model, salt, LABELS[mode], console)
                asked[mode] += done
                took_s[mode] += seconds
        between(urls)
    results = {mode: mix_outcome(mode, asked[mode], took_s[mode]) for mode in MODES}
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps({mode: asdict(result) for mode, result in results.items()}, indent=1) + "\n", encoding="utf-8")
    return results


def offered_load(mix: Mix, kv_bytes_per_token: int, rate_mbit_s: float) -> float:
    """KV that main lacks, as stored, over what the link moves while requests arrive: 1 would saturate it."""
    return mix.miss_tokens * kv_bytes_per_token * 8 / (mix.duration_s * rate_mbit_s * 1e6)


def prime(mix: Mix, urls: Mapping[Mode, str], mode: Mode, model: str, salt: str) -> None:
    """Have the caches of all workers that ``mode`` uses hold the primers. Main's are filled past the slow link, as that would take minutes;
    but for the last, by which the sender measures the link that this mode has.
    """
    for primer in mix.primers:
        last = primer is mix.primers[-1]
        ask(urls[mode if last else "same_site"], {**_body(model, primer, 2, salt), "pdd": {"pipeline": "direct"}})
        if mode == "pdd":
            ask(urls[mode], {**_body(model, primer, 2, salt), "pdd": {"pipeline": "relay"}})


def _replay(mix: Mix, url: str, model: str, salt: str, label: str, console: Console) -> tuple[list[Asked], float]:
    """All requests of the mix through one mode; also the seconds from the first arrival's clock to the last answer."""
    done: list[Asked] = []
    lock = threading.Lock()
    with Progress(console=console, transient=True) as bars, ThreadPoolExecutor(len(mix.requests)) as threads:
        bar = bars.add_task(label, total=len(mix.requests))
        started_s = time.monotonic()

        def one(request: MixRequest) -> None:
            late_s = time.monotonic() - started_s - request.arrival_s
            answer = ask(url, _body(model, request.prompt_ids, request.output_tokens, salt))
            with lock:
                done.append(Asked(request, answer, late_s))
            bars.advance(bar)

        sent = []
        for request in mix.requests:
            time.sleep(max(0.0, started_s + request.arrival_s - time.monotonic()))
            sent.append(threads.submit(one, request))
        for future in sent:
            future.result()
    return done, time.monotonic() - started_s


def _body(model: str, prompt: Sequence[int], output_tokens: int, salt: str) -> dict[str, object]:
    sampling = {"max_tokens": output_tokens, "ignore_eos": True, "temperature": 0}
    return {"model": model, "prompt": list(prompt), "cache_salt": salt, **sampling}


def mix_outcome(mode: Mode, asked: Sequence[Asked], took_s: float) -> MixOutcome:
    """One mode's figures. Raises ValueError when an answer came in fewer than two pieces."""
    answers = [one.answer for one in asked]
    base = outcome(mode, answers)
    ordinary = [gap for answer in answers for gap in ordinary_gaps_s(answer)]
    handed_over = [gap for answer in answers if (gap := handoff_gap_s(answer)) is not None]
    kinds = {kind: [one.answer.pieces[0].at_s for one in asked if one.request.kind == kind] for kind in KINDS}
    return MixOutcome(
        **asdict(base),
        ttft_by_kind_s={kind: percentiles(times) for kind, times in kinds.items() if times},
        median_itl_s=percentiles(ordinary + handed_over)["p50"],
        ordinary_itl_s=percentiles(ordinary),
        handoff_itl_s=percentiles(handed_over) if handed_over else None,
        largest_handoff_itl_s=round(max(handed_over), 4) if handed_over else None,
        tokens_per_s=round(sum(piece.num_tokens for answer in answers for piece in answer.pieces) / took_s, 1),
        pipelines=dict(Counter(str(answer.timeline["pipeline"]) for answer in answers)),
        handoffs=dict(Counter(str(answer.timeline["handoff"]) for answer in answers if answer.timeline["handoff"])),
        fallbacks=sum(int(answer.timeline["fallbacks"] or 0) for answer in answers),
        largest_late_s=round(max(one.late_s for one in asked), 4),
        requests=tuple(request_row(one) for one in sorted(asked, key=lambda one: one.request.arrival_s)),
    )


def show(results: dict[Mode, MixOutcome], console: Console) -> None:
    """Tables of the modes side by side, and PDD against the two splits."""
    table = Table(title="seconds at the client, P50 / P90 / P99")
    for column in ("", "TTFT", *(f"TTFT {kind}" for kind in KINDS), "largest ITL", "E2E", "relay share", "WAN KV, MB", "tokens/s"):
        table.add_column(column)
    for mode, o in results.items():
        times = [o.ttft_s, *(o.ttft_by_kind_s.get(kind) for kind in KINDS), o.max_itl_s, o.e2e_s]
        cells = ["" if p is None else " / ".join(f"{v:.2f}" for v in p.values()) for p in times]
        table.add_row(LABELS[mode], *cells, f"{o.relay_share:.1%}", f"{o.wan_kv_bytes / 1e6:.1f}", f"{o.tokens_per_s:.0f}")
    console.print(table)
    same, cross, pdd = (results[mode] for mode in MODES)
    for p in ("p50", "p90", "p99"):
        ratio, below = pdd.ttft_s[p] / same.ttft_s[p], 1 - pdd.ttft_s[p] / cross.ttft_s[p]
        console.print(f"TTFT {p.upper()}: PDD is {ratio:.2f} x same-site, {below:.1%} below cross-site")
    console.print(f"PDD's pipelines {pdd.pipelines}, handoffs {pdd.handoffs}, fallbacks {pdd.fallbacks}, relay share {pdd.relay_share:.1%}")
    if pdd.handoff_itl_s is not None and pdd.largest_handoff_itl_s is not None:
        figures = {"P50": pdd.handoff_itl_s["p50"], "P99": pdd.handoff_itl_s["p99"], "largest": pdd.largest_handoff_itl_s}
        gaps = ", ".join(f"{name} {gap_s:.3f} s, {gap_s / pdd.median_itl_s:.2f} x" for name, gap_s in figures.items())
        ordinary = " / ".join(f"{gap_s / pdd.median_itl_s:.2f}" for gap_s in pdd.ordinary_itl_s.values())
        console.print(f"gap at handoff {gaps} the median ITL of {pdd.median_itl_s:.3f} s; all other gaps {ordinary} x")
