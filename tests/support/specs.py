"""Model specs without a checkpoint."""

from __future__ import annotations

from dataclasses import replace

from pddbridge.model_spec import ModelSpec, plain_spec
from pddbridge.rope import RopeSpec


def llama_spec(
    *,
    num_layers: int = 3,
    num_heads: int = 6,
    num_kv_heads: int = 3,
    head_dim: int = 8,
    vocab_size: int = 300,
    max_context_tokens: int = 512,
    **changes: object,
) -> ModelSpec:
    """A plain Llama of tiny sizes; ``changes``: any other field."""
    spec = plain_spec(
        num_layers=num_layers,
        hidden_size=48,
        intermediate_size=80,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_context_tokens=max_context_tokens,
        rms_norm_eps=1e-5,
        rope=RopeSpec(1e4),
        tie_embeddings=False,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    return replace(spec, **changes)  # type: ignore[arg-type]
