"""L1: each side's attention, on its device and by the path its engine takes there, against the float64 reference at this model's shape."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import ml_dtypes
import numpy as np

from pdd.conform.compare import worst_absolute, worst_per_vector
from pdd.conform.report import Check, within
from pdd.conform.side import Dtype, Side
from pddbridge.model_spec import ModelSpec

# Queries and pages are unit normals. float32: absolute; bfloat16: of each output vector's norm.
TOLERANCES: Final[dict[Dtype, float]] = {"float32": 1e-5, "bfloat16": 2e-2}
# (tokens in KV, new tokens): decode rows short, long and at a page's edge, extends, chunks with and without context.
DECODE_ROWS: Final = ((0, 1), (1, 1), (31, 1), (32, 1), (300, 1))
MIXED_ROWS: Final = (*DECODE_ROWS, (45, 7), (64, 16), (0, 70), (19, 40))


@dataclass(frozen=True)
class Batch:
    """Arguments of the op: ``queries`` [T, heads, dim] · ``k_pages``, ``v_pages`` [N, kv_heads, page_size, dim], new tokens' KV stored, NaN
    in every slot that no row may read · ``row_starts`` [R+1], ``context_lens`` [R], ``page_tables`` [R, P] i32.
    """

    queries: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    row_starts: np.ndarray
    context_lens: np.ndarray
    page_tables: np.ndarray

    def token(self, index: int) -> str:
        """Which row and position new token ``index`` is."""
        row = int(np.searchsorted(self.row_starts, index, side="right")) - 1
        position = int(self.context_lens[row]) + index - int(self.row_starts[row])
        return f"row {row} ({self.context_lens[row]} + {self.row_starts[row + 1] - self.row_starts[row]} tokens) position {position}"


# The op's arguments in the reference's order, with AttentionOptions last -> [T, heads, dim] and the path that was taken.
Attend = Callable[..., tuple[np.ndarray, str]]


def make_batch(
    rows: Sequence[tuple[int, int]], num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: Dtype, seed: int
) -> Batch:
    """Unit normals for ``rows`` of (tokens in KV, new tokens), pages in random order."""
    rng = np.random.default_rng(seed)
    np_dtype = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(np.float32)
    used = [-(-(context + new) // page_size) for context, new in rows]
    num_pages = sum(used) + 2
    ids = iter((rng.permutation(num_pages - 1) + 1).tolist())
    tables = np.zeros((len(rows), max(used)), np.int32)
    pages = np.full((2, num_pages, num_kv_heads, page_size, head_dim), np.nan, np_dtype)
    for table, count, (context, new) in zip(tables, used, rows, strict=True):
        table[:count] = [next(ids) for _ in range(count)]
        positions = np.arange(context + new)
        values = rng.standard_normal((len(positions), 2, num_kv_heads, head_dim), np.float32).astype(np_dtype)
        pages[:, table[positions // page_size], :, positions % page_size] = values
    news = [new for _, new in rows]
    return Batch(
        queries=rng.standard_normal((sum(news), num_heads, head_dim), np.float32).astype(np_dtype),
        k_pages=pages[0],
        v_pages=pages[1],
        row_starts=np.cumsum([0, *news], dtype=np.int32),
        context_lens=np.array([context for context, _ in rows], np.int32),
        page_tables=tables,
    )


def check_op(side: Side, spec: ModelSpec, dtype: Dtype, seed: int) -> tuple[Check, ...]:
    """The engine's own attention at the model's head counts and size, in a mixed and in a decode step, for each of its layers' windows. The
    notes say by which path.
    """
    probe = importlib.import_module(f"pdd{side.engine}.attention_probe")
    options_of = importlib.import_module("pddkernels.ragged_paged_attention.options").AttentionOptions

    def attend(*arguments: object) -> tuple[np.ndarray, str]:
        out, path = probe.attend(side.device, *arguments)
        return out, path

    checks = []
    for window in dict.fromkeys(spec.layer_windows):
        options = options_of(spec.attention_scale, window, spec.attention_soft_cap)
        for what, rows in (("mixed rows", MIXED_ROWS), ("decode rows", DECODE_ROWS)):
            rows = (*rows, *_beyond(window, what == "mixed rows"))
            batch = make_batch(rows, spec.num_heads, spec.num_kv_heads, spec.head_dim, side.page_size, dtype, seed)
            name = f"attention, {what}" if window is None else f"attention, window {window}, {what}"
            checks.append(check_attention(attend, batch, options, side.name, dtype, name))
    return tuple(checks)


def _beyond(window: int | None, mixed: bool) -> tuple[tuple[int, int], ...]:
    """Rows whose first tokens, and some whole pages, lie before the window of all or some of their new ones."""
    if window is None:
        return ()
    decode = ((window + 45, 1), (window, 1))
    return (*decode, (max(0, window - 10), 30)) if mixed else decode


def check_attention(attend: Attend, batch: Batch, options: object, way: str, dtype: Dtype, what: str) -> Check:
    """``attend`` on ``batch`` with ``options`` (AttentionOptions) against the reference, which computes in float64 from the values as
    rounded."""
    reference = importlib.import_module("pddkernels.ragged_paged_attention.reference").ragged_paged_attention
    arguments = (batch.queries, batch.k_pages, batch.v_pages, batch.row_starts, batch.context_lens, batch.page_tables, options)
    (got, path), want = attend(*arguments), reference(*arguments)
    worst = (worst_absolute if dtype == "float32" else worst_per_vector)(got, want)
    token, head = worst.place[:2]
    tolerance = TOLERANCES[dtype]
    where = f"head {head}, {batch.token(token)}"
    note = f"{path}; {got.shape[1]} heads on {batch.k_pages.shape[1]}, dim {got.shape[2]}"
    return Check("L1", dtype, way, what, within(worst.error, tolerance), worst.error, tolerance, where, note)
