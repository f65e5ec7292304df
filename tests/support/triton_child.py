"""A child process in which Triton's kernels are interpreted on the CPU.

Triton decides when it is first imported, so whoever needs both interpreted and compiled kernels needs two processes. Nothing here imports
it but the functions that run in the child.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from pddbridge.checkpoint import open_checkpoint
from pddbridge.engine import Engine, EngineStats
from pddbridge.kv_spec import TokenRange
from pddkernels.mla_decode.triton_plan import LatentShape, plan_mla
from pddkernels.native.torch_native import Native
from pddkernels.ragged_paged_attention import reference
from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddkernels.ragged_paged_attention.triton_decode_plan import DecodePlan
from pddkernels.ragged_paged_attention.triton_plan import Plan, plan
from pddkernels.ragged_paged_attention.triton_tiles import GFX942, SM80, SM90, Geometry, Gpu, Tile, Tiles, next_power_of_two, tiles_for
from pddkernels.torch_ops import Problem, TorchOps, triton_ops
from pddtorch.arrays import to_numpy, to_torch
from pddtorch.engine import TorchEngine
from tests.conformance.mla_suite import MLABatch
from tests.support.engines import CONFIG, Row, make_engine, step_of
from tests.support.ragged_batches import RaggedBatch
from tests.support.recorders import CallRecorder

# Low and narrow, so that batches of a few dozen tokens take several tiles, several blocks of keys, and split ranges.
SMALL = "small"
CPU = torch.device("cpu")
_GPUS = {gpu.family: gpu for gpu in (SM80, SM90, GFX942)}
_FEW_PROCESSORS = Gpu("sm90", 8, 227 * 1024)


@contextmanager
def interpreting_process() -> Iterator[ProcessPoolExecutor]:
    """Submit this module's functions to it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_start) as child:
        yield child


def _start() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    if not importlib.import_module("triton").knobs.runtime.interpret:
        raise RuntimeError("Triton was imported before it was told to interpret")


def geometry_of(batch: RaggedBatch) -> Geometry:
    _, num_kv_heads, page_size, dim = batch.k_pages.shape
    return Geometry(batch.queries.shape[1], num_kv_heads, dim, page_size, max(batch.queries.itemsize, batch.k_pages.itemsize))


def small_tiles(group: int) -> Tiles:
    rows = next_power_of_two(group)
    return Tiles(few=Tile(max(16, rows), 16, 4, 3, 1, 16), many=Tile(max(32, rows), 32, 4, 3, 1, 32))


def plan_of(batch: RaggedBatch, windows: tuple[int | None, ...], tiles: str = SMALL, num_processors: int = 8) -> Plan:
    """``tiles``: SMALL, or the GPU family whose tiles and number of processors to take."""
    geometry = geometry_of(batch)
    return plan(
        batch.row_starts,
        batch.context_lens,
        batch.page_tables,
        geometry=geometry,
        tiles=small_tiles(geometry.group) if tiles == SMALL else tiles_for(geometry, _GPUS[tiles]),
        windows=windows,
        num_processors=num_processors if tiles == SMALL else _GPUS[tiles].num_processors,
        device=CPU,
    )


def attend(
    batch: RaggedBatch, tiles: str = SMALL, *, spread_queries: bool = False, windows: tuple[int | None, ...] | None = None
) -> np.ndarray:
    """float64 [T, heads, dim]. ``tiles``: see ``plan_of`` · ``spread_queries``: leave room between tokens · ``windows``: what to plan for,
    by default the batch's, and none."""
    from pddkernels.ragged_paged_attention import triton as kernels

    queries, k_pages, v_pages = (to_torch(array) for array in (batch.queries, batch.k_pages, batch.v_pages))
    if spread_queries:
        queries = F.pad(queries, (0, 0, 0, 3))[:, : queries.shape[1]]
    step = plan_of(batch, windows or (None, batch.options.window), tiles)
    sinks = None if batch.sinks is None else torch.from_numpy(batch.sinks)
    return to_numpy(kernels.ragged_paged_attention(queries, k_pages, v_pages, step, batch.options, sinks)).astype(np.float64)


