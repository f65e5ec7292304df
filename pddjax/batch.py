"""From a :class:`pddbridge.engine.Step` to the padded host arrays of one bucket. Pure numpy; the step has been checked before."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from pddbridge.engine import MAX_SCORED_TOKENS, EngineConfig, Step
from pddbridge.scoring import score_offsets
from pddjax.buckets import Buckets, pick
from pddkernels.jax_ops import JaxOps

# A column past every step's tokens: nobody looks at its hidden state, whatever it is.
NO_COLUMN: Final = np.iinfo(np.int32).max


class DecodeBatch(NamedTuple):
    """One new token per row, R rows padded to a bucket: ``token_ids``, ``context_lens``, ``num_new`` (1, padding 0), ``slots`` [R] i32 ·
    ``page_tables`` [R, P] i32 · ``sample_columns`` [max_rows + MAX_SCORED_TOKENS] i32, which of the R hidden states choose a
    token and, from ``max_rows`` on, which are scored; ``NO_COLUMN`` for none.
    """

    token_ids: np.ndarray
    context_lens: np.ndarray
    num_new: np.ndarray
    slots: np.ndarray
    page_tables: np.ndarray
    sample_columns: np.ndarray


class RaggedBatch(NamedTuple):
    """Any step, T tokens padded to a bucket: ``token_ids``, ``positions``, ``slots`` [T] i32 · ``page_tables`` [max_rows, P] i32 ·
    ``plan`` of :meth:`pddkernels.jax_ops.JaxOps.plan` · ``sample_columns`` as of a decode batch, of the T hidden
    states.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    page_tables: np.ndarray
    plan: tuple[np.ndarray, ...]
    sample_columns: np.ndarray


def pages_per_row(config: EngineConfig) -> int:
    """P of every compiled page table: attention loops over the pages in use, so one width serves all."""
    return -(-config.max_context_tokens // config.page_size)


def num_columns(config: EngineConfig) -> int:
    """Hidden states that a step hands to its heads."""
    return config.max_rows + MAX_SCORED_TOKENS


def slots_of(page_table: np.ndarray, positions: np.ndarray, page_size: int) -> np.ndarray:
    """Slots of ``positions`` [n] in the pages of ``page_table`` [P]: [n] i32."""
    return (page_table[positions // page_size] * page_size + positions % page_size).astype(np.int32)


def padding_slots(config: EngineConfig, count: int) -> np.ndarray:
    """``count`` different slots past the pool, which are never written."""
    return np.arange(count, dtype=np.int32) + np.int32(config.num_pages * config.page_size)


def pack(step: Step, config: EngineConfig, buckets: Buckets, ops: JaxOps) -> DecodeBatch | RaggedBatch:
    """The arrays of ``step`` in its smallest bucket: a decode batch if every row has one new token."""
    if len(step.token_ids) == len(step.context_lens):
        return _decode(step, config, pick(buckets.rows, len(step.context_lens)))
    return _ragged(step, config, pick(buckets.tokens, len(step.token_ids)), ops)


def empty_decode(config: EngineConfig, num_rows: int) -> DecodeBatch:
    """A batch of nothing but padding: it writes no page."""
    zeros = np.zeros(num_rows, np.int32)
    tables = np.zeros((num_rows, pages_per_row(config)), np.int32)
    return DecodeBatch(zeros, zeros, zeros, padding_slots(config, num_rows), tables, np.full(num_columns(config), NO_COLUMN, np.int32))


def empty_ragged(config: EngineConfig, num_tokens: int, ops: JaxOps) -> RaggedBatch:
    """A batch of nothing but padding: it writes no page."""
    zeros = np.zeros(num_tokens, np.int32)
    nothing = np.zeros(0, np.int32)
    plan = ops.plan(np.zeros(1, np.int32), nothing, num_tokens, config.max_rows)
    tables = np.zeros((config.max_rows, pages_per_row(config)), np.int32)
    return RaggedBatch(
        zeros,
        zeros,
        padding_slots(config, num_tokens),
        tables,
        plan,
        np.full(num_columns(config), NO_COLUMN, np.int32),
    )


def _decode(step: Step, config: EngineConfig, num_rows: int) -> DecodeBatch:
    used = len(step.context_lens)
    batch = empty_decode(config, num_rows)
    tables = _tables(step, config, num_rows)
    slots = batch.slots.copy()
    slots[:used] = [slots_of(tables[row], step.context_lens[row : row + 1], config.page_size)[0] for row in range(used)]
    return DecodeBatch(
        _padded(step.token_ids, num_rows),
        _padded(step.context_lens, num_rows),
        _padded(np.ones(used, np.int32), num_rows),
        slots,
        tables,
        _sample_columns(step, config),
    )


def _ragged(step: Step, config: EngineConfig, num_tokens: int, ops: JaxOps) -> RaggedBatch:
    used = len(step.token_ids)
    batch = empty_ragged(config, num_tokens, ops)
    tables = _tables(step, config, config.max_rows)
    positions, slots = batch.positions.copy(), batch.slots.copy()
    for row, context_len in enumerate(step.context_lens.tolist()):
        start, stop = int(step.row_starts[row]), int(step.row_starts[row + 1])
        positions[start:stop] = np.arange(context_len, context_len + stop - start)
        slots[start:stop] = slots_of(tables[row], positions[start:stop], config.page_size)
    assert (slots[used:] == batch.slots[used:]).all()
    return RaggedBatch(
        _padded(step.token_ids, num_tokens),
        positions,
        slots,
        tables,
        ops.plan(step.row_starts, step.context_lens, num_tokens, config.max_rows),
        _sample_columns(step, config),
    )


def _tables(step: Step, config: EngineConfig, num_rows: int) -> np.ndarray:
    """Page tables of a compiled width. Only entries that a row uses are copied: the rest may be anything."""
    tables = np.zeros((num_rows, pages_per_row(config)), np.int32)
    for row, length in enumerate(step.context_lens + np.diff(step.row_starts)):
        used = -(-int(length) // config.page_size)
        tables[row, :used] = step.page_tables[row, :used]
    return tables


def _sample_columns(step: Step, config: EngineConfig) -> np.ndarray:
    last = step.row_starts[1:] - 1
    columns = np.full(num_columns(config), NO_COLUMN, np.int32)
    columns[: len(step.samples)] = [last[sample.row] for sample in step.samples]
    scored = score_offsets(step.row_starts, step.scores)
    columns[config.max_rows : config.max_rows + len(scored)] = scored
    return columns


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros(size, np.int32)
    out[: len(values)] = values
    return out
