"""The forward pass of Llama and its descendants over paged KV (arXiv:2302.13971; layer order as in Hugging Face's LlamaForCausalLM).

What differs between families is read from :class:`pddbridge.model_spec.ModelSpec`, whose facts say what each switch here does.

Linears and attention run in compute dtype; the residual stream and what :mod:`pddtorch.pointwise` does are float32 in either, so bfloat16
loses nothing where it would gain nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pddbridge.model_spec import ModelSpec
from pddbridge.rope import inverse_frequencies
from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddtorch.batch import Batch
from pddtorch.pointwise import Pointwise, Rotation
from pddtorch.weights import ModelWeights


class LlamaModel:
    """Weights and the tables that go with them. Stateless between calls; KV lives in the pool."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, dtype: torch.dtype, device: torch.device, pointwise: Pointwise) -> None:
        self._spec = spec
        self._weights = weights
        self._dtype = dtype
        self._pointwise = pointwise
        self._ropes = tuple(
            (torch.from_numpy(inverse_frequencies(rope, spec.head_dim)).to(device), rope.attention_factor) for rope in spec.ropes
        )
        self._options = tuple(AttentionOptions(spec.attention_scale, window, spec.attention_soft_cap) for window in spec.layer_windows)

    @torch.inference_mode()
    def warm_up(self, most_tokens: int, most_logits: int) -> None:
        """Of the products of a step of up to so many tokens: see :meth:`pddtorch.linear.Linear.warm_up`."""
        self._weights.warm_up(most_tokens, most_logits)

    def forward(self, batch: Batch, kv_layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]) -> torch.Tensor | None:
        """Store the new tokens' KV in ``kv_layers`` and return float32 logits [S, vocab] of the sampling rows, None if there are none.

        What only the last layer's hidden states would need is computed for sampling rows alone.
        """
        spec, between = self._spec, self._pointwise
        num_rotated = spec.num_heads + spec.num_kv_heads
        rotations = [_rotation(batch.positions, *rope) for rope in self._ropes]
        hidden = F.embedding(batch.token_ids, self._weights.embedding).float()
        if spec.embedding_scale != 1:
            hidden *= spec.embedding_scale
        # What the last product adds to the residual stream, not added yet: that and the next norm are one operation.
        added: torch.Tensor | None = None
        post_norm: torch.Tensor | None = None
        last = len(kv_layers) - 1
        for index, (layer, (k_pages, v_pages)) in enumerate(zip(self._weights.layers, kv_layers, strict=True)):
            qkv = layer.qkv(between.add_norm(hidden, added, post_norm, layer.input_norm)).view(len(hidden), -1, spec.head_dim)
            queries, keys = between.rotate(qkv, rotations[spec.layer_ropes[index]], layer.qk_norm)
            batch.kernels.append(k_pages, v_pages, keys, qkv[:, num_rotated:])
            if index == last and not len(batch.sample_tokens):
                return None
            attended = batch.kernels.attend(queries, k_pages, v_pages, self._options[index]).view(len(hidden), -1)
            if index == last:
                hidden, attended = hidden[batch.sample_tokens], attended[batch.sample_tokens]
            mlp_input = between.add_norm(hidden, layer.output(attended), layer.attention_post_norm, layer.mlp_norm)
            added, post_norm = layer.down(between.activate(layer.gate_up(mlp_input))), layer.mlp_post_norm
        logits = self._weights.head(between.add_norm(hidden, added, post_norm, self._weights.final_norm)).float()
        return logits if spec.logit_soft_cap is None else logits.div_(spec.logit_soft_cap).tanh_().mul_(spec.logit_soft_cap)


def _rotation(positions: torch.Tensor, inverse_frequencies: torch.Tensor, factor: float) -> Rotation:
    """cos [T, 1, dim] and sin with the first half negated, both times ``factor``."""
    angles = positions[:, None].float() * inverse_frequencies
    cos, sin = angles.cos(), angles.sin()
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
