"""A model's spec from GGUF metadata, architecture by architecture. Any key of the architecture that nobody here knows is refused by name.

GGUF says nothing of ties, biases and Llama 3's RoPE scaling: its tensors show them. What llama.cpp keeps in its code rather than in the
file (Gemma's window patterns, query scale and local RoPE base) follows llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from pddbridge.model_spec import GEMMA2, GEMMA3, LLAMA, QWEN2, QWEN3, ModelSpec, plain_spec
from pddbridge.model_spec_fields import Fields, float_field, int_field, token_ids
from pddbridge.rope import LinearScaling, RopeScaling, RopeSpec, YarnScaling, recognise_llama3, yarn_attention_factor

ARCHITECTURES: Final = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "gemma2": GEMMA2, "gemma3": GEMMA3}

# Keys that are understood here or say nothing about the network.
_COMMON_KEYS: Final = frozenset(
    {
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "tensor_data_layout"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "expert_count", "expert_used_count"),
        *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
    }
)
_OWN_KEYS: Final = {
    "llama": frozenset[str](),
    "qwen2": frozenset[str](),
    "qwen3": frozenset[str](),
    "gemma2": frozenset({"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}),
    "gemma3": frozenset({"attention.sliding_window", "attention.sliding_window_pattern", "final_logit_softcapping", "rope.freq_base_swa"}),
}
_GEMMA3_THETA, _LOCAL_THETA, _DEFAULT_THETA = 1_000_000.0, 10_000.0, 10_000.0
# Layers of the one size of Gemma 2 and 3 (27B) whose query scale is not head_dim ** -0.5 but (hidden_size / num_heads) ** -0.5.
_GEMMA_27B_LAYERS: Final = {"gemma2": 46, "gemma3": 62}


@dataclass(frozen=True)
class TensorFacts:
    """What the tensors of a GGUF file say and its metadata does not. ``rope_factors``: ``rope_freqs.weight``, None without it."""

    vocab_size: int
    tie_embeddings: bool
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    rope_factors: tuple[float, ...] | None = None


def from_gguf(metadata: Fields, tensors: TensorFacts, eos_token_ids: Iterable[int] = ()) -> ModelSpec:
    """Spec from GGUF key-values.

    Float32 values take their shortest decimal, so a GGUF and a ``config.json`` of one model give equal specs.
    Raises ValueError naming the key for anything missing, of wrong type, unknown, or not supported.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ValueError(f"general.architecture: given {architecture!r}, allowed {sorted(ARCHITECTURES)}")
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    try:
        plain = _plain(own, architecture, tensors)
        spec = _gemma(own, architecture, plain) if architecture in _GEMMA_27B_LAYERS else replace(plain, qk_norm=architecture == "qwen3")
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from error
    eos_keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    own_eos = [token_id for key in eos_keys for token_id in token_ids(metadata, key)]
    bos_key = "tokenizer.ggml.bos_token_id"
    return replace(
        spec,
        bos_token_id=int_field(metadata, bos_key) if bos_key in metadata else None,
        eos_token_ids=tuple(sorted({*eos_token_ids, *own_eos})),
    )


