"""Times of kernels by CUDA events, against the measured limits, and beside torch's own attention where that can do the same work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from benchmarks.gpu.batches import PAGE_SIZE, Heads, draw, tables
from benchmarks.gpu.check_attention import problem_of
from benchmarks.gpu.findings import Finding
from benchmarks.gpu.latent import Latents, attend, path_of, plan
from benchmarks.gpu.limits import Limits, measure
from benchmarks.gpu.sizes import Rows, Sizes
from benchmarks.gpu.timing import time_calls
from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddkernels.shapes import MLA_SHAPES, MODEL_SHAPES, MLAShape, ModelShape
from pddkernels.targets import work
from pddkernels.torch_ops import TRITON, TorchOps, choose

# Groups of 4 and of 8 query heads, and the widest heads, half of whose layers have a window and a cap.
MODELS: Final = ("llama-3.1-8b", "qwen3-32b", "gemma-2-9b")
LATENT_MODEL: Final = "deepseek-v3"
_DTYPE: Final = torch.bfloat16


def run(models: tuple[str, ...], device: torch.device, sizes: Sizes, seed: int) -> list[Finding]:
    """``models``: of :data:`pddkernels.shapes.MODEL_SHAPES`; page moves are timed for the first."""
    limits = measure(device, sizes)
    timer = _Timer(device, sizes, limits)
    findings = []
    for model in models:
        shape = MODEL_SHAPES[model]
        for what, rows in sizes.timed.items():
            for window in dict.fromkeys(shape.windows):
                label = f"{model}: {what}{'' if window is None else f', window {window}'}"
                findings.append(_attention(label, timer, shape, rows, window, seed))
    findings += _moves(timer, MODEL_SHAPES[models[0]], models[0], seed)
    for what, rows in sizes.timed.items():
        if rows[0][1] == 1:
            findings.append(_latent(f"{LATENT_MODEL}: {what}", timer, MLA_SHAPES[LATENT_MODEL], rows, seed))
    return findings


class _Timer:
    def __init__(self, device: torch.device, sizes: Sizes, limits: Limits) -> None:
        self.device, self.sizes, self.limits = device, sizes, limits

    def seconds(self, call: Callable[[], object]) -> float:
        return time_calls(call, self.device, self.sizes.rounds).median_s


def _attention(what: str, timer: _Timer, shape: ModelShape, rows: Rows, window: int | None, seed: int) -> Finding:
    path, seconds = _attend(timer, shape, rows, window, seed)
    todo = work.attention([work.Row(*row) for row in rows], shape.num_heads, shape.num_kv_heads, shape.head_dim, window)
    numbers = timer.limits.numbers(todo, seconds)
    if window is not None or shape.soft_cap is not None or shape.sinks:
        return Finding(what, "measured", f"{path}; torch's attention has no such option", numbers)
    try:
        beside = timer.seconds(torch_attention(rows, Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim), timer.device))
    except (ValueError, RuntimeError) as error:  # not such rows; no backend for the shape, or no memory for what it makes of it
        return Finding(what, "measured", f"{path}; torch's attention: {' '.join(str(error).split())[:120]}", numbers)
    return Finding(what, "measured", path, numbers | {"torch_ms": beside * 1e3, "torch_over_ours": beside / seconds})


def _attend(timer: _Timer, shape: ModelShape, rows: Rows, window: int | None, seed: int) -> tuple[str, float]:
    """Path and seconds; pages are gone once it returns."""
    batch = draw(rows, Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim), _DTYPE, window, timer.device, seed)
    ops = choose(problem_of(shape, _DTYPE), timer.device)
    step = ops.plan(batch.row_starts, batch.context_lens, batch.page_tables)
    step.append(batch.k_pages, batch.v_pages, batch.keys, batch.values)
    options = AttentionOptions(shape.head_dim**-0.5, window, shape.soft_cap)
    sinks = torch.zeros(shape.num_heads, device=timer.device) if shape.sinks else None
    return ops.path, timer.seconds(lambda: step.attend(batch.queries, batch.k_pages, batch.v_pages, options, sinks))


def torch_attention(rows: Rows, heads: Heads, device: torch.device) -> Callable[[], torch.Tensor]:
    """``scaled_dot_product_attention`` over the same rows, their KV contiguous, not in pages. Raises ValueError for unequal
    rows.

    Chunks get their keys and values repeated per query head beforehand, so that every backend can serve them; decode rows do not, since
    reading them is the work.
    """
    if len(set(rows)) != 1:
        raise ValueError("rows of unequal lengths")
    context_len, new = rows[0]
    length = context_len + new

    def randn(num_heads: int, num_tokens: int) -> torch.Tensor:
        return torch.randn(len(rows), num_heads, num_tokens, heads.head_dim, device=device, dtype=_DTYPE)

    queries = randn(heads.num_heads, new)
    if new == 1:
        keys, values = randn(heads.num_kv_heads, length), randn(heads.num_kv_heads, length)
        return lambda: F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
    keys, values = randn(heads.num_heads, length), randn(heads.num_heads, length)
    if context_len == 0:
        return lambda: F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    mask = causal_lower_right(new, length)
    return lambda: F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


def _moves(timer: _Timer, shape: ModelShape, model: str, seed: int) -> list[Finding]:
    """Append of one layer, pack and unpack of all: bytes read and written, against a copy."""
    num_tokens, device = timer.sizes.timed_tokens, timer.device
    page_tables, num_pages = tables(np.array([num_tokens]), seed)
    page_shape = (shape.num_layers, num_pages, shape.num_kv_heads, PAGE_SIZE, shape.head_dim)
    pool = torch.randn(page_shape, device=device, dtype=_DTYPE)
    ops = choose(problem_of(shape, _DTYPE), device)
    pack, unpack = _movers(ops, page_tables[0], device)
    wire = pack(pool, 0, num_tokens, 0, shape.num_kv_heads)
    kept = torch.randn((num_tokens, 2, shape.num_kv_heads, shape.head_dim), device=device, dtype=_DTYPE)
    step = ops.plan(np.array([0, num_tokens], np.int32), np.zeros(1, np.int32), page_tables)
    plane_values = shape.num_layers * num_tokens * shape.num_kv_heads * shape.head_dim
    layer_values = 2 * num_tokens * shape.num_kv_heads * shape.head_dim
    calls: dict[str, tuple[int, Callable[[], object]]] = {
        "append, one layer": (layer_values, lambda: step.append(pool[0], pool[1], kept[:, 0], kept[:, 1])),
        "pack, one plane": (plane_values, lambda: pack(pool, 0, num_tokens, 0, shape.num_kv_heads)),
        "unpack, one plane": (plane_values, lambda: unpack(pool, wire, 0, 0)),
    }
    return [
        Finding(
            f"{model}: {name}, {num_tokens} tokens",
            "measured",
            ops.path,
            timer.limits.numbers(work.copy(num_values), timer.seconds(call)),
        )
        for name, (num_values, call) in calls.items()
    ]


def _movers(
    ops: TorchOps, page_table: np.ndarray, device: torch.device
) -> tuple[Callable[[torch.Tensor, int, int, int, int], torch.Tensor], Callable[[torch.Tensor, torch.Tensor, int, int], None]]:
    """Pack and unpack. Triton's get a table that is on the device already: sending it, as the dispatch point does, makes the host wait."""
    if ops.path != TRITON:
        return (
            lambda pool, start, stop, first, count: ops.pack(pool, page_table, start, stop, first, count),
            lambda pool, wire, start, first: ops.unpack(pool, wire, page_table, start, first),
        )
    from pddkernels.kv_pages import triton as kernels

    table = torch.from_numpy(page_table).to(device)
    return (
        lambda pool, start, stop, first, count: kernels.pack_tokens(pool, table, start, stop, first, count),
        lambda pool, wire, start, first: kernels.unpack_tokens(pool, wire, table, start, first),
    )


def _latent(what: str, timer: _Timer, shape: MLAShape, rows: Rows, seed: int) -> Finding:
    batch = draw(rows, Heads(shape.num_heads, 1, shape.latent_dim + shape.rope_dim), _DTYPE, None, timer.device, seed)
    latents = Latents.of(shape, batch.queries, batch.stored()[0][:, 0])
    step = plan(batch.row_starts, batch.context_lens, batch.page_tables, shape, PAGE_SIZE, _DTYPE, timer.device)
    seconds = timer.seconds(lambda: attend(latents, step, shape.scale))
    todo = work.latent_attention([work.Row(*row) for row in rows], shape.num_heads, shape.latent_dim, shape.rope_dim)
    return Finding(what, "measured", path_of(timer.device), timer.limits.numbers(todo, seconds))
