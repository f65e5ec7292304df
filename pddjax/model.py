"""The Llama network and its descendants in flax nnx, over paged KV. Owns the computation; knows neither files nor steps.

What differs between families is read from :class:`pddbridge.model_spec.ModelSpec`, whose facts say what each switch here does. A layer's
window and rotation are arguments, so that all layers of a model are one function of their weights.

Activations are features first, [features, tokens], all the way: on XLA:CPU every product is then ``weight [out, in] @ x``, the fastest
orientation for any number of tokens (4 columns: 22 GB/s of weights read against 6-9 the other way round), from one copy of the weights.
Never transpose the result of a product right away: XLA folds that into the slow orientation.

Layers are unrolled: a ``lax.scan`` over stacked weights copies each layer's weights on XLA:CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from pddbridge.model_spec import Activation, ModelSpec
from pddkernels.ragged_paged_attention.options import AttentionOptions

# (queries [T, heads, dim], one layer's pages, its options) -> [T, heads, dim]: what is left of attention once a step's rows are known.
Attend = Callable[[jax.Array, jax.Array, AttentionOptions], jax.Array]
# (one layer's pages, keys, values [T, kv_heads, dim], slots [T]) -> the pages with the new tokens.
Store = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
# (weight [out, in] of the dtype of x or int8, x [in, T]) -> float32 [out, T]
Product = Callable[[jax.Array, jax.Array], jax.Array]
_ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def product(weight: jax.Array, x: jax.Array) -> jax.Array:
    """``weight [out, in] @ x [in, T]`` -> float32, float32 products exact. Weights in int8 are widened to the dtype of ``x``, which loses
    nothing, as operands of the product: a TPU reads them as int8.
    """
    return jnp.matmul(weight.astype(x.dtype), x, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def scaled(sums: jax.Array, scale: nnx.Param[jax.Array] | None) -> jax.Array:
    """``sums`` [out, T] of a product with steps of ``scale`` [out], or with weights as they are."""
    return sums if scale is None else sums * scale[...][:, None]


class Projection(nnx.Module):
    """``weight [out, in] @ x [in, T] (+ bias)``, accumulated in float32, returned in the compute dtype. ``int8``: the weight is in steps of
    ``scale`` [out] float32, as :mod:`pddbridge.weight_rounding` makes them.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool, dtype: jnp.dtype, product: Product = product, int8: bool = False
    ) -> None:
        self.weight = nnx.Param(jnp.zeros((out_features, in_features), jnp.int8 if int8 else dtype))
        self.scale = nnx.Param(jnp.zeros((out_features,), jnp.float32)) if int8 else None
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if bias else None
        self.dtype = dtype
        self.product = product

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.sums(x)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)[:, None]
        return y.astype(self.dtype)

    def sums(self, x: jax.Array) -> jax.Array:
        """Without the bias, float32."""
        return scaled(self.product(self.weight[...], x), self.scale)


