"""What stands between a layer's matrix products: norms with the residual sum, rotary embedding, activation. Float32 in between, whatever
the compute dtype. In PyTorch operations for any device, and by native kernels on a CPU, where each operation of a small step costs as much
to call as to compute.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from pddbridge.model_spec import ModelSpec
from pddkernels.native.torch_native import Native

# cos [T, 1, dim] and sin with its first half negated, float32.
Rotation = tuple[torch.Tensor, torch.Tensor]


class Pointwise(Protocol):
    """``spec`` and compute dtype are given once. Rows are tokens."""

    def add_norm(
        self, hidden: torch.Tensor, added: torch.Tensor | None, post_weight: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        """``hidden`` [rows, n] float32 += ``added`` [rows, n], normed with ``post_weight`` where the model has post norms; in place.
        Returns RMSNorm(hidden) (arXiv:1910.07467) times ``weight`` in compute dtype."""

    def rotate(self, qkv: torch.Tensor, rotation: Rotation, norm: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, heads, dim] in compute dtype and keys [T, kv_heads, dim] float32 of ``qkv`` [T, heads + 2 kv_heads, dim]: normed with
        ``norm`` [heads + kv_heads, dim] where the model norms them, and rotated, half-split."""

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """act(gate) * up [rows, n] of ``gate_up`` [rows, 2 n]."""


class TorchPointwise:
    """See :class:`Pointwise`."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._spec = spec
        self._dtype = dtype

    def add_norm(
        self, hidden: torch.Tensor, added: torch.Tensor | None, post_weight: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        eps = self._spec.rms_norm_eps
        if added is not None:
            hidden += added if post_weight is None else F.rms_norm(added.float(), post_weight.shape, post_weight, eps)
        return F.rms_norm(hidden, weight.shape, weight, eps).to(self._dtype)

    def rotate(self, qkv: torch.Tensor, rotation: Rotation, norm: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self._spec
        x = qkv[:, : spec.num_heads + spec.num_kv_heads].float()
        if norm is not None:
            x = F.rms_norm(x, (spec.head_dim,), None, spec.rms_norm_eps) * norm
        cos, sin = rotation
        # The roll swaps the halves; their signs are in sin.
        rotated = torch.addcmul(x * cos, x.roll(spec.head_dim // 2, -1), sin)
        return rotated[:, : spec.num_heads].to(self._dtype), rotated[:, spec.num_heads :]

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) if self._spec.activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)


class NativePointwise:
    """See :class:`Pointwise`."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, native: Native) -> None:
        self._spec = spec
        self._dtype = dtype
        self._native = native

    def add_norm(
        self, hidden: torch.Tensor, added: torch.Tensor | None, post_weight: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        return self._native.add_norm(hidden, added, post_weight, weight, self._spec.rms_norm_eps, self._dtype)

    def rotate(self, qkv: torch.Tensor, rotation: Rotation, norm: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self._native.rotate(qkv, *rotation, norm, self._spec.rms_norm_eps, self._spec.num_heads, self._spec.num_kv_heads)

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._native.activate(gate_up, self._spec.activation)
