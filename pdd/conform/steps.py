"""Short ways to say a step of an engine, and pages for its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pddbridge.engine import Engine, KVBlock, SampleRow, Step
from pddbridge.kv_spec import HeadRange, LayerRange, TokenRange
from pddbridge.sampling_params import SamplingParams

GREEDY = SamplingParams(seed=0, max_tokens=64, temperature=0.0)
NO_IDS = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Row:
    """A row of a step: its new ids, the tokens already in KV, its pages."""

    ids: np.ndarray
    context_len: int
    pages: Sequence[int] | np.ndarray
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


def prefill(engine: Engine, ids: np.ndarray, pages: Sequence[int] | np.ndarray, chunks: Sequence[int] = ()) -> None:
    """Put the KV of ``ids`` into ``pages``, in chunks of the sizes given (cyclic; default: as large as a step may be)."""
    sizes = list(chunks) or [engine.config.max_step_tokens]
    start, turn = 0, 0
    while start < len(ids):
        stop = min(len(ids), start + sizes[turn % len(sizes)])
        engine.step(step_of(Row(ids[start:stop], start, pages, samples=False)))
        start, turn = stop, turn + 1


def decode(engine: Engine, ids: np.ndarray, pages: Sequence[int] | np.ndarray, count: int, params: SamplingParams) -> list[int]:
    """``count`` tokens after the prompt ``ids``, whose KV but for the last token's is in ``pages``; no stop rule."""
    tokens: list[int] = []
    pending = int(ids[-1])
    for position in range(count):
        log_ids = np.array(tokens, np.int32)
        row = Row(np.array([pending]), len(ids) - 1 + position, pages, params=params, prompt_ids=ids, log_ids=log_ids)
        pending = engine.step(step_of(row)).records[0].token_id
        tokens.append(pending)
    return tokens


class ScatteredPages:
    """Pages of an engine's pool, handed out once each in an order that ``seed`` shuffles: no two rows share one."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._page_size = engine.config.page_size
        self._left = np.random.default_rng(seed).permutation(engine.config.num_pages).astype(np.int32)

    def take(self, num_tokens: int) -> np.ndarray:
        """A page table [P] i32 for ``num_tokens``. Raises ValueError when the pool has no more."""
        count = -(-num_tokens // self._page_size)
        if count > len(self._left):
            raise ValueError(f"num_pages: {num_tokens} tokens need {count} pages of {self._page_size}, {len(self._left)} are left")
        taken, self._left = self._left[:count], self._left[count:]
        return taken


def poison(engine: Engine, pages: np.ndarray) -> None:
    """NaN in every slot of ``pages`` [P] i32: KV that is read before it is written spoils what it is used for."""
    tokens = TokenRange(0, len(pages) * engine.config.page_size)
    for group in engine.kv_spec.groups:
        layers = LayerRange(group.first_layer, group.first_layer + group.num_layers)
        for plane in group.planes:
            shape = (group.num_layers, len(tokens), plane.num_heads, plane.head_dim)
            values = np.full(shape, np.nan, engine.kv_spec.np_dtype_of(plane))
            engine.write_kv(pages, KVBlock(plane.name, layers, tokens, HeadRange(0, plane.num_heads), values))
