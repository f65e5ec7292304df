"""A Llama forward pass in plain numpy float64, over an open checkpoint: shows what its tensors mean, with no engine between."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pddbridge.checkpoint import Checkpoint


def logits(checkpoint: Checkpoint, ids: Sequence[int]) -> np.ndarray:
    """Float64 logits [len(ids), vocab]."""
    spec = checkpoint.spec

    def weight(name: str) -> np.ndarray:
        return checkpoint.load(name).astype(np.float64)

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        y = x @ weight(f"{name}.weight").T
        return y + weight(f"{name}.bias") if f"{name}.bias" in checkpoint.names else y

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + spec.rms_norm_eps) * weight(name)

    num_tokens, half = len(ids), spec.head_dim // 2
    angles = np.arange(num_tokens)[:, None] * spec.ropes[0].theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def heads(x: np.ndarray, num_heads: int) -> np.ndarray:
        return x.reshape(num_tokens, num_heads, spec.head_dim)

    def rotate(x: np.ndarray) -> np.ndarray:
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    future = np.triu(np.full((num_tokens, num_tokens), -np.inf), 1)
    x = weight("model.embed_tokens.weight")[list(ids)]
    for layer in range(spec.num_layers):
        p = f"model.layers.{layer}"
        h = norm(x, f"{p}.input_layernorm.weight")
        q = rotate(heads(linear(h, f"{p}.self_attn.q_proj"), spec.num_heads))
        k = rotate(heads(linear(h, f"{p}.self_attn.k_proj"), spec.num_kv_heads))
        v = heads(linear(h, f"{p}.self_attn.v_proj"), spec.num_kv_heads)
        k, v = (np.repeat(kv, spec.num_heads // spec.num_kv_heads, axis=1) for kv in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(spec.head_dim) + future
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(axis=-1, keepdims=True), v)
        x = x + linear(mixed.reshape(num_tokens, -1), f"{p}.self_attn.o_proj")
        h = norm(x, f"{p}.post_attention_layernorm.weight")
        gate = linear(h, f"{p}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{p}.mlp.up_proj"), f"{p}.mlp.down_proj")
    head = "model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"
    return norm(x, "model.norm.weight") @ weight(head).T
