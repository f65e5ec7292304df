"""What KV a model has: groups of layers, planes in a group. Owns the names and sizes that both sides agree on before any byte.

Nothing here says how an engine stores KV (that is :mod:`pddbridge.kv_layout`) or how it travels (:mod:`pddbridge.kv_wire`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import ml_dtypes
import numpy as np

# KV dtypes by their wire names. Stored KV is rounded to nearest even when written, so moving it loses nothing.
KV_DTYPES: Final[dict[str, np.dtype[np.generic]]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


@dataclass(frozen=True)
class TokenRange:
    """Absolute token positions ``[start, stop)`` of one request."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"TokenRange: need 0 <= start <= stop, given start={self.start} stop={self.stop}")

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class LayerRange:
    """Absolute layer indices ``[start, stop)``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"LayerRange: need 0 <= start < stop, given start={self.start} stop={self.stop}")

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class HeadRange:
    """Absolute KV head indices ``[start, stop)``, out of the model's total, never of one shard's."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"HeadRange: need 0 <= start < stop, given start={self.start} stop={self.stop}")

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class KVPlane:
    """One kind of vector kept per token: ``k`` and ``v`` of grouped-query attention."""

    name: str
    num_heads: int
    head_dim: int


@dataclass(frozen=True)
class KVGroup:
    """Layers ``[first_layer, first_layer + num_layers)`` that keep the same planes."""

    first_layer: int
    num_layers: int
    planes: tuple[KVPlane, ...]


@dataclass(frozen=True)
class KVSpec:
    """All KV of a model. Wire order of a plane is ``[layers, tokens, heads, dim]``, C-contiguous."""

    groups: tuple[KVGroup, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in KV_DTYPES:
            raise ValueError(f"KVSpec.dtype: given {self.dtype!r}, allowed {sorted(KV_DTYPES)}")
        next_layer = 0
        for group in self.groups:
            if group.first_layer != next_layer or group.num_layers < 1 or not group.planes:
                raise ValueError(f"KVSpec.groups: layers must be consecutive from 0 and planes present, given {self.groups}")
            next_layer += group.num_layers

    @staticmethod
    def gqa(num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> KVSpec:
        """Grouped-query attention: one group, planes ``k`` and ``v``. K is kept after RoPE, half-split convention."""
        planes = (KVPlane("k", num_kv_heads, head_dim), KVPlane("v", num_kv_heads, head_dim))
        return KVSpec((KVGroup(0, num_layers, planes),), dtype)

    @property
    def np_dtype(self) -> np.dtype[np.generic]:
        return KV_DTYPES[self.dtype]

    @property
    def num_layers(self) -> int:
        return sum(group.num_layers for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Payload bytes of one token on the wire, codec raw."""
        values = sum(g.num_layers * p.num_heads * p.head_dim for g in self.groups for p in g.planes)
        return values * self.np_dtype.itemsize
