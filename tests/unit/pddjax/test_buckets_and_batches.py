from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pddbridge.engine import MAX_SCORED_TOKENS
from pddjax.batch import NO_COLUMN, DecodeBatch, RaggedBatch, pack
from pddjax.buckets import Buckets, pick
from pddkernels.jax_ops import JaxOps
from pddkernels.ragged_paged_attention.portable_xla import LARGE_BLOCK, SMALL_BLOCK, max_blocks, plan_query_blocks
from tests.support.engines import CONFIG, Row, random_ids, step_of

OPS = JaxOps("portable", jnp.dtype("float32"), kv_heads=2, head_dim=16)


@pytest.mark.parametrize(
    ("max_rows", "max_step_tokens", "rows", "tokens"),
    [(8, 256, (1, 4, 8), (16, 64, 128, 192, 256)), (1, 1, (1,), (1,)), (4, 16, (1, 4), (16,)), (17, 100, (1, 4, 8, 16, 17), (16, 64, 100))],
)
def test_buckets_end_at_the_limit(max_rows: int, max_step_tokens: int, rows: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    buckets = Buckets.up_to(max_rows, max_step_tokens)
    assert (buckets.rows, buckets.tokens) == (rows, tokens)
    for size in range(1, max_rows + 1):
        assert size <= pick(buckets.rows, size)
    assert [pick(buckets.rows, bucket) for bucket in rows] == list(rows)


@pytest.mark.parametrize("max_step_tokens", [1, 63, 64, 100, 256, 512, 1000, 4096])
def test_no_step_is_padded_by_more_than_an_eighth_of_the_limit(max_step_tokens: int) -> None:
    tokens = Buckets.up_to(1, max_step_tokens).tokens
    assert list(tokens) == sorted(set(tokens))
    assert tokens[-1] == max_step_tokens
    assert max(pick(tokens, size) - size for size in range(1, max_step_tokens + 1)) < max(64, max_step_tokens / 8 + 1)
    assert len(tokens) <= 12


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 1000)), min_size=1, max_size=8))
def test_query_blocks_cover_every_token_once(rows: list[tuple[int, int]]) -> None:
    """Whatever the step: each token in one block, of its row, at its position; never more blocks than the arrays hold."""
    new, context_lens = np.array([n for n, _ in rows]), np.array([c for _, c in rows])
    row_starts = np.concatenate([[0], np.cumsum(new)])
    total = int(row_starts[-1])
    seen: list[tuple[int, int, int]] = []
    planned = plan_query_blocks(row_starts, context_lens, total, len(rows))
    for blocks, size, limit in zip(planned, (LARGE_BLOCK, SMALL_BLOCK), max_blocks(total, len(rows)), strict=True):
        assert blocks.fields.shape == (limit, 4)
        for row, token, length, position in blocks.fields[: blocks.count].tolist():
            assert 1 <= length <= size
            seen += [(row, token + i, position + i) for i in range(length)]
    wanted = [(row, int(row_starts[row]) + i, context_len + i) for row, (n, context_len) in enumerate(rows) for i in range(n)]
    assert sorted(seen) == wanted


def test_a_decode_row_beside_a_chunk_costs_a_small_block() -> None:
    large, small = plan_query_blocks(np.array([0, 256, 257]), np.array([0, 1000]), 257, 2)
    assert (large.count, small.count) == (2, 1)


def test_one_token_per_row_is_a_decode_batch_and_anything_else_ragged() -> None:
    buckets = Buckets.up_to(CONFIG.max_rows, CONFIG.max_step_tokens)
    config = replace(CONFIG, page_size=6, num_pages=9)
    decode = pack(step_of(Row(random_ids(0, 1), 7, [2, 5, 8]), Row(random_ids(1, 1), 0, [4])), config, buckets, OPS)
    assert isinstance(decode, DecodeBatch)
    # Position 7 is slot 1 of the second page; padding is past the pool's 54 slots, each row elsewhere.
    assert decode.slots.tolist() == [31, 24, 56, 57]
    assert decode.num_new.tolist() == [1, 1, 0, 0]
    assert decode.page_tables[0, :3].tolist() == [2, 5, 0]

    ragged = pack(step_of(Row(random_ids(0, 3), 5, [2, 5]), Row(random_ids(1, 1), 0, [4], samples=False)), config, buckets, OPS)
    assert isinstance(ragged, RaggedBatch)
    assert ragged.slots[:5].tolist() == [17, 30, 31, 24, 58]
    assert ragged.positions[:4].tolist() == [5, 6, 7, 0]
    assert len(set(ragged.slots.tolist())) == len(ragged.slots) == 16
    assert ragged.sample_columns.tolist() == [2] + [NO_COLUMN] * (3 + MAX_SCORED_TOKENS)
