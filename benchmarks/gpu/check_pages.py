"""Page moves between pool and wire order, bit for bit, and attention over a pool of more than 2**31 values."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from benchmarks.gpu import exact
from benchmarks.gpu.batches import PAGE_SIZE, places, same_bits, tables
from benchmarks.gpu.check_attention import DTYPES, compare, problem_of
from benchmarks.gpu.findings import Finding, checked
from benchmarks.gpu.sizes import Sizes
from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddkernels.shapes import MODEL_SHAPES, ModelShape
from pddkernels.torch_ops import TorchOps, choose

_LAYERS: Final = 3
_BITS: Final = {2: torch.int16, 4: torch.int32}
_FAR_MODEL: Final = "llama-3.1-8b"
_FAR_TOKENS: Final = 3000


def run(device: torch.device, sizes: Sizes, seed: int) -> list[Finding]:
    findings = []
    for name, dtype in DTYPES.items():
        for model, shape in MODEL_SHAPES.items():
            ops = choose(problem_of(shape, dtype), device)
            problem = _moves(ops, shape, dtype, sizes.moved_tokens, device, seed)
            findings.append(checked(f"{name}: pack and unpack, {model}", problem, note=ops.path))
    what = "attention over a pool of more than 2**31 values"
    findings.append(_far_pages(what, device, seed) if device.type == "cuda" else Finding(what, "skipped", "not a GPU"))
    return findings


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Any bit pattern, NaNs with payloads among them."""
    kind = _BITS[dtype.itemsize]
    info = torch.iinfo(kind)
    return torch.randint(info.min, info.max, shape, dtype=kind, device=device, generator=generator).view(dtype)


def _moves(ops: TorchOps, shape: ModelShape, dtype: torch.dtype, num_tokens: int, device: torch.device, seed: int) -> str | None:
    """What is wrong with packing tokens [3, num_tokens) of all heads and of some, and unpacking them elsewhere; None if nothing."""
    generator = torch.Generator(device).manual_seed(seed)
    page_tables, num_pages = tables(np.array([num_tokens, num_tokens]), seed)
    pool_shape = (_LAYERS, num_pages, shape.num_kv_heads, PAGE_SIZE, shape.head_dim)
    pool, target = (random_bits(pool_shape, dtype, device, generator) for _ in range(2))
    for first, count in ((0, shape.num_kv_heads), (shape.num_kv_heads - 1, 1)):
        heads = slice(first, first + count)
        start = 3
        packed = ops.pack(pool, page_tables[0], start, num_tokens, first, count)
        pages, slots = places(page_tables[0], np.arange(start, num_tokens), device)
        wanted = pool[:, pages, :, slots].transpose(0, 1)[:, :, heads]  # advanced indices apart come first: [tokens, layers, heads, dim]
        if packed.shape != wanted.shape or not same_bits(packed, wanted):
            return f"packed heads {first}..{first + count - 1}: not the bits of the pages"
        wanted_pool = target.clone()
        pages, slots = places(page_tables[1], np.arange(start, num_tokens), device)
        wanted_pool[:, pages, heads, slots] = packed.transpose(0, 1)
        ops.unpack(target, packed, page_tables[1], start, first)
        if not same_bits(target, wanted_pool):
            return f"unpacked heads {first}..{first + count - 1}: pages are not those that were to be, bit for bit"
    return None


def _far_pages(what: str, device: torch.device, seed: int) -> Finding:
    """One decode row in the last pages of pools whose offsets need 64 bits; everything else is NaN."""
    shape, dtype = MODEL_SHAPES[_FAR_MODEL], torch.bfloat16
    used = -(-_FAR_TOKENS // PAGE_SIZE)
    num_pages = 2**31 // (shape.num_kv_heads * PAGE_SIZE * shape.head_dim) + used
    page_shape = (num_pages, shape.num_kv_heads, PAGE_SIZE, shape.head_dim)
    generator = torch.Generator(device).manual_seed(seed)
    pools = [torch.full(page_shape, float("nan"), dtype=dtype, device=device) for _ in range(2)]
    for pool in pools:
        pool[-used:] = torch.randn(pool[-used:].shape, generator=generator, device=device).to(dtype)
    queries = torch.randn((1, shape.num_heads, shape.head_dim), generator=generator, device=device).to(dtype)
    row_starts, context_lens = np.array([0, 1], np.int32), np.array([_FAR_TOKENS - 1], np.int32)
    table = np.arange(num_pages - used, num_pages, dtype=np.int32)[None]
    options = AttentionOptions(shape.head_dim**-0.5)
    ops = choose(problem_of(shape, dtype), device)
    got = ops.plan(row_starts, context_lens, table).attend(queries, pools[0], pools[1], options)
    tails = [pool[-used:] for pool in pools]
    near = table - (num_pages - used)
    return compare(what, got, exact.attention(queries, tails[0], tails[1], row_starts, context_lens, near, options), dtype)
