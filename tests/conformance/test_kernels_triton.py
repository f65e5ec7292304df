"""The Triton kernels, interpreted on the CPU, against the reference; and what the host plans for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings

from pddkernels.kv_pages import reference as reference_pages
from pddkernels.ragged_paged_attention.triton_plan import Plan, plan
from pddkernels.ragged_paged_attention.triton_tiles import SM90, Geometry, Tile, tiles_for
from pddkernels.torch_ops import TRITON
from tests.conformance.kernel_suite import (
    BFLOAT16_RELATIVE_ERROR,
    FIXED_BATCHES,
    FLOAT32_ERROR,
    REAL_BATCHES,
    AttentionPath,
    check_attention,
    check_bfloat16,
    check_float32,
    expected,
)
from tests.conformance.mla_suite import MLA_BATCHES, check_mla
from tests.conformance.page_suite import RANGES, RangeSpec, bits, emptied, make_token_pages, range_specs
from tests.support import triton_child
from tests.support.engines import make_engine, random_ids, relative_error
from tests.support.ragged_batches import BatchSpec, RaggedBatch, RowSpec, batch_specs, make_batch
from tests.support.tiny_families import make_tiny_family


@pytest.fixture(scope="module")
def child() -> Iterator[ProcessPoolExecutor]:
    with triton_child.interpreting_process() as process:
        yield process


@pytest.fixture(scope="module")
def attention(child: ProcessPoolExecutor) -> AttentionPath:
    return lambda batch: child.submit(triton_child.attend, batch).result()


@pytest.fixture(scope="module")
def attention_of(child: ProcessPoolExecutor) -> Callable[[str], AttentionPath]:
    """With the tiles that a GPU family gets."""
    return lambda family: lambda batch: child.submit(triton_child.attend, batch, family).result()


@pytest.mark.parametrize("name", FIXED_BATCHES)
def test_fixed_batches(attention: AttentionPath, name: str) -> None:
    check_float32(attention, FIXED_BATCHES[name])


@pytest.mark.parametrize("name", ["page size is kv heads", "mixed rows, head size 80", "window of a page", "window, cap and sinks"])
def test_bfloat16(attention: AttentionPath, name: str) -> None:
    check_bfloat16(attention, FIXED_BATCHES[name])


def test_float32_queries_over_bfloat16_pages(attention: AttentionPath) -> None:
    """Products in the wider dtype: what was stored is used exactly."""
    batch = make_batch(FIXED_BATCHES["one past whole pages"])
    mixed = replace(batch, k_pages=batch.rounded().k_pages, v_pages=batch.rounded().v_pages)
    assert np.abs(attention(mixed) - expected(mixed)).max() <= FLOAT32_ERROR


@pytest.mark.parametrize("name", ["smollm2-135m", "gpt-oss-20b"])
def test_heads_of_real_models(attention_of: Callable[[str], AttentionPath], name: str) -> None:
    check_bfloat16(attention_of("sm90"), REAL_BATCHES[name])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sm80", "sm90", "gfx942"])
@pytest.mark.parametrize("name", [*REAL_BATCHES, *FIXED_BATCHES])
def test_everything_with_every_familys_tiles(attention_of: Callable[[str], AttentionPath], family: str, name: str) -> None:
    check_attention(attention_of(family), {**REAL_BATCHES, **FIXED_BATCHES}[name])


@settings(max_examples=5, deadline=None)
@given(spec=batch_specs())
def test_drawn_batches(attention: AttentionPath, spec: BatchSpec) -> None:
    check_float32(attention, spec)


@settings(max_examples=3, deadline=None)
@given(spec=batch_specs(dims=(4, 10)))
def test_tiny_heads(attention: AttentionPath, spec: BatchSpec) -> None:
    check_float32(attention, spec)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=300, deadline=None)
@given(spec=batch_specs())
def test_many_drawn_batches(attention: AttentionPath, spec: BatchSpec) -> None:
    check_attention(attention, spec)


def test_queries_may_lie_apart(child: ProcessPoolExecutor) -> None:
    """As rows of a wider projection: heads of keys stand between one token's queries and the next's."""
    check_float32(
        lambda batch: child.submit(triton_child.attend, batch, spread_queries=True).result(), FIXED_BATCHES["prompt of whole pages"]
    )


def test_pools_beyond_2_to_the_31_values(child: ProcessPoolExecutor) -> None:
    got, want = child.submit(triton_child.attend_beyond_two_to_the_31, 37).result()
    assert np.linalg.norm(got - want) <= BFLOAT16_RELATIVE_ERROR * np.linalg.norm(want)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("name", ["page size is kv heads", "mixed rows, head size 80"])
def test_appending(child: ProcessPoolExecutor, dtype: type[np.generic], name: str) -> None:
    """New tokens' slots alone are touched, and of a batch's padding none. Values are multiples of 1/16, which every dtype has: how a chip
    rounds is not for the interpreter to say, which truncates."""
    batch = make_batch(FIXED_BATCHES[name])
    new = tuple(np.round(array * 16) / 16 for array in (batch.new_k, batch.new_v))
    pages = emptied(batch, np.dtype(dtype))
    got = child.submit(triton_child.append, batch, pages, new).result()
    for got_plane, plane, values in zip(got, pages, new, strict=True):
        want = plane.copy()
        reference_pages.write_tokens(want, values, batch.row_starts, batch.context_lens, batch.page_tables)
        assert np.array_equal(bits(got_plane), bits(want))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@settings(max_examples=6, deadline=None)
@example(spec=RANGES[0])
@example(spec=RANGES[1])
@example(spec=RANGES[2])
@example(spec=RANGES[3])
@given(spec=range_specs)
def test_packing_and_unpacking(child: ProcessPoolExecutor, dtype: type[np.generic], spec: RangeSpec) -> None:
    """Wire order as the reference has it, of all heads and of some, any bits kept; the way back touches the range's slots alone."""
    source, target = (make_token_pages(replace(spec, seed=seed), np.dtype(dtype)) for seed in (spec.seed, spec.seed + 1))
    stop = spec.start + spec.num_tokens
    want = reference_pages.pack_tokens(source.k_pages, source.page_table, spec.start, stop)
    for first, count in {(0, spec.num_kv_heads), (spec.num_kv_heads - 1, 1)}:
        got = child.submit(triton_child.pack, np.stack(source.k_pages), source.page_table, spec.start, stop, first, count).result()
        assert np.array_equal(bits(got), bits(want[:, :, first : first + count]))
    expected = tuple(pages.copy() for pages in target.v_pages)
    reference_pages.unpack_tokens(expected, want, target.page_table, spec.start)
    placed = child.submit(triton_child.unpack, np.stack(target.v_pages), want, target.page_table, spec.start, 0).result()
    assert np.array_equal(bits(placed), bits(np.stack(expected)))


