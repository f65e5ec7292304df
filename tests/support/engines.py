"""Engines by name, and short ways to say a step. Loaded through importlib, as a worker does."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pddbridge.engine import Engine, EngineConfig, SampleRow, Step
from pddbridge.sampling_params import SamplingParams

MODULES = {"jax": "pddjax.engine", "torch": "pddtorch.engine"}
GREEDY = SamplingParams(seed=0, max_tokens=64, temperature=0.0)
NO_IDS = np.zeros(0, np.int32)

CONFIG = EngineConfig(
    device="cpu",
    compute_dtype="float32",
    kv_dtype="float32",
    page_size=8,
    num_pages=40,
    max_context_tokens=160,
    max_step_tokens=64,
    max_rows=4,
    num_threads=1,
    compile_cache_dir=None,
)


def make_engine(name: str, model_dir: Path, **changes: str | int | None) -> Engine:
    """``changes``: fields of ``CONFIG`` to replace."""
    engine: Engine = importlib.import_module(MODULES[name]).create(str(model_dir), replace(CONFIG, **changes))  # type: ignore[arg-type]
    return engine


@dataclass(frozen=True)
class Row:
    """A row of a step: its new ids, the tokens already in KV, its pages."""

    ids: np.ndarray
    context_len: int
    pages: Sequence[int]
    samples: bool = True
    params: SamplingParams = GREEDY
    prompt_ids: np.ndarray = field(default_factory=lambda: NO_IDS)
    log_ids: np.ndarray = field(default_factory=lambda: NO_IDS)


def step_of(*rows: Row) -> Step:
    """The ragged batch of ``rows``; page tables are padded with zeros to one width."""
    width = max(len(row.pages) for row in rows)
    tables = np.zeros((len(rows), width), np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row.pages)] = row.pages
    samples = tuple(SampleRow(i, len(row.log_ids), row.params, row.prompt_ids, row.log_ids) for i, row in enumerate(rows) if row.samples)
    return Step(
        token_ids=np.concatenate([row.ids for row in rows]).astype(np.int32),
        row_starts=np.cumsum([0, *(len(row.ids) for row in rows)], dtype=np.int32),
        context_lens=np.array([row.context_len for row in rows], np.int32),
        page_tables=tables,
        samples=samples,
    )


def prefill(engine: Engine, ids: np.ndarray, pages: Sequence[int], chunks: Sequence[int] = ()) -> None:
    """Put the KV of ``ids`` into ``pages``, in chunks of the sizes given (cyclic; default: as large as a step may be)."""
    sizes = list(chunks) or [engine.config.max_step_tokens]
    start, turn = 0, 0
    while start < len(ids):
        stop = min(len(ids), start + sizes[turn % len(sizes)])
        engine.step(step_of(Row(ids[start:stop], start, pages, samples=False)))
        start, turn = stop, turn + 1


def decode_greedy(engine: Engine, ids: np.ndarray, pages: Sequence[int], count: int) -> list[int]:
    """``count`` greedy tokens after ``ids``, whose KV but for the last token's is in ``pages``."""
    tokens: list[int] = []
    pending = int(ids[-1])
    for position in range(count):
        step = step_of(Row(np.array([pending]), len(ids) - 1 + position, pages, log_ids=np.array(tokens, np.int32), prompt_ids=ids))
        pending = engine.step(step).records[0].token_id
        tokens.append(pending)
    return tokens


def random_ids(seed: int, count: int, vocab: int = 300) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, vocab, count).astype(np.int32)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference, over the largest wanted value."""
    return float(np.abs(got - want).max() / np.abs(want).max())