def _plain(own: Fields, architecture: str, tensors: TensorFacts) -> ModelSpec:
    """What all architectures share; the rest as in Llama."""
    unknown = sorted(key for key in own if key not in _COMMON_KEYS | _OWN_KEYS[architecture])
    if unknown:
        raise ValueError(f"{unknown[0]}: given {own[unknown[0]]!r}, not supported, only without it")
    if own.get("expert_count", 0) != 0:
        raise ValueError(f"expert_count: given {own['expert_count']!r}, allowed 0")
    if own.get("vocab_size", tensors.vocab_size) != tensors.vocab_size:
        raise ValueError(f"vocab_size: given {own['vocab_size']!r}, but the embedding has {tensors.vocab_size} rows")
    num_heads, hidden_size, num_layers = (int_field(own, key) for key in ("attention.head_count", "embedding_length", "block_count"))
    if num_heads < 1 or ("attention.key_length" not in own and hidden_size % num_heads):
        raise ValueError(
            f"attention.head_count: given {num_heads}, must divide embedding_length={hidden_size} without attention.key_length"
        )
    head_dim = int_field(own, "attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise ValueError(f"{key}: given {own[key]!r}, allowed {head_dim} (the key length)")
    context = int_field(own, "context_length")
    theta = _shortest(float_field(own, "rope.freq_base", _GEMMA3_THETA if architecture == "gemma3" else _DEFAULT_THETA))
    scaling, served = _scaling(own, theta, head_dim, context, tensors.rope_factors)
    spec = plain_spec(
        architecture=ARCHITECTURES[architecture],
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=int_field(own, "feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=int_field(own, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=tensors.vocab_size,
        max_context_tokens=served,
        rms_norm_eps=_shortest(float_field(own, "attention.layer_norm_rms_epsilon")),
        rope=RopeSpec(theta, scaling),
        tie_embeddings=tensors.tie_embeddings,
    )
    return replace(spec, qkv_bias=tensors.qkv_bias, attention_out_bias=tensors.attention_out_bias, mlp_bias=tensors.mlp_bias)


def _gemma(own: Fields, architecture: str, plain: ModelSpec) -> ModelSpec:
    if architecture == "gemma2":
        period, ropes = 2, plain.ropes
    else:
        period = int_field(own, "attention.sliding_window_pattern", 6)
        ropes = (*plain.ropes, RopeSpec(_shortest(float_field(own, "rope.freq_base_swa", _LOCAL_THETA))))
    if period < 1:
        raise ValueError(f"attention.sliding_window_pattern: given {period}, allowed: 1 or more")
    window = int_field(own, "attention.sliding_window", 4096 if architecture == "gemma2" else None)
    sliding = [(layer + 1) % period != 0 for layer in range(plain.num_layers)]
    is_27b = plain.num_layers == _GEMMA_27B_LAYERS[architecture]
    return replace(
        plain,
        ropes=ropes,
        layer_ropes=tuple(int(is_sliding and len(ropes) > 1) for is_sliding in sliding),
        layer_windows=tuple(window if is_sliding else None for is_sliding in sliding),
        attention_scale=(plain.hidden_size // plain.num_heads if is_27b else plain.head_dim) ** -0.5,
        attention_soft_cap=_cap(own, "attn_logit_softcapping", 50.0) if architecture == "gemma2" else None,
        qk_norm=architecture == "gemma3",
        activation="gelu_tanh",
        norm_offset=1.0,
        post_norms=True,
        embedding_scale=plain.hidden_size**0.5,
        logit_soft_cap=_cap(own, "final_logit_softcapping", 30.0 if architecture == "gemma2" else None),
    )


def _cap(own: Fields, key: str, default: float | None) -> float | None:
    return default if key not in own else _shortest(float_field(own, key))


def _scaling(
    own: Fields, theta: float, head_dim: int, context_tokens: int, factors: tuple[float, ...] | None
) -> tuple[RopeScaling | None, int]:
    """The scaling, and the context it serves (see :mod:`pddbridge.rope_hf`)."""
    kind = own.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"rope.scaling.type: given {kind!r}, allowed ['linear', 'none', 'yarn']")
    if factors is not None:
        if kind != "none":
            raise ValueError(f"rope.scaling.type: given {kind!r} beside rope_freqs.weight, allowed only one of them")
        if len(factors) != head_dim // 2:
            raise ValueError(f"attention.key_length: given {head_dim} with {len(factors)} values in rope_freqs.weight, needs one for two")
        return recognise_llama3(factors, theta, head_dim), context_tokens
    if kind == "none":
        for key in ("rope.scaling.factor", "rope.scaling.original_context_length"):
            if key in own:
                raise ValueError(f"{key}: given {own[key]!r} without rope.scaling.type, not supported, only without it")
        return None, context_tokens
    factor = _shortest(float_field(own, "rope.scaling.factor"))
    if kind == "linear":
        return LinearScaling(factor), context_tokens
    original = int_field(own, "rope.scaling.original_context_length", context_tokens)
    return YarnScaling(factor, original, yarn_attention_factor(factor)), max(context_tokens, int(factor * original))


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))