# A tile of 32 rows holds two tokens of 16 heads, or a fourth of one token's 128.
@pytest.mark.parametrize("name", ["page size is heads", *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek-v3", "long"))])
def test_latent_attention(child: ProcessPoolExecutor, name: str) -> None:
    tile = Tile(rows=32, keys=16, num_warps=4, num_stages=3, programs=1, min_split_keys=32)
    check_mla(lambda batch: child.submit(triton_child.attend_latents, batch, tile).result(), MLA_BATCHES[name])


def test_latent_attention_of_128_heads(child: ProcessPoolExecutor) -> None:
    """DeepSeek-V3's heads in two groups, the decode row's keys split."""
    tile = Tile(rows=64, keys=16, num_warps=8, num_stages=3, programs=1, min_split_keys=32)
    spec = replace(MLA_BATCHES["deepseek-v3"], rows=(RowSpec(70, 1), RowSpec(3, 2)))
    check_mla(lambda batch: child.submit(triton_child.attend_latents, batch, tile).result(), spec)


@pytest.mark.parametrize("family", ["gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3"))])
def test_an_engine_on_these_kernels_says_what_it_says_on_portable_ones(child: ProcessPoolExecutor, tmp_path: Path, family: str) -> None:
    """Nothing but the dispatch point differs. Gemma 2 has windows on every other layer and capped scores."""
    model = make_tiny_family(tmp_path / "model", family)
    prompts = [random_ids(seed, length) for seed, length in ((1, 23), (2, 18))]
    paths, (tokens, planes) = child.submit(triton_child.generate_with_triton, model, prompts, 4).result()
    assert paths == {TRITON}
    engine = make_engine("torch", model)
    want_tokens, want_planes = triton_child.generate(engine, prompts, 4)
    assert tokens == want_tokens
    for got, want in zip(planes, want_planes, strict=True):
        assert relative_error(got, want) < 1e-5
    assert not any(engine.stats().fallbacks.values())


def planned(batch: RaggedBatch, num_processors: int = 8) -> Plan:
    return triton_child.plan_of(batch, (batch.options.window,), num_processors=num_processors)


