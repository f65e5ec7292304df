"""The functions of a model that is split over a mesh: what :class:`pddjax.programs.ModelFunctions` is for one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pddbridge.checkpoint_source import ModelTensors
from pddjax.batch import DecodeBatch, RaggedBatch
from pddjax.kv import Placement
from pddjax.programs import Leaves, ModelFunctions, Pages
from pddjax.sharding import AXIS, LOGITS, PAGES, REPLICATED, TensorParallel, partition_specs, place, shard_of
from pddjax.weights import load_model
from pddkernels.jax_ops import JaxOps

_T = TypeVar("_T")
_Specs: TypeAlias = PartitionSpec | tuple[object, ...]


class ShardedFunctions:
    """Same signatures; ``leaves`` and ``pages`` are global arrays placed as :mod:`pddjax.sharding` says, batches are on every device."""

    def __init__(self, split: TensorParallel, shard: ModelFunctions, leaves: Leaves, specs: list[PartitionSpec], mesh: Mesh) -> None:
        """``shard``: the functions of :func:`pddjax.sharding.shard_of`, whose own leaves are not used · ``specs``: one per leaf."""
        self.leaves = leaves
        self._split, self._shard, self._specs, self._mesh = split, shard, tuple(specs), mesh

    def decode(self, leaves: Leaves, pages: Pages, batch: DecodeBatch) -> tuple[jax.Array, Pages]:
        """See :meth:`pddjax.programs.ModelFunctions.decode`."""
        return self._over((self._specs, PAGES, REPLICATED), (REPLICATED, PAGES), self._shard.decode)(leaves, pages, batch)

    def ragged(self, leaves: Leaves, pages: Pages, batch: RaggedBatch) -> tuple[jax.Array, Pages]:
        """See :meth:`pddjax.programs.ModelFunctions.ragged`."""
        return self._over((self._specs, PAGES, REPLICATED), (REPLICATED, PAGES), self._shard.ragged)(leaves, pages, batch)

    def head(self, leaves: Leaves, hidden: jax.Array, num_samples: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See :meth:`pddjax.programs.ModelFunctions.head`. The logits stay split on the vocabulary; devices exchange only their maxima."""

        def local(leaves: Leaves, hidden: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            logits, highest, ids = self._shard.head(leaves, hidden, num_samples)
            return logits, highest[None], ids[None] + jax.lax.axis_index(AXIS) * logits.shape[0]

        by_device = PartitionSpec(AXIS)
        logits, highest, ids = self._over((self._specs, REPLICATED), (LOGITS, by_device, by_device), local)(leaves, hidden)
        vocab_size = self._split.spec.vocab_size
        best = highest.max(axis=0)
        return logits[:vocab_size], best, jnp.where(highest == best, ids, vocab_size).min(axis=0)

    def _over(self, in_specs: _Specs, out_specs: _Specs, function: Callable[..., _T]) -> Callable[..., _T]:
        return over(self._mesh, in_specs, out_specs, function)


def split_over(
    devices: Sequence[jax.Device], checkpoint: ModelTensors, dtype: jnp.dtype, ops: JaxOps, max_context_tokens: int, int8: bool = False
) -> tuple[ShardedFunctions, Placement]:
    """The model of ``checkpoint`` over ``devices``, in their order. It is put together on the host: no device holds more than its share.
    ``ops``: of one device's heads; ``int8``: see :func:`pddjax.weights.load_model`. Raises ValueError for a model that so many devices
    cannot share.
    """
    split, mesh = TensorParallel(checkpoint.spec, len(devices)), Mesh(np.array(devices), (AXIS,))
    shard = shard_of(split, dtype, max_context_tokens, int8)
    whole = load_model(checkpoint, dtype, max_context_tokens, jax.devices("cpu")[0], int8=int8)
    leaves, specs = tuple(place(split, whole, mesh)), partition_specs(shard)
    return ShardedFunctions(split, ModelFunctions(shard, ops), leaves, specs, mesh), page_placement(split, mesh, ops)


def page_placement(split: TensorParallel, mesh: Mesh, ops: JaxOps) -> Placement:
    """KV pages split on heads: every device reads, writes and copies its own."""
    heads = PartitionSpec(None, AXIS, None)  # [tokens, kv_heads, dim]
    return Placement(
        device=NamedSharding(mesh, PAGES),
        ops=ops,
        read=over(mesh, (PAGES, REPLICATED), (heads, heads), ops.read),
        write=over(mesh, (PAGES, heads, PartitionSpec(AXIS), REPLICATED), PAGES, ops.write),
        copy_page=over(mesh, (PAGES, REPLICATED, REPLICATED), PAGES, ops.copy_page),
        num_devices=split.num_devices,
        copies=len(split.stored_heads) // split.spec.num_kv_heads,
    )


def over(mesh: Mesh, in_specs: _Specs, out_specs: _Specs, function: Callable[..., _T]) -> Callable[..., _T]:
    """``function`` as every device of ``mesh`` runs it on its share. What is said to be the same on all of them is not checked."""
    mapped: Callable[..., _T] = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return mapped