class RMSNorm(nnx.Module):
    """Over the features of [..., features, T] (arXiv:1910.07467). Weights and arithmetic are float32, the result has ``dtype``."""

    def __init__(self, features: int, eps: float, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.ones((features,), jnp.float32))
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-2, keepdims=True) + self.eps)
        return (self.weight[...][:, None] * (wide * scale)).astype(self.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with q, k and v in one product. New KV is stored first and attention reads what was stored."""

    def __init__(self, spec: ModelSpec, dtype: jnp.dtype, product: Product, int8: bool) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        heads = spec.num_heads + 2 * spec.num_kv_heads
        self.qkv = Projection(spec.hidden_size, heads * spec.head_dim, spec.qkv_bias, dtype, product, int8)
        self.out = Projection(spec.num_heads * spec.head_dim, spec.hidden_size, spec.attention_out_bias, dtype, product, int8)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, dtype) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, dtype) if spec.qk_norm else None

    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        pages: jax.Array,
        slots: jax.Array,
        attend: Callable[[jax.Array, jax.Array], jax.Array],
        store: Store,
    ) -> tuple[jax.Array, jax.Array]:
        num_tokens = x.shape[1]
        qkv = self.qkv(x).reshape(-1, self.head_dim, num_tokens)
        turned = qkv[: self.num_heads + self.num_kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            turned = jnp.concatenate((self.q_norm(turned[: self.num_heads]), self.k_norm(turned[self.num_heads :])), axis=0)
        rotated = rotate(turned, rope)
        by_token = jnp.concatenate((rotated, qkv[self.num_heads + self.num_kv_heads :]), axis=0).transpose(2, 0, 1)
        queries, keys, values = jnp.split(by_token, (self.num_heads, self.num_heads + self.num_kv_heads), axis=1)
        pages = store(pages, keys, values, slots)
        mixed = attend(queries, pages).astype(x.dtype).reshape(num_tokens, -1)
        return self.out(mixed.T), pages


class MLP(nnx.Module):
    """A gated linear unit (arXiv:2002.05202) with gate and up in one product."""

    def __init__(self, spec: ModelSpec, dtype: jnp.dtype, product: Product, int8: bool) -> None:
        self.gate_up = Projection(spec.hidden_size, 2 * spec.intermediate_size, spec.mlp_bias, dtype, product, int8)
        self.down = Projection(spec.intermediate_size, spec.hidden_size, spec.mlp_bias, dtype, product, int8)
        self.activation = spec.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up(x), 2, axis=0)
        return self.down(_ACTIVATIONS[self.activation](gate) * up)


class Layer(nnx.Module):
    """One pre-norm decoder layer; with post norms, what is added to the residual stream is normed too. The stream is float32 in any compute
    dtype: rounding it after every layer costs more digits than all products, and it is small.
    """

    def __init__(self, spec: ModelSpec, dtype: jnp.dtype, product: Product, int8: bool) -> None:
        self.attention_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype)
        self.attention = Attention(spec, dtype, product, int8)
        self.attention_post_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, jnp.dtype(jnp.float32)) if spec.post_norms else None
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype)
        self.mlp = MLP(spec, dtype, product, int8)
        self.mlp_post_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, jnp.dtype(jnp.float32)) if spec.post_norms else None

    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        pages: jax.Array,
        slots: jax.Array,
        attend: Callable[[jax.Array, jax.Array], jax.Array],
        store: Store,
    ) -> tuple[jax.Array, jax.Array]:
        mixed, pages = self.attention(self.attention_norm(x), rope, pages, slots, attend, store)
        x = x + (mixed if self.attention_post_norm is None else self.attention_post_norm(mixed))
        fed = self.mlp(self.mlp_norm(x))
        return x + (fed if self.mlp_post_norm is None else self.mlp_post_norm(fed)), pages


class Llama(nnx.Module):
    """Token ids to final hidden states (``__call__``) and hidden states to logits (``head``).

    Parameters by path, which sharding rules go by: ``embedding``, ``lm_head`` (untied, or int8), ``lm_head_scale`` (int8), ``norm.weight``,
    ``layers.i.attention.qkv|out`` and ``layers.i.mlp.gate_up|down`` (``.weight`` [out, in], ``.scale``, ``.bias``), and norms, all
    replicated: ``layers.i.attention_norm|mlp_norm``, ``attention_post_norm|mlp_post_norm``, ``attention.q_norm|k_norm``.
    """

    def __init__(self, spec: ModelSpec, dtype: jnp.dtype, max_context_tokens: int, product: Product = product, int8: bool = False) -> None:
        """``product``: of every weight matrix with activations · ``int8``: these are in int8, see :class:`Projection`, the head too: then
        a tied model's is beside its embedding, which is looked up in ``dtype``.
        """
        self.embedding = nnx.Param(jnp.zeros((spec.vocab_size, spec.hidden_size), dtype))
        self.layers = nnx.List([Layer(spec, dtype, product, int8) for _ in range(spec.num_layers)])
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype)
        shape = (spec.vocab_size, spec.hidden_size)
        self.lm_head = None if spec.tie_embeddings and not int8 else nnx.Param(jnp.zeros(shape, jnp.int8 if int8 else dtype))
        self.lm_head_scale = nnx.Param(jnp.zeros(spec.vocab_size, jnp.float32)) if int8 else None
        # Angles of every position the engine may see, so that cos and sin are numpy's on every device.
        self.rope = RopeTable(jnp.zeros((len(spec.ropes), 2, max_context_tokens, spec.head_dim // 2), jnp.float32))
        self.product = product
        self.layer_ropes = spec.layer_ropes
        self.layer_options = layer_options(spec)
        self.embedding_scale, self.logit_soft_cap = spec.embedding_scale, spec.logit_soft_cap

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        slots: jax.Array,
        pages: list[jax.Array],
        attend: Attend,
        store: Store,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """``token_ids``, ``positions``, ``slots`` [T] i32, ``pages`` one array per layer.

        Returns float32 hidden states [hidden, T] before the last norm, and the pages.
        """
        cos_sin = self.rope[...][:, :, positions].transpose(0, 1, 3, 2)
        ropes = [(table[0], table[1]) for table in cos_sin]
        x = self.lookup(token_ids).T.astype(jnp.float32)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        structure = nnx.graphdef(self.layers[0])

        # All layers of equal options are one function of their weights: traced once instead of once per layer.
        @partial(jax.jit, static_argnames="options")
        def run(
            weights: nnx.State, x: jax.Array, rope: tuple[jax.Array, jax.Array], layer_pages: jax.Array, options: AttentionOptions
        ) -> tuple[jax.Array, jax.Array]:
            return nnx.merge(structure, weights)(x, rope, layer_pages, slots, partial(_attend_as, attend, options), store)

        new_pages = []
        for layer, layer_pages, rope, options in zip(self.layers, pages, self.layer_ropes, self.layer_options, strict=True):
            x, written = run(nnx.state(layer), x, ropes[rope], layer_pages, options)
            new_pages.append(written)
        return x, new_pages

    def lookup(self, token_ids: jax.Array) -> jax.Array:
        """Rows of the embedding: ``token_ids`` [T] i32 -> [T, hidden]. A model that holds a part of the table has its own."""
        return self.embedding[...][token_ids]

    def head(self, hidden: jax.Array) -> jax.Array:
        """[hidden, S] -> float32 logits [vocab, S]."""
        weight = self.embedding if self.lm_head is None else self.lm_head
        logits = scaled(self.product(weight[...], self.norm(hidden)), self.lm_head_scale)
        return logits if self.logit_soft_cap is None else self.logit_soft_cap * jnp.tanh(logits / self.logit_soft_cap)


class RopeTable(nnx.Variable[jax.Array]):
    """Per rotation cos and sin [ropes, 2, positions, dim / 2]: derived from the spec, not a weight."""


def layer_options(spec: ModelSpec) -> tuple[AttentionOptions, ...]:
    """What attention is told, layer by layer."""
    return tuple(AttentionOptions(spec.attention_scale, window, spec.attention_soft_cap) for window in spec.layer_windows)


def _attend_as(attend: Attend, options: AttentionOptions, queries: jax.Array, pages: jax.Array) -> jax.Array:
    return attend(queries, pages, options)


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """RoPE (arXiv:2104.09864), half-split convention, of ``x`` [heads, dim, T] by cos and sin [dim / 2, T]; computed in float32."""
    cos, sin = rope
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=1).astype(x.dtype)
