"""What starting a decode step before the last one's tokens are known gains: a worker's executor with it and without, in turns.

``python benchmarks/run_ahead.py --model smollm2-135m --engine jax --threads 1 --streams 1,8 --json FILE``. The engine computes on a CPU, so
the gain is what a second core takes over; the tokens are compared.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from pdd.models import pull
from pdd.worker import messages as m
from pdd.worker.executor import Executor
from pddbridge.engine import Engine, EngineConfig
from pddbridge.sampling_params import SamplingParams

PROMPT_TOKENS, NUM_TOKENS, SETTLE_STEPS = 30, 60, 8


@dataclass(frozen=True)
class Measured:
    """Tokens per second of ``streams`` greedy requests, medians over the rounds; ``gain``: median of the ratios within rounds."""

    engine: str
    threads: int
    streams: int
    rounds: int
    ahead: float
    in_turn: float
    gain: float


def decode(engine: Engine, streams: int) -> tuple[float, tuple[int, ...]]:
    """Tokens per second once all decode, and the first request's tokens."""
    told: list[tuple[str, m.Event]] = []
    executor = Executor(engine, lambda name, event: told.append((name, event)))
    for number in range(streams):
        prompt = tuple(range(100 + number, 100 + number + PROMPT_TOKENS))
        params = SamplingParams(seed=1, max_tokens=NUM_TOKENS, temperature=0.0)
        executor.handle(m.OpenRequest(f"r{number}", "t", prompt, (), params, False, True, None, (), 1e12, None))
    for _ in range(SETTLE_STEPS):
        executor.run_step()
    before, began = len(told), time.perf_counter()
    for _ in range(NUM_TOKENS - 2 * SETTLE_STEPS):
        executor.run_step()
    rate = sum(isinstance(event, m.Tokens) for _, event in told[before:]) / (time.perf_counter() - began)
    while executor.run_step():
        pass
    return rate, tuple(event.records[0].token_id for name, event in told if isinstance(event, m.Tokens) and name == "r0")


def measure(engines: dict[bool, Engine], streams: int, rounds: int, threads: int) -> Measured:
    """Raises RuntimeError if the tokens differ."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    tokens: set[tuple[int, ...]] = set()
    for turn in range(rounds):
        for ahead in (True, False) if turn % 2 else (False, True):
            rate, first = decode(engines[ahead], streams)
            rates[ahead].append(rate)
            tokens.add(first)
    if len(tokens) != 1:
        raise RuntimeError(f"{streams} streams: the tokens differ")
    gain = statistics.median(a / b for a, b in zip(rates[True], rates[False], strict=True))
    return Measured(engines[True].name, threads, streams, rounds, statistics.median(rates[True]), statistics.median(rates[False]), gain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "pdd")
    parser.add_argument("--engine", choices=("jax", "torch"), default="jax")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    streams = [int(text) for text in given.streams.split(",")]
    os.environ.update(importlib.import_module(f"pdd{given.engine}.threads").environment(given.threads, "cpu", 1, False))
    create = importlib.import_module(f"pdd{given.engine}.engine").create
    model_dir, compiled = pull(given.model, given.cache_dir), str(given.cache_dir / "compiled" / given.engine)
    sizes = (16, 512, 1024, 64, max(streams), given.threads, compiled)
    engines = {
        ahead: create(str(model_dir), EngineConfig("cpu", "float32", "bfloat16", *sizes, run_ahead=ahead)) for ahead in (True, False)
    }
    for engine in engines.values():
        engine.warm_up(lambda *_: None)
    rows = [measure(engines, count, given.rounds, given.threads) for count in streams]
    for row in rows:
        Console().print(
            f"{row.engine}, {row.threads} thread(s), {row.streams} streams: {row.in_turn:.1f} -> {row.ahead:.1f} tokens/s, {row.gain:.3f}"
        )
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
