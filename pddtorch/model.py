"""The Llama family's forward pass over paged KV (arXiv:2302.13971; layer order as in Hugging Face's LlamaForCausalLM).

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
        self._inverse_frequencies = torch.from_numpy(inverse_frequencies(spec)).to(device)

    def forward(self, batch: Batch, kv_layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]) -> torch.Tensor | None:
        """Store the new tokens' KV in ``kv_layers`` and return float32 logits [S, vocab] of the sampling rows, None if there are none.

        What only the last layer's hidden states would need is computed for sampling rows alone.
        """
        spec, eps = self._spec, self._spec.rms_norm_eps
        num_rotated, options = spec.num_heads + spec.num_kv_heads, AttentionOptions(spec.head_dim**-0.5)
        cos, sin = self._rotation(batch.positions)
        hidden = F.embedding(batch.token_ids, self._weights.embedding).float()
        last = len(kv_layers) - 1
        for index, (layer, (k_pages, v_pages)) in enumerate(zip(self._weights.layers, kv_layers, strict=True)):
            qkv = layer.qkv(self._norm(hidden, layer.input_norm, eps)).view(len(hidden), -1, spec.head_dim)
            rotated = _rotate(qkv[:, :num_rotated].float(), cos, sin)
            batch.kernels.append(k_pages, v_pages, rotated[:, spec.num_heads :], qkv[:, num_rotated:])
            if index == last and not len(batch.sample_tokens):
                return None
            queries = rotated[:, : spec.num_heads].to(self._dtype)
            attended = batch.kernels.attend(queries, k_pages, v_pages, options).view(len(hidden), -1)
            if index == last:
                hidden, attended = hidden[batch.sample_tokens], attended[batch.sample_tokens]
            hidden += layer.output(attended)
            gate, up = layer.gate_up(self._norm(hidden, layer.post_attention_norm, eps)).chunk(2, dim=-1)
            hidden += layer.down(F.silu(gate).mul_(up))
        return self._weights.head(self._norm(hidden, self._weights.final_norm, eps)).float()

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm (arXiv:1910.07467) in float32, rounded to compute dtype."""
        return F.rms_norm(hidden, weight.shape, weight, eps).to(self._dtype)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos [T, 1, dim] and sin with the first half negated, for :func:`_rotate`."""
        angles = positions[:, None].float() * self._inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split: [T, heads, dim] float32. The roll swaps the halves; their signs are in ``sin``."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
