"""A decoder layer as one native call: its packed weights, and the call. See ``layer.cpp``."""

from __future__ import annotations

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pddkernels.ragged_paged_attention.options import AttentionOptions

_LANES: Final = 16
_PANEL: Final = 2 * _LANES
_CROSSING: Final = 6  # panels.h


class LayerWeights(NamedTuple):
    """Float32. Norms [features]; of the four products weights [panels, in, 32] of :func:`pack` or :func:`pack_gate_up`, all after
    :func:`cross` or none, and biases [panels * 32], of q, k and v after :func:`pair_halves`. What a family lacks is None, or has no
    elements: biases, ``q_norm`` and ``k_norm`` [dim], post norms.
    """

    attention_norm: jax.Array
    qkv: jax.Array
    qkv_bias: jax.Array | None
    q_norm: jax.Array | None
    k_norm: jax.Array | None
    out: jax.Array
    out_bias: jax.Array | None
    attention_post_norm: jax.Array | None
    mlp_norm: jax.Array
    gate_up: jax.Array
    gate_up_bias: jax.Array | None
    down: jax.Array
    down_bias: jax.Array | None
    mlp_post_norm: jax.Array | None


class LayerRows(NamedTuple):
    """The rows of a step: ``slots`` [T], where tokens are stored, past the pool nowhere · ``page_tables`` [R, P] · ``row_starts`` [R+1],
    ``context_lens`` [R], of which ``num_rows`` [1] are valid. All i32.
    """

    slots: jax.Array
    page_tables: jax.Array
    row_starts: jax.Array
    context_lens: jax.Array
    num_rows: jax.Array


