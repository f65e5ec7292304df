"""A child process in which Triton's kernels are interpreted on the CPU. Triton decides when it is first imported, so whoever needs both
interpreted and compiled kernels needs two processes; the tests' own imports no Triton for this.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from tests.support.ragged_batches import RaggedBatch

Result = TypeVar("Result")

# Low and narrow, so that batches of a few dozen tokens take several tiles, several blocks of keys, and split ranges.
SMALL = "small"


@contextmanager
def interpreting_process() -> Iterator[ProcessPoolExecutor]:
    """Submit this module's functions to it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_start) as child:
        yield child


def _start() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    if not importlib.import_module("triton").knobs.runtime.interpret:
        raise RuntimeError("Triton was imported before it was told to interpret")


def attend(
    batch: RaggedBatch, tiles: str = SMALL, *, spread_queries: bool = False, windows: tuple[int | None, ...] | None = None
) -> np.ndarray:
    """float64 [T, heads, dim]. ``tiles``: SMALL, or the GPU family whose tiles to take · ``spread_queries``: leave room between tokens ·
    ``windows``: what to plan for, by default what the batch has and no window."""
    import torch

    from pddkernels.ragged_paged_attention import triton as kernels
    from pddkernels.ragged_paged_attention.triton_plan import plan
    from pddkernels.ragged_paged_attention.triton_tiles import GFX942, SM80, SM90, tiles_for
    from pddtorch.arrays import to_numpy, to_torch

    queries, k_pages, v_pages = (to_torch(array) for array in (batch.queries, batch.k_pages, batch.v_pages))
    if spread_queries:
        queries = torch.nn.functional.pad(queries, (0, 0, 0, 3))[:, : queries.shape[1]]
    geometry = geometry_of(batch)
    gpus = {gpu.family: gpu for gpu in (SM80, SM90, GFX942)}
    step = plan(
        batch.row_starts,
        batch.context_lens,
        batch.page_tables,
        geometry=geometry,
        tiles=small_tiles(geometry.group) if tiles == SMALL else tiles_for(geometry, gpus[tiles]),
        windows=windows or (None, batch.options.window),
        num_processors=8 if tiles == SMALL else gpus[tiles].num_processors,
        device=torch.device("cpu"),
    )
    sinks = None if batch.sinks is None else torch.from_numpy(batch.sinks)
    return to_numpy(kernels.ragged_paged_attention(queries, k_pages, v_pages, step, batch.options, sinks)).astype(np.float64)


def geometry_of(batch: RaggedBatch):  # type: ignore[no-untyped-def]
    from pddkernels.ragged_paged_attention.triton_tiles import Geometry

    _, num_kv_heads, page_size, dim = batch.k_pages.shape
    return Geometry(batch.queries.shape[1], num_kv_heads, dim, page_size, batch.queries.itemsize)


def small_tiles(group: int):  # type: ignore[no-untyped-def]
    from pddkernels.ragged_paged_attention.triton_tiles import Tile, Tiles, next_power_of_two

    rows = next_power_of_two(group)
    return Tiles(few=Tile(max(16, rows), 16, 4, 3, 1, 16), many=Tile(max(32, rows), 32, 4, 3, 1, 32))


def attend_beyond_two_to_the_31(num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(attended, expected) of one decode row whose pages are the last ones of pools of more than 2**31 values each, of which the rest is
    never touched and so has no memory."""
    import torch

    from pddkernels.ragged_paged_attention import reference
    from pddkernels.ragged_paged_attention import triton as kernels
    from pddkernels.ragged_paged_attention.options import AttentionOptions
    from pddkernels.ragged_paged_attention.triton_plan import plan
    from pddkernels.ragged_paged_attention.triton_tiles import Geometry

    dim, page_size = 64, 16
    used = -(-num_tokens // page_size)
    num_pages = 2**31 // (dim * page_size) + used
    rng = np.random.default_rng(0)
    pools = [torch.empty((num_pages, 1, page_size, dim), dtype=torch.float16) for _ in range(2)]
    for pool in pools:
        pool[-used:] = torch.from_numpy(rng.standard_normal((used, 1, page_size, dim))).half()
    queries = rng.standard_normal((1, 2, dim)).astype(np.float16)
    row_starts, context_lens = np.array([0, 1], np.int32), np.array([num_tokens - 1], np.int32)
    table, options = np.arange(used, dtype=np.int32)[None], AttentionOptions(dim**-0.5)
    step = plan(
        row_starts,
        context_lens,
        table + (num_pages - used),
        geometry=Geometry(2, 1, dim, page_size, 2),
        tiles=small_tiles(2),
        windows=(None,),
        num_processors=1,
        device=torch.device("cpu"),
    )
    got = kernels.ragged_paged_attention(torch.from_numpy(queries), pools[0], pools[1], step, options)
    tails = [pool[-used:].numpy() for pool in pools]
    return got.double().numpy(), reference.ragged_paged_attention(queries, *tails, row_starts, context_lens, table, options)
