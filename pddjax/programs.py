"""The compiled programs of an engine: each bucket is compiled once, ahead of time, and only ever called with its own shapes.

Compiling ahead of time makes the count exact: a program that is called with anything else raises instead of compiling in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from pddjax.batch import DecodeBatch, RaggedBatch
from pddjax.model import Attend, Llama
from pddkernels.jax_ops import JaxOps
from pddkernels.ragged_paged_attention.options import AttentionOptions

Leaves = tuple[jax.Array, ...]
Pages = list[jax.Array]


class Programs:
    """Programs by name and bucket, compiled at first use. ``compilations`` counts them."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[str, int], jax.stages.Compiled] = {}

    @property
    def compilations(self) -> int:
        return len(self._compiled)

    def get(
        self,
        name: str,
        bucket: int,
        function: Callable[..., object],
        donate: int | None,
        arguments: tuple[object, ...],
        x64: bool = False,
    ) -> jax.stages.Compiled:
        """The program of ``function`` for ``bucket``, compiled for the shapes of ``arguments``; a call consumes argument ``donate``.
        ``x64``: what it computes may have 64 bits, its arguments and results may not.
        """
        key = (name, bucket)
        if key not in self._compiled:
            donated = () if donate is None else (donate,)
            with jax.enable_x64(x64):
                self._compiled[key] = jax.jit(function, donate_argnums=donated).lower(*arguments).compile()
        return self._compiled[key]


class ModelFunctions:
    """The model split into structure and weights, and the functions of them that are compiled."""

    def __init__(self, model: Llama, ops: JaxOps) -> None:
        graph, state = nnx.split(model)
        leaves, self._tree = jax.tree.flatten(state)
        self.leaves: Leaves = tuple(leaves)
        self._graph = graph
        self._ops = ops

    def decode(self, leaves: Leaves, pages: Pages, batch: DecodeBatch) -> tuple[jax.Array, Pages]:
        """One token per row. Hidden states of the sampling rows [hidden, max_rows], and the pages with the new KV."""
        attend = partial(self._attend_decode, batch)
        return self._forward(leaves, pages, batch.token_ids, batch.context_lens, batch.slots, attend, batch.sample_columns)

    def ragged(self, leaves: Leaves, pages: Pages, batch: RaggedBatch) -> tuple[jax.Array, Pages]:
        """Any rows. Hidden states of the sampling rows [hidden, max_rows], and the pages with the new KV."""
        attend = partial(self._attend_ragged, batch)
        return self._forward(leaves, pages, batch.token_ids, batch.positions, batch.slots, attend, batch.sample_columns)

    def head(self, leaves: Leaves, hidden: jax.Array, num_samples: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of the first ``num_samples`` columns: float32 logits [vocab, S], their maximum [S], and the lowest id that has it [S] i32."""
        logits = self._model(leaves).head(hidden[:, :num_samples])
        highest = logits.max(axis=0)
        ids = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
        return logits, highest, jnp.where(logits == highest, ids, logits.shape[0]).min(axis=0)

    def _model(self, leaves: Leaves) -> Llama:
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, leaves))

    def _forward(
        self,
        leaves: Leaves,
        pages: Pages,
        token_ids: jax.Array,
        positions: jax.Array,
        slots: jax.Array,
        attend: Attend,
        sample_columns: jax.Array,
    ) -> tuple[jax.Array, Pages]:
        hidden, pages = self._model(leaves)(token_ids, positions, slots, pages, attend, self._ops.append)
        return hidden[:, sample_columns], pages

    def _attend_decode(self, batch: DecodeBatch, queries: jax.Array, pages: jax.Array, options: AttentionOptions) -> jax.Array:
        return self._ops.attend_decode(queries, pages, batch.page_tables, batch.context_lens, batch.num_new, options)

    def _attend_ragged(self, batch: RaggedBatch, queries: jax.Array, pages: jax.Array, options: AttentionOptions) -> jax.Array:
        return self._ops.attend(queries, pages, batch.page_tables, batch.plan, options)
