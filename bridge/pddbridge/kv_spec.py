"""What KV a model has: groups of layers, planes in a group. Owns the names and sizes that both sides agree on before any byte.

Nothing here says how an engine stores KV (that is :mod:`pddbridge.kv_layout`) or how it travels (:mod:`pddbridge.kv_wire`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

import ml_dtypes
import numpy as np

# KV dtypes by their wire names. Stored KV is rounded to nearest even when written, so moving it loses nothing.
# The fp8 pair is OCP's (e4m3 without infinities); the "fnuz" encodings of other chips have the same size and other values, so they are not
# among them. int8 means nothing without its scales: see SCALE_SUFFIX.
KV_DTYPES: Final[dict[str, np.dtype[np.generic]]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
}
# Plane "k_scale" holds the scales of plane "k": value = stored * scale. One scale per token and head, or per equal run of the head's dim.
SCALE_SUFFIX: Final = "_scale"
_SCALE_DTYPES: Final = ("float32", "bfloat16", "float16")


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
    """One kind of vector kept per token: ``k`` and ``v`` of grouped-query attention, their scales, a latent.

    ``dtype``: None for the spec's.
    """

    name: str
    num_heads: int
    head_dim: int
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.head_dim < 1:
            raise ValueError(
                f"KVPlane {self.name!r}: num_heads and head_dim must be at least 1, given {self.num_heads} and {self.head_dim}"
            )
        if self.dtype is not None and self.dtype not in KV_DTYPES:
            raise ValueError(f"KVPlane {self.name!r}: dtype: given {self.dtype!r}, allowed {sorted(KV_DTYPES)}")


@dataclass(frozen=True)
class KVGroup:
    """Layers ``[first_layer, first_layer + num_layers)`` that keep the same planes."""

    first_layer: int
    num_layers: int
    planes: tuple[KVPlane, ...]


@dataclass(frozen=True)
class KVSpec:
    """All KV of a model. Wire order of a plane is ``[layers, tokens, heads, dim]``, C-contiguous, in the plane's dtype."""

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
            self._check_planes(group)

    @staticmethod
    def gqa(num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> KVSpec:
        """Grouped-query attention: one group, planes ``k`` and ``v``. K is kept after RoPE, half-split convention."""
        planes = (KVPlane("k", num_kv_heads, head_dim), KVPlane("v", num_kv_heads, head_dim))
        return KVSpec((KVGroup(0, num_layers, planes),), dtype)

    @staticmethod
    def gqa_scaled(
        num_layers: int, num_kv_heads: int, head_dim: int, dtype: str, scale_dtype: str = "float32", scales_per_head: int = 1
    ) -> KVSpec:
        """As :meth:`gqa` in a narrow ``dtype`` (int8, fp8) with its scales: planes ``k``, ``v``, ``k_scale``, ``v_scale``. A head of a
        token has ``scales_per_head`` scales, each for ``head_dim / scales_per_head`` neighbouring values.
        """
        values = tuple(KVPlane(name, num_kv_heads, head_dim) for name in "kv")
        scales = tuple(KVPlane(name + SCALE_SUFFIX, num_kv_heads, scales_per_head, scale_dtype) for name in "kv")
        return KVSpec((KVGroup(0, num_layers, values + scales),), dtype)

    @staticmethod
    def mla(num_layers: int, latent_dim: int, rope_dim: int, dtype: str) -> KVSpec:
        """Multi-head latent attention: one group, planes ``latent`` (the compressed KV, normalised) and ``rope`` (the key's part that all
        heads share, after RoPE, half-split), of one head each.
        """
        planes = (KVPlane("latent", 1, latent_dim), KVPlane("rope", 1, rope_dim))
        return KVSpec((KVGroup(0, num_layers, planes),), dtype)

    def dtype_of(self, plane: KVPlane) -> str:
        """Name in ``KV_DTYPES`` of ``plane``'s values."""
        return plane.dtype or self.dtype

    def np_dtype_of(self, plane: KVPlane) -> np.dtype[np.generic]:
        return KV_DTYPES[self.dtype_of(plane)]

    @property
    def np_dtype(self) -> np.dtype[np.generic]:
        """Of every plane that does not say otherwise."""
        return KV_DTYPES[self.dtype]

    @property
    def num_layers(self) -> int:
        return sum(group.num_layers for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Payload bytes of one token on the wire, codec raw."""
        return sum(g.num_layers * p.num_heads * p.head_dim * self.np_dtype_of(p).itemsize for g in self.groups for p in g.planes)

    def facts(self) -> dict[str, object]:
        """What the handshake and the fingerprint compare, as JSON values. A plane's dtype is named only where it is not the spec's."""
        facts = asdict(self)
        for group in facts["groups"]:
            for plane in group["planes"]:
                if plane["dtype"] in (None, self.dtype):
                    del plane["dtype"]
        return facts

    def _check_planes(self, group: KVGroup) -> None:
        planes = {plane.name: plane for plane in group.planes}
        if len(planes) != len(group.planes):
            raise ValueError(f"KVSpec.groups: plane names must differ, given {[plane.name for plane in group.planes]}")
        for plane in group.planes:
            scales = planes.get(plane.name + SCALE_SUFFIX)
            if scales is None:
                if self.dtype_of(plane) == "int8":
                    raise ValueError(
                        f"KVSpec.groups: plane {plane.name!r} is int8, so plane {plane.name + SCALE_SUFFIX!r} must be there too"
                    )
            elif scales.num_heads != plane.num_heads or plane.head_dim % scales.head_dim or self.dtype_of(scales) not in _SCALE_DTYPES:
                raise ValueError(
                    f"KVSpec.groups: plane {scales.name!r} must have the heads of {plane.name!r}, a dim that divides its dim and a dtype of"
                    f" {list(_SCALE_DTYPES)}, given {scales} for {plane}"
                )
