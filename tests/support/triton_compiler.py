"""A child process that compiles Triton kernels for an NVIDIA GPU that is not here and tells what is in the code: one target per process,
and never in a process that interprets kernels. ``python -m tests.support.triton_compiler sm90 CASE...``, a JSON row per kernel.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from pddkernels.kv_pages import triton as pages
from pddkernels.mla_decode import triton as latent_attention
from pddkernels.mla_decode.triton_plan import LatentShape, plan_mla, tile_for
from pddkernels.ragged_paged_attention import triton as attention
from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddkernels.ragged_paged_attention.triton_plan import plan
from pddkernels.ragged_paged_attention.triton_tiles import SM80, SM90, Geometry, Gpu, tiles_for
from pddkernels.targets.gpu import _cuda_facts, launches_caught

META = torch.device("meta")
TARGETS = {"sm80": (GPUTarget("cuda", 80, 32), SM80), "sm90": (GPUTarget("cuda", 90, 32), SM90)}


def _attend(gpu: Gpu, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, options: AttentionOptions) -> None:
    """A long chunk, and decode rows with one so long that it is split."""
    geometry = Geometry(heads, kv_heads, dim, 16, dtype.itemsize)
    news, contexts = np.array([2048, 1, 1]), np.array([512, 65_535, 700])
    step = plan(
        np.array([0, *np.cumsum(news)]),
        contexts,
        np.zeros((3, 65_536 // 16), np.int32),
        geometry=geometry,
        tiles=tiles_for(geometry, gpu),
        windows=(options.window,),
        num_processors=gpu.num_processors,
        device=META,
    )
    k_pages = torch.empty((5000, kv_heads, 16, dim), dtype=dtype, device=META)
    queries = torch.empty((2050, heads + kv_heads, dim), dtype=dtype, device=META)[:, :heads]
    attention.ragged_paged_attention(queries, k_pages, k_pages, step, options, torch.empty(heads, dtype=torch.float32, device=META))


def _attend_latents(gpu: Gpu, dtype: torch.dtype) -> None:
    """DeepSeek-V3's heads: decode rows, one so long that it is split."""
    shape = LatentShape(128, 512, 64, 16, dtype.itemsize)
    step = plan_mla(
        np.arange(3),
        np.array([65_535, 700]),
        np.zeros((2, 65_536 // 16), np.int32),
        shape=shape,
        tile=tile_for(shape, gpu),
        num_processors=gpu.num_processors,
        device=META,
    )
    queries = (torch.empty((2, 128, dim), dtype=dtype, device=META) for dim in (512, 64))
    planes = (torch.empty((5000, 16, dim), dtype=dtype, device=META) for dim in (512, 64))
    latent_attention.mla_attention(*queries, *planes, step, 0.1)


def _append(kv_dtype: torch.dtype) -> None:
    """float32 keys, which the rotation leaves, and bfloat16 values."""
    k_pages = torch.empty((5000, 8, 16, 128), dtype=kv_dtype, device=META)
    keys, values = (torch.empty((64, 40, 128), dtype=dtype, device=META)[:, :8] for dtype in (torch.float32, torch.bfloat16))
    pages.append(k_pages, k_pages, keys, values, *(torch.empty(n, dtype=torch.int32, device=META) for n in (64, 1)))


def _cases(gpu: Gpu) -> dict[str, Callable[[], None]]:
    full = AttentionOptions(0.1)
    cases: dict[str, Callable[[], None]] = {
        "llama-3.1-8b": lambda: _attend(gpu, 32, 8, 128, torch.bfloat16, full),
        "deepseek-v3 bfloat16": lambda: _attend_latents(gpu, torch.bfloat16),
        "deepseek-v3 float32": lambda: _attend_latents(gpu, torch.float32),
        "append to bfloat16": lambda: _append(torch.bfloat16),
        "append to float16": lambda: _append(torch.float16),
    }
    for dim in (64, 80, 96, 128, 256):
        for dtype in (torch.float16, torch.float32):
            for options in (full, AttentionOptions(0.1, 1024, 30.0)):
                name = f"dim {dim} {str(dtype).removeprefix('torch.')}{'' if options is full else ' window cap'}"
                cases[name] = lambda dim=dim, dtype=dtype, options=options: _attend(gpu, 28, 4, dim, dtype, options)  # type: ignore[misc]
    return cases


def main() -> None:
    target, gpu = TARGETS[sys.argv[1]]
    cases = _cases(gpu)
    for name in sys.argv[2:] or cases:
        with launches_caught(target) as launches:
            cases[name]()
        for launch in launches:
            kernel = triton.compile(launch.source, target=target, options=launch.options)
            sass, registers = _cuda_facts(kernel)
            names = launch.source.fn.arg_names
            row = {
                "case": name,
                "kernel": launch.name,
                "rows": next((value for path, value in launch.source.constants.items() if names[path[0]] == "ROWS"), 0),
                "spill_bytes": registers.spill_bytes,
                "registers": registers.registers,
                "warp_group_products": len(re.findall(r"\bHGMMA\.", sass)),
                "products": len(re.findall(r"\b(?:HMMA|HGMMA)\.", sass)),
                "copies": sorted(set(re.findall(r"\b(LDGSTS\S*)", sass))),
                "conversions": sorted(set(re.findall(r"\bcvt\.\S+", kernel.asm["ptx"]))),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
