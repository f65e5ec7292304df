"""A checkpoint's tensors on the device, in compute dtype, fused and packed. Reads one tensor at a time: beside the model, a load
holds the parts of one fused weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pddbridge.checkpoint_source import ModelTensors
from pddbridge.weight_rounding import RoundedWeight, round_per_output
from pddkernels.native.torch_native import Native
from pddtorch.arrays import to_torch
from pddtorch.linear import PLAIN, Linear, make_int8_linear, make_linear


@dataclass(frozen=True)
class LayerWeights:
    """``qkv``: q, k and v stacked on the output axis · ``gate_up``: gate, then up. Norm weights are float32 [hidden], their offset added;
    ``qk_norm`` [heads + kv_heads, dim]: a row for each head of q and k, which share one weight each.
    """

    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    output: Linear
    attention_post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    mlp_post_norm: torch.Tensor | None


@dataclass(frozen=True)
class ModelWeights:
    """``embedding`` [vocab, hidden] in compute dtype; a tied head is the same values, packed."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Linear

    @property
    def num_unpacked(self) -> int:
        """Linears that run on the plain path."""
        linears = [linear for layer in self.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return sum(linear.path == PLAIN for linear in (*linears, self.head))

    def warm_up(self, most_tokens: int, most_logits: int) -> None:
        """See :meth:`Linear.warm_up`; one layer stands for all, which are alike."""
        layer = self.layers[0]
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            linear.warm_up(most_tokens)
        self.head.warm_up(most_logits)


def load_weights(
    checkpoint: ModelTensors, dtype: torch.dtype, device: torch.device, native: Native | None, *, int8: bool = False
) -> ModelWeights:
    """Load everything; ``native``: whose products to use where they can be; ``int8``: weights of linears rounded to it, which needs
    ``native``. Raises what ``checkpoint.load`` does, CheckpointError for a file that cannot be read.
    """
    spec = checkpoint.spec
    names = frozenset(checkpoint.names)

    def stacked(tensor_names: list[str], dtype: torch.dtype) -> torch.Tensor:
        parts = [to_torch(checkpoint.load(name)).to(device, dtype) for name in tensor_names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def packed(weight_names: list[str], bias: torch.Tensor | None, *, wide: bool = False) -> Linear:
        if int8:
            assert native is not None
            parts = [round_per_output(checkpoint.load(name)) for name in weight_names]
            rounded = RoundedWeight(*(np.concatenate(values) for values in zip(*parts, strict=True)))
            return make_int8_linear(rounded, bias, native, wide=wide)
        return make_linear(stacked(weight_names, dtype), bias, native, wide=wide)

    def linear(prefix: str, *modules: str) -> Linear:
        biases = [f"{prefix}.{module}.bias" for module in modules]
        return packed([f"{prefix}.{module}.weight" for module in modules], stacked(biases, dtype) if biases[0] in names else None)

    def norm(name: str) -> torch.Tensor:
        return to_torch(checkpoint.load(f"{name}.weight")).to(device, torch.float32) + spec.norm_offset

    def qk_norm(prefix: str) -> torch.Tensor:
        q, k = norm(f"{prefix}.q_norm"), norm(f"{prefix}.k_norm")
        return torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))

    layers = tuple(
        LayerWeights(
            input_norm=norm(f"{prefix}.input_layernorm"),
            qkv=linear(prefix, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            qk_norm=qk_norm(f"{prefix}.self_attn") if spec.qk_norm else None,
            output=linear(prefix, "self_attn.o_proj"),
            # With post norms, Hugging Face's "post_attention_layernorm" is what its name says; without, it is the norm before the MLP.
            attention_post_norm=norm(f"{prefix}.post_attention_layernorm") if spec.post_norms else None,
            mlp_norm=norm(f"{prefix}.{'pre_feedforward' if spec.post_norms else 'post_attention'}_layernorm"),
            gate_up=linear(prefix, "mlp.gate_proj", "mlp.up_proj"),
            down=linear(prefix, "mlp.down_proj"),
            mlp_post_norm=norm(f"{prefix}.post_feedforward_layernorm") if spec.post_norms else None,
        )
        for prefix in (f"model.layers.{layer}" for layer in range(spec.num_layers))
    )
    # Cloned, since on the CPU an embedding of the right dtype would still be the reader's memory.
    embedding_name = "model.embed_tokens.weight"
    embedding = stacked([embedding_name], dtype).clone()
    head = packed([embedding_name if spec.tie_embeddings else "lm_head.weight"], None, wide=True)
    return ModelWeights(embedding, layers, norm("model.norm"), head)
