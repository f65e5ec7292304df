"""Prompt log-probabilities on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pddbridge.engine import MAX_SCORE_LOGPROBS


def scores_of(logits: jax.Array, highest: jax.Array, next_ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities of ``next_ids`` [S] i32 under float32 ``logits`` [vocab, S] with maxima ``highest`` [S]: [S] f32; and the most
    likely tokens, up to ``MAX_SCORE_LOGPROBS`` of them: log-probabilities [S, K] f32 and ids [S, K] i32.
    """
    log_sums = highest + jnp.log(jnp.exp(logits - highest).sum(axis=0))
    chosen = jnp.take_along_axis(logits, next_ids[None], axis=0)[0] - log_sums
    top, ids = jax.lax.top_k(logits.T, min(MAX_SCORE_LOGPROBS, logits.shape[0]))
    return chosen, top - log_sums[:, None], ids
