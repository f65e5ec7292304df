"""From a checkpoint to the model's arrays on a device, one tensor at a time, so that loading needs no second copy of the model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pddbridge.checkpoint_source import ModelTensors
from pddbridge.model_spec import ModelSpec
from pddbridge.rope import rotation_table
from pddbridge.weight_rounding import round_per_output
from pddjax.model import Llama, Product, RMSNorm, product


def load_model(
    checkpoint: ModelTensors,
    dtype: jnp.dtype,
    max_context_tokens: int,
    device: jax.Device,
    product: Product = product,
    int8: bool = False,
) -> Llama:
    """The network of ``checkpoint`` with weights in ``dtype`` on ``device``, those of linear maps and of the head rounded to int8 if
    ``int8``; RoPE tables for ``max_context_tokens`` positions. Raises what ``checkpoint.load`` does, ValueError for weights that cannot be
    rounded.
    """
    spec = checkpoint.spec
    model = nnx.eval_shape(lambda: Llama(spec, dtype, max_context_tokens, product, int8))

    def put(parameter: nnx.Variable[jax.Array], *names: str) -> None:
        place(parameter, [checkpoint.load(name) for name in names])

    def put_norm(norm: RMSNorm | None, name: str) -> None:
        if norm is not None:
            weight = checkpoint.load(f"{name}.weight").astype(np.float32)
            place(norm.weight, [weight + np.float32(spec.norm_offset)])

    def put_weight(parameter: nnx.Variable[jax.Array], scale: nnx.Variable[jax.Array] | None, *names: str) -> None:
        if scale is None:
            return put(parameter, *names)
        rounded = [round_per_output(checkpoint.load(name)) for name in names]
        place(parameter, [part.steps for part in rounded])
        place(scale, [part.scales for part in rounded])

    def place(parameter: nnx.Variable[jax.Array], parts: list[np.ndarray]) -> None:
        values = (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(parameter.dtype, copy=False)
        assert values.shape == parameter.shape, (parameter, values.shape, parameter.shape)
        parameter.set_value(jax.device_put(values, device))

    put(model.embedding, "model.embed_tokens.weight")
    put_norm(model.norm, "model.norm")
    if model.lm_head is not None:
        put_weight(model.lm_head, model.lm_head_scale, "model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight")
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        put_norm(layer.attention_norm, f"{prefix}input_layernorm")
        put_norm(layer.attention.q_norm, f"{prefix}self_attn.q_norm")
        put_norm(layer.attention.k_norm, f"{prefix}self_attn.k_norm")
        # With post norms, Hugging Face's "post_attention_layernorm" is what its name says; without, it is the norm before the MLP.
        put_norm(layer.attention_post_norm, f"{prefix}post_attention_layernorm")
        put_norm(layer.mlp_norm, f"{prefix}{'pre_feedforward' if spec.post_norms else 'post_attention'}_layernorm")
        put_norm(layer.mlp_post_norm, f"{prefix}post_feedforward_layernorm")
        for projection, parts in (
            (layer.attention.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (layer.attention.out, ("self_attn.o_proj",)),
            (layer.mlp.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
            (layer.mlp.down, ("mlp.down_proj",)),
        ):
            put_weight(projection.weight, projection.scale, *(f"{prefix}{part}.weight" for part in parts))
            if projection.bias is not None:
                put(projection.bias, *(f"{prefix}{part}.bias" for part in parts))
    model.rope.set_value(jax.device_put(rope_table(spec, max_context_tokens), device))
    return model


def rope_table(spec: ModelSpec, num_positions: int) -> np.ndarray:
    """Per rotation cos and sin of every position: float32 [ropes, 2, num_positions, dim / 2]."""
    return np.stack([rotation_table(rope, spec.head_dim, num_positions) for rope in spec.ropes])
