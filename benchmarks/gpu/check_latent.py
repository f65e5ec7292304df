"""Multi-head latent attention of the named shapes against float64: Triton's kernel on a GPU, the portable path elsewhere."""

from __future__ import annotations

import torch

from benchmarks.gpu import exact
from benchmarks.gpu.batches import PAGE_SIZE, Batch, Heads, draw, poisoned_memory
from benchmarks.gpu.check_attention import DTYPES, compare
from benchmarks.gpu.findings import Finding
from benchmarks.gpu.latent import Latents, attend, path_of, plan
from benchmarks.gpu.sizes import Sizes
from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddkernels.shapes import MLA_SHAPES, MLAShape


def run(device: torch.device, sizes: Sizes, seed: int) -> list[Finding]:
    findings = [Finding("path", "measured", path_of(device))]
    for model, shape in MLA_SHAPES.items():
        for name, dtype in DTYPES.items():
            for what, rows in sizes.latent_batches.items():
                heads = Heads(shape.num_heads, 1, shape.latent_dim + shape.rope_dim)
                batch = draw(rows, heads, dtype, None, device, seed + len(findings))
                findings.append(_check(f"{model}, {name}: {what}", batch, shape, dtype, device))
    return findings


def _check(what: str, batch: Batch, shape: MLAShape, dtype: torch.dtype, device: torch.device) -> Finding:
    """Keys are latent and rope values side by side, as one KV head; values are the latents."""
    pages, _ = batch.stored()
    wanted = exact.attention(
        batch.queries,
        pages,
        pages[..., : shape.latent_dim],
        batch.row_starts,
        batch.context_lens,
        batch.page_tables,
        AttentionOptions(shape.scale),
    )
    latents = Latents.of(shape, batch.queries, pages[:, 0])
    with poisoned_memory():
        step = plan(batch.row_starts, batch.context_lens, batch.page_tables, shape, PAGE_SIZE, dtype, device)
        got = attend(latents, step, shape.scale)
    return compare(what, got, wanted, dtype)
