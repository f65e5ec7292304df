"""`pdd bench engine`: prefill and decode throughput of each engine and dtype, beside Hugging Face's generate in the same run.

Every subject has a process of its own that sleeps while another is measured. Rounds go through all cases, and within a case through all
subjects in turn, so a machine that drifts is unfair to nobody; ratios are medians of the rounds' paired ratios.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from pdd.bench.engine_costs import WEIGHT_BYTES, decode_bytes, prefill_flops
from pdd.bench.engine_subject import Case, Child, Limits
from pdd.bench.plans import check_least
from pddbridge.checkpoint import open_checkpoint
from pddbridge.kv_spec import KVSpec
from pddbridge.model_spec import ModelSpec

BASELINE = "hf"
_ENGINES = ("jax", "torch")


@dataclass(frozen=True)
class Plan:
    """``subjects``: (engine, compute dtype) pairs. Every dtype among them is measured with Hugging Face's generate, too; "int8" weights
    are compared with its bfloat16 · ``step_tokens``: of a prompt that an engine computes at a time, where generate takes all at once.
    Raises ValueError naming the field.
    """

    subjects: tuple[tuple[str, str], ...]
    streams: tuple[int, ...] = (1, 4, 8, 16)
    context: int = 200
    long_context: int | None = 2000
    prompts: tuple[int, ...] = (256, 1024, 2048)
    decode_steps: int = 32
    rounds: int = 5
    threads: int = 2
    kv_dtype: str = "bfloat16"
    step_tokens: int = 512

    def __post_init__(self) -> None:
        for engine, dtype in self.subjects:
            if engine not in _ENGINES or dtype not in WEIGHT_BYTES:
                allowed = f"one of {', '.join(_ENGINES)}, a colon, and one of {', '.join(WEIGHT_BYTES)}"
                raise ValueError(f"subjects: given {engine}:{dtype}, allowed {allowed}")
        if not self.subjects:
            raise ValueError("subjects: given none, allowed at least one")
        for name, counts in (("streams", self.streams), ("prompts", self.prompts)):
            if min(counts, default=0) < 1:
                raise ValueError(f"{name}: given {list(counts)}, allowed 1 or more each")
        check_least(self, {"context": 1, "decode_steps": 1, "rounds": 1, "threads": 1, "step_tokens": 1})

    @property
    def baselines(self) -> tuple[str, ...]:
        """Dtypes in which the baseline runs."""
        return tuple(dict.fromkeys(baseline_dtype(dtype) for _, dtype in self.subjects))

    def cases(self) -> tuple[Case, ...]:
        decodes = [Case("decode", streams, self.context, self.decode_steps) for streams in self.streams]
        if self.long_context is not None:
            decodes.append(Case("decode", 1, self.long_context, self.decode_steps))
        return (*(Case("prefill", 1, length, 0) for length in self.prompts), *decodes)


@dataclass(frozen=True)
class Row:
    """``tokens_per_s``: median over rounds. ``ratio_to_hf``: median of the rounds' ratios to generate at the same dtype, None for generate
    itself. ``share_of_limit``: of the measured read bandwidth (decode) or matmul rate (prefill), None where none was measured.
    """

    engine: str
    dtype: str
    phase: str
    streams: int
    context: int
    tokens_per_s: float
    ratio_to_hf: float | None
    share_of_limit: float | None


def baseline_dtype(dtype: str) -> str:
    """The dtype in which generate is run beside an engine of ``dtype``: it has no integer weights."""
    return "bfloat16" if dtype == "int8" else dtype


def run(model_dir: Path, cache_dir: Path, plan: Plan, console: Console, json_file: Path | None) -> list[Row]:
    """Measure; writes ``json_file`` when given. Raises ValueError, ChildError."""
    spec = open_checkpoint(model_dir).spec
    cases = plan.cases()
    longest = max(case.context + case.steps for case in cases)
    if longest > spec.max_context_tokens:
        raise ValueError(f"bench engine: {longest} tokens, allowed up to the model's {spec.max_context_tokens}")
    names = [*((BASELINE, dtype) for dtype in plan.baselines), *plan.subjects]
    with ExitStack() as stack:
        children: dict[tuple[str, str], Child] = {}
        for engine, dtype in names:  # one after another: loading and compiling would slow one another down
            console.print(f"starting {engine}:{dtype}")
            arguments = _arguments(engine, dtype, model_dir, cache_dir, plan, longest)
            child = Child(f"{engine}:{dtype}", arguments)
            stack.callback(child.close)
            child.wait_ready()
            children[engine, dtype] = child
        limits = children[names[0]].limits()
        seconds = _measure(children, cases, plan.rounds, console)
    rows = [_row(name, case, seconds, limits, spec, plan) for case in cases for name in names]
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    return rows


def _arguments(engine: str, dtype: str, model_dir: Path, cache_dir: Path, plan: Plan, longest: int) -> list[str]:
    options = {
        "--subject": engine,
        "--dtype": dtype,
        "--kv-dtype": plan.kv_dtype,
        "--threads": plan.threads,
        "--model-dir": model_dir,
        "--cache-dir": cache_dir,
        "--max-context": longest,
        "--max-streams": max(plan.streams),
        "--step-tokens": plan.step_tokens,
    }
    return [str(part) for option in options.items() for part in option]


def _measure(
    children: dict[tuple[str, str], Child], cases: Sequence[Case], rounds: int, console: Console
) -> dict[tuple[tuple[str, str], Case], list[float]]:
    seconds: dict[tuple[tuple[str, str], Case], list[float]] = {(name, case): [] for name in children for case in cases}
    for number in range(rounds + 1):  # the first one warms caches and fills contexts, and does not count
        for case in cases:
            for name, child in children.items():
                took = child.seconds(case)
                if number:
                    seconds[name, case].append(took)
        console.print(f"round {number}/{rounds}", end="\r")
    return seconds


def _row(
    name: tuple[str, str], case: Case, seconds: dict[tuple[tuple[str, str], Case], list[float]], limits: Limits, spec: ModelSpec, plan: Plan
) -> Row:
    engine, dtype = name
    mine = seconds[name, case]
    ratio = None
    if engine != BASELINE:
        ratio = median(theirs / own for theirs, own in zip(seconds[(BASELINE, baseline_dtype(dtype)), case], mine, strict=True))
    took = median(mine)
    rate = case.num_tokens / took
    return Row(
        engine,
        dtype,
        case.phase,
        case.streams,
        case.context,
        round(rate, 2),
        _rounded(ratio),
        _rounded(_share(dtype, case, took, limits, spec, plan)),
    )


def _share(dtype: str, case: Case, seconds: float, limits: Limits, spec: ModelSpec, plan: Plan) -> float | None:
    if case.phase == "decode":
        kv_token_bytes = KVSpec.gqa(spec.num_layers, spec.num_kv_heads, spec.head_dim, plan.kv_dtype).bytes_per_token
        least = decode_bytes(spec, dtype, kv_token_bytes, case.streams, case.context) * case.steps
        return least / seconds / limits.read_bytes_s
    peak = limits.flops_s.get(dtype)
    return None if peak is None else prefill_flops(spec, case.context) / seconds / peak


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def show(rows: Sequence[Row], console: Console) -> None:
    """Tokens per second, the ratio to generate, and the share of what the machine gives."""
    table = Table(title="tokens per second; x generate: ratio to Hugging Face's generate in the same run at the same dtype")
    for column in ("phase", "streams", "context", "engine", "dtype", "tokens/s", "x generate", "share of limit"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        ratio = "" if row.ratio_to_hf is None else f"{row.ratio_to_hf:.2f}"
        share = "" if row.share_of_limit is None else f"{row.share_of_limit:.0%}"
        table.add_row(row.phase, str(row.streams), str(row.context), row.engine, row.dtype, f"{row.tokens_per_s:.1f}", ratio, share)
    console.print(table)
