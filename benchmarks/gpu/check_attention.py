"""Append and attention through the dispatch point that engines use, for one model's heads: against bits and against float64."""

from __future__ import annotations

from typing import Final

import torch

from benchmarks.gpu import exact
from benchmarks.gpu.batches import PAGE_SIZE, Heads, draw, poisoned_memory, same_bits
from benchmarks.gpu.findings import Finding, checked
from benchmarks.gpu.sizes import Rows, Sizes
from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddkernels.shapes import MODEL_SHAPES, ModelShape
from pddkernels.torch_ops import NO_TRITON, TRITON, Problem, TorchOps, choose

FLOAT32_ERROR: Final = 1e-5  # absolute, on unit normal values
HALF_ERROR: Final = 2e-2  # of each output vector's norm, against float64 of the rounded inputs
DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Each dtype of each model is kernels to compile, and float16 ones differ from bfloat16's in nothing else.
_FLOAT16_MODEL: Final = "llama-3.1-8b"


def run(model: str, device: torch.device, sizes: Sizes, seed: int) -> list[Finding]:
    """Every batch, dtype and window of ``model``; and that its heads have kernels on a GPU."""
    shape = MODEL_SHAPES[model]
    findings = [checked("memory is poisoned", None if _is_poisoned(device) else "torch did not fill it with NaN")]
    for name, dtype in DTYPES.items():
        if dtype == torch.float16 and model != _FLOAT16_MODEL:
            continue
        ops = choose(problem_of(shape, dtype), device)
        findings.append(check_path(f"{name}: path", ops, device))
        for what, rows in sizes.batches.items():
            for window in dict.fromkeys(shape.windows):
                label = f"{name}: {what}{'' if window is None else f', window {window}'}"
                findings.append(check_batch(label, ops, shape, rows, dtype, window, device, seed + len(findings)))
    return findings


def _is_poisoned(device: torch.device) -> bool:
    with poisoned_memory():
        return bool(torch.empty(1 << 16, device=device).isnan().all())


def problem_of(shape: ModelShape, dtype: torch.dtype) -> Problem:
    return Problem(shape.num_heads, shape.num_kv_heads, shape.head_dim, PAGE_SIZE, dtype, dtype, tuple(dict.fromkeys(shape.windows)))


def check_path(what: str, ops: TorchOps, device: torch.device) -> Finding:
    """A GPU must take its kernels, unless there is no Triton at all, which is said."""
    if device.type != "cuda":
        return Finding(what, "measured", f"{ops.path}, not a GPU")
    if set(ops.fallbacks) == {NO_TRITON}:
        return Finding(what, "skipped", "triton is not installed: what follows is the portable path")
    problem = None if ops.path == TRITON and not any(ops.fallbacks.values()) else f"{ops.path}: {dict(ops.fallbacks)}"
    return checked(what, problem, note=ops.path)


def check_batch(
    what: str, ops: TorchOps, shape: ModelShape, rows: Rows, dtype: torch.dtype, window: int | None, device: torch.device, seed: int
) -> Finding:
    batch = draw(rows, Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim), dtype, window, device, seed)
    options = AttentionOptions(shape.head_dim**-0.5, window, shape.soft_cap)
    sinks = 2 * torch.randn(shape.num_heads, device=device) if shape.sinks else None
    wanted_pages = batch.stored()
    with poisoned_memory():
        step = ops.plan(batch.row_starts, batch.context_lens, batch.page_tables)
        step.append(batch.k_pages, batch.v_pages, batch.keys, batch.values)
        got = step.attend(batch.queries, batch.k_pages, batch.v_pages, options, sinks)
    if not all(same_bits(*pair) for pair in zip((batch.k_pages, batch.v_pages), wanted_pages, strict=True)):
        return checked(what, "append: pages are not those that were to be, bit for bit")
    wanted = exact.attention(batch.queries, *wanted_pages, batch.row_starts, batch.context_lens, batch.page_tables, options, sinks)
    return compare(what, got, wanted, dtype)


def compare(what: str, got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> Finding:
    """``got`` [T, heads, dim] against float64; NaN anywhere fails, and so does a comparison with nothing."""
    if got.shape != wanted.shape or not got.numel():
        return checked(what, f"shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}, not empty")
    difference = got.double() - wanted
    if dtype == torch.float32:
        errors, allowed = difference.abs().amax(-1), FLOAT32_ERROR
    else:
        errors, allowed = difference.norm(dim=-1) / wanted.norm(dim=-1), HALF_ERROR
    bad = ~(errors <= allowed)  # NaN is bad
    worst = torch.where(errors.isnan(), torch.inf, errors).flatten().argmax().item()
    token, head = divmod(int(worst), errors.shape[1])
    error = float(errors[token, head])
    problem = f"{int(bad.sum())} of {bad.numel()} vectors off, worst token {token} head {head}" if bool(bad.any()) else None
    return checked(what, problem, {"error": error, "allowed": allowed})
