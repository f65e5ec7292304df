"""From a checkpoint to the model's arrays on a device, one tensor at a time, so that loading needs no second copy of the model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pddbridge.checkpoint import Checkpoint
from pddbridge.model_spec import ModelSpec
from pddbridge.rope import inverse_frequencies
from pddjax.model import Llama


def load_model(checkpoint: Checkpoint, dtype: jnp.dtype, max_context_tokens: int, device: jax.Device) -> Llama:
    """The network of ``checkpoint`` with weights in ``dtype`` on ``device``; RoPE tables for ``max_context_tokens`` positions."""
    spec = checkpoint.spec
    model = nnx.eval_shape(lambda: Llama(spec, dtype, max_context_tokens))

    def put(parameter: nnx.Variable[jax.Array], *names: str) -> None:
        parts = [checkpoint.load(name) for name in names]
        values = (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(dtype, copy=False)
        assert values.shape == parameter.shape, (names, values.shape, parameter.shape)
        parameter.set_value(jax.device_put(values, device))

    put(model.embedding, "model.embed_tokens.weight")
    put(model.norm.weight, "model.norm.weight")
    if model.lm_head is not None:
        put(model.lm_head, "lm_head.weight")
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        put(layer.attention_norm.weight, f"{prefix}input_layernorm.weight")
        put(layer.mlp_norm.weight, f"{prefix}post_attention_layernorm.weight")
        for projection, parts in (
            (layer.attention.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (layer.attention.out, ("self_attn.o_proj",)),
            (layer.mlp.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
            (layer.mlp.down, ("mlp.down_proj",)),
        ):
            put(projection.weight, *(f"{prefix}{part}.weight" for part in parts))
            if projection.bias is not None:
                put(projection.bias, *(f"{prefix}{part}.bias" for part in parts))
    model.rope.set_value(jax.device_put(rope_table(spec, max_context_tokens), device))
    return model


def rope_table(spec: ModelSpec, num_positions: int) -> np.ndarray:
    """cos and sin of ``position * inverse frequency``: float32 [2, num_positions, dim / 2], in float32 as transformers has it."""
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * inverse_frequencies(spec)
    return np.stack((np.cos(angles), np.sin(angles)))
