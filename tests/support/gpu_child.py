"""What `make gpu` checks on a GPU, run on interpreted Triton kernels: for a process of :mod:`tests.support.triton_child`."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.gpu import check_attention, check_latent, check_pages, latent
from benchmarks.gpu.findings import Finding
from benchmarks.gpu.sizes import SMALL
from pddkernels.ragged_paged_attention.triton_tiles import Gpu
from pddkernels.shapes import MODEL_SHAPES
from pddkernels.torch_ops import TRITON, Problem, TorchOps, triton_ops
from tests.support.triton_child import small_tiles

CPU = torch.device("cpu")
_FEW_PROCESSORS = Gpu("sm90", 8, 227 * 1024)
_SIZES = replace(SMALL, batches={"mixed": ((5, 20), (0, 0), (40, 1), (3, 4))}, latent_batches={"mixed": ((16, 1), (3, 2))}, moved_tokens=21)


def attention(model: str) -> list[Finding]:
    """In float32: the interpreter does not round new KV to bfloat16 as GPUs do."""
    check_attention.choose = _choose
    check_attention.DTYPES = {"float32": torch.float32}
    return check_attention.run(model, CPU, _SIZES, seed=1)


def pages(model: str) -> list[Finding]:
    check_pages.choose = _choose
    check_pages.MODEL_SHAPES = {model: MODEL_SHAPES[model]}
    return check_pages.run(CPU, _SIZES, seed=1)


def latents() -> list[Finding]:
    latent.path_of = lambda device: TRITON
    latent.gpu_of = lambda device: _FEW_PROCESSORS
    return check_latent.run(CPU, _SIZES, seed=1)


def _choose(problem: Problem, device: torch.device) -> TorchOps:
    return triton_ops(problem, device, _FEW_PROCESSORS, small_tiles(problem.num_heads // problem.num_kv_heads))
