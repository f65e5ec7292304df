"""Architecture facts of a model: everything that an engine must know to build the network, and nothing it must guess.

Engines read these facts, never the name of a family. They come from ``config.json`` (:mod:`pddbridge.model_spec_hf`) or GGUF metadata
(:mod:`pddbridge.model_spec_gguf`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from pddbridge.rope import RopeSpec

LLAMA: Final = "LlamaForCausalLM"
MISTRAL: Final = "MistralForCausalLM"
QWEN2: Final = "Qwen2ForCausalLM"
QWEN3: Final = "Qwen3ForCausalLM"
GEMMA2: Final = "Gemma2ForCausalLM"
GEMMA3: Final = "Gemma3ForCausalLM"
# Served as the text model inside it, whose spec says GEMMA3.
GEMMA3_MULTIMODAL: Final = "Gemma3ForConditionalGeneration"

Activation = Literal["silu", "gelu_tanh"]

_POSITIVE: Final = (
    *("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
    *("max_context_tokens", "rms_norm_eps", "attention_scale", "embedding_scale"),
)


@dataclass(frozen=True)
class ModelSpec:
    """A pre-norm decoder with grouped-query attention, RoPE (half-split) and a gated MLP: Llama, and what others changed about it.

    Per layer: ``layer_windows[l]`` tokens that a query sees, itself among them (None: all before it) · ``layer_ropes[l]``: which of
    ``ropes`` turns its q and k.

    Attention: ``attention_scale`` multiplies q k^T · ``attention_soft_cap`` c makes scores c tanh(scores / c) · ``qkv_bias``,
    ``attention_out_bias`` · ``qk_norm``: an RMSNorm over head_dim for q and one for k, before RoPE.
    Around it: ``embedding_scale`` multiplies token embeddings · ``norm_offset`` is added to every stored norm weight (Gemma keeps w of
    1 + w) · ``post_norms``: the outputs of attention and MLP are normed before they are added · ``activation`` of the gate ·
    ``logit_soft_cap`` as in attention.

    ``tie_embeddings`` is what the checkpoint really holds (see :mod:`pddbridge.checkpoint`), not only what the config says.
    ``eos_token_ids`` is the union of every source. Raises ValueError, naming the field, for numbers that contradict each other.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    rms_norm_eps: float
    ropes: tuple[RopeSpec, ...]
    layer_ropes: tuple[int, ...]
    layer_windows: tuple[int | None, ...]
    attention_scale: float
    attention_soft_cap: float | None
    qk_norm: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    activation: Activation
    norm_offset: float
    post_norms: bool
    embedding_scale: float
    logit_soft_cap: float | None
    tie_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for field in _POSITIVE:
            _check_positive(field, getattr(self, field))
        for field in ("attention_soft_cap", "logit_soft_cap"):
            if (cap := getattr(self, field)) is not None:
                _check_positive(field, cap)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: given {self.num_kv_heads}, must divide num_heads={self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: given {self.head_dim}, must be even for rotary embedding")
        for name in ("layer_windows", "layer_ropes"):
            if (given := len(getattr(self, name))) != self.num_layers:
                raise ValueError(f"{name}: given {given} layers, allowed num_layers={self.num_layers}")
        for window in self.layer_windows:
            if window is not None and window < 1:
                raise ValueError(f"layer_windows: given {window}, allowed: 1 or more, or null")
        if not set(self.layer_ropes) <= set(range(len(self.ropes))):
            raise ValueError(f"layer_ropes: given {self.layer_ropes}, allowed 0..{len(self.ropes) - 1}")
        for token_id in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"eos_token_id or bos_token_id: given {token_id}, allowed 0..{self.vocab_size - 1}")


def plain_spec(
    *,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    max_context_tokens: int,
    rms_norm_eps: float,
    rope: RopeSpec,
    tie_embeddings: bool,
    architecture: str = LLAMA,
    bos_token_id: int | None = None,
    eos_token_ids: tuple[int, ...] = (),
) -> ModelSpec:
    """A Llama without biases: one rotation, no window, nothing around it. Families change fields of it (``dataclasses.replace``)."""
    return ModelSpec(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_context_tokens=max_context_tokens,
        rms_norm_eps=rms_norm_eps,
        ropes=(rope,),
        layer_ropes=(0,) * num_layers,
        layer_windows=(None,) * num_layers,
        attention_scale=max(head_dim, 1) ** -0.5,
        attention_soft_cap=None,
        qk_norm=False,
        qkv_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        activation="silu",
        norm_offset=0.0,
        post_norms=False,
        embedding_scale=1.0,
        logit_soft_cap=None,
        tie_embeddings=tie_embeddings,
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
    )


def _check_positive(field: str, value: float) -> None:
    if not (np.isfinite(value) and value > 0):
        raise ValueError(f"{field}: given {value}, allowed: above 0")
