"""How fast pages become wire order and back, next to a plain memcpy of the same bytes: `python benchmarks/kv_convert.py [--json FILE]`.

Read: ``read_blocks`` into memory that is there (``out``). Write: ``write_blocks``. memcpy: ``numpy.copyto`` of one contiguous buffer to
another. ``numpy_read``, ``numpy_write``: the same conversions where no C++ could be compiled. All on one thread, timed in turns by that
thread's CPU time: what else runs on the machine takes only memory bandwidth away. Before each timing a buffer larger than the caches is
read, so that all KV is cold, and a page of another pool is converted, so that the interpreter's code is not. Ratio: memcpy's time over
ours, the best of each. More than 1 is possible: memcpy fetches what it overwrites, a large conversion writes past the caches.

``strided``: the same bytes of consecutive pages by one strided assignment per layer and plane, without a page table: what a loop over
rows, each moved by one memmove, makes of this memory: a row that stands alone between gaps costs memory latency unless it is fetched ahead.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from pddbridge.engine import KVBlock
from pddbridge.kv_convert import KVPool, read_blocks, write_blocks
from pddbridge.kv_layout_catalogue import GQA_LAYOUTS
from pddbridge.kv_pool import empty_on_lines
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from pddbridge.native.moves import NativeMoves, native_moves

TARGET: Final = 0.60
_COLD_BYTES: Final = 128 << 20
# A pool holds this many prompts, so scattered pages lie far apart.
_POOL_PROMPTS: Final = 3


@dataclass(frozen=True)
class Shape:
    name: str
    num_layers: int
    num_heads: int
    head_dim: int
    num_tokens: int
    page_size: int


SHAPES = (
    Shape("30 layers, 3 heads of 64", 30, 3, 64, 1000, 16),
    Shape("32 layers, 8 heads of 64", 32, 8, 64, 1000, 16),
    Shape("32 layers, 8 heads of 128", 32, 8, 128, 1000, 16),
    Shape("the same, pages of 128", 32, 8, 128, 1000, 128),
)


@dataclass(frozen=True)
class Row:
    shape: str
    layout: str
    pages: str
    megabytes: float
    memcpy_gb_per_s: float
    read: float
    write: float
    numpy_read: float
    numpy_write: float
    strided_read: float
    strided_write: float
    target: float = TARGET


@dataclass(frozen=True)
class Timed:
    run: Callable[[], object]
    warm_up: Callable[[], object]


def best_times(timed: list[Timed], repeats: int) -> list[float]:
    """Seconds of CPU time, the best of each."""
    cold = np.ones(_COLD_BYTES // 8)
    samples: list[list[float]] = [[] for _ in timed]
    for _ in range(repeats):
        for one, kept in zip(timed, samples, strict=True):
            cold.sum()
            one.warm_up()
            start = time.thread_time()
            one.run()
            kept.append(time.thread_time() - start)
    return [min(kept) for kept in samples]


def filled_pool(layout: str, spec: KVSpec, shape: Shape, num_pages: int) -> KVPool:
    pool = KVPool.zeros(GQA_LAYOUTS[layout](shape.page_size, spec.dtype), spec, num_pages)
    for arrays in pool.arrays:
        for array in arrays:
            array.view(np.uint16)[...] = 1
    return pool


def measure(shape: Shape, layout: str, scattered: bool, repeats: int, native: NativeMoves | None) -> Row:
    """One row; the KV of one prompt in a pool of ``_POOL_PROMPTS`` such."""
    spec = KVSpec.gqa(shape.num_layers, shape.num_heads, shape.head_dim, "bfloat16")
    tokens, layers, heads = TokenRange(0, shape.num_tokens), LayerRange(0, shape.num_layers), HeadRange(0, shape.num_heads)
    num_used = -(-shape.num_tokens // shape.page_size)
    num_pages = num_used * _POOL_PROMPTS
    pool, other = filled_pool(layout, spec, shape, num_pages), filled_pool(layout, spec, shape, 1)
    table = np.random.default_rng(0).permutation(num_pages)[:num_used] if scattered else np.arange(num_used)
    size = (2, shape.num_layers, shape.num_tokens, shape.num_heads, shape.head_dim)
    natively = replace(pool, native=native)
    source, target = (empty_on_lines(size, spec.np_dtype) for _ in range(2))
    source.view(np.uint16)[...] = 1
    target.view(np.uint16)[...] = 0
    blocks = [KVBlock(name, layers, tokens, heads, source[i]) for i, name in enumerate("kv")]
    one_page, first = TokenRange(0, 1), np.zeros(1, np.intp)
    page_of_other = list(np.zeros((2, shape.num_layers, 1, *size[3:]), spec.np_dtype))

    def warm_up() -> None:
        for moved_by in (other, replace(other, native=native)):
            write_blocks(moved_by, first, read_blocks(moved_by, first, one_page, out=page_of_other))

    head = np.dtype((np.void, shape.head_dim * spec.np_dtype.itemsize))
    num_whole = shape.num_tokens // shape.page_size
    in_pages = [[planes[p].view[:num_whole].view(head)[..., 0] for planes in pool.planes] for p in range(2)]
    shaped = (shape.num_layers, num_whole, shape.page_size, shape.num_heads)

    def on_wire(values: np.ndarray) -> list[np.ndarray]:
        return [plane[:, : num_whole * shape.page_size].view(head)[..., 0].reshape(shaped) for plane in values.view(np.uint16)]

    def strided(sources: list[list[np.ndarray]] | list[np.ndarray], targets: list[list[np.ndarray]] | list[np.ndarray]) -> None:
        for layer in range(shape.num_layers):
            for p in range(2):
                np.copyto(targets[p][layer], sources[p][layer])

    def memcpy() -> None:
        np.copyto(target.view(np.uint16), source.view(np.uint16))

    wire_target, wire_source = on_wire(target), on_wire(source)
    runs: list[Callable[[], object]] = [
        memcpy,
        lambda: read_blocks(natively, table, tokens, out=list(target)),
        lambda: write_blocks(natively, table, blocks),
        lambda: read_blocks(pool, table, tokens, out=list(target)),
        lambda: write_blocks(pool, table, blocks),
        lambda: strided(in_pages, wire_target),
        lambda: strided(wire_source, in_pages),
    ]
    plain_s, *ours_s = best_times([Timed(run, warm_up) for run in runs], repeats)
    whole = num_whole * shape.page_size / shape.num_tokens
    ratios = [round(plain_s * part / took_s, 3) for took_s, part in zip(ours_s, (1, 1, 1, 1, whole, whole), strict=True)]
    name = "scattered" if scattered else "consecutive"
    return Row(shape.name, layout, name, round(source.nbytes / 1e6, 1), round(source.nbytes / plain_s / 1e9, 2), *ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--layouts", nargs="*", default=list(GQA_LAYOUTS), choices=list(GQA_LAYOUTS))
    parser.add_argument("--cache-dir", help="where compiled C++ is kept")
    arguments = parser.parse_args()
    native, fallbacks = native_moves(arguments.cache_dir)
    if fallbacks:
        print(f"numpy moves everything: {', '.join(fallbacks)}")
    rows = []
    print(f"{'shape':26} {'layout':18} {'pages':12} {'read':>6} {'write':>6}  of memcpy, target {TARGET:.2f}")
    for shape in SHAPES:
        for layout in arguments.layouts:
            if layout == "tpu_ragged_dim64" and shape.head_dim != 64:
                continue
            for scattered in (False, True):
                row = measure(shape, layout, scattered, arguments.repeats, native)
                rows.append(row)
                verdict = "ok" if min(row.read, row.write) >= TARGET else "short"
                print(
                    f"{row.shape:26} {row.layout:18} {row.pages:12} {row.read:6.2f} {row.write:6.2f}  {verdict:5} "
                    f"(numpy {row.numpy_read:.2f}, {row.numpy_write:.2f}; strided {row.strided_read:.2f}, {row.strided_write:.2f})",
                    flush=True,
                )
    print(f"{sum(min(row.read, row.write) >= TARGET for row in rows)} of {len(rows)} rows reach {TARGET:.2f} both ways")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
