"""The Llama network in flax nnx, over paged KV. Owns the computation; knows neither files nor steps.

Activations are features first, [features, tokens], all the way: on XLA:CPU every product is then ``weight [out, in] @ x``, the fastest
orientation for any number of tokens (4 columns: 22 GB/s of weights read against 6-9 the other way round), from one copy of the weights.
Never transpose the result of a product right away: XLA folds that into the slow orientation.

Layers are unrolled: a ``lax.scan`` over stacked weights copies each layer's weights on XLA:CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from pddbridge.model_spec import ModelSpec
from pddkernels.kv_pages.portable_xla import append

# (queries [T, heads, dim], one layer's pages) -> [T, heads, dim]: what is left of attention once the rows of a step are known.
Attend = Callable[[jax.Array, jax.Array], jax.Array]


class Projection(nnx.Module):
    """``weight [out, in] @ x [in, T] (+ bias)``, accumulated in float32, returned in the compute dtype."""

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.zeros((out_features, in_features), dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.weight[...]
        y = product(weight, x)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)[:, None]
        return y.astype(weight.dtype)


class RMSNorm(nnx.Module):
    """Over the features of [features, T], in float32 (arXiv:1910.07467, as transformers' LlamaRMSNorm)."""

    def __init__(self, features: int, eps: float, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.ones((features,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=0, keepdims=True) + self.eps)
        return self.weight[...][:, None] * (wide * scale).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with q, k and v in one product. New KV is stored first and attention reads what was stored."""

    def __init__(self, spec: ModelSpec, dtype: jnp.dtype) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        heads = spec.num_heads + 2 * spec.num_kv_heads
        self.qkv = Projection(spec.hidden_size, heads * spec.head_dim, spec.attention_bias, dtype)
        self.out = Projection(spec.num_heads * spec.head_dim, spec.hidden_size, spec.attention_bias, dtype)

    def __call__(
        self, x: jax.Array, rope: tuple[jax.Array, jax.Array], pages: jax.Array, slots: jax.Array, attend: Attend, kv_dtype: jnp.dtype
    ) -> tuple[jax.Array, jax.Array]:
        num_tokens = x.shape[1]
        qkv = self.qkv(x).reshape(-1, self.head_dim, num_tokens)
        rotated = rotate(qkv[: self.num_heads + self.num_kv_heads], rope)
        by_token = jnp.concatenate((rotated, qkv[self.num_heads + self.num_kv_heads :]), axis=0).transpose(2, 0, 1)
        queries, keys, values = jnp.split(by_token, (self.num_heads, self.num_heads + self.num_kv_heads), axis=1)
        pages = append(pages, keys, values, slots, kv_dtype)
        mixed = attend(queries, pages).astype(x.dtype).reshape(num_tokens, -1)
        return self.out(mixed.T), pages


class MLP(nnx.Module):
    """SwiGLU (arXiv:2002.05202) with gate and up in one product."""

    def __init__(self, spec: ModelSpec, dtype: jnp.dtype) -> None:
        self.gate_up = Projection(spec.hidden_size, 2 * spec.intermediate_size, spec.mlp_bias, dtype)
        self.down = Projection(spec.intermediate_size, spec.hidden_size, spec.mlp_bias, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up(x), 2, axis=0)
        return self.down(jax.nn.silu(gate) * up)


class Layer(nnx.Module):
    """One pre-norm decoder layer."""

    def __init__(self, spec: ModelSpec, dtype: jnp.dtype) -> None:
        self.attention_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype)
        self.attention = Attention(spec, dtype)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype)
        self.mlp = MLP(spec, dtype)

    def __call__(
        self, x: jax.Array, rope: tuple[jax.Array, jax.Array], pages: jax.Array, slots: jax.Array, attend: Attend, kv_dtype: jnp.dtype
    ) -> tuple[jax.Array, jax.Array]:
        mixed, pages = self.attention(self.attention_norm(x), rope, pages, slots, attend, kv_dtype)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), pages


class Llama(nnx.Module):
    """Token ids to final hidden states (``__call__``) and hidden states to logits (``head``)."""

    def __init__(self, spec: ModelSpec, dtype: jnp.dtype, max_context_tokens: int) -> None:
        self.embedding = nnx.Param(jnp.zeros((spec.vocab_size, spec.hidden_size), dtype))
        self.layers = nnx.List([Layer(spec, dtype) for _ in range(spec.num_layers)])
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype)
        self.lm_head = None if spec.tie_embeddings else nnx.Param(jnp.zeros((spec.vocab_size, spec.hidden_size), dtype))
        # Angles of every position the engine may see, so that cos and sin are numpy's on every device.
        self.rope = RopeTable(jnp.zeros((2, max_context_tokens, spec.head_dim // 2), jnp.float32))

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        slots: jax.Array,
        pages: list[jax.Array],
        attend: Attend,
        kv_dtype: jnp.dtype,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """``token_ids``, ``positions``, ``slots`` [T] i32, ``pages`` one array per layer.

        Returns hidden states [hidden, T] before the last norm, and the pages.
        """
        cos, sin = self.rope[...][:, positions].transpose(0, 2, 1)
        x = self.lookup(token_ids).T
        structure = nnx.graphdef(self.layers[0])

        @jax.jit  # all layers are one function of their weights: traced once instead of once per layer
        def run(weights: nnx.State, x: jax.Array, layer_pages: jax.Array) -> tuple[jax.Array, jax.Array]:
            return nnx.merge(structure, weights)(x, (cos, sin), layer_pages, slots, attend, kv_dtype)

        new_pages = []
        for layer, layer_pages in zip(self.layers, pages, strict=True):
            x, written = run(nnx.state(layer), x, layer_pages)
            new_pages.append(written)
        return x, new_pages

    def lookup(self, token_ids: jax.Array) -> jax.Array:
        """Rows of the embedding: ``token_ids`` [T] i32 -> [T, hidden]. A model that holds a part of the table has its own."""
        return self.embedding[...][token_ids]

    def head(self, hidden: jax.Array) -> jax.Array:
        """[hidden, S] -> float32 logits [vocab, S]."""
        weight = self.embedding if self.lm_head is None else self.lm_head
        return product(weight[...], self.norm(hidden))


class RopeTable(nnx.Variable[jax.Array]):
    """cos and sin [2, positions, dim / 2]: derived from the spec, not a weight."""


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """RoPE (arXiv:2104.09864), half-split convention, of ``x`` [heads, dim, T] by cos and sin [dim / 2, T]; computed in float32."""
    cos, sin = rope
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=1).astype(x.dtype)


def product(weight: jax.Array, x: jax.Array) -> jax.Array:
    """``weight [out, in] @ x [in, T]`` -> float32, float32 products exact."""
    return jnp.matmul(weight, x, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