def attend_fixed(batches: list[RaggedBatch], num_rows: int, max_context_tokens: int) -> list[np.ndarray]:
    """What ``attend`` gives for batches of decode rows, by one plan that is filled for each in turn; queries of rows that a batch lacks are
    NaN."""
    from pddkernels.ragged_paged_attention import triton as kernels

    geometry, options = geometry_of(batches[0]), batches[0].options
    fixed = DecodePlan(
        num_rows,
        max_context_tokens,
        geometry=geometry,
        tiles=small_tiles(geometry.group),
        windows=(options.window,),
        num_processors=8,
        device=CPU,
    )
    attended = []
    for batch in batches:
        fixed.fill(batch.context_lens, batch.page_tables)
        queries = torch.full((num_rows, *batch.queries.shape[1:]), float("nan"))
        queries[: len(batch.queries)] = to_torch(batch.queries)
        sinks = None if batch.sinks is None else torch.from_numpy(batch.sinks)
        out = kernels.ragged_paged_attention(queries, to_torch(batch.k_pages), to_torch(batch.v_pages), fixed.plan, options, sinks)
        attended.append(to_numpy(out)[: len(batch.queries)].astype(np.float64))
    return attended


def attend_beyond_two_to_the_31(num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(attended, expected) of one decode row whose pages are the last ones of pools of more than 2**31 values each, of which the rest is
    never touched and so has no memory."""
    from pddkernels.ragged_paged_attention import triton as kernels

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
        device=CPU,
    )
    got = kernels.ragged_paged_attention(torch.from_numpy(queries), pools[0], pools[1], step, options)
    tails = [pool[-used:].numpy() for pool in pools]
    return got.double().numpy(), reference.ragged_paged_attention(queries, *tails, row_starts, context_lens, table, options)


def attend_latents(batch: MLABatch, tile: Tile) -> np.ndarray:
    """float64 [T, heads, latent]."""
    from pddkernels.mla_decode import triton as kernels

    q_latent, q_rope, latent_pages, rope_pages = (
        to_torch(array) for array in (batch.q_latent, batch.q_rope, batch.latent_pages, batch.rope_pages)
    )
    shape = LatentShape(q_latent.shape[1], q_latent.shape[2], q_rope.shape[2], latent_pages.shape[1], q_latent.itemsize)
    arrays = (batch.row_starts, batch.context_lens, batch.page_tables)
    step = plan_mla(*arrays, shape=shape, tile=tile, num_processors=8, device=CPU)
    return to_numpy(kernels.mla_attention(q_latent, q_rope, latent_pages, rope_pages, step, batch.scale)).astype(np.float64)


def append(batch: RaggedBatch, pages: tuple[np.ndarray, np.ndarray], new: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(k_pages, v_pages) after a plan of ``batch`` appended ``new``: parts of wider rows, and two tokens more than the plan knows, as in a
    captured graph's padding."""
    from pddkernels.kv_pages import triton as kernels

    k_pages, v_pages = (to_torch(array.copy()) for array in pages)
    keys, values = (F.pad(to_torch(array), (0, 0, 0, 3, 0, 2), value=9.0)[:, : array.shape[1]] for array in new)
    step = plan_of(batch, (None,))
    kernels.append(k_pages, v_pages, keys, values, F.pad(step.slots, (0, 2)), step.num_tokens)
    return to_numpy(k_pages), to_numpy(v_pages)


def pack(layers: np.ndarray, page_table: np.ndarray, start: int, stop: int, first_head: int, num_heads: int) -> np.ndarray:
    """Wire order of some heads of ``layers`` [L, N, kv_heads, page_size, dim]."""
    from pddkernels.kv_pages import triton as kernels

    return to_numpy(kernels.pack_tokens(to_torch(layers), torch.from_numpy(page_table), start, stop, first_head, num_heads))


def unpack(layers: np.ndarray, values: np.ndarray, page_table: np.ndarray, start: int, first_head: int) -> np.ndarray:
    """``layers`` after ``values`` were placed."""
    from pddkernels.kv_pages import triton as kernels

    pool = to_torch(layers.copy())
    kernels.unpack_tokens(pool, to_torch(values), torch.from_numpy(page_table), start, first_head)
    return to_numpy(pool)


Generated = tuple[list[list[int]], list[np.ndarray]]


def generate_with_triton(model_dir: Path, prompts: list[np.ndarray], count: int) -> tuple[set[str], Generated]:
    """``generate`` on an engine whose dispatch point gives Triton's kernels: the paths it gave, and what came out."""
    import pddtorch.engine

    paths: set[str] = set()

    def choose(problem: Problem, device: torch.device, native: Native | None) -> TorchOps:
        ops = triton_ops(problem, device, _FEW_PROCESSORS, small_tiles(problem.num_heads // problem.num_kv_heads))
        paths.add(ops.path)
        return ops

    pddtorch.engine.choose = choose
    return paths, generate(make_engine("torch", model_dir), prompts, count)


def generate_replayed(model_dir: Path, prompts: list[np.ndarray], count: int) -> tuple[EngineStats, Generated, bool]:
    """``generate`` on an engine with Triton's kernels whose decode steps are replayed: its counters, what came out, and whether pages that
    belong to nobody are as they were."""
    import pddtorch.engine

    def choose(problem: Problem, device: torch.device, native: Native | None) -> TorchOps:
        return triton_ops(problem, device, _FEW_PROCESSORS, small_tiles(problem.num_heads // problem.num_kv_heads))

    pddtorch.engine.choose = choose
    pddtorch.engine._open_native = lambda device, cache_dir: (None, {})
    config = replace(CONFIG, decode_graphs=True, max_step_tokens=20, max_context_tokens=24)
    engine = TorchEngine(open_checkpoint(str(model_dir)), config, CallRecorder())
    engine.warm_up(lambda done, total, what: None)
    used = 8 * len(prompts) + 8
    others, tokens = np.arange(used, config.num_pages, dtype=np.int32), TokenRange(0, (config.num_pages - used) * config.page_size)
    canaries = [replace(block, values=block.values + 7) for block in engine.read_kv(others, tokens)]
    for block in canaries:
        engine.write_kv(others, block)
    generated = generate(engine, prompts, count)
    left = engine.read_kv(others, tokens)
    alike = all(np.array_equal(block.values, canary.values) for block, canary in zip(left, canaries, strict=True))
    return engine.stats(), generated, alike


def generate(engine: Engine, prompts: list[np.ndarray], count: int) -> Generated:
    """``count`` greedy tokens per prompt, and the last prompt's KV by plane.

    Prompts are prefilled whole, each beside the decode rows of those before; then all rows decode in one batch. The last one's KV is read
    and written to other pages, from which it decodes.
    """
    pages = [list(range(8 * i, 8 * i + 8)) for i in range(len(prompts))]
    tokens: list[list[int]] = [[] for _ in prompts]

    def step(rows: list[int], *chunks: Row) -> None:
        pending = []
        for i in rows:
            known = np.concatenate((prompts[i], np.array(tokens[i], np.int32)))
            pending.append(Row(known[-1:], len(known) - 1, pages[i], log_ids=np.array(tokens[i], np.int32), prompt_ids=prompts[i]))
        for i, record in zip(rows, engine.step(step_of(*chunks, *pending)).records, strict=True):
            tokens[i].append(record.token_id)

    for i, ids in enumerate(prompts):
        step(list(range(i)), Row(ids[:-1], 0, pages[i], samples=False))
    blocks = engine.read_kv(np.array(pages[-1], np.int32), TokenRange(0, len(prompts[-1]) - 1))
    pages[-1] = [8 * len(prompts) + page for page in range(8)]
    for block in blocks:
        engine.write_kv(np.array(pages[-1], np.int32), block)
    while any(len(ids) < count for ids in tokens):
        step([i for i, ids in enumerate(tokens) if len(ids) < count])
    return tokens, [block.values for block in blocks]
