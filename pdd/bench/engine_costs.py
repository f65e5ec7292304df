"""What a step must read and compute at least, from the model's sizes alone. Pure."""

from __future__ import annotations

from typing import Final

from pddbridge.model_spec import ModelSpec

WEIGHT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


def layer_weights(spec: ModelSpec) -> int:
    """Weights of all layers' matrix products: q, k, v, output, gate, up, down."""
    attention = spec.hidden_size * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
    return spec.num_layers * (attention + 3 * spec.hidden_size * spec.intermediate_size)


def head_weights(spec: ModelSpec) -> int:
    """Weights of the product that makes logits. A tied embedding is counted here, where it is read whole."""
    return spec.vocab_size * spec.hidden_size


def decode_bytes(spec: ModelSpec, dtype: str, kv_token_bytes: int, streams: int, context: int) -> int:
    """Bytes that one decode step of ``streams`` rows reads at least: every weight once, every row's KV once."""
    return WEIGHT_BYTES[dtype] * (layer_weights(spec) + head_weights(spec)) + streams * context * kv_token_bytes


def prefill_flops(spec: ModelSpec, num_tokens: int) -> int:
    """Multiply-adds times two of a prompt computed once: products, the causal half of attention, one position's logits."""
    attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim * num_tokens * num_tokens
    return 2 * num_tokens * layer_weights(spec) + attention + 2 * head_weights(spec)
