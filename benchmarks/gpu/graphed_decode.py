"""Decode steps as CUDA graphs beside eager ones, on two engines with the same weights: the same logits, tokens and KV, and what it gives.

First in float32 on a small model, whose rows, contexts and pages are drawn; then by the clock, in bfloat16, the two engines in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from benchmarks.gpu.findings import Finding, checked
from benchmarks.gpu.models import config_of, make_engine, shape_of, spec_of
from benchmarks.gpu.sizes import Sizes
from pdd.conform.steps import GREEDY, Row, ScatteredPages, prefill, step_of
from pddbridge.engine import Engine, EngineConfig, RunsAhead, Step
from pddbridge.kv_spec import TokenRange
from pddbridge.model_spec import ModelSpec
from pddbridge.sampling_params import SamplingParams
from pddkernels.shapes import ModelShape

Make = Callable[[ModelSpec, EngineConfig, int], Engine]

_CHECKED: Final = ModelShape("none", 3, 384, 640, 6, 3, 64, 2003)
_PAGE_SIZE: Final = 12
_CONTEXT: Final = 704
_MAX_ROWS: Final = 9  # graphs of 1, 2, 4, 8 and 9 rows
_NUM_ROWS: Final = (1, 2, 3, 5, 8, 9, 4, 1)
# Around pages, and far enough for key ranges to be split over the device.
_CONTEXTS: Final = (0, 1, 11, 12, 13, 63, 64, 300, 690)
# Of the largest logit, in float32: products of other heights add in other orders.
_ERROR: Final = 1e-4
# Root of the mean square over the logits' own, in bfloat16, as for a chunk and a decode row (engine_speed).
_BFLOAT16_ERROR: Final = 0.1
_PARAMS: Final = (GREEDY, SamplingParams(seed=3, max_tokens=64, temperature=0.8, top_p=0.95))
_AHEAD: Final = 12
_AHEAD_AT: Final = 300
_FIRST_TOKENS: Final = 300  # any model here has more
_PAIRS: Final = 3


def run(device: str, torch_device: torch.device, sizes: Sizes, threads: int, seed: int, make: Make | None = None) -> list[Finding]:
    """``make``: an engine, by default one on random weights. Needs a device that replays recorded steps."""
    made: Make = make or (lambda spec, config, seed: make_engine("torch", spec, config, seed))
    findings = check(device, threads, seed, made)
    for model, num_layers in sizes.graphed:
        findings += _time_model(model, num_layers, device, torch_device, sizes, threads, seed, made)
    return findings


@dataclass(frozen=True)
class _Pair:
    graphed: Engine
    eager: Engine

    @staticmethod
    def of(make: Make, spec: ModelSpec, config: EngineConfig, seed: int) -> _Pair:
        return _Pair(make(spec, replace(config, decode_graphs=True), seed), make(spec, config, seed))

    @property
    def both(self) -> tuple[Engine, Engine]:
        return self.graphed, self.eager

    def take(self, num_rows: int, num_tokens: int, seed: int) -> list[np.ndarray]:
        """Page tables, the same in both."""
        pages = ScatteredPages(self.graphed, seed)
        return [pages.take(num_tokens) for _ in range(num_rows)]


def check(device: str, threads: int, seed: int, make: Make) -> list[Finding]:
    spec = spec_of(_CHECKED, _CONTEXT)
    num_pages = _MAX_ROWS * (-(-_CONTEXT // _PAGE_SIZE) + 1)
    config = config_of(spec, device, "float32", num_pages, 256, _MAX_ROWS, threads, _PAGE_SIZE)
    pair = _Pair.of(make, spec, replace(config, run_ahead=True, sample_on_device=True), seed)
    for engine in pair.both:
        engine.warm_up(_quietly)
    recorded = pair.graphed.stats().compilations
    rng, tables = np.random.default_rng(seed), pair.take(_MAX_ROWS, _CONTEXT, seed)
    for table in tables:
        ids = rng.integers(_CHECKED.vocab_size, size=_CONTEXT - 1).astype(np.int32)
        for engine in pair.both:
            prefill(engine, ids, table)
    steps_before = pair.graphed.stats().steps
    error, spoiled = 0.0, 0
    for count in _NUM_ROWS:
        chosen, contexts = rng.permutation(_MAX_ROWS)[:count], rng.choice(_CONTEXTS, count)
        ids = rng.integers(_CHECKED.vocab_size, size=count).astype(np.int32)
        step = step_of(*(Row(ids[i : i + 1], int(contexts[i]), tables[row]) for i, row in enumerate(chosen)))
        before = _all_kv(pair.graphed)
        got, want = pair.graphed.logits(step), pair.eager.logits(step)
        error = max(error, float(np.abs(got - want).max() / np.abs(want).max()))
        places = contexts // _PAGE_SIZE
        written = np.array([tables[row][place] for row, place in zip(chosen, places, strict=True)]) * _PAGE_SIZE + contexts % _PAGE_SIZE
        spoiled += _spoiled(before, _all_kv(pair.graphed), written)
    unlike = []
    for count in (1, 3, _MAX_ROWS):
        for params in _PARAMS:
            rows = _rows(tables[:count], _AHEAD_AT, params, seed)
            if _chain(pair.graphed, rows, _AHEAD) != _chain(pair.eager, rows, _AHEAD):
                unlike.append(f"{count} rows, {'greedy' if params is GREEDY else 'drawn'}")
    stats = pair.graphed.stats()
    eager = stats.steps - steps_before - stats.graphed_steps
    missed = {name: times for name, times in stats.fallbacks.items() if times and name.startswith(("eager", "decode_graphs"))}
    return [
        checked(
            "logits of replayed steps",
            None if error <= _ERROR else "not those of eager ones",
            {"error": error, "allowed": _ERROR},
        ),
        checked("KV that no row writes", f"{spoiled} slots changed" if spoiled else None),
        checked("tokens of replayed steps, started ahead", f"not those of eager ones: {unlike}" if unlike else None),
        checked("every step of decode rows is replayed", f"{eager} were not, counted {missed}" if eager or missed else None),
        checked("nothing is recorded later", None if stats.compilations == recorded else f"{stats.compilations - recorded} graphs were"),
    ]


def _time_model(
    model: str, num_layers: int | None, device: str, torch_device: torch.device, sizes: Sizes, threads: int, seed: int, make: Make
) -> list[Finding]:
    whole, most = shape_of(model), max(sizes.graphed_streams)
    shape = replace(whole, num_layers=num_layers or whole.num_layers)
    tokens = sizes.prompt_tokens + sizes.decode_steps + 3
    spec = spec_of(shape, tokens)
    num_pages = most * (-(-tokens // 16) + 1)
    config = config_of(spec, device, "bfloat16", num_pages, max(256, most), most, threads)
    pair = _Pair.of(make, spec, replace(config, run_ahead=True), seed)
    pair.eager.warm_up(_quietly)
    reserved, began = _reserved_bytes(torch_device), time.perf_counter()
    pair.graphed.warm_up(_quietly)
    numbers = {"s": time.perf_counter() - began, "mb": (_reserved_bytes(torch_device) - reserved) / 1e6}
    name = model if num_layers is None else f"{model}, {shape.num_layers} of {whole.num_layers} layers"
    findings = [Finding(f"{name}: {pair.graphed.stats().compilations} graphs, warmed up", "measured", numbers=numbers)]
    rng, tables = np.random.default_rng(seed), pair.take(most, tokens, seed)
    for table in tables:
        ids = rng.integers(shape.vocab_size, size=sizes.prompt_tokens).astype(np.int32)
        for engine in pair.both:
            prefill(engine, ids, table)
    first = step_of(*_rows(tables, sizes.prompt_tokens, GREEDY, seed))
    got, want = (engine.logits(first) for engine in pair.both)
    error = float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))
    problem = None if error <= _BFLOAT16_ERROR else "not those of an eager step"
    findings.append(checked(f"{name}: logits of a replayed step", problem, {"error": error, "allowed": _BFLOAT16_ERROR}))
    for streams in sizes.graphed_streams:
        rows = _rows(tables[:streams], sizes.prompt_tokens, GREEDY, seed)
        findings.append(_time_streams(f"{name}: decode, {streams} streams", pair, rows, sizes.decode_steps))
    return findings


def _time_streams(what: str, pair: _Pair, rows: list[Row], num_steps: int) -> Finding:
    """Both engines in turn, ``_PAIRS`` times: steps one after the other, and steps started ahead; medians of their ratios."""
    seconds = [
        [(_step_seconds(engine, rows, num_steps), _ahead_seconds(engine, rows, num_steps)) for engine in pair.both] for _ in range(_PAIRS)
    ]
    numbers: dict[str, float] = {}
    for i, kind in enumerate(("", "ahead_")):
        graphed, eager = ([turn[engine][i] for turn in seconds] for engine in (0, 1))
        numbers |= {
            f"{kind}graphed_tokens_s": len(rows) / statistics.median(graphed),
            f"{kind}eager_tokens_s": len(rows) / statistics.median(eager),
            f"{kind}ratio": statistics.median(slow / fast for slow, fast in zip(eager, graphed, strict=True)),
        }
    return Finding(what, "measured", numbers=numbers)


def _step_seconds(engine: Engine, rows: list[Row], num_steps: int) -> float:
    """Median of a step's seconds, from its call to its tokens on the host; the first two are not counted."""
    seconds = []
    for turn in range(num_steps + 2):
        step = step_of(*(replace(row, context_len=row.context_len + turn) for row in rows))
        began = time.perf_counter()
        records = engine.step(step).records
        seconds.append(time.perf_counter() - began)
        rows = [replace(row, ids=np.array([record.token_id], np.int32)) for row, record in zip(rows, records, strict=True)]
    return statistics.median(seconds[2:])