@settings(max_examples=100, deadline=None)
@given(spec=batch_specs())
def test_every_token_sees_every_key_once(spec: BatchSpec) -> None:
    """The items of a plan cover each (token, key it sees) exactly once, and merges name just the partial results of split ones."""
    batch = make_batch(spec)
    step = planned(batch)
    rows = np.repeat(np.arange(len(spec.rows)), np.diff(batch.row_starts))
    positions = np.arange(len(rows)) - batch.row_starts[rows] + batch.context_lens[rows]
    seen = np.zeros((len(rows), int(positions.max()) + 1), int)
    for work in step.works[spec.window]:
        partials: dict[int, list[int]] = {}
        for row, first, count, position, begin, end, partial, is_split in work.items.tolist():
            for token in range(first, first + count):
                assert row == rows[token]
                assert positions[token] == position + token - first
                seen[token, begin:end] += 1
            if is_split:
                partials.setdefault(first, []).append(partial)
        merges = [merge for merge in work.merges.tolist() if merge[1]]
        assert {first: list(range(start, start + count)) for first, _, start, count in merges} == {
            first: sorted(pieces) for first, pieces in partials.items()
        }
        assert sum(count for *_, count in merges) <= work.num_partials
    for token, position in enumerate(positions):
        lowest = 0 if spec.window is None else max(0, position - spec.window + 1)
        assert (seen[token, lowest : position + 1] == 1).all()


def test_a_long_decode_row_is_split_over_the_device_and_short_ones_are_not() -> None:
    rows = (RowSpec(32767, 1), RowSpec(100, 1), RowSpec(50, 1))
    lengths = np.array([row.context_len for row in rows])
    tables = np.zeros((3, 2048), np.int32)
    geometry = Geometry(32, 8, 128, 16, 2)
    step = plan(
        np.arange(4),
        lengths,
        tables,
        geometry=geometry,
        tiles=tiles_for(geometry, SM90),
        windows=(None, 4096),
        num_processors=SM90.num_processors,
        device=torch.device("cpu"),
    )
    whole, windowed = (step.works[window][0].items for window in (None, 4096))
    pieces = whole[(whole[:, 0] == 0) & (whole[:, 2] > 0)]
    assert (pieces[:, 7] == 1).all()
    # 3 programs of this tile fit a processor, and every piece is 8 programs, one per KV head.
    assert 0.8 <= len(pieces) * 8 / (3 * 132) <= 1.1
    assert int((pieces[:, 5] - pieces[:, 4]).max()) == -(-32768 // 64 // len(pieces)) * 64
    assert [row[7] for row in whole.tolist() if row[0] > 0 and row[2]] == [0, 0]
    # Nothing before the window is planned for, and no piece is shorter than what pays.
    behind = windowed[(windowed[:, 0] == 0) & (windowed[:, 2] > 0)]
    assert int(behind[:, 4].min()) == 32768 - 4096
    assert 1 < len(behind) <= 4096 // 256


def test_rows_that_are_a_share_each_are_not_split() -> None:
    """Neither when they all but fill the device (49 rows of 8 programs, 3 for each of 132 processors) nor when some of it stays free."""
    geometry = Geometry(32, 8, 128, 16, 2)
    for num_rows in (40, 49):
        step = plan(
            np.arange(num_rows + 1),
            np.full(num_rows, 4000),
            np.zeros((num_rows, 251), np.int32),
            geometry=geometry,
            tiles=tiles_for(geometry, SM90),
            windows=(None,),
            num_processors=SM90.num_processors,
            device=torch.device("cpu"),
        )
        assert len(step.works[None][0].merges) == 0


def test_steps_of_one_shape_differ_in_the_buffer_alone() -> None:
    """What a captured graph needs: 33 to 64 decode rows of up to 240 tokens have one shape, so one grid and one set of arguments."""
    shapes = set()
    for seed, (num_rows, longest) in enumerate([(33, 200), (40, 180), (64, 230), (64, 235)]):
        rng = np.random.default_rng(seed)
        rows = tuple(RowSpec(int(context_len), 1) for context_len in rng.integers(1, longest, num_rows))
        batch = make_batch(BatchSpec(rows, num_kv_heads=2, group=2, dim=4, page_size=16, seed=seed))
        step = planned(batch, num_processors=1)
        shapes.add(step.shape)
        assert all(view.data_ptr() % 16 == step.buffer.data_ptr() % 16 for work in step.works[None] for view in (work.items, work.merges))
    assert len(shapes) == 1


def test_a_window_that_was_not_planned_for_is_refused(child: ProcessPoolExecutor) -> None:
    batch = make_batch(FIXED_BATCHES["window"])
    with pytest.raises(ValueError, match=r"window: given 9, planned for \[None\]"):
        child.submit(triton_child.attend, batch, windows=(None,)).result()
