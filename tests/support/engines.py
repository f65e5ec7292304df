"""Engines by name, and short ways to say a step. Loaded through importlib, as a worker does."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pdd.conform.steps import GREEDY, NO_IDS, Row, decode, prefill, step_of
from pddbridge.engine import Engine, EngineConfig

__all__ = ["GREEDY", "NO_IDS", "Row", "prefill", "step_of"]

MODULES = {"jax": "pddjax.engine", "torch": "pddtorch.engine"}

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


def decode_greedy(engine: Engine, ids: np.ndarray, pages: Sequence[int], count: int) -> list[int]:
    """``count`` greedy tokens after ``ids``, whose KV but for the last token's is in ``pages``."""
    return decode(engine, ids, pages, count, GREEDY)


def random_ids(seed: int, count: int, vocab: int = 300) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, vocab, count).astype(np.int32)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference, over the largest wanted value."""
    return float(np.abs(got - want).max() / np.abs(want).max())
