"""Tensor parallelism: one model over several devices, as Megatron-LM splits it (arXiv:1909.08053). Owns which device holds what.

A step runs as one ``shard_map`` over the mesh axis ``model``: every device runs the same program of :mod:`pddjax.model` on a smaller model,
with its share of the heads and of the MLP, and the devices add up their parts where a product is split by its inputs. So kernels see local
shapes, and a step of one device and of eight are the same code.

============================  =======================================================================================
parameter                     what device i of n holds
============================  =======================================================================================
``attention.qkv``             rows of its own heads, [q_i; k_i; v_i]. So that a plain split of the rows gives that, the fused
                              [q; k; v] is reordered to [q_0; k_0; v_0; q_1; ...] when it is placed
``mlp.gate_up``               [gate_i; up_i], reordered in the same way
``attention.out, mlp.down``   columns (inputs) i; the products are added up over devices, then the whole bias once
``embedding, lm_head``        rows (vocabulary) i, the table padded with zero rows to a multiple of n
``attention.sinks``           those of its heads
int8 weights' scales          those of its outputs: all of them for ``out`` and ``down``, whose parts are scaled before they are added up
norms, rotary tables          everything
============================  =======================================================================================

KV pages are split on heads. With fewer KV heads than devices each head is stored on several devices, next to each other in the pages array.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pddbridge.model_spec import ModelSpec
from pddjax.model import Llama, Projection

AXIS: Final = "model"
REPLICATED: Final = PartitionSpec()
PAGES: Final = PartitionSpec(None, None, AXIS, None)
LOGITS: Final = PartitionSpec(AXIS, None)  # [vocab, S]

_ROWS: Final = PartitionSpec(AXIS)
_COLUMNS: Final = PartitionSpec(None, AXIS)
# Last two names of a parameter's path -> how it is split.
_SPLITS: Final[dict[tuple[str, str], PartitionSpec]] = {
    ("qkv", "weight"): _ROWS,
    ("qkv", "scale"): _ROWS,
    ("qkv", "bias"): _ROWS,
    ("out", "weight"): _COLUMNS,
    ("out", "scale"): REPLICATED,
    ("out", "bias"): REPLICATED,
    ("gate_up", "weight"): _ROWS,
    ("gate_up", "scale"): _ROWS,
    ("gate_up", "bias"): _ROWS,
    ("down", "weight"): _COLUMNS,
    ("down", "scale"): REPLICATED,
    ("down", "bias"): REPLICATED,
    ("attention_norm", "weight"): REPLICATED,
    ("mlp_norm", "weight"): REPLICATED,
    ("attention_post_norm", "weight"): REPLICATED,
    ("mlp_post_norm", "weight"): REPLICATED,
    ("q_norm", "weight"): REPLICATED,
    ("k_norm", "weight"): REPLICATED,
    ("norm", "weight"): REPLICATED,
    ("", "embedding"): _ROWS,
    ("", "lm_head"): _ROWS,
    ("", "lm_head_scale"): _ROWS,
    ("", "rope"): REPLICATED,
    ("attention", "sinks"): _ROWS,
}


@dataclass(frozen=True)
class TensorParallel:
    """How ``spec``'s model is split over ``num_devices``. Raises ValueError naming the size that does not divide."""

    spec: ModelSpec
    num_devices: int

    def __post_init__(self) -> None:
        n = self.num_devices
        if n < 1:
            raise ValueError(f"num_devices: given {n}, allowed 1 or more")
        for field in ("num_heads", "intermediate_size"):
            if (size := getattr(self.spec, field)) % n:
                raise ValueError(f"num_devices: given {n}, must divide {field}={size}")
        if self.spec.num_kv_heads % n and n % self.spec.num_kv_heads:
            raise ValueError(f"num_devices: given {n}, must divide num_kv_heads={self.spec.num_kv_heads} or be a multiple of it")

    @property
    def local(self) -> ModelSpec:
        """The model that one device computes."""
        n = self.num_devices
        return replace(
            self.spec,
            num_heads=self.spec.num_heads // n,
            num_kv_heads=max(1, self.spec.num_kv_heads // n),
            intermediate_size=self.spec.intermediate_size // n,
            vocab_size=-(-self.spec.vocab_size // n),
        )

    @property
    def stored_heads(self) -> np.ndarray:
        """KV heads as they stand in the pages array, device by device: [max(num_kv_heads, num_devices)] i32."""
        copies = max(1, self.num_devices // self.spec.num_kv_heads)
        return np.repeat(np.arange(self.spec.num_kv_heads, dtype=np.int32), copies)

    def rows(self, fused: str) -> np.ndarray:
        """Rows of the fused ``qkv`` or ``gate_up`` in the order in which they are placed: copied heads more than once."""
        if fused == "gate_up":
            gate = np.arange(self.spec.intermediate_size)
            parts = [gate, gate + self.spec.intermediate_size]
        else:
            first_k, first_v = self.spec.num_heads, self.spec.num_heads + self.spec.num_kv_heads
            heads = (np.arange(first_k), first_k + self.stored_heads, first_v + self.stored_heads)
            parts = [(part[:, None] * self.spec.head_dim + np.arange(self.spec.head_dim)).ravel() for part in heads]
        by_device = [np.split(part, self.num_devices) for part in parts]
        return np.concatenate([piece for device in zip(*by_device, strict=True) for piece in device])


class RowParallel(Projection):
    """A product split by its inputs: devices add their parts up, in the compute dtype, then the bias once."""

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.lax.psum(self.sums(x).astype(self.dtype), AXIS)
        return y if self.bias is None else y + self.bias[...][:, None]


class ModelShard(Llama):
    """What one device computes; runs inside a ``shard_map`` over ``AXIS``. ``head`` gives the logits of its part of the vocabulary."""

    def __init__(self, split: TensorParallel, dtype: jnp.dtype, max_context_tokens: int, int8: bool) -> None:
        spec = split.local
        super().__init__(spec, dtype, max_context_tokens, int8=int8)
        self.vocab_size = split.spec.vocab_size
        for layer in self.layers:
            attention, mlp = layer.attention, layer.mlp
            attention.out = _row_parallel(attention.out)
            mlp.down = _row_parallel(mlp.down)

    def lookup(self, token_ids: jax.Array) -> jax.Array:
        table = self.embedding[...]
        row = token_ids - jax.lax.axis_index(AXIS) * table.shape[0]
        held = (row >= 0) & (row < table.shape[0])
        rows = jnp.where(held[:, None], table[jnp.where(held, row, 0)], 0)
        return jax.lax.psum(rows, AXIS)

    def head(self, hidden: jax.Array) -> jax.Array:
        logits = super().head(hidden)
        ids = jax.lax.axis_index(AXIS) * logits.shape[0] + jnp.arange(logits.shape[0])
        return jnp.where((ids < self.vocab_size)[:, None], logits, -jnp.inf)  # padding of the table is never chosen


def _row_parallel(like: Projection) -> RowParallel:
    out_features, in_features = like.weight.shape
    return RowParallel(in_features, out_features, like.bias is not None, like.dtype, int8=like.scale is not None)


def shard_of(split: TensorParallel, dtype: jnp.dtype, max_context_tokens: int, int8: bool = False) -> ModelShard:
    """The structure of one device's model, without arrays. ``int8``: see :class:`pddjax.model.Llama`."""
    model: ModelShard = nnx.eval_shape(lambda: ModelShard(split, dtype, max_context_tokens, int8))
    return model


def partition_specs(model: nnx.Module) -> list[PartitionSpec]:
    """One per leaf of the state of ``model``, in the order of ``jax.tree.leaves``. Raises ValueError for a parameter that has no rule."""
    return [_split_of(path) for path, _ in _leaves(model)]


def global_leaves(split: TensorParallel, shard: ModelShard, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """Shapes and shardings over ``mesh`` of all leaves, for compiling ahead of time."""
    found = []
    for path, leaf in _leaves(shard):
        axes = _split_of(path)
        shape = tuple(
            size * (split.num_devices if axis == AXIS else 1) for size, axis in zip(leaf.shape, _padded(axes, leaf.ndim), strict=True)
        )
        found.append(jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, axes)))
    return found


def place(split: TensorParallel, model: Llama, mesh: Mesh) -> list[jax.Array]:
    """The leaves of an unsplit ``model`` (on the host) over ``mesh``, in the order of :func:`global_leaves`."""
    placed = []
    for path, leaf in _leaves(model):
        axes, values = _split_of(path), np.asarray(leaf)
        if path[-2] in ("qkv", "gate_up"):
            values = values[split.rows(path[-2])]
        if path[-1] in ("embedding", "lm_head", "lm_head_scale"):
            missing = split.local.vocab_size * split.num_devices - values.shape[0]
            values = np.pad(values, ((0, missing), *((0, 0),) * (values.ndim - 1)))
        placed.append(jax.device_put(values, NamedSharding(mesh, axes)))
    return placed


def _leaves(model: nnx.Module) -> Iterator[tuple[tuple[str, ...], jax.Array]]:
    """(names on the way, array) of every leaf, in the order of ``jax.tree.leaves`` of its state."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.state(model))
    for path, leaf in leaves:
        names = tuple(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))
        yield ("", *names), leaf


def _split_of(path: tuple[str, ...]) -> PartitionSpec:
    split = _SPLITS.get((path[-2], path[-1]))
    if split is None:
        raise ValueError(
            f"tensor parallel: no rule for parameter {'.'.join(path[1:])}, allowed one of {sorted('.'.join(k) for k in _SPLITS)}"
        )
    return split


def _padded(axes: PartitionSpec, ndim: int) -> tuple[str | None, ...]:
    return (*axes, *(None for _ in range(ndim - len(axes))))
