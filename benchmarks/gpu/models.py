"""Specs of the models that engines are measured with, and engines on random weights of them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Final, Literal

from pddbridge.engine import Engine, EngineConfig
from pddbridge.model_spec import ModelSpec, plain_spec
from pddbridge.random_checkpoint import RandomCheckpoint
from pddbridge.rope import Llama3Scaling, RopeSpec
from pddkernels.shapes import MODEL_SHAPES, ModelShape

EngineName = Literal["torch", "jax"]

# Llama 3.1's own rotation, from its config.json.
_LLAMA3_ROPE: Final = RopeSpec(500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))
_TINY: Final = ModelShape("none", 3, 128, 256, 6, 2, 32, 700)
# Heads that kernels have tiles for, sizes that are unequal; small enough that its KV crosses in a second.
HANDED_OVER: Final = ModelShape("none", 3, 384, 640, 6, 2, 64, 2003)


def shape_of(model: str) -> ModelShape:
    """``model``: of :data:`MODEL_SHAPES`, or "tiny"."""
    return _TINY if model == "tiny" else MODEL_SHAPES[model]


def spec_of(shape: ModelShape, max_context_tokens: int, num_layers: int | None = None) -> ModelSpec:
    """A plain Llama of ``shape``, cut to ``num_layers``. Raises ValueError for a shape that a plain Llama is not."""
    if shape.windows != (None,) or shape.soft_cap is not None or shape.sinks:
        raise ValueError(f"shape: given one of {shape.source}, allowed: without windows, caps and sinks")
    return plain_spec(
        num_layers=num_layers or shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_context_tokens=max_context_tokens,
        rms_norm_eps=1e-5,
        rope=_LLAMA3_ROPE,
        tie_embeddings=False,
    )


def set_environment(engines: dict[EngineName, str], threads: int) -> None:
    """What ``engines`` (device by name) read from the environment; before torch or jax is imported. What the user set stands."""
    from pddjax import threads as jax_threads
    from pddtorch import threads as torch_threads

    wanted: dict[str, str] = {}
    if "jax" in engines:
        platform = engines["jax"]
        wanted |= jax_threads.environment(threads, platform)
        wanted |= {"JAX_PLATFORMS": "cpu" if platform == "cpu" else "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if "torch" in engines:
        wanted |= torch_threads.environment(threads, engines["torch"])
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def make_engine(name: EngineName, spec: ModelSpec, config: EngineConfig, seed: int) -> Engine:
    """``name``'s engine on random weights in the config's compute dtype; equal for equal seeds."""
    checkpoint = RandomCheckpoint(spec, seed, config.compute_dtype)
    if name == "torch":
        from pddtorch.engine import TorchEngine

        return TorchEngine(checkpoint, config)
    from pddjax.engine import create_from

    return create_from(checkpoint, config)


def unexpected_fallbacks(name: EngineName, device: str, counted: Mapping[str, int]) -> list[str]:
    """What a GPU has kernels for and did not use them. JAX has none for GPUs, and says so; without Triton PyTorch has none either."""
    from pddkernels.torch_ops import NO_TRITON

    if name != "torch" or not device.startswith("cuda"):
        return []
    expected = {NO_TRITON} if importlib.util.find_spec("triton") is None else set()
    return sorted({reason for reason, times in counted.items() if times} - expected)


def config_of(
    spec: ModelSpec, device: str, dtype: str, num_pages: int, step_tokens: int, rows: int, threads: int, page_size: int = 16
) -> EngineConfig:
    return EngineConfig(
        device=device,
        compute_dtype=dtype,
        kv_dtype=dtype,
        page_size=page_size,
        num_pages=num_pages,
        max_context_tokens=spec.max_context_tokens,
        max_step_tokens=step_tokens,
        max_rows=rows,
        num_threads=threads,
        compile_cache_dir=None,
    )