def pack(weight: np.ndarray) -> np.ndarray:
    """[out, in] -> [panels, in, 32]: panels of 32 outputs, the last one padded with zeros."""
    outs, ins = weight.shape
    panels = -(-outs // _PANEL)
    padded = np.zeros((panels * _PANEL, ins), np.float32)
    padded[:outs] = weight
    return np.ascontiguousarray(padded.reshape(panels, _PANEL, ins).transpose(0, 2, 1))


def pair_halves(weight: np.ndarray, num_heads: int, dim: int, *, normed: bool) -> np.ndarray:
    """q, k and v, or their bias, [out, ...] in the order that ``layer.cpp`` takes them in, before they are packed.

    Of the first ``num_heads`` heads, which rotary embedding turns, sixteen values of the first half come before the sixteen that they are
    turned with, and so on: a panel is turned as it leaves the product. Nothing changes where a norm comes before or ``dim`` is no multiple
    of 32.
    """
    if normed or dim % _PANEL or not len(weight):
        return weight
    turned, rest = np.split(weight, (num_heads * dim,))
    halves = turned.reshape(num_heads, 2, dim // _PANEL, _LANES, *weight.shape[1:])
    return np.concatenate((halves.swapaxes(1, 2).reshape(turned.shape), rest))


def cross(weight: np.ndarray) -> np.ndarray:
    """[out, in] -> [out, 2 + in] for a product whose inputs cross (``panels.h``), before it is packed: what is added for crossing weights,
    what results are multiplied with, and the weights, each output divided by the latter. That is the power of two that makes them as large
    as what is added to them, and rounds nothing.
    """
    sizes = np.sqrt(np.mean(np.square(weight, dtype=np.float64), axis=1))
    powers = np.where(sizes > 0, np.round(np.log2(np.where(sizes > 0, sizes, 1))), 0).astype(np.int32)
    weight = np.ldexp(weight, -powers[:, None])
    units = weight[:, : weight.shape[1] // _CROSSING * _CROSSING].reshape(len(weight), -1, _CROSSING).astype(np.float64)
    added = (units[..., 0] * units[..., 1] - units[..., 3] * units[..., 4]).sum(1)
    return np.concatenate((-added[:, None], np.ldexp(1.0, powers)[:, None], weight), axis=1, dtype=np.float32)


def pack_gate_up(weight: np.ndarray) -> np.ndarray:
    """[gates and as many ups, in] -> [panels, in, 32]: sixteen gates and their ups in turn, each padded with zeros."""
    gate, up = np.split(weight, 2)
    return pack(np.concatenate((_in_lanes(gate), _in_lanes(up)), axis=1).reshape(-1, weight.shape[1]))


def pad_down(weight: np.ndarray) -> np.ndarray:
    """[out, in], with as many inputs as gates are padded to."""
    return np.pad(weight, ((0, 0), (0, -weight.shape[1] % _LANES)))


def _in_lanes(weight: np.ndarray) -> np.ndarray:
    padded = np.pad(weight, ((0, -len(weight) % _LANES), (0, 0)))
    return padded.reshape(-1, _LANES, weight.shape[1])


def pack_bias(bias: np.ndarray) -> np.ndarray:
    """[out] -> [panels * 32] of :func:`pack`."""
    return pack(bias[:, None]).reshape(-1)


def pack_gate_up_bias(bias: np.ndarray) -> np.ndarray:
    """[gates and ups] -> [panels * 32] of :func:`pack_gate_up`."""
    return pack_gate_up(bias[:, None]).reshape(-1)


def layer(
    weights: LayerWeights,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    rows: LayerRows,
    pages: jax.Array,
    options: AttentionOptions,
    *,
    num_heads: int,
    eps: float,
    gelu: bool,
    crossed: bool,
    wanted: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """``x`` [T, hidden] float32, ``cos``, ``sin`` [T, dim / 2] -> the residual stream after the layer, and ``pages`` with the new KV, which
    are taken over.

    With ``wanted`` [W] i32 the result is [W, hidden], of these tokens alone: those past all rows' tokens get zeros. So does [T, hidden] for
    tokens of no row. ``gelu``: in its tanh form, else SiLU. ``crossed``: whether the four weights went through :func:`cross`.
    """
    shape = x.shape if wanted is None else (wanted.shape[0], x.shape[1])
    call = jax.ffi.ffi_call(
        "pdd_layer",
        (jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(pages.shape, pages.dtype)),
        input_output_aliases={len(weights) + 4: 1},
    )
    found, written = call(
        x,
        *(jnp.zeros(0, jnp.float32) if values is None else values for values in weights),
        cos,
        sin,
        rows.slots,
        pages,
        rows.page_tables,
        rows.row_starts,
        rows.context_lens,
        rows.num_rows,
        jnp.zeros(0, jnp.int32) if wanted is None else wanted,
        heads=np.int64(num_heads),
        eps=np.float32(eps),
        scale=np.float32(options.scale),
        soft_cap=np.float32(options.soft_cap or 0),
        window=np.int64(options.window or 0),
        gelu=np.bool_(gelu),
        crossed=np.bool_(crossed),
    )
    return found, written


def head(
    x: jax.Array, norm: jax.Array, weights: jax.Array, *, vocab_size: int, eps: float, soft_cap: float | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``x`` [S, hidden], ``norm`` [hidden], ``weights`` of :func:`pack` -> float32 logits [vocab, S], their maximum [S], NaN if one is, and
    the lowest id that has it [S] i32.
    """
    num_tokens = x.shape[0]
    call = jax.ffi.ffi_call(
        "pdd_head",
        (
            jax.ShapeDtypeStruct((vocab_size, num_tokens), jnp.float32),
            jax.ShapeDtypeStruct((num_tokens,), jnp.float32),
            jax.ShapeDtypeStruct((num_tokens,), jnp.int32),
        ),
    )
    logits, highest, ids = call(x, norm, weights, eps=np.float32(eps), soft_cap=np.float32(soft_cap or 0))
    return logits, highest, ids


def look_up(weights: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Rows ``token_ids`` [T] of the matrix that ``weights`` are packed from: [T, in]."""
    return weights[token_ids // _PANEL, :, token_ids % _PANEL]
