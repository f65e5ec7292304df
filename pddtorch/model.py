"""The forward pass of Llama and its descendants over paged KV (arXiv:2302.13971; layer order as in Hugging Face's LlamaForCausalLM).

What differs between families is read from :class:`pddbridge.model_spec.ModelSpec`, whose facts say what each switch here does.

Linears and attention run in compute dtype; the residual stream, norms and rotary embedding are float32 in either, so bfloat16 loses nothing
where it would gain nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pddbridge.model_spec import ModelSpec
from pddbridge.rope import inverse_frequencies
from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddtorch.batch import Batch
from pddtorch.weights import ModelWeights


class LlamaModel:
    """Weights and the tables that go with them. Stateless between calls; KV lives in the pool."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._weights = weights
        self._dtype = dtype
        self._ropes = tuple(
            (torch.from_numpy(inverse_frequencies(rope, spec.head_dim)).to(device), rope.attention_factor) for rope in spec.ropes
        )
        self._options = tuple(AttentionOptions(spec.attention_scale, window, spec.attention_soft_cap) for window in spec.layer_windows)

    def forward(self, batch: Batch, kv_layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]) -> torch.Tensor | None:
        """Store the new tokens' KV in ``kv_layers`` and return float32 logits [S, vocab] of the sampling rows, None if there are none.

        What only the last layer's hidden states would need is computed for sampling rows alone.
        """
        spec = self._spec
        num_rotated = spec.num_heads + spec.num_kv_heads
        rotations = [_rotation(batch.positions, *rope) for rope in self._ropes]
        hidden = F.embedding(batch.token_ids, self._weights.embedding).float()
        if spec.embedding_scale != 1:
            hidden *= spec.embedding_scale
        last = len(kv_layers) - 1
        for index, (layer, (k_pages, v_pages)) in enumerate(zip(self._weights.layers, kv_layers, strict=True)):
            qkv = layer.qkv(self._norm(hidden, layer.input_norm)).view(len(hidden), -1, spec.head_dim)
            turned = qkv[:, :num_rotated].float()
            if layer.qk_norm is not None:
                turned = F.rms_norm(turned, (spec.head_dim,), None, spec.rms_norm_eps) * layer.qk_norm
            rotated = _rotate(turned, *rotations[spec.layer_ropes[index]])
            batch.kernels.append(k_pages, v_pages, rotated[:, spec.num_heads :], qkv[:, num_rotated:])
            if index == last and not len(batch.sample_tokens):
                return None
            queries = rotated[:, : spec.num_heads].to(self._dtype)
            attended = batch.kernels.attend(queries, k_pages, v_pages, self._options[index]).view(len(hidden), -1)
            if index == last:
                hidden, attended = hidden[batch.sample_tokens], attended[batch.sample_tokens]
            hidden += self._post_norm(layer.output(attended), layer.attention_post_norm)
            gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden += self._post_norm(layer.down(self._activation(gate).mul_(up)), layer.mlp_post_norm)
        logits = self._weights.head(self._norm(hidden, self._weights.final_norm)).float()
        return logits if spec.logit_soft_cap is None else logits.div_(spec.logit_soft_cap).tanh_().mul_(spec.logit_soft_cap)

    def _activation(self, gate: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) if self._spec.activation == "silu" else F.gelu(gate, approximate="tanh")

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm (arXiv:1910.07467) in float32, rounded to compute dtype."""
        return F.rms_norm(hidden, weight.shape, weight, self._spec.rms_norm_eps).to(self._dtype)

    def _post_norm(self, added: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """What is added to the residual stream: normed, in float32, where the model has post norms."""
        return added if weight is None else F.rms_norm(added.float(), weight.shape, weight, self._spec.rms_norm_eps)


def _rotation(positions: torch.Tensor, inverse_frequencies: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos [T, 1, dim] and sin with the first half negated, for :func:`_rotate`, both times ``factor``."""
    angles = positions[:, None].float() * inverse_frequencies
    cos, sin = angles.cos(), angles.sin()
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split: [T, heads, dim] float32. The roll swaps the halves; their signs are in ``sin``."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
