"""Architecture facts of a model, read once from ``config.json`` or GGUF metadata, and the semantic fingerprint.

Everything an engine must know to build the network is in :class:`ModelSpec`; anything unknown is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSpec:
    """Llama-family decoder. ``rope_theta`` with half-split rotation; ``tie_embeddings`` is what the checkpoint really holds
    (see :mod:`pddbridge.checkpoint`), not only what the config says. ``eos_token_ids`` is the union of every source.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    rms_norm_eps: float
    rope_theta: float
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
