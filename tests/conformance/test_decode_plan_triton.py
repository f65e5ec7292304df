"""The plan of decode rows that a captured graph reads, and Triton's kernels over it, interpreted: whatever rows fill it, what a plan of
their own gives."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pddkernels.ragged_paged_attention.triton_decode_plan import DecodePlan, capacity
from pddkernels.ragged_paged_attention.triton_plan import Work, plan
from pddkernels.ragged_paged_attention.triton_tiles import GFX942, SM80, SM90, Geometry, Gpu, tiles_for
from tests.conformance.kernel_suite import FLOAT32_ERROR, expected
from tests.support import triton_child
from tests.support.engines import make_engine, random_ids, relative_error
from tests.support.ragged_batches import BatchSpec, RowSpec, make_batch
from tests.support.tiny_families import make_tiny_family

CPU = torch.device("cpu")
FEW = Gpu("sm90", 5, 227 * 1024)


@pytest.fixture(scope="module")
def child() -> Iterator[ProcessPoolExecutor]:
    with triton_child.interpreting_process() as process:
        yield process


def decode_plan(num_rows: int, longest: int, geometry: Geometry, gpu: Gpu, windows: tuple[int | None, ...] = (None, 100)) -> DecodePlan:
    tiles = tiles_for(geometry, gpu)
    return DecodePlan(num_rows, longest, geometry=geometry, tiles=tiles, windows=windows, num_processors=gpu.num_processors, device=CPU)


def live(work: Work) -> tuple[list[list[int]], list[list[int]]]:
    return work.items[work.items[:, 2] > 0].tolist(), work.merges[work.merges[:, 1] > 0].tolist()


@settings(max_examples=150, deadline=None)
@given(
    gpu=st.sampled_from((SM80, SM90, GFX942, FEW)),
    kv_heads=st.sampled_from((1, 3, 8, 32)),
    steps=st.lists(
        st.lists(st.sampled_from((0, 1, 62, 63, 64, 65, 511, 512, 2000, 9000, 40_959)), min_size=1, max_size=20), min_size=1, max_size=3
    ),
    seed=st.integers(0, 99),
)
def test_a_filled_plan_is_the_steps_own(gpu: Gpu, kv_heads: int, steps: list[list[int]], seed: int) -> None:
    """Each step's items, merges, slots and pages, and nothing of the step before; at the addresses of the first."""
    geometry = Geometry(4 * kv_heads, kv_heads, 128, 16, 2)
    fixed = decode_plan(20, 40_960, geometry, gpu)
    at = [fixed.plan.buffer.data_ptr(), fixed.plan.page_tables.data_ptr()]
    assert all(view.data_ptr() % 16 == at[0] % 16 for (work,) in fixed.plan.works.values() for view in (work.items, work.merges))
    for contexts in steps:
        lengths, count = np.array(contexts, np.int32), len(contexts)
        tables = np.random.default_rng(seed).integers(0, 5000, (count, int(lengths.max()) // 16 + 1)).astype(np.int32)
        fixed.fill(lengths, tables)
        own = plan(
            np.arange(count + 1),
            lengths,
            tables,
            geometry=geometry,
            tiles=tiles_for(geometry, gpu),
            windows=(None, 100),
            num_processors=gpu.num_processors,
            device=CPU,
        )
        for window in (None, 100):
            (work,), (few, _) = fixed.plan.works[window], own.works[window]
            assert live(work) == live(few)
            assert all(first + pieces <= work.num_partials for _, _, first, pieces in work.merges.tolist())
        assert int(fixed.plan.num_tokens) == count
        assert fixed.plan.slots[:count].tolist() == own.slots[:count].tolist()
        for row, length in enumerate(contexts):
            used = length // 16 + 1
            assert fixed.plan.page_tables[row, :used].tolist() == tables[row, :used].tolist()
    assert at == [fixed.plan.buffer.data_ptr(), fixed.plan.page_tables.data_ptr()]


def test_what_a_plan_may_need_is_no_more_than_the_device_fills() -> None:
    """One row of 131,072 tokens is cut for all of an H100; a full batch gets few pieces more than rows; a short context gets none."""
    geometry = Geometry(32, 8, 128, 16, 2)
    tile = tiles_for(geometry, SM90).few
    assert capacity(1, 131_072, tile, 8, 132).items == 1 + 3 * 132 // 8
    assert capacity(256, 131_072, tile, 8, 132).items == 256 + 3 * 132 // 8
    assert capacity(256, 131_072, tile, 8, 132).merges == 33
    short = capacity(64, 128, tile, 8, 132)
    assert (short.items, short.merges, short.partials) == (64, 0, 0)


BATCHES = (
    BatchSpec((RowSpec(95, 1), RowSpec(12, 1), RowSpec(0, 1), RowSpec(11, 1)), 3, 2, 64, page_size=12, seed=1),
    BatchSpec((RowSpec(24, 1),), 3, 2, 64, page_size=12, seed=2),
    BatchSpec((RowSpec(1, 1), RowSpec(90, 1), RowSpec(92, 1)), 3, 2, 64, page_size=12, seed=3, share_prefix=True),
)


@pytest.mark.parametrize("kind", ["full", "window, cap and sinks", "pages of kv heads"])
def test_rows_attend_as_by_a_plan_of_their_own(child: ProcessPoolExecutor, kind: str) -> None:
    """Longer and shorter steps in turn, one split and one not, in a plan of five rows; pages and queries of nobody are NaN."""
    specs = [replace(spec, window=21, soft_cap=2.0, sinks=True) if kind == "window, cap and sinks" else spec for spec in BATCHES]
    if kind == "pages of kv heads":
        specs = [replace(spec, page_size=3) for spec in specs]
    batches = [make_batch(spec) for spec in specs]
    for got, batch in zip(child.submit(triton_child.attend_fixed, batches, 5, 96).result(), batches, strict=True):
        assert np.abs(got - expected(batch)).max() <= FLOAT32_ERROR


def test_an_engine_that_replays_these_kernels_says_what_it_says_on_portable_ones(child: ProcessPoolExecutor, tmp_path: Path) -> None:
    """Gemma 2 has windows on every other layer and capped scores."""
    model = make_tiny_family(tmp_path / "model", "gemma2")
    prompts = [random_ids(seed, length) for seed, length in ((1, 18), (2, 12), (3, 5))]
    stats, (tokens, planes), alike = child.submit(triton_child.generate_replayed, model, prompts, 3).result()
    want_tokens, want_planes = triton_child.generate(make_engine("torch", model), prompts, 3)
    assert tokens == want_tokens
    for got, want in zip(planes, want_planes, strict=True):
        assert relative_error(got, want) < 1e-5
    assert alike
    assert (stats.compilations, stats.fallbacks.get("eager_decode_rows")) == (3, None)
    assert stats.graphed_steps == 3
