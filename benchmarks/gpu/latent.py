"""Multi-head latent attention by the path of a device. Engines do not call the op yet, so it has no dispatch point of its own."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np
import torch

from pddkernels.mla_decode import portable_torch
from pddkernels.mla_decode.triton_plan import LatentShape, plan_mla, tile_for
from pddkernels.ragged_paged_attention.portable_torch import AttentionPlan, plan_attention
from pddkernels.ragged_paged_attention.triton_plan import Plan
from pddkernels.shapes import MLAShape
from pddkernels.torch_ops import PORTABLE, TRITON, gpu_of


@dataclass(frozen=True)
class Latents:
    """``q_latent`` [T, heads, latent], ``q_rope`` [T, heads, rope] · ``latent_pages``, ``rope_pages`` [N, page_size, latent or rope]."""

    q_latent: torch.Tensor
    q_rope: torch.Tensor
    latent_pages: torch.Tensor
    rope_pages: torch.Tensor

    @staticmethod
    def of(shape: MLAShape, queries: torch.Tensor, pages: torch.Tensor) -> Latents:
        """``queries`` [T, heads, latent + rope], ``pages`` [N, page_size, latent + rope]."""
        sizes = [shape.latent_dim, shape.rope_dim]
        return Latents(*(part.contiguous() for whole in (queries, pages) for part in whole.split(sizes, -1)))


def path_of(device: torch.device) -> str:
    return TRITON if device.type == "cuda" and importlib.util.find_spec("triton") else PORTABLE


def plan(
    row_starts: np.ndarray,
    context_lens: np.ndarray,
    page_tables: np.ndarray,
    shape: MLAShape,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Plan | AttentionPlan:
    if path_of(device) == PORTABLE:
        dim = shape.latent_dim + shape.rope_dim
        return plan_attention(
            row_starts,
            context_lens,
            page_tables,
            num_kv_heads=1,
            page_size=page_size,
            head_dim=dim,
            mask_dtype=torch.float32,
            device=device,
        )
    latent = LatentShape(shape.num_heads, shape.latent_dim, shape.rope_dim, page_size, dtype.itemsize)
    gpu = gpu_of(device)
    return plan_mla(
        row_starts,
        context_lens,
        page_tables,
        shape=latent,
        tile=tile_for(latent, gpu),
        num_processors=gpu.num_processors,
        device=device,
    )


def attend(latents: Latents, step: Plan | AttentionPlan, scale: float) -> torch.Tensor:
    arrays = (latents.q_latent, latents.q_rope, latents.latent_pages, latents.rope_pages)
    if isinstance(step, AttentionPlan):
        return portable_torch.mla_attention(*arrays, step, scale)
    from pddkernels.mla_decode import triton as kernels

    return kernels.mla_attention(*arrays, step, scale)
