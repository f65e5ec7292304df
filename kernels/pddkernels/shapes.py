"""Shapes of real models, for the tests and benchmarks of every kernel. Numbers are those of each model's published ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class ModelShape:
    """What a kernel must know of a model. ``source``: the repository on huggingface.co whose ``config.json`` says so."""

    source: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def kv_values_per_token(self) -> int:
        """K and V of all layers, in values; times the itemsize it is the KV of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


MODEL_SHAPES: Final[dict[str, ModelShape]] = {
    "smollm2-135m": ModelShape("HuggingFaceTB/SmolLM2-135M-Instruct", 30, 576, 1536, 9, 3, 64, 49152),
    "llama-3.1-8b": ModelShape("meta-llama/Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256),
    "llama-3.1-70b": ModelShape("meta-llama/Llama-3.1-70B", 80, 8192, 28672, 64, 8, 128, 128256),
    "qwen2.5-7b": ModelShape("Qwen/Qwen2.5-7B", 28, 3584, 18944, 28, 4, 128, 152064),
    "qwen3-32b": ModelShape("Qwen/Qwen3-32B", 64, 5120, 25600, 64, 8, 128, 151936),
}