def _ahead_seconds(engine: Engine, rows: list[Row], num_steps: int) -> float:
    """Of a step, in a chain of them."""
    began = time.perf_counter()
    _chain(engine, rows, num_steps)
    return (time.perf_counter() - began) / num_steps


def _chain(engine: Engine, rows: list[Row], num_steps: int) -> list[list[int]]:
    """Tokens by step, each step started before anybody has seen the tokens of the one before, which are its own."""
    assert isinstance(engine, RunsAhead)
    step = step_of(*rows)
    under_way = [engine.start_step(step)]
    for turn in range(1, num_steps):
        step = _behind(step, turn)
        under_way.append(engine.start_step(step, under_way[-1]))
    return [[record.token_id for record in started.result().records] for started in under_way]


def _behind(step: Step, turn: int) -> Step:
    """The step after ``step``, of tokens that are not known: ``turn`` stands for them."""
    samples = tuple(replace(sample, position=turn, log_ids=np.zeros(turn - 1, np.int32)) for sample in step.samples)
    return replace(step, token_ids=np.full_like(step.token_ids, turn), context_lens=step.context_lens + 1, samples=samples)


def _rows(tables: list[np.ndarray], context_len: int, params: SamplingParams, seed: int) -> list[Row]:
    ids = np.random.default_rng(seed).integers(_FIRST_TOKENS, size=len(tables)).astype(np.int32)
    return [Row(ids[i : i + 1], context_len, table, params=params) for i, table in enumerate(tables)]


def _all_kv(engine: Engine) -> np.ndarray:
    """[2, layers, tokens, kv_heads, dim] of every page."""
    config = engine.config
    blocks = engine.read_kv(np.arange(config.num_pages, dtype=np.int32), TokenRange(0, config.num_pages * config.page_size))
    return np.stack([block.values for block in blocks])


def _spoiled(before: np.ndarray, after: np.ndarray, written: np.ndarray) -> int:
    """Slots that differ in any bit and are not among ``written``."""
    changed = (before.view(np.int32) != after.view(np.int32)).any(axis=(0, 1, 3, 4))
    changed[written] = False
    return int(changed.sum())


def _reserved_bytes(device: torch.device) -> int:
    """Of the device's memory by torch, without what it only keeps for later."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device))


def _quietly(done: int, total: int, what: str) -> None:
    """Nobody watches."""
