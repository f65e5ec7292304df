"""The functions of a model whose layers and head run as one native call each: what :class:`pddjax.programs.ModelFunctions` is elsewhere."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pddjax.batch import DecodeBatch, RaggedBatch
from pddjax.host_memory import together
from pddjax.model import Layer, Llama, Projection, RMSNorm
from pddjax.programs import Leaves, Pages
from pddkernels.native_xla import calls
from pddkernels.native_xla import layers as native
from pddkernels.native_xla.layers import LayerRows, LayerWeights

_NONE = np.zeros(0, np.float32)


class _Weights(NamedTuple):
    """``head``: packed, what makes logits · ``embedding``: [vocab, hidden], no elements where ``head`` is the same."""

    layers: tuple[LayerWeights, ...]
    norm: jax.Array
    head: jax.Array
    embedding: jax.Array
    rope: jax.Array


class FusedFunctions:
    """Same signatures, float32 alone. The last layer is computed for the tokens that sample or are scored, past the storing of its KV:
    nobody looks at the others.
    """

    def __init__(self, model: Llama, device: jax.Device) -> None:
        """Takes ``model`` over: its weights are packed one layer at a time, and gone from it."""
        first = model.layers[0]
        eps, gelu = first.attention_norm.eps, first.mlp.activation == "gelu_tanh"
        self._vocab_size = model.embedding.shape[0]
        self._tied = model.lm_head is None
        crossed = calls.crosses()
        self._layer = partial(native.layer, num_heads=first.attention.num_heads, eps=eps, gelu=gelu, crossed=crossed)
        self._head = partial(native.head, vocab_size=self._vocab_size, eps=eps, soft_cap=model.logit_soft_cap)
        self._embedding_scale, self._layer_ropes, self._layer_options = model.embedding_scale, model.layer_ropes, model.layer_options
        place = partial(jax.device_put, device=device)
        layers = []
        while len(model.layers):
            parts = together(_packed(model.layers.pop(0), crossed))
            layers.append(place(LayerWeights(*(part if part.size else None for part in parts))))  # each argument of a call costs time
        head = model.embedding if model.lm_head is None else model.lm_head
        (packed_head,) = together([native.pack(np.asarray(head[...]))])
        embedding = _NONE if self._tied else model.embedding[...]
        weights = _Weights(tuple(layers), model.norm.weight[...], place(packed_head), place(embedding), model.rope[...])
        leaves, self._tree = jax.tree.flatten(weights)
        self.leaves: Leaves = tuple(leaves)

    def decode(self, leaves: Leaves, pages: Pages, batch: DecodeBatch) -> tuple[jax.Array, Pages]:
        """See :meth:`pddjax.programs.ModelFunctions.decode`."""
        starts = jnp.arange(batch.token_ids.shape[0] + 1, dtype=jnp.int32)
        rows = LayerRows(batch.slots, batch.page_tables, starts, batch.context_lens, batch.num_new.sum(keepdims=True, dtype=jnp.int32))
        return self._forward(leaves, pages, batch.token_ids, batch.context_lens, rows, batch.sample_columns)

    def ragged(self, leaves: Leaves, pages: Pages, batch: RaggedBatch) -> tuple[jax.Array, Pages]:
        """See :meth:`pddjax.programs.ModelFunctions.ragged`."""
        row_starts, context_lens, num_rows = batch.plan
        rows = LayerRows(batch.slots, batch.page_tables, row_starts, context_lens, num_rows)
        return self._forward(leaves, pages, batch.token_ids, batch.positions, rows, batch.sample_columns)

    def head(self, leaves: Leaves, hidden: jax.Array, num_samples: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See :meth:`pddjax.programs.ModelFunctions.head`."""
        weights = self._weights(leaves)
        return self._head(hidden[:, :num_samples].T, weights.norm, weights.head)

    def _weights(self, leaves: Leaves) -> _Weights:
        weights = jax.tree.unflatten(self._tree, leaves)
        assert isinstance(weights, _Weights)
        return weights

    def _forward(
        self, leaves: Leaves, pages: Pages, token_ids: jax.Array, positions: jax.Array, rows: LayerRows, wanted: jax.Array
    ) -> tuple[jax.Array, Pages]:
        weights = self._weights(leaves)
        cos_sin = weights.rope[:, :, positions]
        x = native.look_up(weights.head, token_ids) if self._tied else weights.embedding[token_ids]
        x = x * self._embedding_scale
        new_pages = []
        for index, (layer, layer_pages) in enumerate(zip(weights.layers, pages, strict=True)):
            cos, sin = cos_sin[self._layer_ropes[index]]
            columns = wanted if index == len(pages) - 1 else None
            x, written = self._layer(layer, x, cos, sin, rows, layer_pages, self._layer_options[index], wanted=columns)
            new_pages.append(written)
        return x.T, new_pages


def _packed(layer: Layer, crossed: bool) -> tuple[np.ndarray, ...]:
    """In the order of :class:`LayerWeights`."""
    attention, mlp = layer.attention, layer.mlp
    turned, normed = attention.num_heads + attention.num_kv_heads, attention.q_norm is not None
    pair = partial(native.pair_halves, num_heads=turned, dim=attention.head_dim, normed=normed)
    prepare = native.cross if crossed else np.asarray
    return (
        _norm(layer.attention_norm),
        native.pack(pair(prepare(_values(attention.qkv.weight)))),
        native.pack_bias(pair(_bias(attention.qkv))),
        _norm(attention.q_norm),
        _norm(attention.k_norm),
        native.pack(prepare(_values(attention.out.weight))),
        native.pack_bias(_bias(attention.out)),
        _norm(layer.attention_post_norm),
        _norm(layer.mlp_norm),
        native.pack_gate_up(prepare(_values(mlp.gate_up.weight))),
        native.pack_gate_up_bias(_bias(mlp.gate_up)),
        native.pack(prepare(native.pad_down(_values(mlp.down.weight)))),
        native.pack_bias(_bias(mlp.down)),
        _norm(layer.mlp_post_norm),
    )


def _values(parameter: nnx.Param[jax.Array]) -> np.ndarray:
    return np.asarray(parameter[...])


def _bias(projection: Projection) -> np.ndarray:
    return _NONE if projection.bias is None else _values(projection.bias)


def _norm(norm: RMSNorm | None) -> np.ndarray:
    return _NONE if norm is None else _values(norm.weight)
