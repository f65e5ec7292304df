"""Shapes of real models, for the tests, compile checks and benchmarks of every kernel.

Numbers are those of each model's published ``config.json``, and each was found again in at least two public places that quote it (copies
of the file, other projects' presets, the defaults of transformers' configuration classes). Gemma 3's file leaves the numbers of heads, the
head size, the period of its windows and the vocabulary to those defaults. Not stated here, as no kernel needs it: what scales q k^T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class ModelShape:
    """What a kernel must know of a model. ``source``: the repository on huggingface.co whose ``config.json`` says so.

    ``windows``: the sliding windows of the layers, repeated from the first layer on, None for a layer that sees everything ·
    ``soft_cap``: on attention scores · ``sinks``: whether heads have an attention sink · ``intermediate_size``: of the dense MLP, or of one
    expert where there is no dense one.
    """

    source: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    windows: tuple[int | None, ...] = (None,)
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def kv_values_per_token(self) -> int:
        """K and V of all layers, in values; times the itemsize it is the KV of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class MLAShape:
    """A model with multi-head latent attention (arXiv:2405.04434): per token and layer a latent and one rotated key, shared by all heads.

    ``latent_dim``: kv_lora_rank · ``rope_dim``: qk_rope_head_dim · ``nope_dim``: qk_nope_head_dim · ``v_dim``: v_head_dim.
    """

    source: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    vocab_size: int

    @property
    def scale(self) -> float:
        """1 / sqrt(nope_dim + rope_dim): scores are those of the heads before they were absorbed into the latent. Without YaRN's mscale."""
        return float((self.nope_dim + self.rope_dim) ** -0.5)

    @property
    def kv_values_per_token(self) -> int:
        """Latent and rotated key of all layers, in values."""
        return self.num_layers * (self.latent_dim + self.rope_dim)


MODEL_SHAPES: Final[dict[str, ModelShape]] = {
    "smollm2-135m": ModelShape("HuggingFaceTB/SmolLM2-135M-Instruct", 30, 576, 1536, 9, 3, 64, 49152),
    "llama-3.1-8b": ModelShape("meta-llama/Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256),
    "llama-3.1-70b": ModelShape("meta-llama/Llama-3.1-70B", 80, 8192, 28672, 64, 8, 128, 128256),
    "qwen2.5-7b": ModelShape("Qwen/Qwen2.5-7B", 28, 3584, 18944, 28, 4, 128, 152064),
    "qwen3-32b": ModelShape("Qwen/Qwen3-32B", 64, 5120, 25600, 64, 8, 128, 151936),
    "mistral-7b": ModelShape("mistralai/Mistral-7B-v0.1", 32, 4096, 14336, 32, 8, 128, 32000, windows=(4096,)),
    "gemma-2-9b": ModelShape("google/gemma-2-9b", 42, 3584, 14336, 16, 8, 256, 256000, windows=(4096, None), soft_cap=50.0),
    "gemma-3-4b": ModelShape("google/gemma-3-4b-pt", 34, 2560, 10240, 8, 4, 256, 262208, windows=(1024, 1024, 1024, 1024, 1024, None)),
    "gpt-oss-20b": ModelShape("openai/gpt-oss-20b", 24, 2880, 2880, 64, 8, 64, 201088, windows=(128, None), sinks=True),
}

MLA_SHAPES: Final[dict[str, MLAShape]] = {
    "deepseek-v3": MLAShape("deepseek-ai/DeepSeek-V3", 61, 7168, 18432, 128, 512, 64, 128, 128, 129280),
}
