"""Which path a device gets, and that one which is not its best is counted by its reason."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from pddkernels.ragged_paged_attention.triton_tiles import GFX942, SM80, SM90, Geometry, Gpu, tiles_for
from pddkernels.shapes import MODEL_SHAPES
from pddkernels.torch_ops import NO_TRITON, PORTABLE, UNKNOWN_DTYPE, UNKNOWN_SHAPE, Problem, choose, unavailable

CUDA = torch.device("cuda")
LLAMA = Problem(32, 8, 128, 16, torch.bfloat16, torch.bfloat16)


def test_a_cpu_gets_the_portable_path_and_that_is_no_fallback() -> None:
    ops = choose(LLAMA, torch.device("cpu"))
    assert (ops.path, dict(ops.fallbacks)) == (PORTABLE, {})


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (replace(LLAMA, kv_dtype=torch.float64), UNKNOWN_DTYPE),
        (replace(LLAMA, head_dim=512), UNKNOWN_SHAPE),
        (replace(LLAMA, num_heads=71, num_kv_heads=1), UNKNOWN_SHAPE),
    ],
)
def test_what_the_kernels_cannot_serve_on_a_gpu_is_a_counted_fallback(problem: Problem, reason: str) -> None:
    ops = choose(problem, CUDA)
    assert (ops.path, dict(ops.fallbacks)) == (PORTABLE, {reason: 1})


def test_a_gpu_without_triton_is_a_counted_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ops = choose(LLAMA, CUDA)
    assert (ops.path, dict(ops.fallbacks)) == (PORTABLE, {NO_TRITON: 1})


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_the_kernels_serve_every_named_model(name: str) -> None:
    shape = MODEL_SHAPES[name]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert unavailable(Problem(shape.num_heads, shape.num_kv_heads, shape.head_dim, 16, dtype, dtype, shape.windows)) is None


@pytest.mark.parametrize("gpu", [SM80, SM90, GFX942, Gpu("sm80", 46, 99 * 1024)], ids=lambda gpu: f"{gpu.family}, {gpu.num_processors}")
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_shared_memory_and_hold_a_token(gpu: Gpu, dim: int, itemsize: int) -> None:
    """Also on a GPU whose processors have less than those of its family's largest."""
    for group in (1, 7, 64):
        tiles = tiles_for(Geometry(4 * group, 4, dim, 16, itemsize), gpu)
        for tile in (tiles.few, tiles.many):
            assert tile.rows >= max(16, group)
            buffers = tile.num_stages - (gpu.family == "gfx942")
            padded = 1 << (dim - 1).bit_length()
            queries = tile.rows * padded * itemsize
            assert queries + buffers * 2 * tile.keys * padded * itemsize <= gpu.shared_memory_bytes
