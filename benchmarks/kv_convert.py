"""How fast pages become wire order and back, next to a plain memcpy of the same bytes: `python benchmarks/kv_convert.py [--json FILE]`.

Read: ``read_blocks`` into fresh arrays against ``ndarray.copy`` (both pay for the memory they get), and into memory that is there (``out``)
against ``numpy.copyto``. Write: ``write_blocks`` against ``numpy.copyto``. Every pair is timed in turns, and before each timing a
buffer larger than the caches is read, so that both start cold. Ratio: memcpy's time over ours, the best of each.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pddbridge.engine import KVBlock
from pddbridge.kv_convert import KVPool, read_blocks, write_blocks
from pddbridge.kv_layout_catalogue import GQA_LAYOUTS
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange

_COLD_BYTES = 64 << 20
# A pool holds this many prompts, so scattered pages lie far apart.
_POOL_PROMPTS = 8


@dataclass(frozen=True)
class Shape:
    name: str
    num_layers: int
    num_heads: int
    head_dim: int
    num_tokens: int
    page_size: int


SHAPES = (
    Shape("SmolLM2-135M", 30, 3, 64, 1500, 16),
    Shape("8 heads of 128", 16, 8, 128, 1000, 16),
    Shape("8 heads of 128, pages of 128", 16, 8, 128, 1000, 128),
)


@dataclass(frozen=True)
class Row:
    shape: str
    layout: str
    pages: str
    read_fresh: float
    read_into: float
    write: float


def ratios(pairs: list[tuple[Callable[[], object], Callable[[], object]]], repeats: int) -> list[float]:
    """memcpy's best time over ours for each (memcpy, ours)."""
    cold = np.ones(_COLD_BYTES // 8)
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in pairs]
    for _ in range(repeats):
        for pair, kept in zip(pairs, times, strict=True):
            for run, samples in zip(pair, kept, strict=True):
                cold.sum()
                start = time.perf_counter()
                run()
                samples.append(time.perf_counter() - start)
    return [min(plain) / min(ours) for plain, ours in times]


def measure(shape: Shape, layout_name: str, scattered: bool, repeats: int) -> Row:
    """One row; the KV of one prompt in a pool of ``_POOL_PROMPTS`` such."""
    spec = KVSpec.gqa(shape.num_layers, shape.num_heads, shape.head_dim, "bfloat16")
    tokens = TokenRange(0, shape.num_tokens)
    num_used = -(-shape.num_tokens // shape.page_size)
    num_pages = num_used * _POOL_PROMPTS + 1
    table = np.random.default_rng(0).permutation(num_pages)[:num_used] if scattered else np.arange(1, num_used + 1)
    pool = KVPool.zeros(GQA_LAYOUTS[layout_name](shape.page_size, spec.dtype), spec, num_pages)
    for arrays in pool.arrays:
        for array in arrays:
            array.view(np.uint16)[...] = 1
    layers, heads = LayerRange(0, shape.num_layers), HeadRange(0, shape.num_heads)
    size = (2, shape.num_layers, shape.num_tokens, shape.num_heads, shape.head_dim)
    source, target = np.ones(size, np.uint16).view(spec.np_dtype), np.zeros(size, np.uint16).view(spec.np_dtype)
    source_bits, target_bits = source.view(np.uint16), target.view(np.uint16)
    blocks = [KVBlock(name, layers, tokens, heads, source[i]) for i, name in enumerate("kv")]

    def plain_fresh() -> tuple[np.ndarray, np.ndarray]:
        return source_bits[0].copy(), source_bits[1].copy()

    def plain_into() -> None:
        np.copyto(target_bits, source_bits)

    def read_into() -> None:
        read_blocks(pool, table, tokens, out=list(target))

    def write() -> None:
        write_blocks(pool, table, blocks)

    pairs: list[tuple[Callable[[], object], Callable[[], object]]] = [
        (plain_fresh, lambda: read_blocks(pool, table, tokens)),
        (plain_into, read_into),
        (plain_into, write),
    ]
    return Row(shape.name, layout_name, "scattered" if scattered else "consecutive", *(round(r, 2) for r in ratios(pairs, repeats)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--layouts", nargs="*", default=list(GQA_LAYOUTS), choices=list(GQA_LAYOUTS))
    arguments = parser.parse_args()
    rows = []
    print(f"{'shape':30} {'layout':18} {'pages':12} {'read fresh':>10} {'read into':>10} {'write':>10}   (memcpy = 1.00)")
    for shape in SHAPES:
        for layout in arguments.layouts:
            if layout == "tpu_ragged_dim64" and shape.head_dim != 64:
                continue
            for scattered in (False, True):
                row = measure(shape, layout, scattered, arguments.repeats)
                rows.append(row)
                print(f"{row.shape:30} {row.layout:18} {row.pages:12} {row.read_fresh:10.2f} {row.read_into:10.2f} {row.write:10.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
